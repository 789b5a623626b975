"""A rendezvous of ranks: they exchange bytes, or check that all of them ask for the same.

It serves calls that all workers (or all ranks) make together and that need not be fast: create, init, set_optimizer,
barrier, save, load, the beginning of a training. `agree` compares what ranks ask for. If they differ, or one brings a
bad argument as a `refusal`, all ranks raise one sentence, nothing has changed, and the generation goes on.

Ranks meet in a `MeetingRoom` of a communicator. In a store's meetings its `Generation` looks at what may end them.
`Gathering` is for communicators that belong to no store.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import msgspec
from mpi4py import MPI

from mpips.collectives.agreement import SAME_VALUES, describe_calls, difference
from mpips.collectives.clock import Clock
from mpips.collectives.errors import CollectiveError, of_caller
from mpips.collectives.fabric.requests import receive_next, send_to_all
from mpips.collectives.fabric.wait import NAP_AFTER_BETWEEN_NODES, Limits, drive, wait_until

# tag of messages on the store's communicators, which other modules do not use
TAG = 3
# tag of a `Gathering`, perhaps on a communicator of the user's
GATHERING_TAG = 1017
# first byte of a message: a rank comes to a meeting, or describes how far it is while it waits there
COMES, STANDS = b"c", b"s"
# Messages of a rank that has left may still arrive for this long.
LAST_WORD_SECONDS = 0.2
Items = Sequence[tuple[Any, str]]


class MeetingPlace(Protocol):
    """A place where ranks meet: a `Generation` or a `Gathering`."""

    def meet(self, payload: bytes, what: str, everybody: bool = False) -> list[bytes]:
        """Return each worker's payload (`everybody`: each rank's), in the order of ranks. Collective, blocking."""


# ---- compare what all ask for


class _Word(msgspec.Struct, array_like=True):
    """What a rank brings to `agree`: the call, its arguments, and in `refusal` why it cannot make it."""

    what: str
    items: list[tuple[str, str]]
    refusal: str = ""
    type_error: bool = False
    data: bytes = b""
    alike: str = ""


def agree(
    place: MeetingPlace,
    what: str,
    items: Items = (),
    refusal: BaseException | None = None,
    noun: str = "key",
    data: bytes = b"",
    everybody: bool = False,
    alike: str = "",
) -> list[bytes]:
    """Check that all workers make the same call, and return each worker's `data` in the order of ranks.

    Collective, blocking. An error that all ranks raise is such as
    "mpips.create: option 'servers' is 1 on rank 0 and 2 on rank 1: give all ranks the same".

    Args:
        what: The call.
        items: (name, what is asked for it), such as (key, "float32(3, 4)"). They must be the same on all workers.
        refusal: The error of this rank's own arguments.
        noun: What the names are, for error messages.
        everybody: All ranks of the store take part, not only the workers.
        alike: Calls that give the same word here, and not "", may meet although they are different.

    Raises:
        ValueError: A rank refuses, or two differ. All ranks raise the same sentence, and nothing has changed. It is a
            TypeError if all refusals are.
        StoreError: The generation ends meanwhile.
        StallError: Ranks have not come within the limit.
    """
    named = [(f"{noun} {name!r}", text) for name, text in items]
    why = "" if refusal is None else str(refusal) or type(refusal).__name__
    mine = _Word(what, named, why, isinstance(refusal, TypeError), data, alike)
    gathered = place.meet(msgspec.msgpack.encode(mine), what, everybody)
    every = [msgspec.msgpack.decode(word, type=_Word) for word in gathered]
    refused = [rank for rank, word in enumerate(every) if word.refusal]
    if refused:
        first = every[refused[0]].refusal
        same = len(refused) == len(every) and len({word.refusal for word in every}) == 1
        kind = TypeError if all(every[rank].type_error for rank in refused) else ValueError
        raise of_caller(kind(first if same else f"rank {refused[0]}: {first}"))
    if len({word.alike or word.what for word in every}) > 1:
        raise of_caller(ValueError(describe_calls({rank: word.what for rank, word in enumerate(every)})))
    if unlike := difference({rank: word.items for rank, word in enumerate(every)}):
        raise of_caller(ValueError(f"{every[0].what}: {unlike}: {SAME_VALUES}"))
    return [word.data for word in every]


def attempt(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call `make`. Return its result, and the ValueError or TypeError that it has raised, to be given as `refusal`."""
    try:
        return make(), None
    # The generation is over, so no rendezvous could carry this error.
    except CollectiveError:
        raise
    except (ValueError, TypeError) as error:
        return None, error


def data_of(word: bytes, what: str) -> bytes:
    """Return the data that a rank has brought to an `agree` of this call. b"" if it was another call, or none."""
    said = _decoded(word)
    return said.data if said is not None and said.what == what else b""


def call_of(word: bytes) -> str:
    """Return the call that a rank has brought to an `agree`. "" if it was another kind of meeting, or none."""
    said = _decoded(word)
    return "" if said is None else said.what


def _decoded(word: bytes) -> _Word | None:
    try:
        return msgspec.msgpack.decode(word, type=_Word)
    # It comes from another kind of meeting.
    except msgspec.DecodeError:
        return None


# ---- meeting


@dataclass
class Watch:
    """The rule of one wait: how long it may last, what else may end it, and which ranks are late."""

    limits: Limits
    look: Callable[[float], None] = lambda waited: None
    late: Callable[[], Sequence[int]] = tuple
    nap_after: float = NAP_AFTER_BETWEEN_NODES


class MeetingRoom:
    """Meetings of the ranks of one communicator, one after another. A rank that gives up a meeting comes to no other.

    Each rank sends its bytes to every other rank, so that each knows which ranks it waits for. Only `exchange` blocks.
    """

    def __init__(self, comm: MPI.Comm, tag: int = TAG) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._tag = tag
        # by rank: what it has brought to meetings that are not over here
        self._heard: list[deque[bytes]] = [deque() for _ in range(self.size)]
        # rank -> what it has told while it waited in a meeting, after the number of that meeting
        self._waits: dict[int, bytes] = {}
        # number of meetings that are over here
        self._over = 0
        self._receiving = threading.Lock()

    def exchange(self, payload: bytes, what: str, watch: Watch) -> list[bytes]:
        """Hold a meeting, and return every rank's payload in the order of ranks. Collective, blocking."""
        self.begin(payload)
        drive(wait_until(lambda: not self.missing()), watch, what)
        return self.end()

    def begin(self, payload: bytes) -> None:
        """Come to the next meeting."""
        self._heard[self.rank].append(payload)
        self._tell(COMES, payload)

    def missing(self) -> list[int]:
        """Return the ranks that have not come to the present meeting."""
        # Two threads that receive at once could mix up the order of messages.
        with self._receiving:
            while (message := receive_next(self.comm, self._tag)) is not None:
                source, data = message
                if data[:1] == STANDS:
                    self._waits[source] = data[1:]
                else:
                    self._heard[source].append(data[1:])
        return [rank for rank, heard in enumerate(self._heard) if not heard]

    def end(self) -> list[bytes]:
        """End the present meeting, and return what all ranks have brought to it."""
        self._over += 1
        return [heard.popleft() for heard in self._heard]

    def last_words(self) -> list[bytes]:
        """Return what each rank has brought last to meetings that are not over here. b"" if nothing."""
        return [heard[-1] if heard else b"" for heard in self._heard]

    def describe_wait(self, word: bytes) -> None:
        """Tell the others how far this rank is, which waits in the present meeting."""
        self._tell(STANDS, b"%d " % self._over + word)

    def waits_elsewhere(self) -> dict[int, bytes]:
        """Return the descriptions of ranks that wait in the meeting to which this one has not come."""
        self.missing()
        if self._heard[self.rank]:
            return {}
        present = b"%d " % self._over
        found = {rank: word for rank, word in self._waits.items() if word.startswith(present)}
        return {rank: word[len(present) :] for rank, word in found.items()}

    def _tell(self, kind: bytes, payload: bytes) -> None:
        send_to_all(self.comm, kind + payload, [rank for rank in range(self.size) if rank != self.rank], self._tag)


class Gathering:
    """A meeting place of a communicator that belongs to no generation. The communicator keeps its `MeetingRoom`."""

    def __init__(self, comm: MPI.Comm, limits: Limits | None = None) -> None:
        found = comm.Get_attr(_room_key())
        self._room = found if isinstance(found, MeetingRoom) else MeetingRoom(comm, GATHERING_TAG)
        comm.Set_attr(_room_key(), self._room)
        self._limits = limits or Limits()

    def meet(self, payload: bytes, what: str, everybody: bool = True) -> list[bytes]:
        """Return each rank's payload, in the order of ranks. Collective, blocking."""
        return self._room.exchange(payload, what, Watch(self._limits, late=self._room.missing))


@cache
def _room_key() -> int:
    """Return the attribute key of a communicator's room.

    Made at first use, as this module is imported without MPI too.
    """
    return MPI.Comm.Create_keyval()


class LeftRanks:
    """Finds out whether the ranks that `what` waits for have left."""

    def __init__(self, what: str) -> None:
        self._what = what
        # runs since a missing rank was first seen to have left
        self._clock: Clock | None = None

    def see(self, missing: Sequence[int], gone: Mapping[int, str]) -> None:
        """Raise CollectiveError if a missing rank has left a while ago.

        Not at once, because its last message may arrive after the news that it has left. `gone`: rank -> how it has
        left.
        """
        late = [rank for rank in missing if rank in gone]
        self._clock = (self._clock or Clock()) if late else None
        if self._clock and self._clock.seconds() > LAST_WORD_SECONDS:
            raise CollectiveError(f"{self._what}: rank {late[0]} is needed, and {gone[late[0]]}")

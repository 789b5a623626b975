"""A rendezvous of ranks: they exchange bytes, or check that all of them make the same call.

A call that all workers (or all ranks) make together uses a rendezvous if it need not be fast: create, init,
set_optimizer, barrier, save, load, the beginning of a training. `agree` compares the arguments of all ranks. If two
ranks differ, or a rank reports a bad argument as a `refusal`, all ranks raise an error with the same message. Nothing
has changed then, and the generation (the life of a store until a failure) continues.

Ranks meet in a `MeetingRoom` of a communicator. The `Generation` of a store holds its meetings, and ends them after a
failure. `Gathering` holds meetings on communicators that belong to no store.
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

# tag of messages on the store's communicators; no other module may use this tag
TAG = 3
# tag of messages of a `Gathering`, which may use a communicator that belongs to the user
GATHERING_TAG = 1017
# The first byte of a message. COMES: the sender joins a meeting. STANDS: the sender waits in a meeting, and reports how
# far it has pushed.
COMES, STANDS = b"c", b"s"
# For this many seconds, messages of a rank that has left may still arrive.
LAST_WORD_SECONDS = 0.2
Items = Sequence[tuple[Any, str]]


class MeetingPlace(Protocol):
    """A place where ranks meet: a `Generation` or a `Gathering`."""

    def meet(self, payload: bytes, what: str, everybody: bool = False) -> list[bytes]:
        """Return each worker's payload (`everybody`: each rank's), in the order of ranks. Collective, blocking."""


# ---- compare the arguments of all ranks


class _Word(msgspec.Struct, array_like=True):
    """The message that a rank sends to all other ranks in `agree`. It has the arguments of this rank's call."""

    # the name of the call
    what: str
    # (name, argument), which must be the same on all ranks
    items: list[tuple[str, str]]
    # the reason why the rank cannot make the call, or ""
    refusal: str = ""
    # True if the reason is a TypeError, and False if it is a ValueError
    type_error: bool = False
    # bytes for the other ranks, which are not compared
    data: bytes = b""
    # Calls with the same text here may meet although they differ. "": only equal calls may meet.
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

    Collective, blocking. If the calls differ, all ranks raise the same error, for example
    "mpips.create: option 'servers' is 1 on rank 0 and 2 on rank 1: give all ranks the same".

    Args:
        what: The name of the call.
        items: (name, argument for this name), such as (key, "float32(3, 4)"). All workers must pass the same items.
        refusal: The error in this rank's own arguments, if there is one.
        noun: The word for the things that `items` names, such as "key", for error messages.
        data: Bytes for the other ranks. They are not compared.
        everybody: True if all ranks of the store take part, not only the workers.
        alike: Different calls may meet if all of them pass the same word here. "": only equal calls may meet.

    Raises:
        ValueError: A rank has passed a `refusal`, or two ranks differ. All ranks raise the same message, and nothing
            has changed. The error is a TypeError if all refusals are TypeErrors.
        StoreError: The generation has ended.
        StallError: Some ranks have not come within the limit.
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
    """Call `make`. Return (its result, None). If it raises ValueError or TypeError, return (None, the error).

    The error can be passed to `agree` as the `refusal`.
    """
    try:
        return make(), None
    # The generation is over, so the error cannot be reported in a rendezvous.
    except CollectiveError:
        raise
    except (ValueError, TypeError) as error:
        return None, error


def data_of(word: bytes, what: str) -> bytes:
    """Return the `data` in a rank's message, if the message comes from an `agree` of the call `what`. Otherwise b""."""
    said = _decoded(word)
    return said.data if said is not None and said.what == what else b""


def call_of(word: bytes) -> str:
    """Return the name of the call in a rank's message, if the message comes from an `agree`. Otherwise ""."""
    said = _decoded(word)
    return "" if said is None else said.what


def _decoded(word: bytes) -> _Word | None:
    try:
        return msgspec.msgpack.decode(word, type=_Word)
    # The message comes from a meeting that was not an `agree`.
    except msgspec.DecodeError:
        return None


# ---- meeting


@dataclass
class Watch:
    """The rules for one wait."""

    # how long the wait may last
    limits: Limits
    # function that is called now and then with the seconds that have passed; it raises an error to end the wait
    look: Callable[[float], None] = lambda waited: None
    # function that returns the ranks that have not come yet, for error messages
    late: Callable[[], Sequence[int]] = tuple
    # after this many seconds the waiting rank sleeps between two checks
    nap_after: float = NAP_AFTER_BETWEEN_NODES


class MeetingRoom:
    """Meetings of the ranks of one communicator, one after another.

    Each rank sends its bytes to every other rank, so that each rank knows which ranks have not come. A rank that gives
    up a meeting must not come to a later one. Only `exchange` blocks.
    """

    def __init__(self, comm: MPI.Comm, tag: int = TAG) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._tag = tag
        # for each rank, its payloads for meetings that this rank has not completed
        self._heard: list[deque[bytes]] = [deque() for _ in range(self.size)]
        # rank -> the number of the meeting in which it waits, and its report of how far it has pushed
        self._waits: dict[int, bytes] = {}
        # number of meetings that this rank has completed
        self._over = 0
        self._receiving = threading.Lock()

    def exchange(self, payload: bytes, what: str, watch: Watch) -> list[bytes]:
        """Hold a meeting, and return every rank's payload in the order of ranks. Collective, blocking."""
        self.begin(payload)
        drive(wait_until(lambda: not self.missing()), watch, what)
        return self.end()

    def begin(self, payload: bytes) -> None:
        """Join the next meeting: send this rank's payload to all other ranks."""
        self._heard[self.rank].append(payload)
        self._tell(COMES, payload)

    def missing(self) -> list[int]:
        """Receive messages. Return the ranks that have not come to the current meeting."""
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
        """Complete the current meeting, and return the payloads of all ranks."""
        self._over += 1
        return [heard.popleft() for heard in self._heard]

    def last_words(self) -> list[bytes]:
        """Return for each rank its last payload for a meeting that this rank has not completed, or b""."""
        return [heard[-1] if heard else b"" for heard in self._heard]

    def describe_wait(self, word: bytes) -> None:
        """Report to the other ranks how far this rank has pushed, while it waits in the current meeting."""
        self._tell(STANDS, b"%d " % self._over + word)

    def waits_elsewhere(self) -> dict[int, bytes]:
        """Return the reports of ranks that wait in a meeting to which this rank has not come."""
        self.missing()
        if self._heard[self.rank]:
            return {}
        present = b"%d " % self._over
        found = {rank: word for rank, word in self._waits.items() if word.startswith(present)}
        return {rank: word[len(present) :] for rank, word in found.items()}

    def _tell(self, kind: bytes, payload: bytes) -> None:
        send_to_all(self.comm, kind + payload, [rank for rank in range(self.size) if rank != self.rank], self._tag)


class Gathering:
    """A meeting place on a communicator that belongs to no store. The communicator keeps the `MeetingRoom`."""

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
    """Return the attribute key of a communicator's `MeetingRoom`.

    The key is made at first use, because this module is also imported without MPI.
    """
    return MPI.Comm.Create_keyval()


class LeftRanks:
    """Detects that a rank has left while the call `what` waits for it."""

    def __init__(self, what: str) -> None:
        self._what = what
        # clock that starts when a missing rank is first seen to have left
        self._clock: Clock | None = None

    def see(self, missing: Sequence[int], gone: Mapping[int, str]) -> None:
        """Raise CollectiveError if a missing rank left at least LAST_WORD_SECONDS ago.

        Do not raise earlier, because the rank's last message may arrive after the notice that the rank has left.

        Args:
            gone: rank -> the way in which it has left
        """
        late = [rank for rank in missing if rank in gone]
        self._clock = (self._clock or Clock()) if late else None
        if self._clock and self._clock.seconds() > LAST_WORD_SECONDS:
            raise CollectiveError(f"{self._what}: rank {late[0]} is needed, and {gone[late[0]]}")

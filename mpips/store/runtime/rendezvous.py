"""The one rendezvous: ranks learn each other's bytes, or see that they ask for the same.

It serves what all workers (or all ranks) call together, and no call that has to be fast: create, init, set_optimizer,
barrier, save, load, the beginning of a training. `agree` compares what ranks ask for: where they differ, or one brings
a bad argument as a `refusal`, all ranks raise one sentence, nothing has changed, and everything lives on.

Ranks meet in a `MeetingRoom` of a communicator. The store's `Generation` looks in these waits at what may end it;
`Gathering` serves communicators of which no store knows.
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

from mpips.collectives.clock import Clock
from mpips.collectives.errors import CollectiveError, of_caller
from mpips.collectives.fabric.requests import received, tell
from mpips.collectives.fabric.wait import NAP_AFTER_BETWEEN_NODES, Limits, drive, until

TAG = 3
"""Of messages on the store's communicators; other modules leave it alone."""
GATHERING_TAG = 1017
"""Of a `Gathering`, perhaps on a communicator of the user's."""
COMES, STANDS = b"c", b"s"
"""How messages of a meeting begin: a rank comes to it, or says what it stands at while it waits there."""
LAST_WORD_SECONDS = 0.2
"""How long a message may take from a rank that has left since."""
Items = Sequence[tuple[Any, str]]


class MeetingPlace(Protocol):
    """A place where ranks meet: a `Generation`, or a `Gathering`."""

    def meet(self, payload: bytes, what: str, everybody: bool = False) -> list[bytes]:
        """Return each worker's payload (`everybody`: each rank's), in rank order. Collective, blocking."""


# ---- seeing that all ask for the same


class _Word(msgspec.Struct, array_like=True):
    """A rank's word: the call, what it calls it with, why it cannot (`refusal`, a TypeError or a ValueError)."""

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
    """Return each worker's `data`, in rank order, once all are seen to ask for the same. Collective, blocking.

    Args:
        items: (name, what is asked for it), such as (key, "float32(3, 4)").
        refusal: What was wrong with this rank's own arguments.
        noun: What a name is of.
        everybody: All ranks of the store meet, not the workers alone.
        alike: Not empty: calls that say the same here may meet, whatever they are.

    Raises:
        ValueError: One refuses, or two differ: on all ranks, with one sentence. Nothing has changed. TypeError where
            all refusals are of that type.
        StoreError: The generation ends meanwhile.
        StallError: Ranks have not come within the limit.
    """
    words = [(repr(name), text) for name, text in items]
    why = "" if refusal is None else str(refusal) or type(refusal).__name__
    mine = _Word(what, words, why, isinstance(refusal, TypeError), data, alike)
    said = place.meet(msgspec.msgpack.encode(mine), what, everybody)
    every = [msgspec.msgpack.decode(word, type=_Word) for word in said]
    refused = [rank for rank, word in enumerate(every) if word.refusal]
    if refused:
        first = every[refused[0]].refusal
        same = len(refused) == len(every) and len({word.refusal for word in every}) == 1
        kind = TypeError if all(every[rank].type_error for rank in refused) else ValueError
        raise of_caller(kind(first if same else f"rank {refused[0]}: {first}"))
    for rank, word in enumerate(every):
        if sentence := _difference(every[0], word, rank, noun):
            raise of_caller(ValueError(sentence))
    return [word.data for word in every]


def _difference(first: _Word, other: _Word, rank: int, noun: str) -> str:
    """Return what differs first between rank 0 and another; "" where nothing does."""
    if (first.alike or first.what) != (other.alike or other.what):
        return f"rank 0 calls {first.what}, rank {rank} calls {other.what}: all make this call together"
    for mine, theirs in zip(first.items, other.items):
        if mine[0] != theirs[0]:
            return f"{first.what}: rank 0 gives {noun} {mine[0]}, rank {rank} {noun} {theirs[0]} in its place"
        if mine[1] != theirs[1]:
            return f"{first.what}: {noun} {mine[0]} is {mine[1]} on rank 0 and {theirs[1]} on rank {rank}"
    if len(first.items) != len(other.items):
        return f"{first.what}: rank 0 gives {len(first.items)} {noun}s, rank {rank} gives {len(other.items)}"
    return ""


def attempt(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return what `make` returns, or the ValueError or TypeError that it raises, to be brought as a `refusal`."""
    try:
        return make(), None
    except CollectiveError:  # the generation is over: nobody is to be told of it in a rendezvous
        raise
    except (ValueError, TypeError) as error:
        return None, error


def data_of(word: bytes, what: str) -> bytes:
    """Return the data of what a rank has brought to an `agree`; b"" where it has not, or to another call."""
    said = _decoded(word)
    return said.data if said is not None and said.what == what else b""


def call_of(word: bytes) -> str:
    """Return the call of what a rank has brought to an `agree`; "" of another meeting, or of nothing."""
    said = _decoded(word)
    return "" if said is None else said.what


def _decoded(word: bytes) -> _Word | None:
    try:
        return msgspec.msgpack.decode(word, type=_Word)
    except msgspec.DecodeError:  # of another meeting
        return None


# ---- meeting


@dataclass
class Watch:
    """The view of one wait: how long it may last, what else may end it, who is late."""

    limits: Limits
    look: Callable[[float], None] = lambda waited: None
    late: Callable[[], Sequence[int]] = tuple
    nap_after: float = NAP_AFTER_BETWEEN_NODES


class MeetingRoom:
    """Meetings of the ranks of one communicator, one after the other. A rank that gives one up comes to no other.

    Each rank sends its bytes to each other rank, so that each knows whom it waits for. Nothing blocks but `exchange`.
    """

    def __init__(self, comm: MPI.Comm, tag: int = TAG) -> None:
        self.comm, self.rank, self.size, self._tag = comm, comm.Get_rank(), comm.Get_size(), tag
        self._heard: list[deque[bytes]] = [deque() for _ in range(self.size)]
        """What each rank has brought to meetings that are not over here."""
        self._waits: dict[int, bytes] = {}
        """What ranks have said while they waited in a meeting, with its number."""
        self._over = 0
        """Meetings that are over here."""
        self._receiving = threading.Lock()

    def exchange(self, payload: bytes, what: str, watch: Watch) -> list[bytes]:
        """Return everybody's payload, in rank order. Collective, blocking."""
        self.begin(payload)
        drive(until(lambda: not self.missing()), watch, what)
        return self.end()

    def begin(self, payload: bytes) -> None:
        """Begin a meeting."""
        self._heard[self.rank].append(payload)
        self._tell(COMES, payload)

    def missing(self) -> list[int]:
        """Return the ranks that have not come to the present meeting."""
        with self._receiving:  # two threads would mix up the order
            while (message := received(self.comm, self._tag)) is not None:
                source, data = message
                if data[:1] == STANDS:
                    self._waits[source] = data[1:]
                else:
                    self._heard[source].append(data[1:])
        return [rank for rank, heard in enumerate(self._heard) if not heard]

    def end(self) -> list[bytes]:
        """Return what all have brought to the present meeting, which is over with that."""
        self._over += 1
        return [heard.popleft() for heard in self._heard]

    def last_words(self) -> list[bytes]:
        """Return what each rank has brought last, b"" where it has not come, while no meeting is over."""
        return [heard[-1] if heard else b"" for heard in self._heard]

    def describe_wait(self, word: bytes) -> None:
        """Say to the others what this rank, which waits in the present meeting, stands at."""
        self._tell(STANDS, b"%d " % self._over + word)

    def waits_elsewhere(self) -> dict[int, bytes]:
        """Return what each rank has said that stands in the meeting to which this one has not come."""
        self.missing()
        if self._heard[self.rank]:
            return {}
        present = b"%d " % self._over
        found = {rank: word for rank, word in self._waits.items() if word.startswith(present)}
        return {rank: word[len(present) :] for rank, word in found.items()}

    def _tell(self, kind: bytes, payload: bytes) -> None:
        tell(self.comm, kind + payload, [rank for rank in range(self.size) if rank != self.rank], self._tag)


class Gathering:
    """A place where ranks of a communicator meet that belongs to no generation. The communicator keeps its room."""

    def __init__(self, comm: MPI.Comm, limits: Limits | None = None) -> None:
        found = comm.Get_attr(_room_key())
        self._room = found if isinstance(found, MeetingRoom) else MeetingRoom(comm, GATHERING_TAG)
        comm.Set_attr(_room_key(), self._room)
        self._limits = limits or Limits()

    def meet(self, payload: bytes, what: str, everybody: bool = True) -> list[bytes]:
        """Return each rank's payload, in rank order. Collective, blocking."""
        return self._room.exchange(payload, what, Watch(self._limits, late=self._room.missing))


@cache
def _room_key() -> int:
    """Return under what a communicator keeps its room. Made at first use: this is imported without MPI, too."""
    return MPI.Comm.Create_keyval()


class LeftRanks:
    """Sees whether those whom `what` waits for are still there."""

    def __init__(self, what: str) -> None:
        self._what = what
        # since somebody who is missing was seen to have left
        self._clock: Clock | None = None

    def see(self, missing: Sequence[int], gone: Mapping[int, str]) -> None:
        """Raise CollectiveError where one who is missing has left some time ago, as its words may come later than that.
        `gone` says how each has left."""
        late = [rank for rank in missing if rank in gone]
        self._clock = (self._clock or Clock()) if late else None
        if self._clock and self._clock.seconds() > LAST_WORD_SECONDS:
            raise CollectiveError(f"{self._what}: rank {late[0]} is needed, and {gone[late[0]]}")

"""The one rendezvous: ranks learn each other's bytes, or see that they ask for the same.

Used by what all workers (or all ranks) call together: create, init, set_optimizer, forget, recut, barrier, save, load.
Each rank sends its bytes to each other rank, so that each knows whom it waits for. A bad argument is brought along as a
`refusal`: all ranks raise one sentence, nothing has changed, and the generation lives on.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from mpi4py import MPI

from collectives.errors import CollectiveError, of_caller
from collectives.fabric.wait import Generation as Waiting
from collectives.fabric.wait import Limits, drive, until
from collectives.network.failures import received, tell

TAG = 3
"""Of messages on the store's communicators; other modules leave it alone."""
COMES, STANDS = b"c", b"s"
"""How messages of a meeting begin: a rank comes to it, or says what it stands at while it waits there."""
LAST_WORD_SECONDS = 0.2
"""How long a message may take from a rank that has left since."""
Items = Sequence[tuple[Any, str]]


class Meets(Protocol):
    """Where ranks meet: a `Generation`."""

    def meet(self, payload: bytes, what: str, everybody: bool = False) -> list[bytes]: ...


class Room:
    """Meetings of the ranks of one communicator, one after the other. A rank that gives one up comes to no other."""

    def __init__(self, comm: MPI.Comm, tag: int = TAG) -> None:
        self.comm, self.rank, self.size, self._tag = comm, comm.Get_rank(), comm.Get_size(), tag
        self._heard: list[deque[bytes]] = [deque() for _ in range(self.size)]
        """What each rank has brought to meetings that are not over here."""
        self._standing: dict[int, bytes] = {}
        """What ranks have said while they waited in a meeting, with its number."""
        self._over = 0
        """Meetings that are over here."""
        self._receiving = threading.Lock()

    def bring(self, payload: bytes) -> None:
        """Begin a meeting. Does not block."""
        self._heard[self.rank].append(payload)
        self._tell(COMES, payload)

    def stand(self, word: bytes) -> None:
        """Say to the others what this rank, which waits in the present meeting, stands at. Does not block."""
        self._tell(STANDS, b"%d " % self._over + word)

    def standing(self) -> dict[int, bytes]:
        """Return what each rank has said that stands in the meeting to which this one has not come. Does not block."""
        self.missing()
        if self._heard[self.rank]:
            return {}
        present = b"%d " % self._over
        found = {rank: word for rank, word in self._standing.items() if word.startswith(present)}
        return {rank: word[len(present) :] for rank, word in found.items()}

    def _tell(self, kind: bytes, payload: bytes) -> None:
        tell(self.comm, kind + payload, [rank for rank in range(self.size) if rank != self.rank], self._tag)

    def missing(self) -> list[int]:
        """Ranks that have not come to the present meeting. Does not block."""
        with self._receiving:  # two threads would mix up the order
            while (message := received(self.comm, self._tag)) is not None:
                source, data = message
                if data[:1] == STANDS:
                    self._standing[source] = data[1:]
                else:
                    self._heard[source].append(data[1:])
        return [rank for rank, heard in enumerate(self._heard) if not heard]

    def brought(self) -> list[bytes]:
        """What all have brought to the present meeting, which is over with that."""
        self._over += 1
        return [heard.popleft() for heard in self._heard]

    def last(self) -> list[bytes]:
        """What each rank has brought last, b"" where it has not come, while no meeting is over."""
        return [heard[-1] if heard else b"" for heard in self._heard]

    def exchange(self, payload: bytes, what: str, waiting: Waiting) -> list[bytes]:
        """Everybody's payload, in rank order. Collective, blocking."""
        self.bring(payload)
        drive(until(lambda: not self.missing()), waiting, what)
        return self.brought()


class Assembling:
    """How a rank waits for others while nothing stands yet that could end."""

    nap_after = 2e-3

    def __init__(self, limits: Limits, late: Callable[[], Sequence[int]] = tuple) -> None:
        self.limits, self.late = limits, late

    def look(self, waited: float) -> None:
        """There is nothing to be heard."""


class _Word(msgspec.Struct, array_like=True):
    """What a rank brings: the call, what it calls it with, why it cannot (`refusal`, a TypeError or a ValueError)."""

    what: str
    items: list[tuple[str, str]]
    refusal: str = ""
    type_error: bool = False
    data: bytes = b""


def exchange(generation: Meets, payload: bytes, what: str, everybody: bool = False) -> list[bytes]:
    """Each worker's payload, in rank order. Collective over the workers (`everybody`: over all ranks of the store),
    blocking.

    StoreError where the generation ends meanwhile; StallError, naming the ranks that have not come, after the limit.
    """
    return generation.meet(payload, what, everybody)


def agree(
    generation: Meets, what: str, items: Items = (), refusal: BaseException | None = None, noun: str = "key",
    data: bytes = b"", everybody: bool = False,
) -> list[bytes]:  # fmt: skip
    """See that all workers ask for the same; each one's `data`, in rank order. Collective, blocking.

    `items` are (name, what is asked for it), such as (key, "float32(3, 4)"); `noun` says what a name is of. `refusal`
    is what was wrong with this rank's own arguments. Where one refuses, or two differ, all ranks raise the same
    ValueError (TypeError where the only refusals are such), nothing has changed, and the generation lives on.
    """
    words = [(repr(name), text) for name, text in items]
    mine = _Word(what, words, _text(refusal), isinstance(refusal, TypeError), data)
    said = exchange(generation, msgspec.msgpack.encode(mine), what, everybody)
    every = [msgspec.msgpack.decode(word, type=_Word) for word in said]
    error = difference(every, noun)
    if error is not None:
        raise of_caller(error)
    return [word.data for word in every]


def data_of(word: bytes, what: str) -> bytes:
    """The data of what a rank has brought to an `agree`; b"" where it has not, or to another call."""
    try:
        said = msgspec.msgpack.decode(word, type=_Word)
    except msgspec.DecodeError:  # of another meeting
        return b""
    return said.data if said.what == what else b""


def call_of(word: bytes) -> str:
    """The call of what a rank has brought to an `agree`; "" of another meeting, or where it has brought nothing."""
    try:
        return msgspec.msgpack.decode(word, type=_Word).what
    except msgspec.DecodeError:
        return ""


def attempt(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What `make` returns, or the ValueError or TypeError that it raises, to be brought along as a `refusal`."""
    try:
        return make(), None
    except CollectiveError:  # the generation is over: nobody is to be told of it in a rendezvous
        raise
    except (ValueError, TypeError) as error:
        return None, error


class Presence:
    """Whether those whom `what` waits for are still there."""

    def __init__(self, what: str) -> None:
        self._what, self._first = what, math.inf
        """When somebody who is missing was seen to have left."""

    def see(self, missing: Sequence[int], gone: Mapping[int, str]) -> None:
        """CollectiveError where one who is missing has left some time ago: what it has said may come later than the
        word that it has left. `gone` says how."""
        late = [rank for rank in missing if rank in gone]
        self._first = min(self._first, time.monotonic()) if late else math.inf
        if late and time.monotonic() > self._first + LAST_WORD_SECONDS:
            raise CollectiveError(f"{self._what}: rank {late[0]} is needed, and {gone[late[0]]}")


def difference(every: Sequence[_Word], noun: str = "key") -> ValueError | TypeError | None:
    """What all ranks raise; None where all ask for the same. Pure."""
    refused = [rank for rank, word in enumerate(every) if word.refusal]
    if refused:
        first = every[refused[0]]
        same = len(refused) == len(every) and len({word.refusal for word in every}) == 1
        sentence = first.refusal if same else f"rank {refused[0]}: {first.refusal}"
        return (TypeError if all(every[rank].type_error for rank in refused) else ValueError)(sentence)
    for rank, word in enumerate(every):
        if sentence := _unlike(every[0], word, rank, noun):
            return ValueError(sentence)
    return None


def _unlike(first: _Word, other: _Word, rank: int, noun: str) -> str:
    if first.what != other.what:
        return f"rank 0 calls {first.what}, rank {rank} calls {other.what}: all make this call together"
    for mine, theirs in zip(first.items, other.items):
        if mine[0] != theirs[0]:
            return f"{first.what}: rank 0 gives {noun} {mine[0]}, rank {rank} {noun} {theirs[0]} in its place"
        if mine[1] != theirs[1]:
            return f"{first.what}: {noun} {mine[0]} is {mine[1]} on rank 0 and {theirs[1]} on rank {rank}"
    if len(first.items) != len(other.items):
        return f"{first.what}: rank 0 gives {len(first.items)} {noun}s, rank {rank} gives {len(other.items)}"
    return ""


def _text(refusal: BaseException | None) -> str:
    return "" if refusal is None else str(refusal) or type(refusal).__name__

"""Short notes between nodes: a rank has failed, or calls differ. Within a node the board says so.

Operations are numbered. A rank that has waited `SPEAK_SECONDS` tells all others which operation it is in. Who hears of
an operation that it knows by another name answers with that name, so every rank gets all names and raises the same
MismatchError. A rank that ends the generation tells all others why. Where several do so at once, all take the sentence
of the earliest operation, then of the lowest rank: each listens `SETTLE_SECONDS` longer before it raises.

While all is well nothing is sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
from mpi4py import MPI

from mpips.collectives.errors import KINDS, CollectiveError, MismatchError, kind_of
from mpips.collectives.fabric.failure import failed
from mpips.collectives.fabric.layout import DEPARTURES, PROGRAM_ENDED, disagreement
from mpips.collectives.fabric.requests import received, tell
from mpips.collectives.fabric.wait import Limits

SPEAK_SECONDS = 0.05
SETTLE_SECONDS = 0.15
NAMES_SECONDS = 0.5  # to wait for the names of all ranks once two are known to differ
HISTORY = 64
LOOK_FOR_DEATHS_SECONDS = 0.02
IN_OPERATION, OVER, LEFT = 0, 1, 2
_TAG = 1


class Note(msgspec.Struct, array_like=True, order=True):
    """A note of a rank: in which operation it is (`text` names it), why the generation is over (`kind` is a place in
    `KINDS`), or that it has left after that operation (`kind` tells how). Of notes of an end, the first in order
    counts."""

    number: int
    rank: int
    sort: int
    text: str = ""
    kind: int = 0


class Control:
    """The notes of one generation. `comm` is used for nothing else; `names`: its ranks as the user counts them."""

    def __init__(self, comm: MPI.Intracomm, limits: Limits, names: Sequence[int]) -> None:
        self.comm, self._rank, self._size, self._names = comm, comm.rank, comm.size, names
        self.limits = limits
        self.number = 0
        """The operation that this rank has begun last."""
        self._mine: dict[int, str] = {}
        self._heard: dict[int, dict[int, str]] = {}
        self._told: set[int] = set()
        self._open: set[int] = set()
        self._left: dict[int, Note] = {}
        self._over: list[Note] = []
        self._settled = self._differs = self._due = 0.0

    def operation(self, text: str, steps: Iterator[None]) -> Iterator[None]:
        """The steps of one operation, numbered; every rank begins the same operations in the same order."""
        number = self._begin(text)
        try:
            yield from steps
        except (MPI.Exception, MismatchError):
            yield from self._named(number)
            raise
        self._end(number)

    def _named(self, number: int) -> Iterator[None]:
        """This operation has failed: MismatchError with what all ranks call, where that is because they differ."""
        self._tell(number)
        until = time.monotonic() + NAMES_SECONDS
        while len(self._heard.get(number, ())) < self._size - 1 and time.monotonic() < until:
            self.look(0.0)
            yield
        if number in self._heard:
            self._compare(number)

    def agreed(self, text: str) -> Iterator[None]:
        """MismatchError on every rank unless all bring the same text."""
        number = self._begin(text)
        self._tell(number)
        while len(self._heard.get(number, ())) < self._size - 1:
            self.look(0.0)
            yield
        self._end(number)
        self._compare(number)

    def look(self, waited: float) -> None:
        """Speak up after a while, hear what others say, and raise if it does not fit."""
        self._hear()
        if waited > SPEAK_SECONDS:
            for number in sorted(self._open - self._told):
                self._tell(number)
        if self._over:
            raise self._settle()
        for number in sorted(self._heard):
            self._compare(number)
        self._see_deaths()
        gone = [rank for rank, note in self._left.items() if self._open and note.number < min(self._open)]
        if gone:
            first = min(gone)
            raise CollectiveError(f"rank {self._names[first]} is needed, and {DEPARTURES[self._left[first].kind]}")

    def late(self) -> Sequence[int]:
        """Ranks that have not said that they are in the present operation."""
        heard = self._heard.get(self.number, {})
        return [self._names[rank] for rank in range(self._size) if rank != self._rank and rank not in heard]

    @property
    def over(self) -> bool:
        """Return whether a rank has ended the generation."""
        return bool(self._over)

    def ended(self) -> dict[int, str]:
        """Ranks that have said that they have left; and how."""
        self._hear()
        dead = {self._names[rank]: DEPARTURES[0] for rank in failed(self.comm)}
        return dead | {self._names[rank]: DEPARTURES[note.kind] for rank, note in self._left.items()}

    def end(self, error: BaseException, sentence: str) -> CollectiveError:
        """End the generation for all ranks; what they raise. Blocks for SETTLE_SECONDS."""
        if not self._over:
            note = Note(min(self._open, default=self.number + 1), self._rank, OVER, sentence, kind_of(error))
            self._over.append(note)
            self._send(note)
        return self._settle()

    def leave(self, how: int = PROGRAM_ENDED) -> None:
        """Say that this rank comes no more. Waits for nobody."""
        self._send(Note(min(self._open, default=self.number + 1) - 1, self._rank, LEFT, kind=how))

    def _begin(self, text: str) -> int:
        self.number += 1
        self._mine[self.number] = text
        self._open.add(self.number)
        self._forget(self.number - HISTORY)
        return self.number

    def _end(self, number: int) -> None:
        self._open.discard(number)
        if number <= self.number - HISTORY:
            self._forget(number)

    def _forget(self, number: int) -> None:
        if number not in self._open:
            self._mine.pop(number, None)
            self._heard.pop(number, None)
            self._told.discard(number)

    def _hear(self) -> None:
        while (message := received(self.comm, _TAG)) is not None:
            note = msgspec.msgpack.decode(message[1], type=Note)
            if note.sort == OVER:
                self._over.append(note)
            elif note.sort == LEFT:
                self._left[note.rank] = note
            else:
                self._heard.setdefault(note.number, {})[note.rank] = note.text
                if note.number in self._mine and note.number not in self._told:
                    self._tell(note.number)

    def _tell(self, number: int) -> None:
        self._told.add(number)
        self._send(Note(number, self._rank, IN_OPERATION, self._mine[number]))

    def _send(self, note: Note) -> None:
        others = [other for other in range(self._size) if other != self._rank]
        tell(self.comm, msgspec.msgpack.encode(note), others, _TAG)

    def _see_deaths(self) -> None:
        """CollectiveError where a process has ended without a word."""
        if (now := time.monotonic()) >= self._due:
            self._due = now + LOOK_FOR_DEATHS_SECONDS
            for rank in failed(self.comm):
                if rank not in self._left:
                    raise CollectiveError(f"rank {self._names[rank]} is needed, and {DEPARTURES[0]}")

    def _compare(self, number: int) -> None:
        """MismatchError where others know this operation by another name; once all have named it, or after a while."""
        mine = self._mine.get(number)
        if mine is None or all(text == mine for text in self._heard[number].values()):
            return
        texts = {**self._heard[number], self._rank: mine}
        self._differs = self._differs or time.monotonic()
        if len(texts) == self._size or time.monotonic() > self._differs + NAMES_SECONDS:
            raise MismatchError(disagreement({self._names[rank]: text for rank, text in texts.items()}))

    def _settle(self) -> CollectiveError:
        """Wait for notes of an end that come at the same time; what all ranks raise."""
        self._settled = self._settled or time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < self._settled:
            self._hear()
            time.sleep(1e-3)
        first = min(self._over)
        return KINDS[first.kind](first.text)

"""What a rank keeps of the servers of its node: their memory, mapped while they live, and readable when they do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError
from collectives.fabric import arena
from collectives.fabric.arena import Region
from mpips.store.recovery.inventory import Holding, Shelf
from mpips.store.recovery.memory import ledger
from mpips.store.recovery.memory.ledger import Book
from mpips.store.roles import Layout

Array = NDArray[Any]
T = TypeVar("T")


class Settled(Generic[T]):
    """What this rank had when the last generation was over, while attempts are made to begin the next one."""

    def __init__(self) -> None:
        self._value: T | None = None
        self._generation = -1

    def before(self, generation: int, now: T) -> T:
        """What this rank had before the first attempt to begin that generation, which is what it has `now` if this is
        it."""
        if generation > self._generation or self._value is None:
            self._value, self._generation = now, generation
        return self._value

    def begun(self) -> None:
        """The generation has begun: what was before may go."""
        self._value = None


class Mapped(NamedTuple):
    """A server's segment, and where its ledger lies."""

    segment: NDArray[np.uint8]
    region: Region


class Held:
    """The memory of the servers of one generation, by their ranks; of those that share this node and keep a ledger."""

    def __init__(self, regions: Mapping[int, Region] | None = None) -> None:
        self._mapped: dict[int, Mapped] = {}
        for rank, region in (regions or {}).items():
            try:
                self._mapped[rank] = Mapped(arena.segment(region), region)
            except CollectiveError:  # another container: MPI shares memory there, we cannot
                continue
        self._books: dict[tuple[int, int], Book | None] = {}

    @property
    def ranks(self) -> list[int]:
        """The servers whose memory is here."""
        return list(self._mapped)

    def shelves(self, layout: Layout, generation: int) -> list[Shelf]:
        """What the dead servers had for which this rank speaks when `generation` is to begin: it is the lowest of
        those left on their node."""
        before = layout.before
        if before is None:
            return []
        found = []
        for rank in self._mapped:
            here = min(old for old in before.origin if before.nodes[old] == before.nodes[rank])
            if rank in before.lost and here == before.origin[layout.rank]:
                book = self._book(rank, generation)
                if book is not None:
                    found.append(Shelf(rank, False, book.settings, self._holdings(rank, book, layout.asynchronous)))
        return found

    def at(self, owner: int, index: int, before: bool, generation: int) -> list[Array]:
        """Values and state of a unit of a server whose memory is here; `before`: as they were a round before."""
        book = self._book(owner, generation)
        assert book is not None
        return ledger.undo_of(self._mapped[owner].segment, book.units[index]).at(before)

    def _book(self, rank: int, generation: int) -> Book | None:
        if (rank, generation) not in self._books:
            self._books[rank, generation] = ledger.read(*self._mapped[rank], generation)
        return self._books[rank, generation]

    def _holdings(self, rank: int, book: Book, asynchronous: bool) -> list[Holding]:
        segment = self._mapped[rank].segment
        found = []
        for entry in book.units:
            undo = ledger.undo_of(segment, entry)
            standings = undo.standings()
            counts = undo.pushes(ledger.told(segment, entry)) if asynchronous else []
            if asynchronous:
                standings = [(max(counts, default=0), standings[0][1])]
            states = [dtype for dtype, _, _ in entry.arrays[1:]]
            pushes = list(zip(entry.contributors, counts))
            found.append(Holding(entry.key, entry.start, entry.stop, standings, undo.torn, states, pushes))
        return found

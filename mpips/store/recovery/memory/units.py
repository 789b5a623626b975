"""Units of one server: their memory, made for what workers ask for or for what is left of the generation before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.fabric import arena
from collectives.fabric.arena import Region
from mpips.optimizers.base import state_dtypes
from mpips.optimizers.groups import Groups
from mpips.store.recovery.inventory import Holding, dtype_names
from mpips.store.recovery.memory import ledger, undo
from mpips.store.recovery.memory.ledger import Book, Ledger
from mpips.store.recovery.memory.surviving import Surviving
from mpips.store.recovery.memory.undo import WORDS, Undo
from mpips.store.server.unit import Unit
from mpips.store.transport import frames
from mpips.store.transport.frames import Created, UnitCard

Array = NDArray[Any]


class Made(NamedTuple):
    """Units in the order of their cards, and where workers find them."""

    units: list[Unit]
    where: Created


class Memory:
    """What a server makes its units of. With a `ledger` the store survives deaths: each unit has an undo copy."""

    def __init__(self, ledger: Ledger | None) -> None:
        self.ledger = ledger

    def make(self, cards: Sequence[UnitCard], groups: Groups, adopted: Mapping[int, Unit] | None = None) -> Made:
        """Units for these cards, at round 0. `adopted`: old units, by new numbers, of which values and state stay where
        they are."""
        adopted = adopted or {}
        fresh = [card for card in cards if card.number not in adopted]
        itemsizes = [frames.dtype_of(card.dtype).itemsize for card in fresh]
        first_bytes, nbytes = frames.arrange(fresh, itemsizes)
        memory = arena.empty(nbytes, np.uint8)
        places = dict(zip([card.number for card in fresh], first_bytes, strict=True))
        first_words, count = frames.arrange_words(cards)
        words = _zeros(count)
        journals = _zeros(WORDS * len(cards))
        units = []
        for index, (card, word) in enumerate(zip(cards, first_words, strict=True)):
            mine = memoryview(words[word : word + 1 + len(card.contributors)])  # type: ignore[arg-type]
            journal = memoryview(journals[WORDS * index : WORDS * (index + 1)])  # type: ignore[arg-type]
            old = adopted.get(card.number)
            if old is None:
                at, dtype = places[card.number], frames.dtype_of(card.dtype)
                stored = memory[at : at + (card.stop - card.start) * dtype.itemsize].view(dtype)
                kept = self._undo(card, stored, groups, journal)
            else:
                stored, kept = old.stored, self._again(old, journal)
            unit = (Unit if kept is None else Surviving)(
                card.number, card.key, stored, mine, card.contributors, card.block_elements, card.row_elements,
                card.start, kept,
            )  # fmt: skip
            unit.optimizer = groups.of(card.key)
            units.append(unit)
        return Made(units, Created(_region(words), [_region(unit.stored) for unit in units]))

    def _undo(self, card: UnitCard, stored: Array, groups: Groups, journal: memoryview) -> Undo | None:
        if self.ledger is None:
            return None
        return undo.new(stored, card.row_elements, state_dtypes(groups.of(card.key), stored.dtype), journal)

    def _again(self, old: Unit, journal: memoryview) -> Undo | None:
        """The undo copy of an old unit, with words of its own: the old ones stay true until the next generation
        begins."""
        if old.undo is None:
            return None
        return Undo(old.undo.arrays, old.undo.copies, journal, old.undo.rows, old.undo.row_elements)

    def publish(self, units: Iterable[Unit], settings: bytes, generation: int) -> None:
        """Tell those who outlive this server what it has, from that generation on."""
        if self.ledger is None:
            return
        entries = []
        for unit in units:
            assert unit.undo is not None
            words = np.asarray(unit.words)
            entries.append(ledger.entry(self.ledger, unit.key, unit.start, unit.undo, words, unit.contributors))
        self.ledger.publish(Book(entries, settings), generation)


def holding(unit: Unit, asynchronous: bool) -> Holding:
    """What a living server has of a unit."""
    stop = unit.start + unit.stored.size
    if unit.undo is not None and not asynchronous:
        standings = unit.undo.standings()
    else:
        round_ = max(unit.done, default=0) if asynchronous else unit.round
        standings = [(round_, unit.stands_at)]
    state = unit.undo.state if unit.undo is not None else unit.state or ()
    pushes = list(zip(unit.contributors, unit.done)) if asynchronous else []
    return Holding(unit.key, unit.start, stop, standings, unit.torn, dtype_names(state), pushes)


def at(unit: Unit, before: bool) -> list[Array]:
    """Values and state of a living server's unit; `before`: as they were a round before."""
    if unit.undo is not None:
        return unit.undo.at(before)
    return [unit.stored, *(unit.state or ())]


def _zeros(count: int) -> Array:
    words = arena.empty(max(count, 8), np.uint64)
    words[...] = 0
    return words


def _region(array: Array) -> Region:
    region = arena.locate(array)
    assert region is not None
    return region

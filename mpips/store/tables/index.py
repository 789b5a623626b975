"""The index of a table's rows: where the row of each id lies. Open addressing, 4 bytes a slot, at most half full.

It grows into one of twice the size a piece at a time, so nothing stops for that: meanwhile an id is looked for in both.
Without a compiled loop a step of a call probes one slot of all ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpips.store.tables import kernels
from mpips.store.tables.initial import Ids, hashes_of

Positions = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Slots = NDArray[np.uint32]
FIRST_SLOTS = 1 << 10
MOVED_AT_ONCE = 1 << 15
"""Slots of an index that is growing which each insertion moves, at least."""
MOST_ROWS = (1 << 32) - 2


class Index:
    """Positions of rows by id. `ids`: the id of each position, which the owner writes before it inserts the row."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._count = 0
        self._slots, self._growing = np.zeros(FIRST_SLOTS, np.uint32), np.zeros(0, np.uint32)
        """1 + a row's position in each slot, and the slots before these, of which `_moved` are moved."""
        self._moved = 0
        self._next, self._written = np.zeros(0, np.uint32), 0
        """The slots for the next growth, of which so many are written with zeros."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all slots."""
        return self._slots.nbytes + self._growing.nbytes + 4 * self._written

    def find(self, ids: Ids) -> Positions:
        """Return the position of each id's row, -1 where there is none."""
        found = self._found(self._slots, ids)
        if len(self._growing):
            left = np.flatnonzero(found < 0)
            found[left] = self._found(self._growing, ids[left])
        return found

    def insert(self, ids: Ids, positions: Positions) -> None:
        """Add rows that are not there, each once."""
        self._count += len(ids)
        self._grow(len(ids))
        _insert(self._slots, ids, positions)

    def remove(self, ids: Ids, positions: Positions) -> None:
        """Remove rows that are there, each once. Their ids still stand at their positions."""
        self._count -= len(ids)
        hashes, marks = hashes_of(ids), (positions + 1).astype(np.uint32)
        if len(self._growing):
            # What stood behind them moves at once, so that no gap parts it from where it is looked for.
            where, left = _cut(self._growing, _slots_of(self._growing, hashes, marks))
            self._put_back(left[where >= self._moved])
        self._put_back(_cut(self._slots, _slots_of(self._slots, hashes, marks))[1])

    def _put_back(self, marks: Slots) -> None:
        """Insert rows that are counted already."""
        positions = marks.astype(np.int64) - 1
        _insert(self._slots, self._ids[positions], positions)

    def _grow(self, added: int) -> None:
        """See that there is room for all rows, of which so many come now, and go on with a move that is under way."""
        if 2 * self._count > len(self._slots):
            self._move(len(self._growing))
            size = len(self._slots)
            while size < 2 * self._count:
                size *= 2
            self._growing, self._slots, self._moved = self._slots, self._next_slots(size), 0
        # Twice the rows that are new would suffice to be through before the next growth.
        self._move(self._moved + max(MOVED_AT_ONCE, 8 * added))
        if 16 * self._count > 7 * len(self._slots):
            self._write_zeros(2 * len(self._slots), max(MOVED_AT_ONCE, 64 * added))

    def _next_slots(self, size: int) -> Slots:
        """Return that many empty slots."""
        self._write_zeros(size, size)
        slots, self._next, self._written = self._next, np.zeros(0, np.uint32), 0
        return slots

    def _write_zeros(self, size: int, count: int) -> None:
        """Prepare that many more of the next slots: rows come all over them, and the machine gives memory slowly."""
        if len(self._next) != size:
            self._next, self._written = np.empty(size, np.uint32), 0
        stop = min(size, self._written + count)
        self._next[self._written : stop] = 0
        self._written = stop

    def _move(self, until: int) -> None:
        """Move the slots of an index that grows, up to this one."""
        if not len(self._growing):
            return
        marks = self._growing[self._moved : until]
        positions = marks[marks != 0].astype(np.int64) - 1
        _insert(self._slots, self._ids[positions], positions)
        self._moved = until
        if until >= len(self._growing):
            self._growing, self._moved = np.zeros(0, np.uint32), 0

    def _found(self, slots: Slots, ids: Ids) -> Positions:
        """Return the position of each id in some slots, -1 where it is not there."""
        found = np.empty(len(ids), np.int64)
        if kernels.find(ids, slots, self._ids, found):
            return found
        mask = len(slots) - 1
        at, left = (hashes_of(ids) & np.uint64(mask)).astype(np.int64), np.arange(len(ids))
        found[...] = -1
        while len(left):
            held = slots[at].astype(np.int64) - 1
            used = np.flatnonzero(held >= 0)
            left, at, held = left[used], at[used], held[used]
            same = self._ids[held] == ids[left]
            found[left[same]] = held[same]
            left, at = left[~same], (at[~same] + 1) & mask
        return found


def _insert(slots: Slots, ids: Ids, positions: Positions) -> None:
    """Put rows that are not there into slots. Of those that try one slot the last gets it; others go on."""
    if kernels.insert(ids, slots, positions):
        return
    mask = len(slots) - 1
    at, marks = (hashes_of(ids) & np.uint64(mask)).astype(np.int64), (positions + 1).astype(np.uint32)
    while len(at):
        empty = slots[at] == 0
        slots[at[empty]] = marks[empty]
        left = slots[at] != marks
        at, marks = (at[left] + 1) & mask, marks[left]


def _slots_of(slots: Slots, hashes: Hashes, marks: Slots) -> Positions:
    """Return the slots where these marks stand; those that stand nowhere are left out."""
    mask = len(slots) - 1
    at, found = (hashes & np.uint64(mask)).astype(np.int64), []
    while len(at):
        held = slots[at]
        found.append(at[held == marks])
        further = (held != marks) & (held != 0)
        at, marks = (at[further] + 1) & mask, marks[further]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _cut(slots: Slots, at: Positions) -> tuple[Positions, Slots]:
    """Empty these slots, and those behind them up to an empty one. Return the latter, and what stood there."""
    slots[at] = 0  # so what stands behind each ends at the next
    mask, runs = len(slots) - 1, [at[:0]]
    while len(at):
        at = (at + 1) & mask
        at = at[slots[at] != 0]
        runs.append(at)
    where = np.concatenate(runs)
    marks = slots[where]
    slots[where] = 0
    return where, marks

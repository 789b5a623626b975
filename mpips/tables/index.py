"""The index of a table's rows: where the row of each id lies. Open addressing, 4 bytes a slot, at most half full.

    slot = 0, or bits of the id's hash above those that say where to look, and in the place of these 1 + the position

So a row of another id is mostly passed by without a look at its id. The index grows into one of twice the size a piece
at a time, so nothing stops for that: meanwhile an id is looked for in both. Slots lie in the server's sparse file, and
`words` say where, for those who read rows in place. Without a compiled loop a step of a call probes one slot of all
ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.arena import SparseFile
from mpips.tables import kernels
from mpips.tables.initial import Ids, hashes_of

Positions = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Slots = NDArray[np.uint32]
FIRST_SLOTS = 1 << 10
MOVED_AT_ONCE = 1 << 15
"""Slots of an index that is growing which each insertion moves, at least."""
MOST_ROWS = (1 << 32) - 2
WORDS = 4
SLOTS_AT, SLOTS, GROWING_AT, GROWING = range(WORDS)
"""Offset in the file and number of slots, and of those of the smaller index that is being moved; 0: there is none."""
LOW = np.uint64((1 << 32) - 1)


class Index:
    """Positions of rows by id. `ids`: the id of each position, which the owner writes before it inserts the row.
    `file`: where slots lie; `words`: who reads rows in place finds them by."""

    def __init__(self, ids: Ids, file: SparseFile, words: Hashes) -> None:
        self._ids, self._file, self._words = ids, file, words
        self._count = self._top = 0
        """Rows, and the first position behind all of them."""
        self._slots, at = file.zeros((FIRST_SLOTS,), np.uint32)
        self._growing, self._moved = np.zeros(0, np.uint32), 0
        """The slots before these, of which so many are moved."""
        self._next, self._next_at, self._written = np.zeros(0, np.uint32), 0, 0
        """The slots for the next growth and their offset, of which so many are written with zeros."""
        words[:] = at, FIRST_SLOTS, 0, 0

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
        self._top = max(self._top, int(positions.max(initial=-1)) + 1)
        self._grow(len(ids))
        _insert(self._slots, ids, positions)

    def remove(self, ids: Ids, positions: Positions) -> None:
        """Remove rows that are there, each once. Their ids still stand at their positions."""
        self._count -= len(ids)
        hashes = hashes_of(ids)
        if len(self._growing):
            # What stood behind them moves at once, so that no gap parts it from where it is looked for.
            where, left = _cut(self._growing, _slots_of(self._growing, hashes, positions))
            self._put_back(_positions_in(self._growing, left[where >= self._moved]))
        left = _cut(self._slots, _slots_of(self._slots, hashes, positions))[1]
        self._put_back(_positions_in(self._slots, left))

    def _put_back(self, positions: Positions) -> None:
        """Insert rows that are counted already."""
        _insert(self._slots, self._ids[positions], positions)

    def _grow(self, added: int) -> None:
        """See that there is room for all rows, of which so many come now, and go on with a move that is under way."""
        needed = max(2 * self._count, self._top + 1)  # each position has to fit into a slot
        if needed > len(self._slots):
            self._move(len(self._growing))
            size = len(self._slots)
            while size < needed:
                size *= 2
            self._begin_move(size)
        # Twice the rows that are new would suffice to be through before the next growth.
        self._move(self._moved + max(MOVED_AT_ONCE, 8 * added))
        if 16 * self._count > 7 * len(self._slots):
            self._write_zeros(2 * len(self._slots), max(MOVED_AT_ONCE, 64 * added))

    def _begin_move(self, size: int) -> None:
        """Let that many empty slots be the index, into which the others are moved."""
        self._write_zeros(size, size)
        self._growing, self._slots, self._moved = self._slots, self._next, 0
        self._words[:] = self._next_at, size, self._words[SLOTS_AT], len(self._growing)
        self._next, self._written = np.zeros(0, np.uint32), 0

    def _write_zeros(self, size: int, count: int) -> None:
        """Prepare that many more of the next slots: rows come all over them, and the machine gives memory slowly."""
        if len(self._next) != size:
            (self._next, self._next_at), self._written = self._file.zeros((size,), np.uint32), 0
        stop = min(size, self._written + count)
        self._next[self._written : stop] = 0
        self._written = stop

    def _move(self, until: int) -> None:
        """Move the slots of an index that grows, up to this one."""
        if not len(self._growing):
            return
        marks = self._growing[self._moved : until]
        self._put_back(_positions_in(self._growing, marks[marks != 0]))
        self._moved = until
        if until >= len(self._growing):
            self._growing, self._moved = np.zeros(0, np.uint32), 0
            self._words[GROWING_AT:] = 0

    def _found(self, slots: Slots, ids: Ids) -> Positions:
        """Return the position of each id in some slots, -1 where it is not there."""
        found = np.empty(len(ids), np.int64)
        if kernels.find(ids, slots, self._ids, found):
            return found
        mask, above = _bits(slots)
        hashes, left = hashes_of(ids), np.arange(len(ids))
        at, tags = (hashes & mask).astype(np.int64), (hashes & above).astype(np.uint32)
        found[...] = -1
        while len(left):
            held = slots[at]
            used = np.flatnonzero(held)
            left, at, tags, held = left[used], at[used], tags[used], held[used]
            positions, same = _positions_in(slots, held), (held & np.uint32(above)) == tags
            same[same] = self._ids[positions[same]] == ids[left[same]]
            found[left[same]] = positions[same]
            left, at, tags = left[~same], (at[~same] + 1) & int(mask), tags[~same]
        return found


def _bits(slots: Slots) -> tuple[np.uint64, np.uint64]:
    """Return the bits of a hash that say where to look, and those that stand in a slot beside the position."""
    mask = np.uint64(len(slots) - 1)
    return mask, LOW & ~mask


def _marks(slots: Slots, hashes: Hashes, positions: Positions) -> Slots:
    """Return what stands in the slots of rows."""
    return ((hashes & _bits(slots)[1]) | (positions + 1).astype(np.uint64)).astype(np.uint32)


def _positions_in(slots: Slots, marks: Slots) -> Positions:
    """Return the positions that marks of these slots, none of them empty, say."""
    return (marks & np.uint32(len(slots) - 1)).astype(np.int64) - 1


def _insert(slots: Slots, ids: Ids, positions: Positions) -> None:
    """Put rows that are not there into slots. Of those that try one slot the last gets it; others go on."""
    if kernels.insert(ids, slots, positions):
        return
    hashes, mask = hashes_of(ids), len(slots) - 1
    at, marks = (hashes & np.uint64(mask)).astype(np.int64), _marks(slots, hashes, positions)
    while len(at):
        empty = slots[at] == 0
        slots[at[empty]] = marks[empty]
        left = slots[at] != marks
        at, marks = (at[left] + 1) & mask, marks[left]


def _slots_of(slots: Slots, hashes: Hashes, positions: Positions) -> Positions:
    """Return the slots where rows stand; those that stand nowhere are left out."""
    mask, marks = len(slots) - 1, _marks(slots, hashes, positions)
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

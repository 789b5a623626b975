"""The index of a table's rows: a hash table from ids to the positions of their rows.

The hash table uses open addressing, 4 bytes for each slot, and is at most half full. A slot is 0 if it is empty.
Otherwise its low bits hold 1 + the position of a row, and its high bits hold the high bits of the id's lower hash half.
(The low bits of the hash choose the slot, so they need not be stored.) A lookup first compares these stored bits. So
for most rows of other ids it need not read the id.

A full index grows into a new one of twice the size. Each insertion moves a part of the slots, so that no call takes
long. Until all slots have been moved, ids are looked up in both indexes. Slots are in the server's sparse file. `words`
hold their offset in the file, for processes that read rows in place (`in_place`).

Without compiled loops, each step of a lookup probes one slot for all ids at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import SparseFile
from mpips.store.keys.row_sums import Ids, hashes_of
from mpips.tables import kernels

Positions = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Slots = NDArray[np.uint32]
FIRST_SLOTS = 1 << 10
# While the index grows, each insertion moves at least this many slots.
MOVED_AT_ONCE = 1 << 15
MOST_ROWS = (1 << 32) - 2
WORDS = 4
# Indices in `words`. SLOTS_AT and SLOTS: offset in the file and number of slots of the index. GROWING_AT and GROWING:
# offset and number of slots of the smaller index that is being moved into it (0 if the index is not growing).
SLOTS_AT, SLOTS, GROWING_AT, GROWING = range(WORDS)
LOW = np.uint64((1 << 32) - 1)


class Index:
    """The index of one table: finds the position of an id's row.

    Args:
        ids: The id at each position. The caller writes an id into this array before it inserts the row.
        file: The file in which slots are allocated.
        words: Receives the places of the slots, for processes that read rows in place.
    """

    def __init__(self, ids: Ids, file: SparseFile, words: Hashes) -> None:
        self._ids = ids
        self._file = file
        self._words = words
        # number of rows
        self._count = 0
        # the first position after those of all rows
        self._top = 0
        self._slots, at = file.zeros((FIRST_SLOTS,), np.uint32)
        # the slots of the old, smaller index, while they are being moved
        self._growing = np.zeros(0, np.uint32)
        # number of slots of `_growing` that have already been moved
        self._moved = 0
        # the slots for the next growth
        self._next = np.zeros(0, np.uint32)
        # the offset of `_next` in the file
        self._next_at = 0
        # number of slots of `_next` that have already been zeroed
        self._written = 0
        words[:] = at, FIRST_SLOTS, 0, 0

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes + self._growing.nbytes + 4 * self._written

    def find(self, ids: Ids) -> Positions:
        """Return the position of each id's row, or -1 for an id without a row."""
        found = self._found(self._slots, ids)
        if len(self._growing):
            left = np.flatnonzero(found < 0)
            found[left] = self._found(self._growing, ids[left])
        return found

    def insert(self, ids: Ids, positions: Positions) -> None:
        """Add rows that are not in the index. No id may repeat."""
        self._count += len(ids)
        self._top = max(self._top, int(positions.max(initial=-1)) + 1)
        self._grow(len(ids))
        _insert(self._slots, ids, positions)

    def remove(self, ids: Ids, positions: Positions) -> None:
        """Remove rows that are in the index. No id may repeat. `self._ids` must still have the ids of these rows."""
        self._count -= len(ids)
        hashes = hashes_of(ids)
        if len(self._growing):
            # A lookup ends at an empty slot, so it would miss rows in the slots after an emptied one. So `_cut` also
            # empties those slots. The rows in them that have not been moved yet are inserted into the new index now.
            where, left = _cut(self._growing, _slots_of(self._growing, hashes, positions))
            self._put_back(_positions_in(self._growing, left[where >= self._moved]))
        left = _cut(self._slots, _slots_of(self._slots, hashes, positions))[1]
        self._put_back(_positions_in(self._slots, left))

    def _put_back(self, positions: Positions) -> None:
        """Insert rows into the index. `_count` already includes them."""
        _insert(self._slots, self._ids[positions], positions)

    def _grow(self, added: int) -> None:
        """Make room for `added` more rows, and continue to move the slots of a growing index."""
        # The index may be at most half full, and every position must fit into the low bits of a slot.
        needed = max(2 * self._count, self._top + 1)
        if needed > len(self._slots):
            self._move(len(self._growing))
            size = len(self._slots)
            while size < needed:
                size *= 2
            self._begin_move(size)
        # With two slots for each added row, the move would end just before the next growth. Move more to be safe.
        self._move(self._moved + max(MOVED_AT_ONCE, 8 * added))
        if 16 * self._count > 7 * len(self._slots):
            self._write_zeros(2 * len(self._slots), max(MOVED_AT_ONCE, 64 * added))

    def _begin_move(self, size: int) -> None:
        """Begin to grow: make `size` empty slots the index. Later calls of `_move` move the old slots into it."""
        self._write_zeros(size, size)
        self._growing, self._slots, self._moved = self._slots, self._next, 0
        self._words[:] = self._next_at, size, self._words[SLOTS_AT], len(self._growing)
        self._next, self._written = np.zeros(0, np.uint32), 0

    def _write_zeros(self, size: int, count: int) -> None:
        """Write zeros into `count` more of the slots for the next growth.

        Writing zeros makes the kernel provide memory for the slots. Rows will be inserted at random slots, and the
        kernel is slow to provide memory page by page. So each insertion before a growth prepares some of the slots.
        """
        if len(self._next) != size:
            (self._next, self._next_at), self._written = self._file.zeros((size,), np.uint32), 0
        stop = min(size, self._written + count)
        arena.use_huge_pages(self._next, self._next[: self._written].nbytes, self._next[:stop].nbytes)
        self._next[self._written : stop] = 0
        self._written = stop

    def _move(self, until: int) -> None:
        """Move the slots of the smaller index before slot `until` into the index."""
        if not len(self._growing):
            return
        marks = self._growing[self._moved : until]
        self._put_back(_positions_in(self._growing, marks[marks != 0]))
        self._moved = until
        if until >= len(self._growing):
            self._growing, self._moved = np.zeros(0, np.uint32), 0
            self._words[GROWING_AT:] = 0

    def _found(self, slots: Slots, ids: Ids) -> Positions:
        """Look up ids in `slots`. Return the position of each id, or -1 for an id that is not in them."""
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
    """Return two masks for a hash.

    One selects the bits that choose a slot, the other the bits that are stored in the slot.
    """
    mask = np.uint64(len(slots) - 1)
    return mask, LOW & ~mask


def _marks(slots: Slots, hashes: Hashes, positions: Positions) -> Slots:
    """Return the content of a slot for each of these rows."""
    return ((hashes & _bits(slots)[1]) | (positions + 1).astype(np.uint64)).astype(np.uint32)


def _positions_in(slots: Slots, marks: Slots) -> Positions:
    """Return the positions that these slot contents hold. No slot may be empty."""
    return (marks & np.uint32(len(slots) - 1)).astype(np.int64) - 1


def _insert(slots: Slots, ids: Ids, positions: Positions) -> None:
    """Insert rows into slots.

    Without a compiled loop all rows try their slots at once. If several rows try one slot, the last row gets it, and
    the other rows try the next slot.
    """
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
    """Return the slots of these rows. Rows that are not in `slots` are ignored."""
    mask, marks = len(slots) - 1, _marks(slots, hashes, positions)
    at, found = (hashes & np.uint64(mask)).astype(np.int64), []
    while len(at):
        held = slots[at]
        found.append(at[held == marks])
        further = (held != marks) & (held != 0)
        at, marks = (at[further] + 1) & mask, marks[further]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _cut(slots: Slots, at: Positions) -> tuple[Positions, Slots]:
    """Empty the slots `at`, and after each of them all slots up to the next empty one.

    Return the slots after the slots `at`, and their old contents.
    """
    # Empty the slots `at` first, so that the slots to empty after one of them end at the next one.
    slots[at] = 0
    mask, runs = len(slots) - 1, [at[:0]]
    while len(at):
        at = (at + 1) & mask
        at = at[slots[at] != 0]
        runs.append(at)
    where = np.concatenate(runs)
    marks = slots[where]
    slots[where] = 0
    return where, marks

"""Positions of rows, given to ids and found again; and which old rows give theirs back (`evict`, `limit`).

Rows never move. When a row is dropped, its position goes to a new one. Which rows are dropped depends only on the ids
of each update:

- with `evict`, rows that no update has named for `evict` updates;
- with `limit`, if there are more rows than that, those whose last update is the oldest, and among rows with the same
  last update those with smaller ids first.

To know them without a scan, `Order` keeps the positions that each update has named, oldest update first. A row that is
named again appears in a later list too, and its earlier entry no longer counts. So a call does work in proportion to
what it names and drops, and a little to clear lists of entries that no longer count.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.arena import SparseFile
from mpips.collectives.machine import free_memory
from mpips.store.keys.row_sums import Ids
from mpips.tables.index import Hashes, Index, Positions

Touched = NDArray[np.int32]
# `touched` of a position without a row; updates count from 1
FREE = 0
# While too many entries no longer count, each update looks through at least this many.
CLEARED_AT_ONCE = 1 << 12
# rows that `restore` inserts into the index at a time
RESTORED_AT_ONCE = 1 << 20
# most bytes of the index for one row, while it grows
INDEX_BYTES = 24
# Free memory is checked for this many bytes of rows at a time, and as much is left to other processes.
SEEN_BYTES = 1 << 26


def room() -> int:
    """Return the bytes of memory that new rows may take before the next row is refused.

    Tables for which memory was checked already may take up to `SEEN_BYTES` more.
    """
    return max(0, free_memory() - 2 * SEEN_BYTES)


class Places:
    """The positions of a table's rows by id, and the rows to drop.

    Args:
        ids: The id of the row at each position, with space for as many rows as there can be.
        touched: The last update that has named the row at each position; `FREE` if there is no row.
        row_bytes: Memory of a row without the index.
        file: Where the index allocates slots.
        words: Where processes that read in place find the index.
        evict, limit: Which rows are dropped; 0: none.
    """

    def __init__(
        self,
        ids: Ids,
        touched: Touched,
        row_bytes: int,
        file: SparseFile,
        words: Hashes,
        evict: int = 0,
        limit: int = 0,
    ) -> None:
        self._ids = ids
        self._touched = touched
        self._evict = evict
        self._limit = limit
        self._file = file
        self._words = words
        self._row_bytes = row_bytes + INDEX_BYTES
        # free memory was checked for the positions before this one
        self._sure = 0
        # number of rows
        self.count = 0
        # first position that was never given out
        self.top = 0
        # Positions of dropped rows; `_free_count` of them are valid.
        self._free = np.zeros(0, np.uint32)
        self._free_count = 0
        self._index = Index(ids, file, words)
        self._order = Order(ids, touched) if evict or limit else None

    @property
    def nbytes(self) -> int:
        """Bytes of the index, the order and the list of free positions."""
        order = self._order.nbytes if self._order else 0
        return self._index.nbytes + self._free.nbytes + order

    def find(self, ids: Ids) -> Positions:
        """Return the position of each id's row, or -1 if it has none."""
        return self._index.find(ids)

    def has_room(self, count: int) -> bool:
        """True if the machine has memory for `count` more rows."""
        top = self.top + max(0, count - self._free_count)
        if top <= self._sure:
            return True
        sure = max(top, self._sure + SEEN_BYTES // self._row_bytes)
        needed = (sure - self.top) * self._row_bytes + SEEN_BYTES
        if sure > len(self._ids) or needed > free_memory() or needed > self._file.room:
            return False
        self._sure = sure
        return True

    def check_room(self, count: int) -> None:
        """Raise MemoryError if the machine has no memory for `count` more rows. Nothing has changed then."""
        if not self.has_room(count):
            raise MemoryError(self.no_room(count))

    def no_room(self, count: int) -> str:
        """Return the text of that error."""
        return (
            f"no memory for {count:,} rows ({count * self._row_bytes:,} bytes) beside the {self.count:,} that are "
            "there: give the table limit= or evict=, or the store more servers"
        )

    def add(self, ids: Ids) -> tuple[Positions, Positions]:
        """Give positions to ids without rows. No id may repeat.

        Call `check_room` before, and `touch` afterwards. Return all positions, and those of them that had a row before.
        """
        old = min(len(ids), self._free_count)
        again = self._free[self._free_count - old : self._free_count].astype(np.int64)
        fresh = np.arange(self.top, self.top + len(ids) - old)
        positions = np.concatenate([again, fresh])
        self._ids[positions] = ids
        self._index.insert(ids, positions)
        self.count, self.top, self._free_count = self.count + len(ids), self.top + len(fresh), self._free_count - old
        return positions, again

    def touch(self, positions: Positions, update: int) -> None:
        """Note that `update`, which is later than all before, names these rows."""
        self._touched[positions] = update
        if self._order is not None:
            self._order.append(positions, update, self.count)

    def due(self, update: int) -> Positions:
        """Return the rows to drop after `update`, which has been noted. They leave the order: call `remove` next."""
        if self._order is None:
            return np.zeros(0, np.int64)
        due = self._order.older_than(update - self._evict + 1) if self._evict else []
        excess = self.count - sum(map(len, due)) - self._limit if self._limit else 0
        if excess > 0:
            due += self._order.first(excess)
        return np.concatenate(due) if due else np.zeros(0, np.int64)

    def remove(self, positions: Positions) -> None:
        if not len(positions):
            return
        self._index.remove(self._ids[positions], positions)
        self._touched[positions] = FREE
        count = self._free_count + len(positions)
        if count > len(self._free):
            self._free = np.concatenate([self._free[: self._free_count], np.zeros(count, np.uint32)])
        self._free[self._free_count : count] = positions
        self._free_count, self.count = count, self.count - len(positions)

    def restore(self, top: int) -> None:
        """Rebuild everything from `ids` and `touched` of the positions before `top`."""
        lying, self._index = self.lying(0, top), Index(self._ids, self._file, self._words)
        for start in range(0, len(lying), RESTORED_AT_ONCE):
            piece = lying[start : start + RESTORED_AT_ONCE]
            self._index.insert(self._ids[piece], piece)
        self._free = np.flatnonzero(self._touched[:top] == FREE).astype(np.uint32)
        self.count, self.top, self._free_count, self._sure = len(lying), top, len(self._free), top
        self.rebuild_order()

    def rebuild_order(self) -> None:
        """Rebuild the order after rows were put together with their last updates, by a load or a recovery."""
        if self._order is not None:
            self._order.rebuild(self.top)

    def lying(self, start: int, stop: int, since: int = FREE) -> Positions:
        """Return the positions in [start, stop) of rows that an update after `since` has named."""
        return start + np.flatnonzero(self._touched[start:stop] > since)


class Order:
    """Rows ordered by the last update that has named them, oldest first."""

    def __init__(self, ids: Ids, touched: Touched) -> None:
        self._ids = ids
        self._touched = touched
        # update -> positions that it has named; those that a later update has named do not count
        self._named: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()
        # the update whose positions are sorted by id
        self._sorted = FREE
        # number of positions in all lists
        self._entries = 0
        # updates whose lists are still to be cleared, the next one last
        self._uncleared: list[int] = []

    @property
    def nbytes(self) -> int:
        return 4 * self._entries

    def append(self, positions: Positions, update: int, count: int) -> None:
        """Note that `update` has named these rows. `count` is the number of all rows."""
        if len(positions):
            self._put(update, positions.astype(np.uint32))
        # When more than half of the entries no longer count, begin to clear all lists, some with each update.
        if not self._uncleared and self._entries > 2 * count + CLEARED_AT_ONCE:
            self._uncleared = list(reversed(self._named))
        work = 4 * len(positions) + CLEARED_AT_ONCE
        while self._uncleared and work > 0:
            update = self._uncleared.pop()
            if update in self._named:
                work -= len(self._named[update])
                self._put(update, self._counting(update))

    def older_than(self, update: int) -> list[Positions]:
        """Take out the rows whose last update is before this one."""
        found = []
        while self._named and (first := next(iter(self._named))) < update:
            found.append(self._counting(first).astype(np.int64))
            self._put(first, np.zeros(0, np.uint32))
        return found

    def first(self, count: int) -> list[Positions]:
        """Take out `count` rows: those that no update has named for longest.

        Of rows with the same last update, those with smaller ids come first.
        """
        found = []
        while count > 0:
            first = next(iter(self._named))
            counting = self._counting(first)
            if count < len(counting) and self._sorted != first:
                counting, self._sorted = counting[np.argsort(self._ids[counting])], first
            found.append(counting[:count].astype(np.int64))
            self._put(first, counting[count:])
            count -= len(found[-1])
        return found

    def rebuild(self, top: int) -> None:
        """Order the rows before position `top` anew."""
        positions = np.flatnonzero(self._touched[:top] != FREE)
        touched = self._touched[positions]
        order = np.argsort(touched, kind="stable")
        entries, touched = positions[order].astype(np.uint32), touched[order]
        starts = np.flatnonzero(touched[1:] != touched[:-1]) + 1
        parts: list[NDArray[np.uint32]] = np.split(entries, starts) if len(entries) else []
        self._named = OrderedDict((int(self._touched[part[0]]), part) for part in parts)
        self._entries, self._uncleared, self._sorted = len(positions), [], FREE

    def _counting(self, update: int) -> NDArray[np.uint32]:
        """Return the rows that this update has named and no later one."""
        named = self._named[update]
        return named[self._touched[named] == update]

    def _put(self, update: int, positions: NDArray[np.uint32]) -> None:
        """Set the list of an update."""
        self._entries += len(positions) - len(self._named.get(update, ()))
        if len(positions):
            self._named[update] = positions
        else:
            self._named.pop(update, None)

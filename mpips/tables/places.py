"""Positions of rows, given to ids and found again; and which old rows give theirs back (`evict`, `limit`).

Rows never move, and the position of one that is dropped goes to a new one. Which rows are dropped depends on the ids of
each update alone: those that no update has named for `evict` updates, and, beyond `limit`, those longest not named; of
those that the same update has named last, the smaller ids first.

The order of the rows is a list of positions for each update, the oldest first. A row that is named again stands in a
later list, too, and the earlier entry no longer counts. So a call does work for what it names and for what it drops,
and a little to clear lists of entries that do not count.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.arena import SparseFile
from mpips.collectives.machine import free_memory
from mpips.tables.index import Hashes, Index, Positions
from mpips.tables.initial import Ids

Touched = NDArray[np.int32]
FREE = 0
"""In place of an update, where no row lies; updates count from 1."""
CLEARED_AT_ONCE = 1 << 12
"""Entries of the order that each update looks through, at least, while there are too many."""
RESTORED_AT_ONCE = 1 << 20
INDEX_BYTES = 24
"""At most, of a row."""
SEEN_BYTES = 1 << 26
"""Of rows, for which the machine is asked at a time; so many are left to others."""


def room() -> int:
    """Return the bytes that new rows may take before one more is refused: some `SEEN_BYTES` more where memory was seen
    for them."""
    return max(0, free_memory() - 2 * SEEN_BYTES)


class Places:
    """Positions of rows by id. `ids`, `touched`: of each position, room for as many as there can be: the id of its row,
    and the update that has named it last, `FREE` where none lies. `row_bytes`: what a row takes. `file`, `words`: of
    the index."""

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
        self._ids, self._touched, self._evict, self._limit = ids, touched, evict, limit
        self._file, self._words = file, words
        self._row_bytes, self._sure = row_bytes + INDEX_BYTES, 0
        """The machine had memory for the positions before `_sure`."""
        self.count = 0
        """How many rows there are."""
        self.top = 0
        """The positions that were ever given out are those before it."""
        self._free = np.zeros(0, np.uint32)
        self._free_count = 0
        self._index = Index(ids, file, words)
        self._order = Order(ids, touched) if evict or limit else None

    @property
    def nbytes(self) -> int:
        """Return the bytes of index, order, and of the list of free positions."""
        order = self._order.nbytes if self._order else 0
        return self._index.nbytes + self._free.nbytes + order

    def find(self, ids: Ids) -> Positions:
        """Return the position of each id's row, -1 where there is none."""
        return self._index.find(ids)

    def has_room(self, count: int) -> bool:
        """Return whether the machine has memory for so many more rows."""
        top = self.top + max(0, count - self._free_count)
        if top <= self._sure:
            return True
        sure = max(top, self._sure + SEEN_BYTES // self._row_bytes)
        needed = (sure - self.top) * self._row_bytes + SEEN_BYTES
        if sure > len(self._ids) or needed > free_memory() or needed > self._file.room:
            return False
        self._sure = sure
        return True

    def see_room(self, count: int) -> None:
        """MemoryError where the machine has no memory for so many more rows; nothing has changed."""
        if not self.has_room(count):
            raise MemoryError(self.no_room(count))

    def no_room(self, count: int) -> str:
        """Return the sentence of a machine that has no memory for so many more rows."""
        return (
            f"no memory for {count:,} rows ({count * self._row_bytes:,} bytes) beside the {self.count:,} that are "
            "there: give the table limit= or evict=, or the store more servers"
        )

    def add(self, ids: Ids) -> tuple[Positions, Positions]:
        """Give positions to rows that are not there, each once: return all, and those where rows have lain before.

        They have to be touched next. `see_room` comes before."""
        old = min(len(ids), self._free_count)
        again = self._free[self._free_count - old : self._free_count].astype(np.int64)
        fresh = np.arange(self.top, self.top + len(ids) - old)
        positions = np.concatenate([again, fresh])
        self._ids[positions] = ids
        self._index.insert(ids, positions)
        self.count, self.top, self._free_count = self.count + len(ids), self.top + len(fresh), self._free_count - old
        return positions, again

    def touch(self, positions: Positions, update: int) -> None:
        """Note that an update, a later one than before, names these rows."""
        self._touched[positions] = update
        if self._order is not None:
            self._order.append(positions, update, self.count)

    def due(self, update: int) -> Positions:
        """Return the rows that are to be dropped after this update, which has been noted; `remove` comes next."""
        if self._order is None:
            return np.zeros(0, np.int64)
        due = self._order.older_than(update - self._evict + 1) if self._evict else []
        excess = self.count - sum(map(len, due)) - self._limit if self._limit else 0
        if excess > 0:
            due += self._order.first(excess)
        return np.concatenate(due) if due else np.zeros(0, np.int64)

    def remove(self, positions: Positions) -> None:
        """Drop rows."""
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
        """Find the rows before this position anew, by their ids and the updates that have named them."""
        lying, self._index = self.lying(0, top), Index(self._ids, self._file, self._words)
        for start in range(0, len(lying), RESTORED_AT_ONCE):
            piece = lying[start : start + RESTORED_AT_ONCE]
            self._index.insert(self._ids[piece], piece)
        self._free = np.flatnonzero(self._touched[:top] == FREE).astype(np.uint32)
        self.count, self.top, self._free_count, self._sure = len(lying), top, len(self._free), top
        self.see_touched()

    def see_touched(self) -> None:
        """Rows have been set with the updates that named them last: put them in order."""
        if self._order is not None:
            self._order.rebuild(self.top)

    def lying(self, start: int, stop: int, since: int = FREE) -> Positions:
        """Return the positions in [start, stop) of rows that an update after `since` has named."""
        return start + np.flatnonzero(self._touched[start:stop] > since)


class Order:
    """Rows by the update that has named them last, the oldest first."""

    def __init__(self, ids: Ids, touched: Touched) -> None:
        self._ids, self._touched = ids, touched
        self._named: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()
        """Positions by the update that has named them. Those count that no later one has named."""
        self._sorted = FREE
        """The update whose positions stand in the order of their ids."""
        self._entries = 0
        self._uncleared: list[int] = []
        """Updates whose entries are still to be looked through, the next one last."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all entries."""
        return 4 * self._entries

    def append(self, positions: Positions, update: int, count: int) -> None:
        """An update has named these rows. `count`: of all rows."""
        if len(positions):
            self._put(update, positions.astype(np.uint32))
        if not self._uncleared and self._entries > 2 * count + CLEARED_AT_ONCE:
            self._uncleared = list(reversed(self._named))
        work = 4 * len(positions) + CLEARED_AT_ONCE
        while self._uncleared and work > 0:
            update = self._uncleared.pop()
            if update in self._named:
                work -= len(self._named[update])
                self._put(update, self._counting(update))

    def older_than(self, update: int) -> list[Positions]:
        """Take out the rows that were named last before this update."""
        found = []
        while self._named and (first := next(iter(self._named))) < update:
            found.append(self._counting(first).astype(np.int64))
            self._put(first, np.zeros(0, np.uint32))
        return found

    def first(self, count: int) -> list[Positions]:
        """Take out so many rows, those longest not named."""
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
        """Begin anew with the rows before this position."""
        positions = np.flatnonzero(self._touched[:top] != FREE)
        touched = self._touched[positions]
        order = np.argsort(touched, kind="stable")
        entries, touched = positions[order].astype(np.uint32), touched[order]
        starts = np.flatnonzero(touched[1:] != touched[:-1]) + 1
        parts: list[NDArray[np.uint32]] = np.split(entries, starts) if len(entries) else []
        self._named = OrderedDict((int(self._touched[part[0]]), part) for part in parts)
        self._entries, self._uncleared, self._sorted = len(positions), [], FREE

    def _counting(self, update: int) -> NDArray[np.uint32]:
        """Return the rows that this update has named, and no later one."""
        named = self._named[update]
        return named[self._touched[named] == update]

    def _put(self, update: int, positions: NDArray[np.uint32]) -> None:
        """Let these be the entries of an update."""
        self._entries += len(positions) - len(self._named.get(update, ()))
        if len(positions):
            self._named[update] = positions
        else:
            self._named.pop(update, None)

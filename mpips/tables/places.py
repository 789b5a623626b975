"""Assign positions to the rows of ids, find them, and choose rows to drop (`evict`, `evict_after`, `limit`).

Rows never move. When a row is dropped, a new row gets its position. Which rows are dropped depends only on the ids, the
times and the scores of each update:

- with `evict`, rows that no update has named for `evict` updates;
- with `evict_after`, rows whose last update is at least `evict_after` ago;
- with `limit`, if there are more rows than `limit`, the rows whose last update is the oldest. Among rows with equal
  last updates those with smaller ids are dropped first. With `evict_by`, the rows with the smallest scores (see
  `eviction`).

To find old rows without a scan, `Order` keeps a list of the positions that each update has named, oldest update
first. If a later update names a row again, the row is also in a later list, and its earlier entry is invalid. So the
work of a call is proportional to the number of rows that it names and drops, plus a little to remove invalid entries.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.arena import SparseFile
from mpips.collectives.machine import free_memory
from mpips.store.keys.row_sums import Ids
from mpips.tables.eviction import ByScore
from mpips.tables.index import Hashes, Index, Positions

Touched = NDArray[np.int32]
NONE: Positions = np.zeros(0, np.int64)
# the value of `touched` at a position without a row; no update has this number, because updates are numbered from 1
FREE = 0
# While the lists of `Order` (see above) have too many invalid entries, each update checks at least this many entries.
CLEARED_AT_ONCE = 1 << 12
# number of rows that `restore` inserts into the index at a time, which limits the memory that it needs
RESTORED_AT_ONCE = 1 << 20
# largest number of bytes that the index uses for one row; it uses this many only while it grows
INDEX_BYTES = 24
# The machine's free memory is checked each time the rows have grown by this many bytes. As many bytes are left to other
# processes.
SEEN_BYTES = 1 << 26


def room() -> int:
    """Return the number of bytes that new rows may take before servers refuse more rows.

    A table that has passed its last check of free memory may take up to `SEEN_BYTES` more than this.
    """
    return max(0, free_memory() - 2 * SEEN_BYTES)


class Places:
    """The positions of a table's rows by id, and the choice of rows to drop.

    Args:
        ids: The id of the row at each position. Its length is the largest possible number of rows.
        touched: The last update that has named the row at each position. `FREE` at a position without a row.
        row_bytes: Memory of a row without the index.
        file: The file in which the index allocates slots.
        words: Words that hold the offset of the index, for processes that read rows in place.
        evict, limit, after: The limits of the rules for dropping rows. 0 means that a rule drops no rows. `after` is
            `evict_after`.
        times: The time of the last update of the row at each position. None unless `after`.
        scores: The score of the row at each position. None if `limit` drops the oldest rows.
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
        after: int = 0,
        times: NDArray[np.int64] | None = None,
        scores: NDArray[np.float64] | None = None,
    ) -> None:
        self._ids = ids
        self._touched = touched
        self._times = times
        self._evict = evict
        self._limit = limit
        self._after = after
        self._file = file
        self._words = words
        self._row_bytes = row_bytes + INDEX_BYTES
        # the first position for which free memory has not been checked yet
        self._sure = 0
        # number of rows
        self.count = 0
        # the first position that has never had a row
        self.top = 0
        # Positions of dropped rows. Only the first `_free_count` entries are valid.
        self._free = np.zeros(0, np.uint32)
        self._free_count = 0
        self._index = Index(ids, file, words)
        self._scored = ByScore(ids, touched, scores) if limit and scores is not None else None
        self._order = Order(ids, touched) if evict or after or (limit and scores is None) else None

    @property
    def nbytes(self) -> int:
        """The memory of the index, the orders and the list of free positions."""
        order = sum(each.nbytes for each in (self._order, self._scored) if each is not None)
        return self._index.nbytes + self._free.nbytes + order

    def find(self, ids: Ids) -> Positions:
        """Return the position of each id's row, or -1 for an id without a row."""
        return self._index.find(ids)

    def top_with(self, count: int) -> int:
        """Return the value that `top` will have after `count` more rows. Positions of dropped rows are used first."""
        return self.top + max(0, count - self._free_count)

    def has_room(self, count: int) -> bool:
        """True if the machine has memory for `count` more rows."""
        top = self.top_with(count)
        if top <= self._sure:
            return True
        sure = max(top, self._sure + SEEN_BYTES // self._row_bytes)
        needed = (sure - self.top) * self._row_bytes + SEEN_BYTES
        if sure > len(self._ids) or needed > free_memory() or needed > self._file.room:
            return False
        self._sure = sure
        return True

    def check_room(self, count: int) -> None:
        """Raise MemoryError if the machine has no memory for `count` more rows."""
        if not self.has_room(count):
            raise MemoryError(self.no_room(count))

    def no_room(self, count: int) -> str:
        """Return the message of the error that the machine has no memory for `count` more rows."""
        return (
            f"no memory for {count:,} rows ({count * self._row_bytes:,} bytes) beside the {self.count:,} that are "
            "there: give the table limit= or evict=, or the store more servers"
        )

    def add(self, ids: Ids) -> tuple[Positions, Positions]:
        """Assign positions to ids without rows. No id may repeat.

        Call `check_room` before, and `touch` afterwards.

        Returns:
            The positions of all ids, and those among them that had a row before.
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
        """Note that the update with number `update` names these rows, so that they count as recently used.

        The numbers must increase from call to call.
        """
        self._touched[positions] = update
        if self._order is not None:
            self._order.append(positions, update, self.count)
        if self._scored is not None:
            self._scored.note(positions, self.count)

    def unused(self, update: int) -> Positions:
        """Select the rows that the rule `evict` drops at the end of an update. Return their positions.

        This is the first of two steps. It takes these rows out of the list of rows by age (`Order`), so they will not
        be selected again. The second step is `remove`, which the caller must call next with the positions. `remove`
        frees the positions. The same two steps apply to `expired` and `excess`.

        Args:
            update: The number of the update that ends. Its rows must have been passed to `touch` before.
        """
        if self._order is None or not self._evict:
            return NONE
        return np.concatenate([NONE, *self._order.older_than(update - self._evict + 1)])

    def expired(self, now: int) -> Positions:
        """Select the rows that the rule `evict_after` drops at the time `now`. Return their positions.

        The caller must pass the positions to `remove` next (see `unused`).
        """
        if self._order is None or self._times is None:
            return NONE
        return np.concatenate([NONE, *self._order.before(now - self._after, self._times)])

    def excess(self) -> Positions:
        """Select the rows that the rule `limit` drops, if there are more rows than `limit`. Return their positions.

        The caller must pass the positions to `remove` next (see `unused`).
        """
        excess = self.count - self._limit if self._limit else 0
        if excess <= 0:
            return NONE
        if self._scored is not None:
            return self._scored.first(excess, self.top)
        assert self._order is not None
        return np.concatenate(self._order.first(excess))

    def remove(self, positions: Positions) -> None:
        """Drop the rows at these positions, and free the positions for new rows."""
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
        """Rebuild this object after a recovery, from what `ids` and `touched` contain at the positions before `top`."""
        lying, self._index = self.lying(0, top), Index(self._ids, self._file, self._words)
        for start in range(0, len(lying), RESTORED_AT_ONCE):
            piece = lying[start : start + RESTORED_AT_ONCE]
            self._index.insert(self._ids[piece], piece)
        self._free = np.flatnonzero(self._touched[:top] == FREE).astype(np.uint32)
        self.count, self.top, self._free_count, self._sure = len(lying), top, len(self._free), top
        self.rebuild_order()

    def rebuild_order(self) -> None:
        """Rebuild the order after a load or a recovery, which writes rows with the numbers of their last updates."""
        if self._order is not None:
            self._order.rebuild(self.top)
        if self._scored is not None:
            self._scored.forget()

    def lying(self, start: int, stop: int, since: int = FREE) -> Positions:
        """Return the positions in [start, stop) whose rows an update after `since` has named."""
        return start + np.flatnonzero(self._touched[start:stop] > since)


class Order:
    """Rows ordered by the last update that has named them, oldest first."""

    def __init__(self, ids: Ids, touched: Touched) -> None:
        self._ids = ids
        self._touched = touched
        # update -> positions that it has named. A position is invalid if a later update has named it.
        self._named: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()
        # the update whose positions are sorted by id
        self._sorted = FREE
        # number of positions in all lists
        self._entries = 0
        # updates whose lists may still have invalid entries; the last of them is cleared next
        self._uncleared: list[int] = []

    @property
    def nbytes(self) -> int:
        return 4 * self._entries

    def append(self, positions: Positions, update: int, count: int) -> None:
        """Note that `update` has named these rows. `count` is the number of all rows."""
        if len(positions):
            self._put(update, positions.astype(np.uint32))
        # When more than half of the entries are invalid, begin to clear all lists, a few with each update.
        if not self._uncleared and self._entries > 2 * count + CLEARED_AT_ONCE:
            self._uncleared = list(reversed(self._named))
        work = 4 * len(positions) + CLEARED_AT_ONCE
        while self._uncleared and work > 0:
            update = self._uncleared.pop()
            if update in self._named:
                work -= len(self._named[update])
                self._put(update, self._counting(update))

    def older_than(self, update: int) -> list[Positions]:
        """Remove the rows whose last update is before `update` from the order, and return their positions."""
        found = []
        while self._named and (first := next(iter(self._named))) < update:
            found.append(self._counting(first).astype(np.int64))
            self._put(first, np.zeros(0, np.uint32))
        return found

    def before(self, time: int, times: NDArray[np.int64]) -> list[Positions]:
        """Remove the rows whose last update was not after `time` from the order, and return their positions.

        `times` is the time of the last update of the row at each position.
        """
        found = []
        while self._named:
            counting = self._counting(first := next(iter(self._named)))
            # All rows of one update have the same time, with one exception: a table may have rows from several servers
            # of an asynchronous store, which number their updates differently. Even then no row is dropped too early.
            if len(counting) and times[counting].max() > time:
                break
            found.append(counting.astype(np.int64))
            self._put(first, np.zeros(0, np.uint32))
        return found

    def first(self, count: int) -> list[Positions]:
        """Remove the `count` rows that no update has named for the longest time, and return their positions.

        Among rows with equal last updates those with smaller ids come first.
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
        """Rebuild the order of all rows before position `top`."""
        positions = np.flatnonzero(self._touched[:top] != FREE)
        touched = self._touched[positions]
        order = np.argsort(touched, kind="stable")
        entries, touched = positions[order].astype(np.uint32), touched[order]
        starts = np.flatnonzero(touched[1:] != touched[:-1]) + 1
        parts: list[NDArray[np.uint32]] = np.split(entries, starts) if len(entries) else []
        self._named = OrderedDict((int(self._touched[part[0]]), part) for part in parts)
        self._entries, self._uncleared, self._sorted = len(positions), [], FREE

    def _counting(self, update: int) -> NDArray[np.uint32]:
        """Return the positions of rows that this update has named, and that no later update has named."""
        named = self._named[update]
        return named[self._touched[named] == update]

    def _put(self, update: int, positions: NDArray[np.uint32]) -> None:
        """Set the list of positions of an update."""
        self._entries += len(positions) - len(self._named.get(update, ()))
        if len(positions):
            self._named[update] = positions
        else:
            self._named.pop(update, None)

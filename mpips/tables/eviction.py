"""Drop rows by score (`evict_by`), and rows whose last update is too long ago on the wall clock (`evict_after`).

A score is either the number of updates that have named the row (`evict_by="count"`), or a number that the program gives
(`evict_by="score"`). The time of an update is the clock of the first worker whose push it contains: in a synchronous
store that of worker 0, which sends it to all servers with its push. No server reads a clock. So all servers and mirrors
have the same times, and a round that is undone has its time undone.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.store.keys.row_sums import Ids
from mpips.tables.index import Positions

# the values of `evict_by`: the order in which `limit` drops rows
AGE, COUNT, SCORE = "age", "count", "score"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
MICROSECONDS = 1_000_000
# A scan finds its bound by a sample of the rows. About this many rows of the sample are within the bound.
SAMPLED = 256
# about 3,000 years
MOST_SECONDS = 1e11


def now() -> int:
    """Return the time on the wall clock, in microseconds since 1970."""
    return time.time_ns() // 1000


def span_of(given: Any) -> int:
    """Return a time span such as "7d", "12h", "90s" or 90.0 (seconds), in microseconds. Raises ValueError."""
    number, unit = given, 1
    if isinstance(given, str) and given[-1:] in UNITS:
        number, unit = given[:-1], UNITS[given[-1]]
    try:
        seconds = float(number) * unit
    except (TypeError, ValueError):
        seconds = math.nan
    if not 1 / MICROSECONDS <= seconds <= MOST_SECONDS:
        raise ValueError(
            f"evict_after={given!r}: give a time above 0, such as '7d', '12h', '30m', '90s' or 90.0 seconds"
        )
    return round(seconds * MICROSECONDS)


class ByScore:
    """Finds the rows with the smallest scores. Among equal scores older updates come first, then smaller ids.

    Only a scan finds the smallest of all rows. So a scan chooses a *bound* that more rows are within than are needed,
    and keeps these rows as a *pool*. Rows that change later join the pool if they are within the bound then. So the
    pool has all rows within the bound, and as long as these are enough, no other row can be among the smallest.

    Args:
        ids: The id at each position.
        touched: The last update that has named the row at each position. 0 at a position without a row.
        scores: The score at each position.
    """

    def __init__(self, ids: Ids, touched: NDArray[np.int32], scores: NDArray[np.float64]) -> None:
        self._keys: tuple[NDArray[Any], ...] = (scores, touched, ids)
        self._touched = touched
        self.forget()

    @property
    def nbytes(self) -> int:
        return sum(positions.nbytes + touched.nbytes for positions, touched in self._pool)

    def forget(self) -> None:
        """Note that rows have changed in an unknown way, so that the next call of `first` scans all rows."""
        # Positions, and the last update of each row then. An entry is invalid once the row has been named again or
        # dropped, because then the last update is another.
        self._pool: list[tuple[NDArray[np.uint32], NDArray[np.int32]]] = []
        # score, last update and id; a row is within the bound if it is not larger; empty before a scan
        self._bound: tuple[Any, ...] = ()

    def note(self, positions: Positions, count: int) -> None:
        """Note that these rows have another score or update now. `count` is the number of all rows."""
        if self._bound:
            self._put(self._within(positions))
            if self.nbytes > 4 * count + (1 << 16):
                self.forget()

    def first(self, count: int, top: int) -> Positions:
        """Return the positions of the `count` rows to drop. The caller must drop them. There must be enough rows.

        `top` is the first position after those of all rows.
        """
        valid = [positions[self._touched[positions] == touched] for positions, touched in self._pool]
        pool = np.concatenate([np.zeros(0, np.uint32), *valid]).astype(np.int64)
        if len(pool) < count:
            pool = self._scanned(count, top)
        self._pool = []
        self._put(pool)
        return self._smallest(pool, count)[0]

    def _put(self, positions: Positions) -> None:
        self._pool.append((positions.astype(np.uint32), self._touched[positions]))

    def _scanned(self, count: int, top: int) -> Positions:
        """Choose a new bound, and return all rows within it. These are at least `count`."""
        rows = np.flatnonzero(self._touched[:top])
        # A scan costs the number of rows, and each call until the next scan costs the size of the pool. This size makes
        # both about equal.
        size = math.isqrt(len(rows) * count)
        pool = rows[:0]
        # The second step, without a sample, is for a sample whose bound is too low.
        for step in (1 + size // SAMPLED, 1):
            if len(pool) < count:
                self._bound = self._smallest(rows[::step], -(-size // step))[1]
                pool = self._within(rows)
        return pool

    def _within(self, positions: Positions) -> Positions:
        """Return those of these rows that are within the bound."""
        found = []
        for key, bound in zip(self._keys, self._bound):
            values = key[positions]
            found.append(positions[values < bound])
            positions = positions[values == bound]
        return np.concatenate([*found, positions])

    def _smallest(self, positions: Positions, count: int) -> tuple[Positions, tuple[Any, ...]]:
        """Return the `count` smallest rows among these, and the score, last update and id of the largest of them."""
        found, bound = [], []
        # Sorting all rows by three keys would take much longer. So take the rows below the count-th score, then look
        # only at the rows with this score, and so on.
        for key in self._keys:
            values = key[positions]
            bound.append(np.partition(values, count - 1)[count - 1])
            found.append(positions[values < bound[-1]])
            count -= len(found[-1])
            positions = positions[values == bound[-1]]
        return np.concatenate([*found, positions]), tuple(bound)

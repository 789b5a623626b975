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

    Only a scan finds the smallest of all rows. So a scan looks for more rows than are needed, and keeps them as a
    *pool*. Later calls choose from the pool: all rows outside of it are larger than its largest row was at the scan.

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
        return sum(part.nbytes for part in self._pool)

    def forget(self) -> None:
        """Note that rows have changed in an unknown way, so that the next call of `first` scans all rows."""
        # positions; a position may occur twice, and its row may have become larger than the bound or have been dropped
        self._pool: list[NDArray[np.uint32]] = []
        # score, last update and id of the pool's largest row at the scan; empty before a scan
        self._bound: tuple[Any, ...] = ()

    def note(self, positions: Positions, count: int) -> None:
        """Note that these rows have another score or update now. `count` is the number of all rows."""
        if self._bound:
            self._pool.append(positions[self._in_bound(positions)].astype(np.uint32))
            if self.nbytes > 4 * count + (1 << 16):
                self.forget()

    def first(self, count: int, top: int) -> Positions:
        """Return the positions of the `count` rows to drop. The caller must drop them. There must be enough rows.

        `top` is the first position after those of all rows.
        """
        pool = np.unique(np.concatenate([np.zeros(0, np.uint32), *self._pool])).astype(np.int64)
        pool = pool[self._touched[pool] != 0]
        pool = pool[self._in_bound(pool)]
        if len(pool) < count:
            rows = np.flatnonzero(self._touched[:top])
            # A scan costs the number of rows, and each call until the next scan costs the size of the pool. This size
            # makes both about equal.
            pool, self._bound = self._smallest(rows, min(len(rows), max(count, math.isqrt(len(rows) * count))))
        chosen = self._smallest(pool, count)[0]
        self._pool = [np.setdiff1d(pool, chosen, assume_unique=True).astype(np.uint32)]
        return chosen

    def _in_bound(self, positions: Positions) -> NDArray[np.bool_]:
        """Return a mask of the rows that are not larger than the bound."""
        inside = np.ones(len(positions), bool)
        # from the least important key to the most important one
        for key, bound in zip(reversed(self._keys), reversed(self._bound)):
            values = key[positions]
            inside = (values < bound) | ((values == bound) & inside)
        return inside

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

"""Drop rows by score (`evict_by`), and rows whose last update is too long ago on the wall clock (`evict_after`).

A score is either the number of updates that have named the row (`evict_by="count"`), or a number that the program gives
(`evict_by="score"`). The time of an update is the clock of the first worker whose push it contains: in a synchronous
store this is worker 0, which sends its time to all servers with its push. No server reads a clock. So all servers and
mirrors have the same times. If a round is undone, its time is undone too.
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
# A scan chooses its bound from a sample of the rows. About this many rows of the sample are within the bound.
SAMPLED = 256
# limit of `evict_after`: about 3,000 years
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

    Only a scan of all rows can find the smallest ones. So a scan chooses a *bound* such that more rows than needed are
    within it, and keeps these rows as a *pool*. A row that changes later joins the pool if it is then within the bound.
    So the pool always has all rows within the bound. As long as they are enough, the smallest rows are among them.

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
        """Note that unknown rows have changed, so that the next call of `first` scans all rows."""
        # Positions of rows, and the last update of each row at the time it joined. An entry is invalid once the row has
        # been named again or dropped, because its last update is then different.
        self._pool: list[tuple[NDArray[np.uint32], NDArray[np.int32]]] = []
        # score, last update and id; a row with the same or a smaller tuple is within the bound; empty before the first
        # scan
        self._bound: tuple[Any, ...] = ()

    def note(self, positions: Positions, count: int) -> None:
        """Note that these rows have another score or update now. `count` is the number of all rows."""
        if self._bound:
            self._put(self._within(positions))
            if self.nbytes > 4 * count + (1 << 16):
                self.forget()

    def first(self, count: int, top: int) -> Positions:
        """Return the positions of the `count` rows to drop. The caller must drop them. There must be enough rows.

        All rows are at positions before `top`.
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
        """Choose a new bound, and return all rows within it, which are at least `count` rows."""
        rows = np.flatnonzero(self._touched[:top])
        # A scan takes time in proportion to the number of rows, and each call until the next scan in proportion to the
        # size of the pool. With this size both take about equally long.
        size = math.isqrt(len(rows) * count)
        pool = rows[:0]
        # The second pass uses all rows instead of a sample. It is needed if the bound from the sample is too low.
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
        # Sorting all rows by three keys would take much longer. So take the rows with less than the count-th smallest
        # score. Then compare only the rows with exactly this score by the next key, and likewise for the third key.
        for key in self._keys:
            values = key[positions]
            bound.append(np.partition(values, count - 1)[count - 1])
            found.append(positions[values < bound[-1]])
            count -= len(found[-1])
            positions = positions[values == bound[-1]]
        return np.concatenate([*found, positions]), tuple(bound)

"""Decide which ids get a row: ids that enough updates have named (`seen`), or ids that are drawn at random (`chance`).

    admitted by chance  <=>  mix(mix(id ^ key) + update * golden ratio) < chance * 2^64

Both rules depend only on the ids of each update. For `seen`, a second table counts the updates that name ids without a
row. Its rows have one value, the count. So the same code limits, saves and restores the counts and other rows.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.store.keys.row_sums import GOLDEN, Ids, mixed
from mpips.tables.rows import TableRows

# combined with the key, so that the random numbers for admission differ from those for first values
OTHER = 0x5851F42D4C957F2D
# limit of `times`: counts are float32, which represents all whole numbers up to this limit exactly
MOST = 1 << 24


@dataclass(frozen=True)
class Seen:
    """The rule that `mpips.seen` makes: an id gets a row with the `times`-th update that names it.

    Attributes:
        times: The number of updates that must name an id before it gets a row.
        remember: The largest number of ids without a row that are counted.
    """

    times: int
    remember: int


@dataclass(frozen=True)
class Chance:
    """The rule that `mpips.chance` makes: each update that names an id gives it a row with this probability."""

    probability: float


def seen(times: int, remember: int = 1 << 20) -> Seen:
    """Return a rule for `admit`: an id gets a row with the `times`-th update that names it.

    Args:
        times: At least 1, and less than 2**24.
        remember: The largest number of ids without a row that all servers count together, less than 2**31. If there are
            more, the servers forget the ids that no update has named for the longest time.

    Raises:
        ValueError: An argument is not a whole number or is out of range.
    """
    numbers = []
    for word, given in (("times", times), ("remember", remember)):
        try:
            numbers.append(operator.index(given))
        except TypeError:
            numbers.append(0)
        most = MOST if word == "times" else 1 << 31
        if not 1 <= numbers[-1] < most:
            raise ValueError(f"seen({word}={given!r}): give a whole number from 1 on, below {most}")
    return Seen(*numbers)


def chance(probability: float) -> Chance:
    """Return a rule for `admit`: each update that names an id gives it a row with this probability.

    Args:
        probability: A number in (0, 1].

    Raises:
        ValueError: The probability is not in this range.
    """
    try:
        number = float(probability)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= 1:
        raise ValueError(f"chance(probability={probability!r}): give a number above 0 and up to 1")
    return Chance(number)


def lucky(key: int, ids: Ids, update: int, probability: float) -> NDArray[np.bool_]:
    """Return a mask of the ids that this update admits at random. `key` is the table's key for first values."""
    streams = mixed(ids.view(np.uint64) ^ np.uint64(key ^ OTHER))
    words = mixed(streams + np.uint64(update * GOLDEN % (1 << 64)))
    # Use 53 bits, because float64 represents them exactly.
    return (words >> np.uint64(11)) < np.uint64(math.ceil(probability * (1 << 53)))


def often_named(counts: TableRows, ids: Ids, times: int) -> NDArray[np.bool_]:
    """Count an update for ids without a row. Return a mask of the ids that have now been named by `times` updates.

    The caller makes rows for these ids, so their counts are removed. After that, old counts are dropped (`evict`,
    `remember`).
    """
    # The counts' optimizer is SGD with learning rate 1, so a gradient of -1 adds 1.
    counts.change_rows(ids, np.full((len(ids), 1), -1, np.float32))
    reached: NDArray[Any] = counts.pull(ids)[:, 0] >= times
    counts.remove(ids[reached])
    counts.drop_due_rows()
    return reached

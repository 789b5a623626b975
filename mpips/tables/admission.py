"""Which ids get a row: those that enough updates have named (`seen`), or that chance admits (`chance`).

    admitted by chance  <=>  mix(mix(id ^ key) + update * golden ratio) < chance * 2^64

Both depend on the ids of each update alone. Counts of ids are rows of a table of their own, with one value, the count:
so they are bounded, saved and restored as rows are.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.tables.initial import GOLDEN, Ids, mixed
from mpips.tables.rows import TableRows

COUNTS = "/seen"
"""What the name of a table of counts has behind that of its table."""
OTHER = 0x5851F42D4C957F2D
"""What sets apart the chances of ids from their first values."""
MOST = 1 << 24
"""Whole numbers that a count may take: it is a float32."""


@dataclass(frozen=True)
class Seen:
    """Ids that so many updates have named get a row; at most `remember` other ids are counted. Made by `mpips.seen`."""

    times: int
    remember: int


@dataclass(frozen=True)
class Chance:
    """Each update that names an id gives it a row with this probability. Made by `mpips.chance`."""

    probability: float


def seen(times: int, remember: int = 1 << 20) -> Seen:
    """Return the rule of `admit` that an id gets a row with the update that is the `times`-th to name it.

    Args:
        times: From 1 on.
        remember: At most so many ids without a row are counted on all servers; those longest not named are forgotten.
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
    """Return the rule of `admit` that each update which names an id gives it a row with this probability, in (0, 1]."""
    try:
        number = float(probability)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= 1:
        raise ValueError(f"chance(probability={probability!r}): give a number above 0 and up to 1")
    return Chance(number)


def lucky(key: int, ids: Ids, update: int, probability: float) -> NDArray[np.bool_]:
    """Return which ids this update admits by chance. `key`: of the table's first values."""
    streams = mixed(ids.view(np.uint64) ^ np.uint64(key ^ OTHER))
    words = mixed(streams + np.uint64(update * GOLDEN % (1 << 64)))
    # 53 bits, of which float64 holds all.
    return (words >> np.uint64(11)) < np.uint64(math.ceil(probability * (1 << 53)))


def often_named(counts: TableRows, ids: Ids, update: int, times: int) -> NDArray[np.bool_]:
    """Count that this update names ids without a row; return which reach `times`, and forget those.

    They get a row, so they take no place of the others, of which those longest not named are forgotten, too."""
    counts.change_rows(ids, np.full((len(ids), 1), -1, np.float32), update)
    reached: NDArray[Any] = counts.pull(ids)[:, 0] >= times
    counts.remove(ids[reached])
    counts.drop_due_rows()
    return reached

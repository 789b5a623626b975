"""Compute the first values of rows from their ids alone, by a counter-based random generator (SplitMix64).

    value(seed, table, id, column) = a + (b - a) * mix(mix(id ^ key) + (column + 1) * golden ratio) / 2^64

Here [a, b] is [-bound, bound], and the key is a hash of seed and table name. So the first values of a row are equal,
bit by bit, at any time and on any server. The arithmetic uses integers modulo 2^64 and is exact, up to one conversion
to float64.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.optimizers.base import working_dtype
from mpips.store.keys.row_sums import GOLDEN, Ids, mixed

# The number of values that are computed at a time. With 8 bytes for each value they fit into the cache.
MADE_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Uniform:
    """A rule for first values: they are spread evenly over [-bound, bound]. Made by `mpips.uniform`."""

    bound: float


def uniform(bound: float) -> Uniform:
    """Return a rule for a table's first values: spread evenly over [-bound, bound].

    `uniform(0)` gives zeros.

    Raises:
        ValueError: `bound` is not a finite number >= 0.
    """
    try:
        number = float(bound)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"uniform(bound={bound!r}): give a finite number >= 0")
    return Uniform(number)


def key_of(seed: int, table: str) -> int:
    """Return a 64-bit key. Tables with different keys have different first values."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {table}".encode(), digest_size=8).digest(), "little")


def first_rows(key: int, bound: float, ids: Ids, dim: int, dtype: np.dtype) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield the first values of rows piece by piece, as (slice of `ids`, values (k, dim)).

    Values of float16 and bfloat16 are rounded to float32 first.
    """
    columns = np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    step = max(1, MADE_AT_ONCE // dim)
    for start in range(0, len(ids), step):
        piece = slice(start, start + step)
        streams = mixed(ids[piece].view(np.uint64) ^ np.uint64(key))
        words = mixed(streams[:, None] + columns) >> np.uint64(11)
        values = words.astype(np.float64) * (2 * bound / (1 << 53)) - bound
        yield piece, values.astype(working_dtype(np.dtype(dtype)), copy=False).astype(dtype, copy=False)

"""Rows in float16 and bfloat16: sum gradients and update rows in float32, and round to nearest or at random.

Optimizers compute with float32 copies of the rows, and with float32 gradients and state. Their compiled loops convert
one row at a time (`widened_row` and `store_row`). Without compiled loops NumPy converts blocks of rows.

Let x be a number between two neighbours a and b, with |a| < |b|. Rounding at random ("stochastic") replaces x by b with
the probability (x - a) / (b - a), and otherwise by a. So updates smaller than half the distance between neighbours are
not lost: on average their effect is right. The random number depends only on the table's seed and name, the id, the
number of the update and the column:

    word = mix(mix(mix(id ^ key) + update * golden ratio) + (column + 1) * golden ratio)
    b is chosen  <=>  (x - a) / (b - a) + (word >> 11) / 2^53 >= 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mpips.collectives.kernels.quiet import quiet
from mpips.optimizers.base import working_dtype
from mpips.store.keys import row_sums
from mpips.store.keys.row_sums import GOLDEN, Ids, Places, mixed, sorted_sums
from mpips.tables import kernels

Array = NDArray[Any]
# combined with the key, so that the random numbers for rounding differ from those for first values
OTHER = 0x2545F4914F6CDD1D
# used instead of the result of `streams_of` if rows are rounded to nearest
NEAREST = np.zeros(0, np.uint64)


def is_half(dtype: np.dtype) -> bool:
    return dtype.name in kernels.HALVES


@quiet
def sum_into(total: Array, gradients: Array, rows: Places) -> None:
    """Set rows of `total` to sums of gradients (k, dim), like `row_sums.sum_into`.

    Both arrays are float16 or bfloat16. The sums are computed in float32 and rounded once.
    """
    if not len(rows):
        return
    dim, wide = total.shape[1], working_dtype(total.dtype)
    begun, scratch = np.zeros(len(total), np.int32), np.empty(len(rows) // 2 * dim, wide)
    bits = gradients.reshape(-1).view(np.uint16)
    if not kernels.merge_halves(total.reshape(-1), bits, rows, begun, scratch, dim):
        once, sums = sorted_sums(rows, gradients.astype(wide))
        total[once] = sums


def summed(parts: Sequence[tuple[Ids, Array]]) -> tuple[Ids, Array]:
    """Sum pushes of float16 or bfloat16 from first to last, like `row_sums.summed`. The sums are float32."""
    parts = [part for part in parts if len(part[0])] or parts[:1]
    if len(parts) == 1:
        ids, gradients = parts[0]
        return ids, widened(gradients)
    return row_sums.summed(parts, dtype=working_dtype(parts[0][1].dtype))


def widened(values: Array) -> Array:
    """Return float16 or bfloat16 rows (k, dim) as a new array of float32."""
    wide = np.empty(values.shape, working_dtype(values.dtype))
    if not kernels.widen_rows(values.reshape(-1), wide.reshape(-1)):
        wide[...] = values
    return wide


def streams_of(key: int, ids: Ids, update: int) -> NDArray[np.uint64]:
    """Return a seed for each id. The random numbers for the id's row in this update are computed from the seed.

    `key` is the number from which the table's first values are computed, too.
    """
    return mixed(mixed(ids.view(np.uint64) ^ np.uint64(key ^ OTHER)) + np.uint64(update * GOLDEN % (1 << 64)))


@quiet
def round_into(values: Array, rows: Array, streams: NDArray[np.uint64]) -> None:
    """Round float32 rows (k, dim) into float16 or bfloat16 rows.

    Args:
        streams: `NEAREST` to round to nearest (ties to even), or the result of `streams_of` to round at random.
    """
    dim = values.shape[1]
    if kernels.round_rows(values.reshape(-1), rows.reshape(-1), streams, dim):
        return
    columns = np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    words = mixed(streams[:, None] + columns)
    values[...] = rounded_at_random(rows, words, values.dtype) if len(streams) else rows


@quiet
def rounded_at_random(x: Array, words: NDArray[np.uint64], dtype: np.dtype) -> Array:
    """Round each float32 number to one of its two neighbours in float16 or bfloat16, by 64 random bits for each number.

    Infinity and NaN stay as they are. Beyond the largest number the upper neighbour is infinity.
    """
    info: Any = ml_dtypes.finfo(dtype)
    # float64 represents all of these numbers exactly
    sizes = np.abs(x.astype(np.float64))
    _, exponents = np.frexp(sizes)
    steps = np.ldexp(1.0, np.maximum(exponents - 1, info.minexp) - info.nmant)
    below = np.floor(sizes / steps)
    up = sizes / steps - below >= (float(1 << 53) - (words >> np.uint64(11)).astype(np.float64)) / (1 << 53)
    rounded = np.copysign((below + up) * steps, x)
    return np.where(np.isfinite(x), rounded, x).astype(np.float32).astype(dtype)

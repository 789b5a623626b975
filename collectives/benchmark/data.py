"""What each rank puts in, and what must come out: exact in every dtype, and another value at every position."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PRIME = 251  # a shift by any number of elements that is no multiple of it is noticed


def contribution(op: str, rank: int, n: int, dtype: np.dtype[Any], p: int) -> NDArray[Any]:
    """The n elements that `rank` of p puts in: small whole numbers, so that the result over p ranks is exact where it
    can be."""
    span = 2 if op == "prod" else max(2, min(PRIME, _exact(dtype) // max(1, p)))
    index = np.arange(n, dtype=np.int64)
    return (((index + 7 * rank) % PRIME) % span + (op == "prod")).astype(dtype)


def expected(kind: str, op: str, rank: int, p: int, n: int, dtype: np.dtype[Any], bounds: list[int]) -> NDArray[Any]:
    """What `rank` must hold at the end of collective `kind`; `n` elements go in on every rank, `bounds` cuts n in p."""
    own = slice(bounds[rank], bounds[rank + 1])
    if kind == "allgather":
        parts = [contribution(op, r, n, dtype, p)[bounds[r] : bounds[r + 1]] for r in range(p)]
        return np.concatenate(parts)
    if kind == "broadcast":
        return contribution(op, 0, n, dtype, p)
    if kind == "alltoall":
        return np.concatenate([contribution(op, r, n, dtype, p)[own] for r in range(p)])
    total = _reduce(op, p, n, dtype)
    return total[own] if kind == "reduce_scatter" else total


def _reduce(op: str, p: int, n: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    combine: Any = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}[op]
    wide = np.dtype(np.float64) if dtype.kind not in "iu" else dtype
    total = contribution(op, 0, n, dtype, p).astype(wide)
    for rank in range(1, p):
        combine(total, contribution(op, rank, n, dtype, p).astype(wide), out=total)
    if op == "mean":
        total = total / p
    return total.astype(dtype)


def wrong(result: NDArray[Any], wanted: NDArray[Any]) -> int:
    """How many elements differ: exactly for integers, by more than two units in the last place for floats."""
    if result.shape != wanted.shape:
        return max(result.size, wanted.size)
    if result.dtype.kind in "iu":
        return int(np.count_nonzero(result != wanted))
    epsilon = 2.0 / _exact(result.dtype)
    a, b = result.astype(np.float64), wanted.astype(np.float64)
    same = (a == b) | (np.abs(a - b) <= 2 * epsilon * np.abs(b))
    return int(result.size - np.count_nonzero(same))


def _exact(dtype: np.dtype[Any]) -> int:
    """Whole numbers up to this one are exact in the dtype."""
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).max)
    return {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24}.get(dtype.name, 2**53)

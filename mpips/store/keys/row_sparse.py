"""Row-sparse gradients, as of embedding layers: merge them, pack them for messages, apply them to weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from mpips.collectives import arrays
from mpips.collectives.kernels.quiet import quiet
from mpips.optimizers.base import Optimizer
from mpips.optimizers.equation import is_fused

# number of rows that are added, or gathered from weights and state, at a time
ROWS_AT_A_TIME = 4096


@dataclass(frozen=True, eq=False)
class RowSparse:
    """Rows of an array of shape `shape`. All other rows are zero.

    The arrays are checked once, in the constructor, and not copied.

    Args:
        rows: Row numbers: integers of shape (k,), in any order. The values of a row that is named repeatedly are added.
        values: The rows, of shape (k, *shape[1:]).
        shape: The shape of the whole array.

    Raises:
        ValueError: An argument has a wrong shape or dtype, or a row number is out of range. The message names it.
    """

    rows: np.ndarray
    values: np.ndarray
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        rows, values = _array(self.rows, "rows of a RowSparse"), _array(self.values, "values of a RowSparse")
        shape = tuple(int(n) for n in self.shape)
        if rows.size == 0:
            rows = rows.astype(np.int64)
        if not shape or min(shape) < 0:
            raise ValueError(f"RowSparse needs a shape of at least one dimension, all >= 0, not {shape}")
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise ValueError(f"RowSparse needs 1-D integer rows, not {rows.dtype.name}{rows.shape}")
        if values.shape != (len(rows), *shape[1:]):
            raise ValueError(
                f"RowSparse with {len(rows)} rows of {shape} needs values {(len(rows), *shape[1:])}, not {values.shape}"
            )
        if len(rows) and not (rows.min() >= 0 and rows.max() < shape[0]):
            raise ValueError(f"RowSparse rows must lie in [0, {shape[0]}), not {int(rows.min())}..{int(rows.max())}")
        object.__setattr__(self, "rows", rows.astype(np.int64, copy=False))
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "shape", shape)

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def merged(self) -> RowSparse:
        """Return the same array with ascending rows and no repeats.

        Values of a repeated row are added in their order.
        """
        if np.all(self.rows[1:] > self.rows[:-1]):
            return self
        order = np.argsort(self.rows, kind="stable")
        rows = self.rows[order]
        starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
        return RowSparse(rows[starts], sums_of_runs(self.values, order, starts), self.shape)

    def to_dense(self) -> np.ndarray:
        """Return the whole array, with zeros in all other rows."""
        dense = np.zeros(self.shape, self.dtype)
        self.add_to(dense)
        return dense

    def add_to(self, dense: np.ndarray) -> None:
        """Add the rows to an array of the same shape, in place."""
        if dense.shape != self.shape:
            raise ValueError(f"RowSparse of shape {self.shape} cannot be added to an array of shape {dense.shape}")
        once = self.merged()
        with np.errstate(all="ignore"):
            dense[once.rows] += once.values

    def between(self, start: int, stop: int) -> RowSparse:
        """Return the part of the array in rows [start, stop), such as a shard. Row numbers then count from `start`."""
        chosen = (self.rows >= start) & (self.rows < stop)
        return RowSparse(self.rows[chosen] - start, self.values[chosen], (stop - start, *self.shape[1:]))


class EmptyPush(RowSparse):
    """A push without values, which still counts towards the round of its key.

    If all contributors push it, the key and its optimizer's state and step count stay as they are. If others push
    values, it counts as zeros.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        for name, value in (("rows", np.empty(0, np.int64)), ("values", np.empty((0, *shape[1:]), dtype))):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "shape", tuple(shape))


@quiet
def sums_of_runs(values: np.ndarray, order: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Sum runs of `values[order]`. The runs begin at `starts`, and each is added from first to last.

    `np.add.reduceat` adds in another order, and takes ten times as long for wide rows.
    """
    sums, counts = values[order[starts]], np.diff(starts, append=len(order))
    done, most = 1, int(counts.max())
    longer = np.flatnonzero(counts > done)
    # Add the next value of every run with one call, as long as that needs fewer calls than adding up the runs that are
    # left one by one.
    while len(longer) > most - done:
        sums[longer] += values[order[starts[longer] + done]]
        done += 1
        longer = longer[counts[longer] > done]
    for run in longer.tolist():
        rest = values[order[starts[run] + done : starts[run] + counts[run]]]
        both = np.concatenate([sums[run : run + 1], rest])
        # NumPy's `reduce` adds in order, except along the axis that is contiguous in memory, where it sums pairwise. If
        # a row has only one element, axis 0 is that axis. `accumulate` always adds in order.
        if sums[run].size > 1:
            sums[run] = np.add.reduce(both, axis=0, dtype=values.dtype)
        else:
            sums[run] = np.add.accumulate(both, dtype=values.dtype)[-1]
    return sums


def _array(x: object, name: str) -> np.ndarray:
    """Return `x` as a NumPy array. A PyTorch tensor is viewed, even if it records gradients. A list is copied."""
    arrays.check_unmasked(x, name)
    return arrays.host(x) if arrays.is_torch(x) else np.asarray(x)


def add(parts: Sequence[RowSparse]) -> RowSparse:
    """Return the merged sum of arrays of one shape and dtype. Reproducible: they are added in the order given."""
    if not parts:
        raise ValueError("add needs at least one RowSparse")
    first = parts[0]
    for part in parts[1:]:
        if part.shape != first.shape or part.dtype != first.dtype:
            raise ValueError(f"cannot add RowSparse {part.dtype.name}{part.shape} to {first.dtype.name}{first.shape}")
    rows = np.concatenate([part.rows for part in parts])
    return RowSparse(rows, np.concatenate([part.values for part in parts]), first.shape).merged()


@quiet
def merge(a: RowSparse, b: RowSparse) -> RowSparse:
    """Add two merged arrays. Uses less memory than `add`, which copies both before it sums them."""
    rows = np.union1d(a.rows, b.rows)
    values = np.zeros((len(rows), *a.shape[1:]), a.dtype)
    values[np.searchsorted(rows, a.rows)] = a.values
    for start in range(0, len(b.rows), ROWS_AT_A_TIME):
        part = slice(start, start + ROWS_AT_A_TIME)
        values[np.searchsorted(rows, b.rows[part])] += b.values[part]
    return RowSparse(rows, values, a.shape)


def sum_of(parts: Sequence[RowSparse]) -> RowSparse:
    """Return the merged sum of arrays, added one by one.

    Uses less memory than `add`, which copies all of them first.
    """
    return functools.reduce(merge, [part.merged() for part in parts])


def packed(rows: RowSparse) -> np.ndarray:
    """Encode rows as bytes: the row numbers (int64), then the values."""
    values = np.ascontiguousarray(rows.values).reshape(-1)
    return np.concatenate([rows.rows.view(np.uint8), values.view(np.uint8)])


def unpacked(data: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> RowSparse:
    """Decode what `packed` encoded, for an array of this shape and dtype."""
    count = data.size // (8 + math.prod(shape[1:]) * dtype.itemsize)
    values = data[8 * count :].view(dtype).reshape(count, *shape[1:])
    return RowSparse(data[: 8 * count].view(np.int64), values, shape)


def update_rows(
    optimizer: Optimizer, weights: np.ndarray, parts: Sequence[RowSparse], state: Sequence[np.ndarray], step: int
) -> None:
    """Update the rows named in the gradients with the gradients' sum, in place in `weights` and `state`.

    Other rows keep their values and state ("lazy": no decay of momentum or weights for them), as in MXNet.

    Args:
        weights: C-contiguous, of the gradients' shape.
        parts: One or more gradients.
        state: The state arrays, as created by `optimizer.init(weights.reshape(-1))`.
        step: The number of this update, from 1.
    """
    for part in parts:
        if weights.shape != part.shape:
            raise ValueError(f"weights {weights.shape} and RowSparse gradient {part.shape} differ in shape")
    parts = [part.merged() for part in parts]
    rows, values = [part.rows for part in parts], [part.values for part in parts]
    if not any(map(len, rows)) or (is_fused(optimizer) and optimizer.update_rows(weights, rows, values, state, step)):
        return
    total = sum_of(parts)
    tables = [array.reshape(weights.shape) for array in state]
    for start in range(0, len(total.rows), ROWS_AT_A_TIME):
        some = total.rows[start : start + ROWS_AT_A_TIME]
        chosen, chosen_state = weights[some], [table[some] for table in tables]
        gradient = np.ascontiguousarray(total.values[start : start + ROWS_AT_A_TIME], dtype=weights.dtype)
        optimizer.update(chosen.reshape(-1), gradient.reshape(-1), [part.reshape(-1) for part in chosen_state], step)
        weights[some] = chosen
        for table, part in zip(tables, chosen_state):
            table[some] = part

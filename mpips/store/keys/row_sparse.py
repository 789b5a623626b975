"""Row-sparse gradients, for example of embedding layers: merge them, pack them for messages, apply them to weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from mpips.collectives import arrays
from mpips.collectives.fabric.tasks import Task
from mpips.optimizers.base import Optimizer
from mpips.optimizers.equation import is_fused
from mpips.store.keys.row_sums import sorted_sums, summed, update_in_blocks

# number of rows of weights and state that are copied at a time
ROWS_AT_A_TIME = 4096


@dataclass(frozen=True, eq=False)
class RowSparse:
    """Rows of an array of shape `shape`. All other rows are zero.

    The arrays are checked once, in the constructor, and not copied.

    Args:
        rows: Row numbers: integers of shape (k,), in any order. If a row number repeats, its values are added.
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
        """Return an equal array with ascending row numbers and no repeats.

        The values of a repeated row are added from first to last.
        """
        if np.all(self.rows[1:] > self.rows[:-1]):
            return self
        return RowSparse(*sorted_sums(self.rows, self.values), self.shape)

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
        """Return the part of a merged array in rows [start, stop), such as a shard. Its row numbers count from `start`.

        The values are not copied.
        """
        chosen = slice(*np.searchsorted(self.rows, [start, stop]))
        return RowSparse(self.rows[chosen] - start, self.values[chosen], (stop - start, *self.shape[1:]))


class EmptyPush(RowSparse):
    """A push without values. It still counts as this worker's contribution to the round.

    If all workers make empty pushes, the key and its optimizer's state and step count stay as they are. If other
    workers push values, an empty push counts as zeros.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        for name, value in (("rows", np.empty(0, np.int64)), ("values", np.empty((0, *shape[1:]), dtype))):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "shape", tuple(shape))


def _array(x: object, name: str) -> np.ndarray:
    """Return `x` as a NumPy array. A PyTorch tensor is viewed, even if it records gradients. A list is copied."""
    arrays.check_unmasked(x, name)
    return arrays.host(x) if arrays.is_torch(x) else np.asarray(x)


def add(parts: Sequence[RowSparse]) -> RowSparse:
    """Return the sum of row-sparse arrays of one shape and dtype, merged (see `RowSparse.merged`).

    The values of a row are added one after another, in the order of `parts` and of the rows in each part.
    """
    rows = np.concatenate([part.rows for part in parts])
    return RowSparse(rows, np.concatenate([part.values for part in parts]), parts[0].shape).merged()


def sum_of(parts: Sequence[RowSparse]) -> RowSparse:
    """Return the sum of row-sparse arrays of one shape and dtype, merged (see `RowSparse.merged`).

    Unlike `add`, this function first merges each array, and then adds the merged arrays in the order of `parts`. So if
    a row repeats within an array, the result may differ from that of `add` by rounding.
    """
    first, width = parts[0], math.prod(parts[0].shape[1:])
    merged = [part.merged() for part in parts]
    rows, values = summed([(part.rows, part.values.reshape(len(part.rows), width)) for part in merged], ascending=True)
    return RowSparse(rows, values.reshape(len(rows), *first.shape[1:]), first.shape)


def packed(rows: RowSparse, allocate: Callable[..., np.ndarray] = np.empty) -> np.ndarray:
    """Encode rows as bytes: the row numbers (int64), then the values."""
    parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (rows.rows, rows.values)]
    return np.concatenate(parts, out=allocate(parts[0].size + parts[1].size, np.uint8))


def unpacked(data: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> RowSparse:
    """Decode what `packed` encoded, for an array of this shape and dtype."""
    count = data.size // (8 + math.prod(shape[1:]) * dtype.itemsize)
    values = data[8 * count :].view(dtype).reshape(count, *shape[1:])
    return RowSparse(data[: 8 * count].view(np.int64), values, shape)


class RowGather:
    """Collects the rows that all ranks of a communicator push, on every rank.

    This takes two allgathers. The first exchanges the size of each rank's rows. The second exchanges the rows, in one
    block for each rank. All blocks are as long as the longest one needs.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._sizes = np.zeros(size, np.int64)
        # Reuse the array, because collectives find their cached plan by the array's identity.
        self._blocks = np.empty(0, np.uint8)

    def gather(
        self, rows: RowSparse, allgather: Callable[[np.ndarray], Task[None]], every: list[RowSparse]
    ) -> Task[None]:
        """Append the merged rows of each rank to `every`, in the order of ranks. They are valid until the next call.

        Args:
            allgather: Returns the task of an allgather in place. The array has one block for each rank, and all blocks
                are equally long.
        """
        mine = packed(rows.merged())
        self._sizes[self._rank] = mine.size
        yield from allgather(self._sizes)
        # Use powers of 2, so that collectives need plans for only a few lengths.
        block = max(64, 1 << (int(self._sizes.max()) - 1).bit_length())
        if self._blocks.size < block * len(self._sizes):
            self._blocks = np.empty(block * len(self._sizes), np.uint8)
        blocks = self._blocks[: block * len(self._sizes)].reshape(-1, block)
        blocks[self._rank, : mine.size] = mine
        yield from allgather(blocks.reshape(-1))
        every += [unpacked(each[:size], rows.shape, rows.dtype) for each, size in zip(blocks, self._sizes.tolist())]


def update_rows(
    optimizer: Optimizer, weights: np.ndarray, gradient: RowSparse, state: Sequence[np.ndarray], step: int
) -> None:
    """Make one optimizer step on those rows of `weights` that a row-sparse gradient contains.

    These rows of `weights` and of the arrays in `state` are changed in place. The gradient is not changed. All other
    rows keep their values and state: their momentum and weights do not decay ("lazy" updates, as in MXNet).

    Args:
        weights: C-contiguous, of the gradient's shape.
        gradient: A merged gradient, so that no row repeats.
        state: The state arrays, as created by `optimizer.init(weights.reshape(-1))`.
        step: The number of this update, from 1.
    """
    if weights.shape != gradient.shape:
        raise ValueError(f"weights {weights.shape} and RowSparse gradient {gradient.shape} differ in shape")
    rows, values = gradient.rows, gradient.values
    if not len(rows) or (is_fused(optimizer) and optimizer.update_rows(weights, rows, values, state, step)):
        return

    def update(block: slice, chosen: Sequence[np.ndarray]) -> None:
        part = np.ascontiguousarray(values[block], dtype=weights.dtype)
        weight, *rest = [array.reshape(-1) for array in chosen]
        optimizer.update(weight, part.reshape(-1), rest, step)

    tables = [weights, *(array.reshape(weights.shape) for array in state)]
    update_in_blocks(rows, tables, ROWS_AT_A_TIME, update)

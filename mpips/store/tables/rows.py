"""The rows of one table on one server: values and optimizer state, one behind the other, found by an index of ids.

Nothing stops for growth. Rows lie in a sparse file of the server's memory (`arena.SparseFile`), each array in addresses
that are reserved at once and take memory only as rows are written. They never move. Another process of the node reads
them in place, also when the server has ended: it opens the file by its region while the server lives, and takes
`view(offset, shape, dtype)` of an array by its offset in `TableRows.places`. Of `words` there, `words[ROWS]` says how
many rows there are; it is written behind them.

The index (`index`) grows a piece at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.fabric.arena import SparseFile
from mpips.store.keys.rows import sums_of_runs
from mpips.store.tables.index import MOST_ROWS, Index, Positions
from mpips.store.tables.initial import Ids, first_rows
from mpips.store.tables.row_optimizers import RowOptimizer

Array = NDArray[Any]
BLOCK_BYTES = 1 << 18
"""Of rows with their state, which are updated at a time."""
WORDS = 8
ROWS = 0
"""Of a table's words: how many rows there are."""


def arrays_of(dim: int, dtype: np.dtype, optimizer: RowOptimizer) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Return the arrays of a table by name: of each the dtype, and the shape of what it holds of one row."""
    state = {f"state{number}": (dtype, (width,)) for number, width in enumerate(optimizer.widths(dim))}
    counts = {"counts": (np.dtype(np.int32), ())} if optimizer.counts_rows else {}
    return {"ids": (np.dtype(np.int64), ()), "values": (dtype, (dim,)), **state, **counts}


class TableRows:
    """Rows of `dim` values of a dtype, made when first asked for. `key`, `bound`: of their first values. `file`: where
    they lie; None: in one of their own."""

    def __init__(
        self, dim: int, dtype: np.dtype, key: int, bound: float, optimizer: RowOptimizer,
        file: SparseFile | None = None,
    ) -> None:  # fmt: skip
        self._dim, self._dtype, self._key, self._bound, self._optimizer = dim, dtype, key, bound, optimizer
        self._file = SparseFile() if file is None else file
        self.places: dict[str, int] = {}
        """Offsets in the file: of each array, and of `words`."""
        arrays = arrays_of(dim, dtype, optimizer)
        self.row_bytes = sum(kind.itemsize * math.prod(shape) for kind, shape in arrays.values())
        """Bytes of a row with its id and state, without its share of the index: 8 to 16, 24 while that grows."""
        self._capacity = min(MOST_ROWS, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // self.row_bytes)
        self._arrays = {
            name: self._reserved(name, (self._capacity, *shape), dtype) for name, (dtype, shape) in arrays.items()
        }
        self._words = memoryview(self._reserved("words", (WORDS,), np.dtype(np.uint64)))  # type: ignore[arg-type]
        self._ids, self._values = self._arrays["ids"], self._arrays["values"]
        self._state = [self._arrays[name] for name in arrays if name.startswith("state")]
        self._counts = self._arrays.get("counts")
        self._index = Index(self._ids)

    @property
    def count(self) -> int:
        """Return how many rows there are."""
        return int(self._words[ROWS])

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows, their state and the index."""
        return self.count * self.row_bytes + self._index.nbytes

    def pull(self, ids: Ids) -> Array:
        """Return the rows of these ids, each once, (k, dim); those that are not there are made."""
        return self._values[self._positions(ids)]

    def update(self, ids: Ids, gradients: Array, step: int) -> None:
        """Update the rows of these ids, each once, by gradients (k, dim); those that are not there are made first.
        `step`: the update of the table, counted from 1, for schedules."""
        positions, step_rows = self._positions(ids), max(1, BLOCK_BYTES // self.row_bytes)
        for start in range(0, len(ids), step_rows):
            block = slice(start, start + step_rows)
            self._update_block(positions[block], gradients[block], step)

    def _update_block(self, at: Positions, gradients: Array, step: int) -> None:
        """Update rows that lie at these positions, so few that what is made on the way stays in the cache."""
        counts = None
        if self._counts is not None:
            counts = self._counts[at] + 1
            self._counts[at] = counts
        values, state = self._values[at], [array[at] for array in self._state]
        self._optimizer.update(values, gradients, state, counts, step)
        self._values[at] = values
        for array, new in zip(self._state, state, strict=True):
            array[at] = new

    def read(self, array: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of one of the arrays (`arrays_of`), as they lie here."""
        return self._arrays[array][start : min(stop, self.count)]

    def put(self, arrays: Mapping[str, Array]) -> None:
        """Set rows, of all arrays by name; ids are each there once."""
        at = self._positions(arrays["ids"])
        for name, values in arrays.items():
            self._arrays[name][at] = values

    def _positions(self, ids: Ids) -> Positions:
        """Return where rows lie; those that are not there are made."""
        found = self._index.find(ids)
        missing = np.flatnonzero(found < 0)
        if len(missing):
            found[missing] = self._add(ids[missing])
        return found

    def _add(self, ids: Ids) -> Positions:
        """Make rows that are not there; where they lie."""
        count = self.count + len(ids)
        if count > self._capacity:
            raise MemoryError(f"{count} rows of {self.row_bytes} bytes are more than this machine's memory holds")
        positions = np.arange(self.count, count)
        self._ids[self.count : count] = ids
        for piece, values in first_rows(self._key, self._bound, ids, self._dim, self._dtype):
            self._values[self.count : count][piece] = values
        self._index.insert(ids, positions)
        self._words[ROWS] = count
        return positions

    def _reserved(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return zeros in the file, which take memory where they are written."""
        array, self.places[name] = self._file.zeros(shape, dtype)
        return array


def merged(ids: Ids, gradients: Array) -> tuple[Ids, Array]:
    """Return ids ascending, each once, and the sums of their gradients, each added in the order they stand."""
    if np.all(ids[1:] > ids[:-1]):
        return ids, gradients
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    return ordered[starts], sums_of_runs(gradients, order, starts)


def summed(parts: Sequence[tuple[Ids, Array]]) -> tuple[Ids, Array]:
    """Return the sum of gradients of rows: (ids, ascending, each once; gradients). They are added from first to last.

    In each part an id stands once.
    """
    if len(parts) == 1:
        return parts[0]
    ids, places = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
    total = np.zeros((len(ids), parts[0][1].shape[1]), parts[0][1].dtype)
    start = 0
    for part, gradients in parts:
        total[places[start : start + len(part)]] += gradients
        start += len(part)
    return ids, total

"""Payloads that lie in memory of this node, as the server's state reads them (`server_state.Source`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.compression import Compressor
from mpips.row_sparse import RowSparse

Array = NDArray[Any]


class Elements:
    """All elements of a unit, perhaps still being written: `filled[0]` counts the blocks written over all rounds."""

    local = True
    complete = True
    coded = False
    sparse = False

    def __init__(
        self, array: Array, filled: Sequence[int] | memoryview | None = None, before: int = 0, reusable: bool = False
    ) -> None:
        self.array, self.reusable = array, reusable
        self.steady = array if filled is None else None
        self._filled, self._before = filled, before

    def ready(self, block: int) -> bool:
        return self._filled is None or self._filled[0] - self._before > block

    def part(self, block: int, start: int, stop: int) -> Array:
        return self.array[start:stop]

    def add_to(self, out: Array) -> None:
        out += self.array

    def rows(self) -> RowSparse:
        raise TypeError("the payload is not row-sparse")

    def drop(self) -> None:
        pass


class Compressed:
    """What a compressor made of a unit's elements; `payload` is uint8."""

    local = True
    complete = True
    coded = True
    sparse = False
    steady: Array | None = None

    def __init__(self, payload: Array, compressor: Compressor) -> None:
        self._payload, self._compressor = payload, compressor

    def ready(self, block: int) -> bool:
        return True

    def part(self, block: int, start: int, stop: int) -> Array:
        raise TypeError("a compressed payload has no plain elements")

    def add_to(self, out: Array) -> None:
        self._compressor.decode(self._payload, out, add=True)

    def rows(self) -> RowSparse:
        raise TypeError("the payload is not row-sparse")

    def drop(self) -> None:
        pass


class Rows:
    """Rows of a unit whose elements are whole rows: `payload` holds `count` row numbers (int64), then their values."""

    local = True
    complete = True
    coded = True
    sparse = True
    steady: Array | None = None

    def __init__(self, payload: Array, count: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        numbers = payload[: 8 * count].view(np.int64)
        values = payload[8 * count :].view(dtype).reshape(count, *shape[1:])
        self._rows = RowSparse(numbers, values, shape)

    def ready(self, block: int) -> bool:
        return True

    def part(self, block: int, start: int, stop: int) -> Array:
        raise TypeError("a row-sparse payload has no plain elements")

    def add_to(self, out: Array) -> None:
        self._rows.add_to(out.reshape(self._rows.shape))

    def rows(self) -> RowSparse:
        return self._rows

    def drop(self) -> None:
        pass

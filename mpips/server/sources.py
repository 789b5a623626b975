"""Contributions whose payload lies in memory of this node (`unit.Source`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.compression import Compressor
from mpips.keys.row_sparse import RowSparse
from mpips.transport.outbox import PLACES, header_bytes

Array = NDArray[Any]


class Payload:
    """What all have in common: nothing has to be fetched."""

    local = True
    coded = False
    sparse = False
    steady: Array | None = None

    def ready(self, block: int) -> bool:
        return True

    def part(self, block: int, start: int, stop: int) -> Array:
        raise TypeError("the payload has no plain elements")

    def add_to(self, out: Array) -> None:
        raise TypeError("the payload is not coded")

    def rows(self) -> RowSparse:
        raise TypeError("the payload is not row-sparse")

    def drop(self) -> None:
        pass


class Elements(Payload):
    """All elements of a unit."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.steady = array

    def part(self, block: int, start: int, stop: int) -> Array:
        return self.array[start:stop]


class Filling(Payload):
    """A worker's `outbox`, perhaps still being filled; one round at a time, the next begins when it has been read."""

    def __init__(self, outbox: Array, blocks: int, block_elements: int, dtype: np.dtype) -> None:
        header = header_bytes(blocks)
        self._words = memoryview(outbox[:header].view(np.uint64))  # type: ignore[arg-type]
        self._slots, self._blocks, self._step = outbox[header:].view(dtype), blocks, block_elements
        self._first = 0

    def begin(self, round_: int) -> None:
        """What comes next is this round's."""
        self._first = (round_ - 1) * self._blocks

    def ready(self, block: int) -> bool:
        return self._words[0] - self._first > block

    def part(self, block: int, start: int, stop: int) -> Array:
        at = self._words[PLACES + block] * self._step + start - block * self._step
        return self._slots[at : at + stop - start]


class Compressed(Payload):
    """What a compressor made of a unit's elements; `payload` is uint8."""

    coded = True

    def __init__(self, payload: Array, compressor: Compressor) -> None:
        self._payload, self._compressor = payload, compressor

    def add_to(self, out: Array) -> None:
        self._compressor.decode(self._payload, out, add=True)


class Rows(Payload):
    """Rows of a unit whose elements are whole rows: `payload` holds `count` row numbers (int64), then their values."""

    coded = True
    sparse = True

    def __init__(self, payload: Array, count: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        numbers = payload[: 8 * count].view(np.int64)
        values = payload[8 * count :].view(dtype).reshape(count, *shape[1:])
        self._rows = RowSparse(numbers, values, shape)

    def add_to(self, out: Array) -> None:
        self._rows.add_to(out.reshape(self._rows.shape))

    def rows(self) -> RowSparse:
        return self._rows

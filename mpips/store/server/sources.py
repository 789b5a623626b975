"""Contributions: payloads that lie in memory of this node (`unit.Source`), and what makes them of frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.fabric import arena
from collectives.fabric.arena import Region
from mpips.compression import Compressor
from mpips.store.keys.row_sparse import RowSparse
from mpips.store.server.unit import Source, Unit
from mpips.store.transport.frames import ROUND_AT, Coding, Frame
from mpips.store.transport.line import Line
from mpips.store.transport.outbox import PLACES, header_bytes

VIEWS = 4096
"""Least number of regions that are kept mapped."""
Array = NDArray[Any]
Push = tuple[Unit, int, Source, int]
"""Unit, position of the contributor, source and priority."""


class Payload:
    """What all have in common: nothing has to be fetched."""

    local = True
    coded = False
    sparse = False
    empty = False
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


class Empty(Rows):
    """A push that counts as a round only: no rows."""

    empty = True

    def __init__(self, unit: Unit) -> None:
        row = unit.row_elements if unit.stored.size % unit.row_elements == 0 else 1
        super().__init__(np.empty(0, np.uint8), 0, (unit.stored.size // row, row), unit.stored.dtype)


class Receiving(Protocol):
    """What receives payloads from other nodes (`transport.receiver`)."""

    def source(
        self, line: Line, worker: int, unit: Unit, frame: Frame, read: Callable[[Array], Source] | None
    ) -> Source:
        """The payload of a frame; `read` makes a source of a coded one."""
        ...


class Settings(Protocol):
    """What tells how payloads are to be read."""

    compressor: Compressor | None


class Pushes:
    """What push frames say. Where the same region may be pushed again, it is kept by the frame but for its round."""

    def __init__(self, units: Mapping[int, Unit], receiver: Receiving, settings: Settings) -> None:
        self._units, self._receiver, self._settings = units, receiver, settings
        self._views: dict[tuple[int, ...], Array] = {}
        self._most = VIEWS
        self.known: dict[bytes, Push] = {}

    def new(self, worker: int, line: Line, data: bytes) -> Push:
        """What a frame pushes that is not known."""
        frame = Frame.of(data)
        unit = self._units[frame.unit]
        push = unit, unit.position[worker], self._source(worker, line, frame, unit), frame.priority
        if type(push[2]) in (Elements, Filling):
            if len(self.known) >= self._most:
                self.known.clear()
            self.known[data[:ROUND_AT]] = push
        return push

    def keep(self, units: Mapping[int, Unit]) -> None:
        """Forget pushes of units that are no more; make room for those of new ones."""
        self._most = max(VIEWS, 2 * sum(len(unit.contributors) for unit in units.values()))
        for frame in [frame for frame, push in self.known.items() if push[0].number not in units]:
            del self.known[frame]

    def _source(self, worker: int, line: Line, frame: Frame, unit: Unit) -> Source:
        if not line.local:
            read = None if frame.coding == Coding.PLAIN else self._reader(frame, unit)
            return self._receiver.source(line, worker, unit, frame, read)
        payload = self._view(frame)
        if frame.coding == Coding.GROWING:
            return Filling(payload, unit.blocks, unit.block_elements, unit.stored.dtype)
        if frame.coding == Coding.PLAIN:
            return Elements(payload.view(unit.stored.dtype))
        return self._reader(frame, unit)(payload)

    def _reader(self, frame: Frame, unit: Unit) -> Callable[[Array], Source]:
        """What makes a source of a coded payload, whenever it is read: with the compressor of when it was pushed."""
        if frame.coding == Coding.NOTHING:
            return lambda payload: Empty(unit)
        if frame.coding == Coding.ROWS:
            shape = (unit.stored.size // max(1, unit.row_elements), unit.row_elements)
            return lambda payload: Rows(payload, frame.aux, shape, unit.stored.dtype)
        compressor = self._settings.compressor
        assert compressor is not None
        return lambda payload: Compressed(payload, compressor)

    def _view(self, frame: Frame) -> Array:
        """The payload's bytes; the same region is mapped and touched once."""
        key = frame.region
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= self._most:
                self._views.clear()
            view = self._views[key] = arena.attach(Region(*key))
        return view

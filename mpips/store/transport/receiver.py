"""Payloads between nodes, on the server's side: blocks as messages, few at a time, in the order they are summed.

A worker sends a block when the server has a buffer for it and says so (CREDIT), except for payloads of one block, which
come right behind their frame: a credit would wait in the server's link behind the answers that fill it. First values
are received where the unit keeps them. What all that may fill at a server says `buffers`. Nothing here blocks, but the
end of a generation.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.network.failures import is_death, send
from collectives.network.requests import keep, over
from mpips.store.keys.row_sparse import RowSparse
from mpips.store.transport.buffers import Buffers
from mpips.store.transport.channel import LOOK_SECONDS, MessageLine
from mpips.store.transport.frames import ALONG, Coding, Frame, Op
from mpips.store.transport.line import Line
from mpips.store.transport.tags import pull_tag, push_tag

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
ROW_MESSAGES = 2  # messages with rows that are under way to a worker
DRAIN_SECONDS = 0.2
"""How long a server takes in what workers have under way when the generation is over, so that they need not wait for
it."""


class ServerUnit(Protocol):
    """What is read here of a unit of the server's state."""

    number: int
    stored: Array
    blocks: int
    block_elements: int
    row_elements: int
    contributors: tuple[int, ...]
    position: dict[int, int]

    @property
    def turn(self) -> int:
        """Position of the contributor whose next block is awaited."""
        ...

    def bounds(self, block: int) -> tuple[int, int]:
        """Elements [start, stop) of a block."""
        ...


class Coded(Protocol):
    """A compressed or row-sparse payload in memory."""

    def add_to(self, out: Array) -> None:
        """Add all elements to `out`."""
        ...

    def rows(self) -> RowSparse:
        """The payload as rows."""
        ...


Read = Callable[[Bytes], Coded]


class Block(NamedTuple):
    """A block on its way to the server."""

    request: MPI.Request
    data: Bytes
    due: bool


class Shipment(NamedTuple):
    """An answer under way."""

    unit: int
    worker: int
    blocks: Iterator[Bytes]
    """Those not yet sent."""
    in_flight: int
    requests: deque[MPI.Request]


class Receiver:
    """One server's messages with payloads, from and to workers of other nodes."""

    def __init__(self, comm: MPI.Comm, in_flight: int) -> None:
        self.comm, self.in_flight = comm, in_flight
        self.buffers = Buffers()
        self._shipping: list[Shipment] = []
        self._coming: dict[int, MPI.Request] = {}
        """Receives that are not over."""
        self._lost: dict[int, MPI.Request] = {}
        """Those from workers that have died."""

    # ---- in

    def source(self, line: Line, worker: int, unit: ServerUnit, frame: Frame, read: Read | None = None) -> Blocks:
        """The payload of a PUSH; `read` makes a source of a coded one when it is there."""
        if frame.coding == Coding.PLAIN or read is None:
            return Blocks(self, line, worker, unit, frame)
        return Letter(self, line, worker, unit, frame, read)

    def first(self, unit: ServerUnit, worker: int) -> FirstValue:
        """The payload of a SET, received where the unit keeps its values."""
        blocks = _cut(unit.stored, unit.block_elements)
        return FirstValue([self.receive(data, worker, unit.number, False) for data in blocks], self.came)

    def receive(self, data: Bytes, worker: int, unit: int, due: bool) -> Block:
        """Start to receive a block."""
        request = self.comm.Irecv(data, worker, push_tag(unit))
        self._coming[id(request)] = request
        return Block(request, data, due)

    def came(self, block: Block) -> bool:
        """Whether a block is there; never, where its worker has died before."""
        name = id(block.request)
        if block.request:  # null once it has ended
            try:
                if not block.request.Test():
                    return False
            except MPI.Exception as error:
                if not is_death(error):
                    raise
                self._lost[name] = block.request
            del self._coming[name]
        return name not in self._lost

    # ---- out

    def ship(self, unit: ServerUnit, worker: int, rows: NDArray[np.int64] | None = None) -> None:
        """Start to send a unit, or rows of it; it must not change until `delivered` names it."""
        if rows is None:
            blocks: Iterator[Bytes] = iter(_cut(unit.stored, unit.block_elements))
        else:
            table, step = unit.stored.reshape(-1, unit.row_elements), max(1, unit.block_elements // unit.row_elements)
            blocks = (table[rows[at : at + step]].reshape(-1).view(np.uint8) for at in range(0, len(rows), step))
        # What lies in the unit goes at once; rows are copied, so only a few messages of them are under way.
        shipment = Shipment(unit.number, worker, blocks, sys.maxsize if rows is None else ROW_MESSAGES, deque())
        self._post(shipment)
        self._shipping.append(shipment)

    def _post(self, shipment: Shipment) -> None:
        tag = pull_tag(shipment.unit)
        for block in islice(shipment.blocks, shipment.in_flight - len(shipment.requests)):
            shipment.requests.append(send(self.comm, block, shipment.worker, tag))

    def delivered(self) -> list[tuple[int, int]]:
        """(unit, worker) of everything that has gone since the last call."""
        gone, rest = [], []
        for shipment in self._shipping:
            while shipment.requests and shipment.requests[0].Test():
                shipment.requests.popleft()
                self._post(shipment)
            if shipment.requests:
                rest.append(shipment)
            else:
                gone.append((shipment.unit, shipment.worker))
        self._shipping = rest
        return gone

    # ---- the end

    def done(self, lines: Iterable[Line]) -> bool:
        """Whether everything sent has been taken; when all workers have left."""
        self.delivered()
        return not self._shipping and all(line.done() for line in lines if isinstance(line, MessageLine))

    def stop(self, lines: Iterable[Line]) -> None:
        """The generation is over: take in for a moment what workers have under way, as they wait until it is; then
        give up all receives. What MPI may still touch is kept. Nothing that comes here counts as a contribution."""
        distant = [line for line in lines if isinstance(line, MessageLine)]
        dropped: list[MPI.Request] = []
        until = time.monotonic() + DRAIN_SECONDS
        heard = list(distant)
        while heard and time.monotonic() < until:
            for line in list(heard):
                try:
                    dropped += [request for data in line.read() for request in self._drop(line, Frame.of(data))]
                except MPI.Exception:  # its worker has died
                    heard.remove(line)
            time.sleep(LOOK_SECONDS)
        receives = [*self._coming.values(), *dropped]
        for request in receives:
            if not over(request):
                request.Cancel()
        keep([*receives, *(request for shipment in self._shipping for request in shipment.requests)])
        for line in distant:
            line.leave()
        self._coming.clear()
        self._shipping.clear()

    def _drop(self, line: MessageLine, frame: Frame) -> list[MPI.Request]:
        """Receive what follows a frame unasked, for nothing."""
        unasked = frame.aux if frame.op == Op.SET else int(frame.op == Op.PUSH and frame.flags & ALONG)
        tag = push_tag(frame.unit)
        return [self.comm.Irecv(np.empty(frame.nbytes, np.uint8), line.peer, tag) for _ in range(unasked)]


class FirstValue:
    """The first value of a unit, on its way."""

    def __init__(self, blocks: list[Block], came: Callable[[Block], bool]) -> None:
        self._blocks, self._came = blocks, came

    def done(self) -> bool:
        """Whether all of it is there."""
        while self._blocks and self._came(self._blocks[0]):
            self._blocks.pop(0)
        return not self._blocks


class Blocks:
    """A plain payload that comes from another node block by block (`server.unit.Source`)."""

    local = False
    coded = False
    sparse = False
    empty = False
    steady: Array | None = None

    def __init__(self, receiver: Receiver, line: Line, worker: int, unit: ServerUnit, frame: Frame) -> None:
        self._receiver, self._line, self._worker, self._unit, self._round = receiver, line, worker, unit, frame.round
        self._blocks = unit.blocks if frame.coding == Coding.PLAIN else 1
        self._early = max(2, receiver.in_flight // len(unit.contributors))
        self._coming: deque[Block] = deque()
        """Blocks `_asked - len(_coming)` up to `_asked`."""
        self._asked = 0
        if frame.flags & ALONG:
            data = receiver.buffers.take(frame.nbytes, True, sent=True)
            assert data is not None
            self._coming.append(receiver.receive(data, worker, unit.number, False))
            self._asked = 1

    def ready(self, block: int) -> bool:
        """Whether this block is there; asks for it, and for some that follow, where there is room."""
        while self._asked < min(self._blocks, block + self._early) and self._ask(self._asked == block):
            self._asked += 1
        return block < self._asked and self._receiver.came(self._coming[0])

    def _ask(self, next_one: bool) -> bool:
        """Ask for one more block; False where there is no room for it."""
        unit, receiver = self._unit, self._receiver
        due = next_one and unit.position.get(self._worker, unit.turn) == unit.turn
        data = receiver.buffers.take(self._nbytes(self._asked), due)
        if data is None:
            return False
        self._coming.append(receiver.receive(data, self._worker, unit.number, due))
        self._line.post(Op.CREDIT, unit.number, self._round, aux=self._asked)
        return True

    def _nbytes(self, block: int) -> int:
        start, stop = self._unit.bounds(block)
        return int((stop - start) * self._unit.stored.itemsize)

    def _take(self) -> Bytes:
        """The next block that has come; its memory is used again for what is asked for next."""
        came = self._coming.popleft()
        self._receiver.buffers.give(came.data, came.due)
        return came.data

    def part(self, block: int, start: int, stop: int) -> Array:
        """The elements of this block, which is ready; good until the next look at any payload."""
        return self._take().view(self._unit.stored.dtype)

    def drop(self) -> None:
        """The generation is over; `Receiver.stop` sees to what is on its way."""
        self._coming.clear()

    def add_to(self, out: Array) -> None:
        """Of coded payloads only."""
        raise TypeError("a plain payload is taken block by block")

    def rows(self) -> RowSparse:
        """Of row-sparse payloads only."""
        raise TypeError("the payload is not row-sparse")


class Letter(Blocks):
    """A compressed or row-sparse payload from another node, in one message."""

    coded = True

    def __init__(
        self, receiver: Receiver, line: Line, worker: int, unit: ServerUnit, frame: Frame, read: Read
    ) -> None:  # fmt: skip
        super().__init__(receiver, line, worker, unit, frame)
        self._size, self._read = frame.nbytes, read
        self.empty = frame.coding == Coding.NOTHING
        self.sparse = self.empty or frame.coding == Coding.ROWS

    def _nbytes(self, block: int) -> int:
        return self._size

    def part(self, block: int, start: int, stop: int) -> Array:
        """Of plain payloads only."""
        raise TypeError("a coded payload has no plain elements")

    def add_to(self, out: Array) -> None:
        """Add all elements to `out`."""
        self._read(self._take()).add_to(out)

    def rows(self) -> RowSparse:
        """The payload as rows, in memory of its own: it is kept until the round ends."""
        return self._read(self._take().copy()).rows()


def _cut(stored: Array, block_elements: int) -> list[Bytes]:
    """What each message of a unit holds; one at least."""
    data, size = stored.view(np.uint8), max(1, block_elements) * stored.itemsize
    return [data[start : start + size] for start in range(0, max(data.size, 1), size)]

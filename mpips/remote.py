"""Payloads between nodes, on the server's side: blocks as messages, few at a time, in the order they are summed.

A worker sends a block when the server has a buffer for it and says so (CREDIT), except for payloads of one block, which
come right behind their frame: a credit would wait in the server's link behind the answers that fill it. Every credit is
answered, by nothing where the worker has given up meanwhile; then the round has failed, or a REFUSE withdraws the rest.
What all that may fill at a server says `mpips.buffers`.
"""

from __future__ import annotations

import sys
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.buffers import Buffers
from mpips.lines import Line, MessageLine
from mpips.messages import Coding, Frame, Op
from mpips.row_sparse import RowSparse
from mpips.tags import pull_tag, push_tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi4py import MPI

    from mpips.unit import Source, Unit

ROW_MESSAGES = 2  # messages with rows that are under way to a worker
ALONG = 1  # flag of a frame whose payload follows at once


class Block(NamedTuple):
    """A block on its way to the server."""

    request: MPI.Request
    data: NDArray[np.uint8]
    due: bool


class Shipment(NamedTuple):
    """An answer under way."""

    unit: int
    worker: int
    blocks: Iterator[NDArray[np.uint8]]
    """Those not yet sent."""
    in_flight: int
    requests: deque[MPI.Request]


class Postman:
    """Sends stored units to workers of other nodes and knows when they have gone."""

    def __init__(self, comm: MPI.Comm, in_flight: int) -> None:
        from mpi4py import MPI

        self.comm, self.in_flight = comm, in_flight
        self._status = MPI.Status()
        self._shipping: list[Shipment] = []
        self.buffers = Buffers()
        self._forgotten: list[Block] = []

    def receive(self, data: NDArray[np.uint8], worker: int, tag: int) -> MPI.Request:
        """Start to receive a block."""
        return self.comm.Irecv(data, worker, tag)

    def came(self, request: MPI.Request) -> int:
        """How many bytes have come, -1 where the message has not ended."""
        return self._status.Get_count() if request.Test(self._status) else -1

    def forget(self, coming: list[Block]) -> None:
        """Blocks that nobody waits for any more; workers send them all the same, as they were asked to."""
        self._forgotten += coming

    def ship(self, unit: Unit, worker: int, rows: NDArray[np.int64] | None = None) -> None:
        """Start to send a unit, or rows of it; it must not change until `delivered` names it."""
        if rows is None:
            data = unit.stored.view(np.uint8)
            size = unit.block_elements * unit.stored.itemsize
            blocks = (data[start : start + size] for start in range(0, max(data.size, 1), size))
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
            shipment.requests.append(self.comm.Isend(block, shipment.worker, tag))

    def delivered(self) -> list[tuple[int, int]]:
        """(unit, worker) of everything that has gone since the last call."""
        gone = []
        rest = []
        for shipment in self._shipping:
            while shipment.requests and shipment.requests[0].Test():
                shipment.requests.popleft()
                self._post(shipment)
            if shipment.requests:
                rest.append(shipment)
            else:
                gone.append((shipment.unit, shipment.worker))
        self._shipping = rest
        if self._forgotten:
            self._forgotten = [block for block in self._forgotten if not self._arrived(block)]
        return gone

    def _arrived(self, block: Block) -> bool:
        if block.request.Test():
            self.buffers.give(block.data, block.due)
            return True
        return False

    def finish(self, lines: list[Line]) -> None:
        """Wait until everything sent has been taken."""
        while self._shipping:
            self.delivered()
        for block in self._forgotten:
            block.request.Cancel()
            block.request.Wait()
        self._forgotten.clear()
        for line in lines:
            if isinstance(line, MessageLine):
                line.finish()


class Blocks:
    """A plain payload that comes from another node block by block (`unit.Source`)."""

    local = False
    coded = False
    sparse = False
    steady: NDArray[Any] | None = None

    def __init__(self, postman: Postman, line: Line, worker: int, unit: Unit, frame: Frame) -> None:
        self._postman, self._line, self._worker, self._unit, self._round = postman, line, worker, unit, frame.round
        self._blocks = unit.blocks if frame.coding == Coding.PLAIN else 1
        self._early = max(2, postman.in_flight // len(unit.contributors))
        self._coming: deque[Block] = deque()
        """Blocks `_asked - len(_coming)` up to `_asked`."""
        self._asked = 0
        self._whole = False
        self.complete = bool(frame.flags & ALONG)
        if frame.flags & ALONG:
            data = postman.buffers.take(frame.nbytes, True, sent=True)
            assert data is not None
            self._coming.append(Block(postman.receive(data, worker, push_tag(unit.number)), data, False))
            self._asked = 1

    def ready(self, block: int) -> bool:
        while self._asked < min(self._blocks, block + self._early) and self._ask(self._asked == block):
            self._asked += 1
        return block < self._asked and self._came(self._coming[0])

    def _came(self, block: Block) -> bool:
        """Whether the block asked for first has come: one that the worker keeps back never does."""
        if block.request:  # it is null once it has ended
            self._whole = self._postman.came(block.request) == block.data.size
        return self._whole

    def _ask(self, next_one: bool) -> bool:
        """Ask for one more block; False where there is no room for it."""
        unit, postman = self._unit, self._postman
        due = next_one and unit.position.get(self._worker, unit.turn) == unit.turn
        data = postman.buffers.take(self._nbytes(self._asked), due)
        if data is None:
            return False
        self._coming.append(Block(postman.receive(data, self._worker, push_tag(unit.number)), data, due))
        self._line.post(Op.CREDIT, unit.number, self._round, aux=self._asked)
        return True

    def _nbytes(self, block: int) -> int:
        start, stop = self._unit.bounds(block)
        return (stop - start) * self._unit.stored.itemsize

    def _take(self) -> NDArray[np.uint8]:
        """The next block that has come; its memory is used again for what is asked for next."""
        came = self._coming.popleft()
        self._postman.buffers.give(came.data, came.due)
        return came.data

    def part(self, block: int, start: int, stop: int) -> NDArray[Any]:
        return self._take().view(self._unit.stored.dtype)

    def drop(self) -> None:
        self._postman.forget(list(self._coming))
        self._coming.clear()

    def add_to(self, out: NDArray[Any]) -> None:
        raise TypeError("a plain payload is taken block by block")

    def rows(self) -> RowSparse:
        raise TypeError("the payload is not row-sparse")


class Letter(Blocks):
    """A compressed or row-sparse payload from another node, in one message; `read` makes a source of it."""

    coded = True

    def __init__(
        self, postman: Postman, line: Line, worker: int, unit: Unit, frame: Frame,
        read: Callable[[NDArray[np.uint8]], Source],
    ) -> None:  # fmt: skip
        super().__init__(postman, line, worker, unit, frame)
        self._size, self._read = frame.nbytes, read
        self.sparse = frame.coding == Coding.ROWS

    def _nbytes(self, block: int) -> int:
        return self._size

    def part(self, block: int, start: int, stop: int) -> NDArray[Any]:
        raise TypeError("a coded payload has no plain elements")

    def add_to(self, out: NDArray[Any]) -> None:
        self._read(self._take()).add_to(out)

    def rows(self) -> RowSparse:
        return self._read(self._take().copy()).rows()  # kept until the round ends; the buffer has another user by then

"""Payloads between nodes, on the server's side: blocks as messages, few at a time, in the order they are summed.

A worker sends a block when the server has a buffer for it and says so (CREDIT), except for payloads of one block, which
come right behind their frame: a credit would wait in the server's link behind the answers that fill it. So what a
server keeps for pushes under way is a few blocks of every worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpips.lines import TAG_DATA, Line, MessageLine
from mpips.messages import Frame, Op
from mpips.row_sparse import RowSparse

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpips.unit import Unit

UNITS = 8000  # tags are reused after so many units; MPI promises 32767 tags
ALONG = 1  # flag of a frame whose payload follows at once


def push_tag(unit: int) -> int:
    """The tag of payloads that go to the server."""
    return TAG_DATA + 2 * (unit % UNITS)


def pull_tag(unit: int) -> int:
    """The tag of payloads that come from the server."""
    return TAG_DATA + 2 * (unit % UNITS) + 1


def small_payload(comm: MPI.Comm, worker: int, unit: int, nbytes: int) -> NDArray[np.uint8]:
    """The payload that follows its frame."""
    data = np.empty(nbytes, np.uint8)
    comm.Recv(data, worker, push_tag(unit))
    return data


class Postman:
    """Sends stored units to workers of other nodes and knows when they have gone."""

    def __init__(self, comm: MPI.Comm, in_flight: int) -> None:
        self.comm, self.in_flight = comm, in_flight
        self._shipping: list[tuple[int, int, list[MPI.Request]]] = []
        self._coming: list[tuple[MPI.Request, NDArray[np.uint8]]] = []

    def receive(self, data: NDArray[np.uint8], worker: int, tag: int) -> MPI.Request:
        """Start to receive a block; its memory lives until it is there, even where its round fails before."""
        if len(self._coming) > 64:
            self._coming = [(request, data) for request, data in self._coming if not request.Test()]
        self._coming.append((self.comm.Irecv(data, worker, tag), data))
        return self._coming[-1][0]

    def ship(self, unit: Unit, worker: int) -> None:
        """Start to send all blocks of a unit; it must not change until `delivered` names it."""
        data = unit.stored.view(np.uint8)
        size = unit.block_elements * unit.stored.itemsize
        requests = [
            self.comm.Isend(data[start : start + size], worker, pull_tag(unit.number))
            for start in range(0, max(data.size, 1), size)
        ]
        self._shipping.append((unit.number, worker, requests))

    def delivered(self) -> list[tuple[int, int]]:
        """(unit, worker) of everything that has gone since the last call."""
        gone = []
        rest = []
        for unit, worker, requests in self._shipping:
            while requests and requests[0].Test():
                requests.pop(0)
            if requests:
                rest.append((unit, worker, requests))
            else:
                gone.append((unit, worker))
        self._shipping = rest
        return gone

    def finish(self, lines: list[Line]) -> None:
        """Wait until everything sent has been taken."""
        for _, _, requests in self._shipping:
            for request in requests:
                request.Wait()
        self._shipping.clear()
        for line in lines:
            if isinstance(line, MessageLine):
                line.finish()


class Blocks:
    """A plain payload that comes from another node block by block (`server_state.Source`)."""

    local = False
    coded = False
    steady: NDArray[Any] | None = None

    def __init__(self, postman: Postman, line: Line, worker: int, unit: Unit, frame: Frame) -> None:
        self._postman, self._line, self._worker, self._unit, self._round = postman, line, worker, unit, frame.round
        self._dtype = unit.stored.dtype
        self._asked = 0
        self._coming: dict[int, MPI.Request] = {}
        self._buffers: list[NDArray[Any]] = []
        if frame.flags & ALONG:
            data = np.empty(frame.nbytes, np.uint8)
            self._coming[0] = postman.receive(data, worker, push_tag(unit.number))
            self._buffers, self._asked = [data.view(self._dtype)], 1

    def ready(self, block: int) -> bool:
        unit = self._unit
        if not self._buffers:
            count = min(max(2, self._postman.in_flight // len(unit.contributors)), unit.blocks)
            self._buffers = [np.empty(min(unit.block_elements, unit.stored.size), self._dtype) for _ in range(count)]
        while self._asked < min(unit.blocks, block + len(self._buffers)):
            self._ask(self._asked)
        if block in self._coming and self._coming[block].Test():
            del self._coming[block]
        return block < self._asked and block not in self._coming

    def _ask(self, block: int) -> None:
        unit = self._unit
        size = min(unit.block_elements, unit.stored.size - block * unit.block_elements)
        buffer = self._buffers[block % len(self._buffers)][:size]
        self._coming[block] = self._postman.receive(buffer.view(np.uint8), self._worker, push_tag(unit.number))
        self._line.post(Op.CREDIT, unit.number, self._round, aux=block)
        self._asked += 1

    def part(self, block: int, start: int, stop: int) -> NDArray[Any]:
        return self._buffers[block % len(self._buffers)][: stop - start]

    def add_to(self, out: NDArray[Any]) -> None:
        raise TypeError("a plain payload is taken block by block")

    def rows(self) -> RowSparse | None:
        return None

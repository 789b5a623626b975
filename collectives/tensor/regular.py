"""The paper's rival `reg`: reduce to the host, MPI_Allreduce, broadcast to the vectors, pipelined over the three.

Source: MXNET-MPI paper, section 7.3 d (reg-IBMGpu). The vector is cut into parts; while part i is reduced over the
worker's vectors, the MPI sums part i - 1 and part i - 2 is spread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpi4py import MPI

from collectives.call import Call
from collectives.operations import mpi_type, scale
from collectives.tensor.vectors import Ticket, Vectors, until

PART_BYTES = 1 << 20


class RegularTensor:
    """An allreduce of a tensor on the MPI's own Iallreduce."""

    def __init__(self, comm: MPI.Comm, call: Call, vectors: Vectors):
        assert call.operation is not None
        if mpi_type(call.dtype) is None:
            raise ValueError(f"MPI has no type that it can reduce for {call.dtype.name}: use multi_ring or auto")
        self._comm, self._call, self._vectors = comm, call, vectors
        self._work = vectors.host(call.n)
        size = max(1, PART_BYTES // call.dtype.itemsize)
        self._parts = [(start, min(start + size, call.n)) for start in range(0, call.n, size)]

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        operation, vectors = self._call.operation, self._vectors
        assert operation is not None
        vectors.begin()
        gathers: list[Ticket] = []
        requests: list[Any] = []
        spreads: list[Ticket] = []
        for i in range(len(self._parts) + 2):
            if i < len(self._parts):
                start, stop = self._parts[i]
                gathers.append(vectors.gather(start, stop, None, self._work[start:stop]))
            if 0 <= i - 1 < len(self._parts):
                yield from until(gathers[i - 1])
                start, stop = self._parts[i - 1]
                requests.append(self._comm.Iallreduce(MPI.IN_PLACE, self._work[start:stop], operation.mpi))
            if 0 <= i - 2 < len(self._parts):
                while not requests[i - 2].Test():
                    yield
                spreads.append(self._spread(*self._parts[i - 2]))
        yield from until(*spreads)

    def _spread(self, start: int, stop: int) -> Ticket:
        part, operation = self._work[start:stop], self._call.operation
        if operation is not None and operation.is_mean:
            function, arguments = scale(part, self._call.p * self._vectors.count)
            function(*arguments)
        return self._vectors.spread(start, stop, part)

"""The allreduces of tensors that the paper compares its own with: `reg`, on the MPI's call, and `vector_ring`, Baidu's.

reg          Source: MXNET-MPI paper, section 7.3 d (reg-IBMGpu). The vector is cut into parts. While part i is reduced
             over the worker's vectors, the MPI sums part i - 1, and part i - 2 is spread.
vector_ring  Source: sections 6.3 and 7.3, figure 20. With p workers of k vectors the ring has P = pk members; member
             rk + v is vector v of worker r. Each step moves a chunk of n/P elements from every member to the next:
             k - 1 times inside the worker, once over the wire, from and to a host buffer.
             Cost: 2(P-1) steps instead of 2(p-1), each with a copy to the host and one from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpi4py import MPI

from collectives.arrays import Vector
from collectives.call import Call, mpi_type, scale
from collectives.fabric.requests import Tags, keep_collective, receives, release, sends
from collectives.schedule import ring
from collectives.schedule.model import cut
from collectives.tensor.vectors import NO_MEMORY, Ticket, Vectors, running, until

PART_BYTES = 1 << 20


class Reg:
    """Reduce to the host, MPI_Iallreduce, spread, in a pipeline. Memory: one vector on the host."""

    def __init__(self, comm: MPI.Comm, call: Call, vectors: Vectors):
        if mpi_type(call.dtype) is None:
            raise ValueError(f"MPI has no type that it can reduce for {call.dtype.name}: use multi_ring or auto")
        self._comm, self._call, self._vectors = comm, call, vectors
        self._work = vectors.host(call.n)
        size = max(1, PART_BYTES // call.dtype.itemsize)
        self._parts = [(start, min(start + size, call.n)) for start in range(0, call.n, size)]

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        requests: list[MPI.Request] = []
        try:
            with running(self._vectors):
                yield from self._steps(requests)
        finally:
            for request in requests:
                keep_collective(request, self._comm)

    def free(self) -> None:
        """Give the memory back."""
        self._parts, self._work = [], NO_MEMORY
        self._vectors.free()

    def _steps(self, requests: list[MPI.Request]) -> Iterator[None]:
        parts, gathers, spreads = self._parts, list[Ticket](), list[Ticket]()
        for i in range(len(parts) + 2):
            if i < len(parts):
                start, stop = parts[i]
                gathers.append(self._vectors.gather(start, stop, None, self._work[start:stop]))
            if 0 <= i - 1 < len(parts):
                yield from until(gathers[i - 1])
                requests.append(self._sum(*parts[i - 1]))
            if 0 <= i - 2 < len(parts):
                while not requests[i - 2].Test():
                    yield
                spreads.append(self._spread(*parts[i - 2]))
        yield from until(*spreads)

    def _sum(self, start: int, stop: int) -> MPI.Request:
        assert self._call.operation is not None
        return self._comm.Iallreduce(MPI.IN_PLACE, self._work[start:stop], self._call.operation.mpi)

    def _spread(self, start: int, stop: int) -> Ticket:
        part, operation = self._work[start:stop], self._call.operation
        if operation is not None and operation.is_mean:
            function, arguments = scale(part, self._call.p * self._vectors.count)
            function(*arguments)
        return self._vectors.spread(start, stop, part)


class _Step(NamedTuple):
    add: bool
    sent: tuple[int, int]
    """What the last vector sends over the wire."""
    received: tuple[int, int]
    """What the first vector receives over the wire."""
    inside: list[tuple[int, int]]
    """What vector v passes on to vector v + 1, for each v but the last."""
    requests: list[MPI.Prequest]


class VectorRing:
    """A ring through all vectors. Memory: two chunks on the host; one vector more for a mean."""

    def __init__(self, comm: MPI.Comm, call: Call, vectors: Vectors, tags: Tags):
        self._call, self._vectors = call, vectors
        self._members = call.p * vectors.count
        longest = -(-call.n // self._members)
        self._outgoing, self._incoming = vectors.host(longest), vectors.host(longest)
        is_mean = call.operation is not None and call.operation.is_mean
        self._whole = vectors.host(call.n) if is_mean else None
        self._steps = list(self._compile(comm, *tags.take(1, call.text)))

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        vectors, last = self._vectors, self._vectors.count - 1
        with running(vectors):
            yield from until(vectors.adopt())
            for step in self._steps:
                yield from until(vectors.fetch(last, *step.sent, _first(self._outgoing, step.sent)))
                MPI.Prequest.Startall(step.requests)
                passed = [vectors.pass_on(which, *extent, step.add) for which, extent in enumerate(step.inside)]
                while not MPI.Request.Testall(step.requests):
                    yield
                arrived = vectors.store(0, *step.received, _first(self._incoming, step.received), step.add)
                yield from until(*passed, arrived)
            if self._whole is not None:
                yield from self._average(self._whole)

    def free(self) -> None:
        """Give the requests back to MPI, and the memory."""
        for step in self._steps:
            release(step.requests)
        self._steps, self._whole = [], None
        self._outgoing = self._incoming = NO_MEMORY
        self._vectors.free()

    def _average(self, whole: Vector) -> Iterator[None]:
        yield from until(self._vectors.fetch(0, 0, self._call.n, whole))
        function, arguments = scale(whole, self._members)
        function(*arguments)
        yield from until(self._vectors.spread(0, self._call.n, whole))

    def _compile(self, comm: MPI.Comm, tag: int) -> Iterator[_Step]:
        count, total = self._vectors.count, self._members
        members = [comm.rank * count + which for which in range(count)]
        stages = [ring.STAGES["allreduce"](total)(member) for member in members]
        for steps in zip(*stages):
            rounds = [next(iter(step)) for step in steps]
            sent = [self._extent(int(r.send.start)) for r in rounds]
            received = self._extent(int(rounds[0].receive.start))
            source, target = int(rounds[0].receive_from) // count, int(rounds[-1].send_to) // count
            incoming, outgoing = _first(self._incoming, received), _first(self._outgoing, sent[-1])
            requests = receives(comm, incoming, source, tag)
            requests += sends(comm, outgoing, target, tag)
            yield _Step(rounds[0].add, sent[-1], received, sent[:-1], requests)

    def _extent(self, chunk: int) -> tuple[int, int]:
        return int(cut(self._call.n, self._members, chunk)), int(cut(self._call.n, self._members, chunk + 1))


def _first(buffer: Vector, extent: tuple[int, int]) -> Vector:
    return buffer[: extent[1] - extent[0]]

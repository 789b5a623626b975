"""The paper's other rival: one ring through every vector of every worker, as Baidu's.

Source: MXNET-MPI paper, sections 6.3 and 7.3, figure 20. With p workers of k vectors the ring has P = pk members;
member rk + v is vector v of worker r. Each step moves a chunk of n/P elements from every member to the next: k - 1
times inside the worker, once over the wire, from and to a host buffer.

Cost: 2(P-1) steps instead of 2(p-1), each with a copy to the host and one from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpi4py import MPI

from collectives.arrays import Vector
from collectives.call import Call
from collectives.network.messages import pieces, release
from collectives.network.tags import Tags
from collectives.operations import scale
from collectives.schedule import ring
from collectives.schedule.model import cut
from collectives.tensor.vectors import Ticket, Vectors, until


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
    """An allreduce of a tensor by a ring through all vectors."""

    def __init__(self, comm: MPI.Comm, call: Call, vectors: Vectors, tags: Tags):
        self._call, self._vectors = call, vectors
        self._members = call.p * vectors.count
        longest = -(-call.n // self._members)
        self._outgoing, self._incoming = vectors.host(longest), vectors.host(longest)
        self._steps = list(self._compile(comm, *tags.take(1, call.text)))

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        vectors, last = self._vectors, self._vectors.count - 1
        vectors.begin()
        yield from until(vectors.adopt())
        for step in self._steps:
            yield from until(vectors.fetch(last, *step.sent, _first(self._outgoing, step.sent)))
            MPI.Prequest.Startall(step.requests)
            passed = [vectors.pass_on(which, *extent, step.add) for which, extent in enumerate(step.inside)]
            while not MPI.Request.Testall(step.requests):
                yield
            arrived = vectors.store(0, *step.received, _first(self._incoming, step.received), step.add)
            yield from until(arrived, *passed)
        yield from self._average()

    def free(self) -> None:
        """Give the requests back to MPI."""
        for step in self._steps:
            release(step.requests)
        self._steps = []

    def _average(self) -> Iterator[None]:
        operation = self._call.operation
        if operation is None or not operation.is_mean:
            return
        whole = self._vectors.host(self._call.n)
        yield from until(self._vectors.fetch(0, 0, self._call.n, whole))
        function, arguments = scale(whole, self._members)
        function(*arguments)
        ticket: Ticket = self._vectors.spread(0, self._call.n, whole)
        yield from until(ticket)

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
            requests = [comm.Recv_init(piece, source, tag) for piece in pieces(incoming)]
            requests += [comm.Send_init(piece, target, tag) for piece in pieces(outgoing)]
            yield _Step(rounds[0].add, sent[-1], received, sent[:-1], requests)

    def _extent(self, chunk: int) -> tuple[int, int]:
        return int(cut(self._call.n, self._members, chunk)), int(cut(self._call.n, self._members, chunk + 1))


def _first(buffer: Vector, extent: tuple[int, int]) -> Vector:
    return buffer[: extent[1] - extent[0]]

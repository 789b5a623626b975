"""The rivals of the paper's tensor allreduce, on vectors in host memory. An instance can be called again and again.

reg          Section 7.3 d (reg-IBMGpu). The vector is cut into parts. While part i is reduced over the worker's
             vectors, the MPI library sums part i - 1, and part i - 2 is copied to the vectors. `Blocking` does the same
             with a single part.
vector_ring  Baidu's (sections 6.3 and 7.3, figure 20). With p workers of k vectors the ring has P = pk members. Member
             rk + v is vector v of worker r. Each step moves a chunk of n/P elements from every member to the next,
             k - 1 times inside the worker and once over the wire. It takes 2(P - 1) steps instead of 2(p - 1).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.schedule.model import cut
from examples.reproduce.tensor.model import PART_BYTES

# seconds between two tests of the messages on the wire
NAP = 1e-4


def reduce(vectors: list[Any], out: Any) -> None:
    """Sum the vectors into `out`."""
    np.add(vectors[0], vectors[1], out=out)
    for vector in vectors[2:]:
        np.add(out, vector, out=out)


def spread(vectors: list[Any], source: Any) -> None:
    """Copy `source` to all vectors."""
    for vector in vectors:
        np.copyto(vector, source)


def wait(*requests: MPI.Request) -> None:
    """Wait for messages by sleeping, because the emulated hosts share the cores."""
    while not MPI.Request.Testall(list(requests)):
        time.sleep(NAP)


class Blocking:
    """The paper's reg without its pipeline, with the MPI library's blocking call."""

    def __init__(self, comm: MPI.Comm, vectors: list[Any]) -> None:
        self._comm = comm
        self._vectors = vectors
        self._host = np.empty_like(vectors[0])

    def __call__(self) -> None:
        reduce(self._vectors, self._host)
        self._comm.Allreduce(MPI.IN_PLACE, self._host)
        spread(self._vectors, self._host)


class Reg:
    """The paper's reg: reduce to the host, MPI_Iallreduce and spread, in a pipeline."""

    def __init__(self, comm: MPI.Comm, vectors: list[Any]) -> None:
        self._comm = comm
        host = np.empty_like(vectors[0])
        size = max(1, PART_BYTES // host.itemsize)
        parts = [slice(start, start + size) for start in range(0, host.size, size)]
        self._parts = [([vector[part] for vector in vectors], host[part]) for part in parts]

    def __call__(self) -> None:
        requests: list[MPI.Request] = []
        for i, (vectors, host) in enumerate(self._parts):
            reduce(vectors, host)
            requests.append(self._comm.Iallreduce(MPI.IN_PLACE, host))
            if i:
                self._finish(requests, i - 1)
        self._finish(requests, len(self._parts) - 1)

    def _finish(self, requests: list[MPI.Request], i: int) -> None:
        wait(requests[i])
        spread(*self._parts[i])


class VectorRing:
    """A ring through all vectors of all workers."""

    def __init__(self, comm: MPI.Comm, vectors: list[Any]) -> None:
        self._comm = comm
        self._vectors = vectors
        self._members = comm.size * len(vectors)
        longest = -(-vectors[0].size // self._members)
        self._outgoing, self._incoming = (np.empty(longest, vectors[0].dtype) for _ in range(2))

    def __call__(self) -> None:
        comm, first = self._comm, self._comm.rank * len(self._vectors)
        for step in range(2 * (self._members - 1)):
            chunks = [self._chunk(first + which - step) for which in range(-1, len(self._vectors))]
            came, *passed, sent = chunks
            outgoing, incoming = (
                buffer[: chunk.stop - chunk.start] for buffer, chunk in ((self._outgoing, sent), (self._incoming, came))
            )
            np.copyto(outgoing, self._vectors[-1][sent])
            before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
            requests = comm.Irecv(incoming, before), comm.Isend(outgoing, after)
            adds = step < self._members - 1
            for source, target, chunk in zip(self._vectors, self._vectors[1:], passed):
                self._take(target[chunk], source[chunk], adds)
            wait(*requests)
            self._take(self._vectors[0][came], incoming, adds)

    def _chunk(self, number: int) -> slice:
        n, members = self._vectors[0].size, self._members
        number %= members
        return slice(int(cut(n, members, number)), int(cut(n, members, number + 1)))

    def _take(self, target: Any, source: Any, adds: bool) -> None:
        if adds:
            np.add(target, source, out=target)
        else:
            np.copyto(target, source)

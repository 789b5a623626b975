"""What happens inside a client: reduce, broadcast, reduce-scatter, allgather, as generators that yield to wait."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.operations import mpi_type
from collectives.schedule import cut

if TYPE_CHECKING:
    from mpi4py import MPI

Array = NDArray[Any]
Task = Generator[None, None, None]


def _until(request: MPI.Request) -> Task:
    while not request.Test():
        yield


def _all(requests: list[MPI.Request]) -> Task:
    from mpi4py import MPI

    while not MPI.Request.Testall(requests):
        yield


def _typed(array: Array) -> list[Any]:
    return [array, mpi_type(array.dtype)]


def allreduce(comm: MPI.Comm, x: Array, out: Array) -> Task:
    """out = sum of everybody's x, both (n,)."""
    if mpi_type(x.dtype) is not None:
        yield from _until(comm.Iallreduce(_typed(x), _typed(out)))
        return
    everyone = np.empty((comm.Get_size(), x.size), x.dtype)
    yield from _until(comm.Iallgather(x.view(np.uint8), everyone.view(np.uint8)))
    np.add.reduce(everyone, axis=0, out=out, dtype=x.dtype)


def reduce(comm: MPI.Comm, x: Array, out: Array | None) -> Task:
    """out on rank 0 = sum of everybody's x; both (n,)."""
    if mpi_type(x.dtype) is not None:
        yield from _until(comm.Ireduce(_typed(x), None if out is None else _typed(out)))
        return
    everyone = None if out is None else np.empty((comm.Get_size(), x.size), x.dtype)
    yield from _until(comm.Igather(x.view(np.uint8), None if everyone is None else everyone.view(np.uint8)))
    if everyone is not None and out is not None:
        np.add.reduce(everyone, axis=0, out=out, dtype=x.dtype)


def broadcast(comm: MPI.Comm, x: Array) -> Task:
    """Rank 0's x on every rank."""
    yield from _until(comm.Ibcast(x.view(np.uint8)))


def reduce_scatter(comm: MPI.Comm, x: Array, out: Array, cuts: Sequence[int], tag: int) -> Task:
    """out on rank i = elements [cuts[i], cuts[i+1]) of the sum of everybody's x.

    Every rank sends every other its slice. Several may be under way in any order, with different tags: non-blocking
    collectives would have to start in the same order everywhere.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    others = np.empty((size - 1, out.size), x.dtype)
    requests = [comm.Irecv(row.view(np.uint8), (rank - 1 - i) % size, tag) for i, row in enumerate(others)]
    for to in ((rank + i) % size for i in range(1, size)):
        requests.append(comm.Isend(x[cuts[to] : cuts[to + 1]].view(np.uint8), to, tag))
    yield from _all(requests)
    np.copyto(out, x[cuts[rank] : cuts[rank + 1]])
    for row in others:
        np.add(out, row, out=out)


def reduce_to_first(comm: MPI.Comm, x: Array, out: Array | None, tag: int) -> Task:
    """out on rank 0 = sum of everybody's x: reduce-scatter, then slices to rank 0; tags as in `reduce_scatter`."""
    rank, size = comm.Get_rank(), comm.Get_size()
    cuts = [int(cut(x.size, size, i)) for i in range(size + 1)]
    mine = np.empty(cuts[rank + 1] - cuts[rank], x.dtype)
    yield from reduce_scatter(comm, x, mine, cuts, tag)
    if out is None:
        yield from _all([comm.Isend(mine.view(np.uint8), 0, tag)])
        return
    out[: cuts[1]] = mine
    slices = [out[a:b].view(np.uint8) for a, b in pairwise(cuts)]
    yield from _all([comm.Irecv(slices[i], i, tag) for i in range(1, size)])


def spread(comm: MPI.Comm, x: Array, tag: int) -> Task:
    """Rank 0's x on every rank: slices from rank 0, then everybody's slice to all; tags as in `reduce_scatter`."""
    rank, size = comm.Get_rank(), comm.Get_size()
    cuts = [int(cut(x.size, size, i)) for i in range(size + 1)]
    slices = [x[a:b].view(np.uint8) for a, b in pairwise(cuts)]
    if rank == 0:
        requests = [comm.Isend(slices[i], i, tag) for i in range(1, size)]
        yield from _all(requests + [comm.Isend(slices[0], i, tag) for i in range(1, size)])
        return
    own = comm.Irecv(slices[rank], 0, tag)
    others = [comm.Irecv(slices[i], i, tag) for i in range(size) if i != rank]
    yield from _all([own])
    yield from _all(others + [comm.Isend(slices[rank], i, tag) for i in range(1, size) if i != rank])


def allgather(comm: MPI.Comm, x: Array, cuts: Sequence[int], tag: int) -> Task:
    """Rank i's elements [cuts[i], cuts[i+1]) of x on every rank, in place; tags as in `reduce_scatter`."""
    rank, size = comm.Get_rank(), comm.Get_size()
    slices = [x[a:b].view(np.uint8) for a, b in pairwise(cuts)]
    requests = [comm.Irecv(slices[(rank - i) % size], (rank - i) % size, tag) for i in range(1, size)]
    requests += [comm.Isend(slices[rank], (rank + i) % size, tag) for i in range(1, size)]
    yield from _all(requests)

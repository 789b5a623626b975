"""What happens inside a client: reduce, broadcast, reduce-scatter, allgather, as generators that yield while they wait."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.operations import mpi_type

if TYPE_CHECKING:
    from mpi4py import MPI

Array = NDArray[Any]
Task = Generator[None, None, None]


def _until(request: MPI.Request) -> Task:
    while not request.Test():
        yield


def _typed(array: Array) -> list[Any]:
    return [array, mpi_type(array.dtype)]


def _counts(cuts: Sequence[int], itemsize: int) -> tuple[list[int], list[int]]:
    return [(b - a) * itemsize for a, b in zip(cuts, cuts[1:])], [a * itemsize for a in cuts[:-1]]


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


def reduce_scatter(comm: MPI.Comm, x: Array, out: Array, cuts: Sequence[int]) -> Task:
    """out on rank i = elements [cuts[i], cuts[i+1]) of the sum of everybody's x."""
    if mpi_type(x.dtype) is not None:
        yield from _until(comm.Ireduce_scatter(_typed(x), _typed(out), _counts(cuts, 1)[0]))
        return
    counts, offsets = _counts(cuts, x.itemsize)
    everyone = np.empty((comm.Get_size(), out.size), x.dtype)
    mine = everyone.view(np.uint8).reshape(-1)
    size = comm.Get_size()
    places = ([out.nbytes] * size, [out.nbytes * i for i in range(size)])
    yield from _until(comm.Ialltoallv([x.view(np.uint8), (counts, offsets)], [mine, places]))
    np.add.reduce(everyone, axis=0, out=out, dtype=x.dtype)


def allgather(comm: MPI.Comm, x: Array, cuts: Sequence[int]) -> Task:
    """Rank i's elements [cuts[i], cuts[i+1]) of x on every rank, in place."""
    from mpi4py import MPI

    counts, offsets = _counts(cuts, x.itemsize)
    yield from _until(comm.Iallgatherv(MPI.IN_PLACE, [x.view(np.uint8), (counts, offsets)]))

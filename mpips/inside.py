"""What happens inside a client: reduce, broadcast, reduce-scatter, allgather, as generators that yield to wait.

All sums add in the order of the ranks, so that an element's bits do not depend on how keys are cut.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.schedule.model import cut

if TYPE_CHECKING:
    from mpi4py import MPI

Array = NDArray[Any]
Task = Generator[bool | None, None, None]
SHORT_BYTES = 8 << 10
"""Up to here one message from everybody to rank 0 is taken for faster than two rounds of smaller ones."""

_to_nobody: list[MPI.Request] = []
"""Messages of calls that were given up, and in them their memory."""


def until(request: MPI.Request) -> Task:
    """Wait for one request."""
    while not request.Test():
        yield False


def _add(parts: Mapping[int, Array], out: Array) -> None:
    """out = the sum of all ranks' parts in their order."""
    first, *others = (parts[rank] for rank in range(len(parts)))
    if not others:
        np.copyto(out, first)
    for part in others:
        np.add(first, part, out=out)
        first = out


def _all(receives: list[MPI.Request], sends: list[MPI.Request]) -> Task:
    """Wait for all; who gives up, or is interrupted, receives nothing any more, and what it sent may go to nobody."""
    from mpi4py import MPI

    requests = receives + sends
    try:
        while not MPI.Request.Testall(requests):
            yield False
    except BaseException:
        _give_up(receives)
        _to_nobody.extend(request for request in sends if request)
        raise


def _give_up(receives: list[MPI.Request]) -> None:
    for request in receives:
        if request:
            request.Cancel()
            request.Wait()


def broadcast(comm: MPI.Comm, x: Array, tag: int) -> Task:
    """Rank 0's x on every rank; tags as in `reduce_scatter`."""
    if x.nbytes > SHORT_BYTES:
        yield from spread(comm, x, tag)
        return
    data = x.view(np.uint8)
    if comm.Get_rank():
        yield from _all([comm.Irecv(data, 0, tag)], [])
    else:
        yield from _all([], [comm.Isend(data, to, tag) for to in range(1, comm.Get_size())])


def reduce_scatter(comm: MPI.Comm, x: Array, out: Array, cuts: Sequence[int], tag: int) -> Task:
    """out on rank i = elements [cuts[i], cuts[i+1]) of the sum of everybody's x.

    Every rank sends every other its slice. Several may be under way in any order, with different tags: non-blocking
    collectives would have to start in the same order everywhere.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    others = [(rank + i) % size for i in range(1, size)]
    parts = dict(zip(others, np.empty((size - 1, out.size), x.dtype)))
    receives = [comm.Irecv(parts[source].view(np.uint8), source, tag) for source in reversed(others) if out.size]
    slices = [(to, x[cuts[to] : cuts[to + 1]]) for to in others]
    yield from _all(receives, [comm.Isend(part.view(np.uint8), to, tag) for to, part in slices if part.size])
    parts[rank] = x[cuts[rank] : cuts[rank + 1]]
    _add(parts, out)


def reduce_to_first(comm: MPI.Comm, x: Array, out: Array | None, tag: int) -> Task:
    """out on rank 0 = sum of everybody's x; tags as in `reduce_scatter`. A long vector is reduce-scattered, then slices
    go to rank 0; a short one goes there whole."""
    rank, size = comm.Get_rank(), comm.Get_size()
    owners = size if x.nbytes > SHORT_BYTES else 1
    cuts = [int(cut(x.size, owners, min(i, owners))) for i in range(size + 1)]
    mine = np.empty(cuts[rank + 1] - cuts[rank], x.dtype)
    yield from reduce_scatter(comm, x, mine, cuts, tag)
    if out is None:
        if mine.size:
            yield from _all([], [comm.Isend(mine.view(np.uint8), 0, tag)])
        return
    out[: cuts[1]] = mine
    slices = [out[a:b].view(np.uint8) for a, b in pairwise(cuts)]
    yield from _all([comm.Irecv(slices[i], i, tag) for i in range(1, size) if slices[i].size], [])


def spread(comm: MPI.Comm, x: Array, tag: int) -> Task:
    """Rank 0's x on every rank: slices from rank 0, then everybody's slice to all; tags as in `reduce_scatter`."""
    rank, size = comm.Get_rank(), comm.Get_size()
    cuts = [int(cut(x.size, size, i)) for i in range(size + 1)]
    slices = [x[a:b].view(np.uint8) for a, b in pairwise(cuts)]
    if rank == 0:
        sends = [comm.Isend(slices[i], i, tag) for i in range(1, size)]
        yield from _all([], sends + [comm.Isend(slices[0], i, tag) for i in range(1, size)])
        return
    own = comm.Irecv(slices[rank], 0, tag)
    others = [comm.Irecv(slices[i], i, tag) for i in range(size) if i != rank]
    try:
        yield from _all([own], [])
    except BaseException:
        _give_up(others)
        raise
    yield from _all(others, [comm.Isend(slices[rank], i, tag) for i in range(1, size) if i != rank])


def allgather(comm: MPI.Comm, x: Array, cuts: Sequence[int], tag: int) -> Task:
    """Rank i's elements [cuts[i], cuts[i+1]) of x on every rank, in place; tags as in `reduce_scatter`."""
    rank, size = comm.Get_rank(), comm.Get_size()
    slices = [x[a:b].view(np.uint8) for a, b in pairwise(cuts)]
    receives = [comm.Irecv(slices[(rank - i) % size], (rank - i) % size, tag) for i in range(1, size)]
    yield from _all(receives, [comm.Isend(slices[rank], (rank + i) % size, tag) for i in range(1, size)])

"""Alpha and beta of a communicator, from timed collectives, and what collectives then cost by the paper's formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

import collectives

from mpips.mlp.communication import Sum

_SMALL = 64  # bytes
_SCATTERED_BYTES = 256 << 10  # a rank's part of the scatter that is timed


class Link(NamedTuple):
    """Latency in seconds a message and inverse bandwidth in seconds a byte."""

    alpha: float
    beta: float


def allreduce_seconds(ranks: int, size: float, link: Link) -> float:
    """An allreduce of `size` bytes: ``2 (alpha ceil(log2 P) + beta (P - 1) / P size)``.

    The summand of the paper's section 5, whose printed P / (P - 1) we take for a slip: its source, Gholami et al.,
    and the limit P = 1 both want (P - 1) / P.
    """
    return 2 * (link.alpha * math.ceil(math.log2(ranks)) + link.beta * (ranks - 1) / ranks * size)


def gather_seconds(ranks: int, size: float, link: Link) -> float:
    """An allgather of `size` bytes in all: ``alpha ceil(log2 P) + beta (P - 1) / P size`` (a third of section 6's
    sum)."""
    return link.alpha * math.ceil(math.log2(ranks)) + link.beta * (ranks - 1) / ranks * size


def scatter_seconds(batch: int, model: int, data: float, alpha: float, beta: float) -> float:
    """One scatter to all ranks, `data` bytes a batch part: ``alpha + nb nm data beta`` (section 7, method one)."""
    return alpha + batch * model * data * beta


def broadcast_seconds(batch: int, model: int, data: float, alpha: float, beta: float) -> float:
    """A scatter to one rank a part, then broadcasts: ``2 alpha + max(nb, nm) data beta`` (section 7, method two)."""
    return 2 * alpha + max(batch, model) * data * beta


def way_seconds(batch: int, model: int, data: float, link: Link) -> dict[str, float]:
    """The cost of both ways of sending, by the paper's rule, the cheaper of two equal ones first."""
    return {
        "scatter": scatter_seconds(batch, model, data, *link),
        "broadcast": broadcast_seconds(batch, model, data, *link),
    }


def measure_allreduce(comm: MPI.Comm, size: int, half: bool = False, repeats: int = 7) -> Link:
    """The link for which `allreduce_seconds` gives the measured times of a tiny and of a `size`-byte sum. Collective.

    With `half`, of a sum of float32 that travels as `size` bytes of float16. Median of `repeats`, of the slowest
    rank. One rank has nothing to measure: alpha and beta are 0.
    """
    if comm.size == 1:
        return Link(0.0, 0.0)
    elements = (max(nbytes, _SMALL) // (2 if half else 4) for nbytes in (_SMALL, size))
    tiny, large = (_sum_seconds(comm, count, half, repeats) for count in elements)
    alpha = tiny / (2 * math.ceil(math.log2(comm.size)))
    beta = max(large - tiny, 0.0) / (2 * (comm.size - 1) / comm.size * max(size, _SMALL))
    return Link(alpha, beta)


def measure_scatter(comm: MPI.Comm, repeats: int = 5) -> Link:
    """The link for which `scatter_seconds` gives the measured times of a tiny and of a large scatter. Collective.

    Median of `repeats`, of the slowest rank. One rank has nothing to measure: alpha and beta are 0.
    """
    if comm.size == 1:
        return Link(0.0, 0.0)
    tiny, large = (_scatter_seconds(comm, nbytes, repeats) for nbytes in (8, _SCATTERED_BYTES))
    return Link(tiny, max(large - tiny, 0.0) / (comm.size * _SCATTERED_BYTES))


def _sum_seconds(comm: MPI.Comm, elements: int, half: bool, repeats: int) -> float:
    array = collectives.empty(elements, np.float32, comm)
    array[...] = 0
    running = Sum(array, comm, half)
    seconds = _median(comm, running.run, repeats)
    running.free()
    return seconds


def _scatter_seconds(comm: MPI.Comm, nbytes: int, repeats: int) -> float:
    mine = np.zeros(nbytes // 8)
    everything = np.zeros(comm.size * mine.size) if comm.rank == 0 else None
    return _median(comm, lambda: comm.Scatter(everything, mine, root=0), repeats)


def _median(comm: MPI.Comm, run: Callable[[], object], repeats: int) -> float:
    """The median of `repeats` calls after one, each taken at the slowest rank."""
    times = np.empty(repeats)
    for index in range(-1, repeats):
        comm.Barrier()
        start = perf_counter()
        run()
        if index >= 0:
            times[index] = perf_counter() - start
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return float(np.median(times))

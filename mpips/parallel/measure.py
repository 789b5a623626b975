"""Alpha and beta of a communicator, from timed allreduces, in the terms of the paper's formulas."""

from __future__ import annotations

import math
from time import perf_counter
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

import collectives

from .communication import Sum

_SMALL = 64  # bytes


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


def measure(comm: MPI.Comm, size: int, half: bool = False, repeats: int = 7) -> Link:
    """The link for which `allreduce_seconds` gives the measured times of a tiny and of a `size`-byte sum. Collective.

    With `half`, of a sum of float32 that travels as `size` bytes of float16. Median of `repeats`, of the slowest
    rank. One rank has nothing to measure: alpha and beta are 0.
    """
    if comm.size == 1:
        return Link(0.0, 0.0)
    tiny, large = (_median(comm, max(nbytes, _SMALL) // (2 if half else 4), half, repeats) for nbytes in (_SMALL, size))
    alpha = tiny / (2 * math.ceil(math.log2(comm.size)))
    beta = max(large - tiny, 0.0) / (2 * (comm.size - 1) / comm.size * max(size, _SMALL))
    return Link(alpha, beta)


def _median(comm: MPI.Comm, elements: int, half: bool, repeats: int) -> float:
    array = collectives.empty(elements, np.float32, comm)
    array[...] = 0
    running = Sum(array, comm, half)
    times = np.empty(repeats)
    for index in range(-1, repeats):
        comm.Barrier()
        start = perf_counter()
        running.run()
        if index >= 0:
            times[index] = perf_counter() - start
    running.free()
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return float(np.median(times))

"""Group gradients into buckets, by a strategy of `mpips.overlap` and measured times of backward passes.

A bucket holds parameters that follow each other in the order in which their gradients become ready. Its allreduce
starts when the last gradient of the bucket is ready. The strategies solve the partition problem of MG-WFBP
(`mpips.overlap.problem`), which numbers layers from the front of the model, while gradients become ready from its back.
So the order is reversed before and after a strategy is called.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from numbers import Real
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

import mpips.collectives as collectives
from mpips.collectives.benchmark.harness import measure_costs
from mpips.collectives.simulator.cost import LinkCost
from mpips.overlap.problem import Problem
from mpips.overlap.strategies import PARTITIONS

CHOICES = f"auto, {', '.join(PARTITIONS)}, or a number of MiB"
# sizes in bytes of the allreduces that `measure_allreduce` times
PROBE_BYTES = (1 << 12, 1 << 18, 1 << 21)
# If the duration of backward passes changes by this fraction, buckets are planned again.
DRIFT = 0.3


class Bucket(NamedTuple):
    """The parameters at positions [first, last) in the order in which their gradients become ready."""

    first: int
    last: int


def check_buckets(asked: object) -> None:
    """Raise TypeError or ValueError unless `asked` is the name of a strategy or a positive number of MiB."""
    if isinstance(asked, str):
        if asked != "auto" and asked not in PARTITIONS:
            raise ValueError(f"buckets={asked!r} is unknown: choose {CHOICES}")
    elif isinstance(asked, bool) or not isinstance(asked, Real):
        raise TypeError(f"buckets is of type {type(asked).__name__}: pass {CHOICES}")
    elif not float(asked) > 0:
        raise ValueError(f"buckets is {asked}: pass {CHOICES} above 0")


def cut_by_strategy(nbytes: Sequence[int], ready: Sequence[float], costs: LinkCost, strategy: str) -> list[Bucket]:
    """Cut gradients into buckets by a strategy.

    Args:
        nbytes: The bytes of each gradient, in the order of readiness.
        ready: The time at which each gradient is ready, in seconds since the start of backward.
        costs: The cost of an allreduce, in seconds per call and per byte.
        strategy: A key of `PARTITIONS`.
    """
    if not nbytes:
        return []
    compute = [max(0.0, after - before) for before, after in pairwise([0.0, *ready])]
    problem = Problem.of(compute[::-1], costs.alpha, [costs.beta * n for n in nbytes[::-1]])
    count = len(nbytes)
    return [Bucket(count - last, count - first + 1) for first, last in PARTITIONS[strategy](problem)[::-1]]


def cut_by_bytes(nbytes: Sequence[int], most: float) -> list[Bucket]:
    """Cut gradients into buckets of at most `most` bytes. A larger gradient gets a bucket of its own."""
    cuts: list[Bucket] = []
    first, size = 0, 0
    for index, n in enumerate(nbytes):
        if index > first and size + n > most:
            cuts.append(Bucket(first, index))
            first, size = index, 0
        size += n
    return [*cuts, Bucket(first, len(nbytes))] if nbytes else []


def cut_by_type(buckets: Sequence[Bucket], dtypes: Sequence[object]) -> list[Bucket]:
    """Split buckets, so that all parameters of a bucket have one dtype."""
    cuts = []
    for first, last in buckets:
        inner = [index for index in range(first + 1, last) if dtypes[index] != dtypes[index - 1]]
        cuts += [Bucket(*ends) for ends in pairwise([first, *inner, last])]
    return cuts


def measure_allreduce(comm: MPI.Intracomm, algorithm: str) -> LinkCost:
    """Measure the cost of an allreduce on this communicator, in seconds per call and per byte. Collective, blocking."""
    plans = {}
    for nbytes in PROBE_BYTES:
        array = collectives.empty(nbytes // 4, np.float32, comm)
        array.fill(0)
        plans[nbytes] = collectives.plan("allreduce", array, comm, algorithm=algorithm)
    costs = measure_costs(comm, plans)
    for plan in plans.values():
        plan.free()
    return costs


class BackwardProfile:
    """The times at which gradients become ready on this rank, in seconds since the start of the backward pass."""

    def __init__(self, count: int, comm: MPI.Intracomm) -> None:
        self._comm = comm
        # time at which each gradient was ready in the last pass
        self._times = np.zeros(count)
        # duration of each pass since `_average_span` was last called
        self._spans = list[float]()
        self._began = 0.0
        # duration of a pass, averaged over ranks, when `average` was last called
        self._usual_span = 0.0

    def begin(self) -> None:
        """Note the start of a backward pass."""
        self._began = time.perf_counter()

    def note_ready(self, index: int) -> None:
        """Note that gradient `index` is ready."""
        self._times[index] = time.perf_counter() - self._began

    def end(self) -> None:
        """Note the end of a backward pass."""
        self._spans.append(time.perf_counter() - self._began)

    def average(self) -> tuple[list[int], list[float]]:
        """Average the times of the last pass over ranks. Collective.

        Returns:
            The indices of the gradients in the order of readiness, and the time at which each of them is ready. From
            this call on, `note_ready(i)` refers to the i-th gradient of the returned order.
        """
        collectives.allreduce(self._times, self._comm, op="mean")
        order = sorted(range(len(self._times)), key=lambda index: (self._times[index], index))
        self._usual_span = self._average_span()
        ready = list(accumulate((float(self._times[index]) for index in order), max))
        self._times = self._times[order]
        return order, ready

    def has_drifted(self) -> bool:
        """True if backward now takes much more or much less time than when `average` was last called. Collective."""
        span = self._average_span()
        return bool(self._usual_span) and abs(span - self._usual_span) > DRIFT * self._usual_span

    def _average_span(self) -> float:
        """Return the median duration of the passes since the last call, averaged over ranks. Collective.

        The first of these passes is left out, because it is a warm-up if the buckets have just changed.
        """
        middle = np.array([float(np.median(self._spans[1:] or self._spans or [0.0]))])
        self._spans = []
        return float(collectives.allreduce(middle, self._comm, op="mean")[0])

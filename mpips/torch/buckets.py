"""Buckets: which gradients travel together, by a strategy of `mpips.overlap`, from the times of backward passes.

A bucket is a run of parameters, in the order in which their gradients become ready; its allreduce starts when the last
of them is there. Strategies solve the partition problem of MG-WFBP (`mpips.overlap.problem`), whose layers are counted
from the front of the model: the other way round.
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
from mpips.collectives.simulator.cost import LinkCost, fit
from mpips.overlap.problem import Problem
from mpips.overlap.strategies import PARTITIONS

CHOICES = f"auto, {', '.join(PARTITIONS)}, or a number of MiB"
PROBE_BYTES, PROBES = (1 << 12, 1 << 18, 1 << 21), 5
DRIFT = 0.3
"""Share by which backward's time may move before buckets are planned again."""


class Bucket(NamedTuple):
    """Parameters [first, last) in the order of readiness."""

    first: int
    last: int


def check_buckets(asked: object) -> None:
    """Raise TypeError or ValueError where this is neither a strategy nor a number of MiB above 0."""
    if isinstance(asked, str):
        if asked != "auto" and asked not in PARTITIONS:
            raise ValueError(f"buckets={asked!r} is unknown: choose {CHOICES}")
    elif isinstance(asked, bool) or not isinstance(asked, Real):
        raise TypeError(f"buckets is of type {type(asked).__name__}: pass {CHOICES}")
    elif not float(asked) > 0:
        raise ValueError(f"buckets is {asked}: pass {CHOICES} above 0")


def cut_by_strategy(nbytes: Sequence[int], ready: Sequence[float], costs: LinkCost, strategy: str) -> list[Bucket]:
    """Return buckets by a strategy: `nbytes` of each gradient, and the second at which it is ready, in this order."""
    if not nbytes:
        return []
    compute = [max(0.0, after - before) for before, after in pairwise([0.0, *ready])]
    problem = Problem.of(compute[::-1], costs.alpha, [costs.beta * n for n in nbytes[::-1]])
    count = len(nbytes)
    return [Bucket(count - last, count - first + 1) for first, last in PARTITIONS[strategy](problem)[::-1]]


def cut_by_bytes(nbytes: Sequence[int], most: float) -> list[Bucket]:
    """Return buckets of at most `most` bytes; a gradient that is longer is one by itself."""
    found: list[Bucket] = []
    first, size = 0, 0
    for index, n in enumerate(nbytes):
        if index > first and size + n > most:
            found.append(Bucket(first, index))
            first, size = index, 0
        size += n
    return [*found, Bucket(first, len(nbytes))] if nbytes else []


def cut_by_type(buckets: Sequence[Bucket], dtypes: Sequence[object]) -> list[Bucket]:
    """Return the buckets, cut again where the type of the parameters changes."""
    found = []
    for first, last in buckets:
        inner = [index for index in range(first + 1, last) if dtypes[index] != dtypes[index - 1]]
        found += [Bucket(*ends) for ends in pairwise([first, *inner, last])]
    return found


def measure_costs(comm: MPI.Intracomm, algorithm: str) -> LinkCost:
    """Measure what an allreduce costs on this communicator now. Collective, blocking."""
    seconds = np.zeros(len(PROBE_BYTES))
    for index, nbytes in enumerate(PROBE_BYTES):
        array = collectives.empty(nbytes // 4, np.float32, comm)
        array.fill(0)
        run = collectives.plan("allreduce", array, comm, algorithm=algorithm)
        runs = []
        for _ in range(PROBES):
            begin = time.perf_counter()
            run()
            runs.append(time.perf_counter() - begin)
        seconds[index] = np.median(runs)
        run.free()
    collectives.allreduce(seconds, comm, op="mean")
    return fit(list(zip(PROBE_BYTES, seconds.tolist())))


class BackwardProfile:
    """Times of one rank's backward passes over `count` gradients, in seconds from the first gradient."""

    def __init__(self, count: int, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._times, self._spans = np.zeros(count), list[float]()
        self._began = self._usual_span = 0.0

    def begin(self) -> None:
        """Note that the first gradient of a backward is there."""
        self._began = time.perf_counter()

    def note_ready(self, index: int) -> None:
        """Note that a gradient is there."""
        self._times[index] = time.perf_counter() - self._began

    def end(self) -> None:
        """Note that backward has ended."""
        self._spans.append(time.perf_counter() - self._began)

    def average(self) -> tuple[list[int], list[float]]:
        """Return gradients in the order of readiness, and when each is ready, by the mean over ranks. Collective."""
        collectives.allreduce(self._times, self._comm, op="mean")
        order = sorted(range(len(self._times)), key=lambda index: (self._times[index], index))
        self._usual_span = self._average_span()
        ready = list(accumulate((float(self._times[index]) for index in order), max))
        self._times = self._times[order]
        return order, ready

    def has_drifted(self) -> bool:
        """Return whether backward takes longer, or shorter, than at the last `average`. Collective."""
        span = self._average_span()
        return bool(self._usual_span) and abs(span - self._usual_span) > DRIFT * self._usual_span

    def _average_span(self) -> float:
        """Return backward's seconds: the median of the last passes but the first, its mean over ranks. Collective."""
        middle = np.array([float(np.median(self._spans[1:] or self._spans or [0.0]))])
        self._spans = []
        return float(collectives.allreduce(middle, self._comm, op="mean")[0])

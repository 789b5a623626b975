"""Times callables that all ranks call together, alternately, so that every ratio comes from one run.

A sample is the mean time of one call over a short batch, on the slowest rank. In every round all candidates have a
turn, a barrier before each, in an order drawn anew: what a call finds in the caches depends on the one before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

BATCH_SECONDS = 2e-3  # long beside the time between a barrier's first rank and its last, and beside a call of which the
# caches hold what the candidate before has left
WARM_CALLS = 10
LEAST_SAMPLES = 5
MOST_SAMPLES = 200


class Timing(NamedTuple):
    """Seconds of one call: fastest sample, median, 99th percentile; and the number of samples."""

    least: float
    median: float
    p99: float
    samples: int


def measure(comm: MPI.Comm, candidates: Sequence[Callable[[], object]], budget_s: float) -> list[Timing]:
    """Timings of the candidates, equal on every rank. Collective and blocking, for about `budget_s` seconds in all."""
    if not candidates:
        return []
    batch = [_batch(comm, run) for run in candidates]
    cost = sum(seconds * calls for seconds, calls in batch)
    rounds = int(min(MOST_SAMPLES, max(LEAST_SAMPLES, budget_s / max(cost, 1e-9))))
    local = np.zeros((len(candidates), rounds))
    orders = np.random.default_rng(0)  # the same on all ranks
    for turn in range(rounds):
        for which in orders.permutation(len(candidates)):
            local[which, turn] = _sample(comm, candidates[which], batch[which][1])
    slowest = np.empty_like(local)
    comm.Allreduce(local, slowest, op=MPI.MAX)
    return [Timing(row.min(), float(np.median(row)), float(np.percentile(row, 99)), rounds) for row in slowest]


def _batch(comm: MPI.Comm, run: Callable[[], object]) -> tuple[float, int]:
    """(seconds of one call, calls a batch), after warming up; agreed over all ranks."""
    for _ in range(WARM_CALLS):
        run()
    calls = 1
    while True:
        seconds = np.array([_sample(comm, run, calls)])
        comm.Allreduce(MPI.IN_PLACE, seconds, op=MPI.MAX)
        if seconds[0] * calls >= BATCH_SECONDS or calls >= 4096:
            return float(seconds[0]), calls
        calls *= 2


def _sample(comm: MPI.Comm, run: Callable[[], object], calls: int) -> float:
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls

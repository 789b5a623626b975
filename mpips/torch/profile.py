"""What buckets are planned from: when gradients are ready in a backward, and what an allreduce costs here."""

from __future__ import annotations

import time
from itertools import accumulate

import numpy as np
import torch
from mpi4py import MPI

import collectives
from mpips.overlap.measure import fit_costs as fitted
from mpips.torch.buckets import Costs
from mpips.torch.gradients import empty

DRIFT = 0.3
"""How far backward's time may move before the buckets are planned again."""
PROBE_BYTES, PROBES = (1 << 12, 1 << 18, 1 << 21), 5


class Profile:
    """Times of one rank's backward passes over `count` gradients, in seconds from the first gradient."""

    def __init__(self, count: int, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._times, self._spans = np.zeros(count), list[float]()
        self._began = self._usual = 0.0

    def begin(self) -> None:
        """The first gradient of a backward is there."""
        self._began = time.perf_counter()

    def ready(self, index: int) -> None:
        """So is this one."""
        self._times[index] = time.perf_counter() - self._began

    def end(self) -> None:
        """Backward has ended."""
        self._spans.append(time.perf_counter() - self._began)

    def order(self) -> tuple[list[int], list[float]]:
        """Gradients in the order in which they become ready, and when, by the mean over all ranks. Collective."""
        collectives.allreduce(self._times, self._comm, op="mean")
        order = sorted(range(len(self._times)), key=lambda index: (self._times[index], index))
        self._usual = self._span()
        ready = list(accumulate((float(self._times[index]) for index in order), max))
        self._times = self._times[order]
        return order, ready

    def moved(self) -> bool:
        """Whether backward takes longer, or shorter, than when the order was taken. Collective."""
        span = self._span()
        return bool(self._usual) and abs(span - self._usual) > DRIFT * self._usual

    def _span(self) -> float:
        """Backward's seconds, the median of the last passes but the first, by the mean over all ranks. Collective."""
        middle = np.array([float(np.median(self._spans[1:] or self._spans or [0.0]))])
        self._spans = []
        return float(collectives.allreduce(middle, self._comm, op="mean")[0])


def costs(comm: MPI.Intracomm, algorithm: str) -> Costs:
    """What an allreduce costs on this communicator, measured now. Collective."""
    seconds = np.zeros(len(PROBE_BYTES))
    for index, nbytes in enumerate(PROBE_BYTES):
        array = empty(nbytes // 4, torch.float32, comm).zero_().numpy()
        run = collectives.plan("allreduce", array, comm, algorithm=algorithm)
        runs = []
        for _ in range(PROBES):
            begin = time.perf_counter()
            run()
            runs.append(time.perf_counter() - begin)
        seconds[index] = np.median(runs)
        run.free()
    collectives.allreduce(seconds, comm, op="mean")
    return Costs(*fitted(np.ones(len(seconds)), PROBE_BYTES, seconds))

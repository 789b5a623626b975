"""Which of some ways is the fastest, found out by the first calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from mpi4py import MPI

TRIALS = 8


class Choice:
    """Which way serves a sort of call best: the first runs try all in turn, then the fastest is kept. One for all plans
    of that sort, so that all ranks are always at the same trial, whatever plans each has kept. A way's time counts as
    many times as its handicap says. `decided`: there is no trial, the first stays."""

    def __init__(self, comm: MPI.Comm, handicaps: Sequence[float] = (1.0, 1.0), decided: bool = False):
        self._comm, self._handicaps, self.decided = comm, handicaps, decided
        """Whether `way` stays."""
        self._times: list[list[float]] = [[] for _ in handicaps]
        self.way = 0
        """The one that the next run takes."""

    def learn(self, seconds: float) -> Iterator[None]:
        """How long the last run took, by the byte where lengths differ; at the last trial the ranks agree, in steps
        between which there is something to wait for."""
        if self.decided:
            return
        self._times[self.way].append(seconds)
        self.way = (self.way + 1) % len(self._times)
        if len(self._times[-1]) == TRIALS:
            least = np.median(self._times, axis=1) * self._handicaps
            request = self._comm.Iallreduce(MPI.IN_PLACE, least, MPI.MAX)
            while not request.Test():
                yield
            self.way, self.decided = int(least.argmin()), True

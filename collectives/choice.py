"""Which of two ways is the faster, found out by the first calls."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

TRIALS = 4


class Choice:
    """Which of two ways serves a sort of call better: the first runs try both in turn, then the faster is kept. One for
    all plans of that sort, so that all ranks are always at the same trial, whatever plans each has kept. The second
    stays unless it takes more than `favour` times as long."""

    def __init__(self, comm: MPI.Comm, decided: bool = False, favour: float = 1.0):
        self._comm, self._favour = comm, favour
        self._times: tuple[list[float], list[float]] = ([], [])
        self._decided = decided
        self.second = False
        """Whether the next run takes the second way."""

    def learn(self, seconds: float) -> Iterator[None]:
        """How long the last run took; at the last trial the ranks agree, in steps between which there is something to
        wait for."""
        if self._decided:
            return
        self._times[self.second].append(seconds)
        self.second = not self.second
        if len(self._times[False]) == len(self._times[True]) == TRIALS:
            least = np.array([min(times) for times in self._times])
            request = self._comm.Iallreduce(MPI.IN_PLACE, least, MPI.MAX)
            while not request.Test():
                yield
            self.second, self._decided = bool(least[1] < self._favour * least[0]), True

"""Model parallelism: what the ranks that share one network exchange in a step (the paper, section 6, Algorithm 2)."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from mpi4py import MPI

from .clock import Clock
from .communication import Gather, Sum


class ModelExchange:
    """The exchange of one model communicator. Arrays come again every step, so what moves them is made once each.

    Arrays are told apart by address and shape; the network keeps them alive.
    """

    def __init__(self, comm: MPI.Comm, clock: Clock) -> None:
        self.parts, self.part = comm.size, comm.rank
        self._comm, self._clock = comm, clock
        self._sums: dict[tuple[int, tuple[int, ...]], Sum] = {}
        self._gathers: dict[tuple[int, tuple[int, ...]], Gather] = {}

    def gather(self, full: np.ndarray) -> None:
        """Fill (neurons, samples) with every rank's slice of rows; blocking."""
        start = perf_counter()
        key = _key(full)
        if key not in self._gathers:
            self._gathers[key] = Gather(full, self._comm)
        self._gathers[key].run()
        self._clock.add("forward", start)

    def sum(self, array: np.ndarray) -> None:
        """Sum a forward array over the ranks; blocking."""
        start = perf_counter()
        self._sum(array).run()
        self._clock.add("forward", start)

    def start_sum(self, array: np.ndarray) -> _Backward:
        """Begin to sum a backward array over the ranks."""
        start = perf_counter()
        pending = _Backward(self._sum(array).start(), self._clock)
        self._clock.add("backward", start)
        return pending

    def _sum(self, array: np.ndarray) -> Sum:
        key = _key(array)
        if key not in self._sums:
            self._sums[key] = Sum(array, self._comm)
        return self._sums[key]


class _Backward:
    def __init__(self, running: Sum, clock: Clock) -> None:
        self._running, self._clock = running, clock

    def wait(self) -> None:
        start = perf_counter()
        self._running.wait()
        self._clock.add("backward", start)


def _key(array: np.ndarray) -> tuple[int, tuple[int, ...]]:
    return array.ctypes.data, array.shape

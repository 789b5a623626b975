"""Tensor parallelism: what the ranks that share one network exchange in a step.

Source: the paper, section 6, Algorithm 2, which calls it model parallelism. `network.splits` says how layers are cut.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
from mpi4py import MPI

from mpips.mlp.clock import Clock
from mpips.mlp.communication import Gather, Sum, address


class TensorExchange:
    """The exchange of one model communicator. Arrays come again every step, so what moves them is made once each.

    Arrays are told apart by address and shape; the network keeps them alive. With `half` they travel as float16.
    """

    def __init__(self, comm: MPI.Comm, clock: Clock, half: bool = False) -> None:
        self.parts, self.part = comm.size, comm.rank
        self._comm, self._clock, self._half = comm, clock, half
        self._running: Sum | None = None
        self._under_way = False
        self._sums: dict[tuple[int, tuple[int, ...]], Sum] = {}
        self._gathers: dict[tuple[int, tuple[int, ...]], Gather] = {}

    def gather(self, full: np.ndarray) -> None:
        """Fill (neurons, samples) with every rank's slice of rows; blocking."""
        start = perf_counter()
        key = _key(full)
        if key not in self._gathers:
            self._gathers[key] = Gather(full, self._comm, self._half)
        self._clock.sent()
        self._gathers[key].run()
        self._clock.arrived()
        self._clock.add("forward", start)

    def sum(self, array: np.ndarray) -> None:
        """Sum a forward array over the ranks; blocking."""
        start = perf_counter()
        sum_ = self._sum(array)
        self._clock.sent()
        sum_.run()
        self._clock.arrived()
        self._clock.add("forward", start)

    def start_sum(self, array: np.ndarray) -> TensorExchange:
        """Begin to sum a backward array over the ranks; one at a time."""
        start = perf_counter()
        self._running = self._sum(array).start()
        self._clock.sent()
        self._under_way = True
        self._clock.add("backward", start)
        return self

    def poll(self) -> None:
        """Move on the sum that has been started."""
        if self._running is not None and self._running.test():
            self._arrived()

    def wait(self) -> None:
        """Finish the sum that has been started."""
        start = perf_counter()
        assert self._running is not None
        self._running.wait()
        self._running = None
        self._arrived()
        self._clock.add("backward", start)

    def _arrived(self) -> None:
        if self._under_way:
            self._under_way = False
            self._clock.arrived()

    def _sum(self, array: np.ndarray) -> Sum:
        key = _key(array)
        if key not in self._sums:
            self._sums[key] = Sum(array, self._comm, self._half)
        return self._sums[key]


def _key(array: np.ndarray) -> tuple[int, tuple[int, ...]]:
    return address(array), array.shape

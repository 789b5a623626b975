"""Batch parallelism: one sum of all gradients per minibatch, after the backward pass (the paper, section 5,
Algorithm 1)."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from mpi4py import MPI

from .clock import Clock
from .communication import Sum


class BatchReduction:
    """Sums the flat gradients of the ranks that hold the same slice of the network."""

    def __init__(self, gradients: np.ndarray, comm: MPI.Comm, clock: Clock) -> None:
        self._sum = Sum(gradients, comm)
        self._clock = clock

    def run(self) -> None:
        """Replace the gradients by their sum over the batch ranks; blocking."""
        start = perf_counter()
        self._sum.run()
        self._clock.add("backward", start)

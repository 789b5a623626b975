"""One rank's step of hybrid training (the paper, section 7, Algorithm 3); with nm = 1 it is Algorithm 1, with nb =
1 Algorithm 2."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import numpy as np
from mpi4py import MPI

import collectives
from mpips.optimizers import Optimizer

from .batch import BatchReduction
from .clock import Clock
from .grid import Grid
from .mlp import MLP
from .model import ModelExchange
from .network import Network


class Hybrid:
    """The slice of a model that this rank of the grid trains, and the state of its optimizer.

    Starts from the weights of `model`: its seed's, or, where its arrays were already used, what they hold (they
    must then be the same on every rank). Making one is collective only in that all ranks of the grid must.
    """

    def __init__(self, model: MLP, grid: Grid, optimizer: Optimizer, mode: str = "pairs") -> None:
        self.grid, self.optimizer, self.clock = grid, optimizer, Clock()
        exchange = ModelExchange(grid.model_comm, self.clock) if grid.model > 1 else None
        self.network = Network(model.specification, exchange, mode, partial(collectives.empty, comm=grid.comm))
        if model.used:
            self.network.take(model.parameters)
        self.state = optimizer.init(self.network.flat_parameters)
        self.updates = 0
        self._reduction = BatchReduction(self.network.flat_gradients, grid.batch_comm, self.clock)

    def step(self, x: np.ndarray, y: np.ndarray, samples: int) -> float:
        """One minibatch of `samples` samples, of which this rank's batch index has (x, y), possibly none.

        Returns the sum of the losses of its own samples; the same on all ranks of a model communicator.
        """
        start, before = perf_counter(), self.clock.communication()
        loss = self.network.step(x, y, samples)
        self._reduction.run()
        self.updates += 1
        network = self.network
        self.optimizer.update(network.flat_parameters, network.flat_gradients, self.state, self.updates)
        self.clock.add("compute", start + self.clock.communication() - before)
        return loss

    def evaluate(self, x: np.ndarray, y: np.ndarray, block: int) -> tuple[float, float]:
        """Sum of the losses and number of right classes over the samples of all batch indices. Collective, in parallel.

        `block` is the most samples of one forward pass; every rank of a model communicator has the same (x, y).
        """
        start, before = perf_counter(), dict(self.clock.seconds)
        totals = np.zeros(2)
        for first in range(0, len(x), block):
            totals += self.network.evaluate(x[first : first + block], y[first : first + block])
        self.grid.batch_comm.Allreduce(MPI.IN_PLACE, totals)
        self.clock.seconds.update(before)
        self.clock.add("evaluate", start)
        return float(totals[0]), float(totals[1])

"""One rank's worker: its slice of the network, what updates it, and its step of training.

Source: the paper, section 7, Algorithm 3; with one model rank it is Algorithm 1, with one batch rank Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Protocol

import numpy as np
from mpi4py import MPI

import collectives
from mpips.optimizers.base import Optimizer

from mpips.mlp.clock import Clock
from mpips.mlp.data.minibatches import Rule
from mpips.mlp.data_parallel import LocalUpdate, LossScale, Update
from mpips.mlp.mesh import Mesh, spans_nodes
from mpips.mlp.network.mlp import MLP
from mpips.mlp.network.network import Network
from mpips.mlp.tensor_parallel import TensorExchange


class UpdateServers(Protocol):
    """Servers that keep the weights of a network, as training knows them; `mpips.mlp.Servers` are such."""

    between: bool
    """Whether the ranks of the job are on several nodes."""

    def arguments(self) -> dict[str, object]:
        """What must be the same on every rank, by name."""

    def connect(
        self, network: Network, mesh: Mesh, optimizer: Optimizer, clock: Clock, overlap: bool | None
    ) -> Update:
        """What updates this rank's slice. `overlap`: whether gradients leave during the backward pass; None: where
        ranks are on several nodes. Collective over the job; TrainingError where they cannot serve this network."""

    def give_up(self, sentence: str) -> None:
        """Tell the servers that there will be no training, and why; all workers call, then raise."""


class Worker:
    """The slice of a model that this rank of the mesh trains, and what updates it.

    Starts from the weights of `model`: its seed's, or, where its arrays were already used, what they hold (they
    must then be the same on every rank). Collective over the mesh. `overlap`: whether gradients travel beside the
    computation, and `half`: whether a "mixed" network sends float16; None: where the ranks are on several nodes.
    `servers` keep the weights and run the optimizer, or average elastically; see `mpips.mlp.Servers`. `start` may
    write the first weights.
    """

    def __init__(
        self,
        model: MLP,
        mesh: Mesh,
        optimizer: Optimizer,
        mode: str = "pairs",
        overlap: bool | None = None,
        half: bool | None = None,
        servers: UpdateServers | None = None,
        start: Callable[[Network], None] | None = None,
    ) -> None:
        self.mesh, self.optimizer, self.clock = mesh, optimizer, Clock()
        self.overlap, self.half, self.servers = overlap, half, servers
        spans, mixed = spans_nodes(mesh), model.specification.dtype == "mixed"
        narrow = [mixed and (each if half is None else half) for each in spans]
        self._exchange = TensorExchange(mesh.model_comm, self.clock, narrow[1]) if mesh.model > 1 else None
        empty = partial(collectives.empty, comm=mesh.comm)
        self.network = Network(model.specification, self._exchange, mode, empty, model.xp)
        if model.used:
            self.network.take(model.parameters)
        if start is not None:
            start(self.network)
        self.updates = 0
        self.rule: Rule | None = None
        self.labels: tuple[str, ...] = ()
        """By what the rows were dealt that it was trained on; None where that is not known."""
        self.update: Update
        if servers is None:
            beside = spans.batch if overlap is None else overlap
            scale = LossScale(mesh.model_comm) if mixed else None
            self.update = LocalUpdate(self.network, mesh.batch_comm, optimizer, self.clock, beside, narrow[0], scale)
        else:
            self.update = servers.connect(self.network, mesh, optimizer, self.clock, overlap)
        self._polls_model = self._exchange is not None and (spans.model if overlap is None else overlap)
        if any(spans) or overlap or (servers is not None and servers.between):
            self.network.progress = self

    def gradient(self, layer: int) -> None:
        """The network's word that a layer's gradients are there."""
        self.update.gradient(layer)

    def poll(self) -> None:
        """Look after what is on its way."""
        if self._polls_model and self._exchange is not None:
            self._exchange.poll()
        self.update.poll()

    def step(self, x: np.ndarray, y: np.ndarray, samples: int) -> float:
        """One minibatch of `samples` samples, of which this rank's batch index has (x, y), possibly none.

        Returns the sum of the losses of its own samples; the same on all ranks of a model communicator.
        """
        start, before = perf_counter(), self.clock.communication()
        loss = self.network.step(x, y, self.update.share(samples))
        self.updates += 1
        self.update.run(self.updates)
        self.clock.add("compute", start + self.clock.communication() - before)
        return loss

    def evaluate(self, x: np.ndarray, y: np.ndarray, block: int) -> tuple[float, float]:
        """Sum of the losses and number of right classes over the samples of all batch indices. Collective, in parallel.

        `block` is the most samples of one forward pass; every rank of a model communicator has the same (x, y).
        """
        start, before, under_way = perf_counter(), dict(self.clock.seconds), self.clock.under_way
        totals = np.zeros(2)
        for first in range(0, len(x), block):
            totals += self.network.evaluate(x[first : first + block], y[first : first + block])
        self.mesh.batch_comm.Allreduce(MPI.IN_PLACE, totals)
        self.clock.seconds.update(before)
        self.clock.under_way = under_way
        self.clock.add("evaluate", start)
        return float(totals[0]), float(totals[1])

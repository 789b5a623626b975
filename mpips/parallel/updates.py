"""What becomes of the gradients of a step: summed over the batch ranks, they update the weights on every rank."""

from __future__ import annotations

from typing import Protocol

from mpi4py import MPI

from mpips.optimizers import Optimizer, State

from .batch import BatchReduction, buckets
from .clock import Clock
from .loss_scale import LossScale
from .network import Network


class Update(Protocol):
    """One way from gradients to new weights."""

    loss_scale: LossScale | None
    """That of mixed precision."""

    def gradient(self, layer: int) -> None:
        """The gradients of a layer are there."""

    def poll(self) -> None:
        """Look after what is on its way."""

    def share(self, samples: int) -> float:
        """By what this rank's sum of gradients is divided in a minibatch of so many samples; 0: it takes no part."""

    def run(self, step: int) -> None:
        """Finish step number `step`, from 1: the weights become the new ones. Collective, blocking."""

    def fetch(self) -> State:
        """The optimizer's state, laid out as the flat parameters; valid on the ranks of batch index 0. Collective."""

    def restore(self, state: State, step: int) -> None:
        """Go on from such a state, the same on all batch indices, after `step` updates. Collective."""


class Local:
    """The optimizer runs on every rank, bucket by bucket as the sums arrive (Algorithms 1 and 3)."""

    def __init__(
        self, network: Network, comm: MPI.Comm, optimizer: Optimizer, clock: Clock, overlap: bool, half: bool,
        scale: LossScale | None,
    ) -> None:  # fmt: skip
        self._network, self._optimizer, self.loss_scale = network, optimizer, scale
        self.state = optimizer.init(network.flat_parameters)
        cut = buckets(network.layer_elements, 2 if half else network.dtype.itemsize)
        self._reduction = BatchReduction(network.flat_gradients, cut, comm, clock, overlap, half)
        self.gradient, self.poll = self._reduction.gradient, self._reduction.poll

    def share(self, samples: int) -> float:
        return samples if self.loss_scale is None else samples / self.loss_scale.scale

    def run(self, step: int) -> None:
        parameters, gradients = self._network.flat_parameters, self._network.flat_gradients
        if self.loss_scale is None:
            for _, start, stop in self._reduction.finish():
                part = slice(start, stop)
                state = tuple(array[part] for array in self.state)
                self._optimizer.update(parameters[part], gradients[part], state, step)
            return
        for _ in self._reduction.finish():
            pass
        if self.loss_scale.judge(gradients):
            self._optimizer.update(parameters, gradients, self.state, step)

    def fetch(self) -> State:
        return self.state

    def restore(self, state: State, step: int) -> None:
        for mine, array in zip(self.state, state):
            mine[...] = array


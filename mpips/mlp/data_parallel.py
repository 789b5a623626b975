"""Data parallelism: buckets of gradients, their sums over the ranks that hold the same slice, and the update with them.

Source: the paper, section 5, Algorithm 1. The flat gradients are summed in buckets of whole layers, from the last layer
to the first. Beside computation, a bucket is on its way from the moment its lowest layer's gradient is there; otherwise
buckets go one by one after the backward pass. Both give the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from mpips.optimizers.base import Optimizer, State

from mpips.mlp.clock import Clock
from mpips.mlp.communication import Sum
from mpips.mlp.network.network import Network

BUCKET_BYTES = 256 << 10
START_SCALE, LEAST_SCALE, MOST_SCALE = 2.0**10, 1.0, 2.0**24
GROWTH = 2000  # good updates, after which the loss scale doubles


class Bucket(NamedTuple):
    """Elements [start, stop) of the flat gradients, complete when the gradient of `layer` is there."""

    layer: int
    start: int
    stop: int


def buckets(elements: Sequence[int], itemsize: int) -> list[Bucket]:
    """Layers in the order of the backward pass, put together until a bucket has `BUCKET_BYTES`; `elements` by layer."""
    found = []
    stop = start = sum(elements)
    for layer in range(len(elements) - 1, -1, -1):
        start -= elements[layer]
        if (stop - start) * itemsize >= BUCKET_BYTES or layer == 0:
            found.append(Bucket(layer, start, stop))
            stop = start
    return found


class GradientSums:
    """Sums the flat gradients of the ranks that hold the same slice of the network."""

    def __init__(
        self, gradients: np.ndarray, cut: Sequence[Bucket], comm: MPI.Comm, clock: Clock, overlap: bool, half: bool
    ) -> None:
        self.buckets = cut
        self._sums = [Sum(gradients[bucket.start : bucket.stop], comm, half) for bucket in cut]
        self._by_layer = {bucket.layer: sum_ for bucket, sum_ in zip(cut, self._sums)}
        self._clock, self._overlap = clock, overlap
        self._started: list[Sum] = []

    def gradient(self, layer: int) -> None:
        """The gradients of a layer and of all above it are there."""
        if self._overlap and layer in self._by_layer:
            start = perf_counter()
            sum_ = self._by_layer[layer].start()
            if sum_.moves:
                self._clock.sent()
                self._started.append(sum_)
            self._clock.add("backward", start)

    def poll(self) -> None:
        """Move on what has been started."""
        while self._started and self._started[0].test():
            self._arrived()

    def finish(self) -> Iterator[Bucket]:
        """Every bucket, as its gradients become their sum over the batch ranks; blocking. One that is not beside
        computation is begun here."""
        for bucket, sum_ in zip(self.buckets, self._sums):
            start = perf_counter()
            if self._overlap:
                sum_.wait()
                if self._started and self._started[0] is sum_:
                    self._arrived()
            elif sum_.moves:
                self._clock.sent()
                sum_.run()
                self._clock.arrived()
            self._clock.add("backward", start)
            yield bucket

    def _arrived(self) -> None:
        """The sum that was started first, of those under way, is known to be there."""
        del self._started[0]
        self._clock.arrived()


class LossScale:
    """The loss scale of mixed precision, the same on all ranks of a mesh: gradients travel as float16 multiplied by it,
    so that small ones do not vanish.

    Source: Micikevicius et al., "Mixed precision training" (2018), section 3.2. The scale is chosen as training goes:
    an update whose gradients overflowed float16 is left out and the scale halved; after `GROWTH` good updates it
    doubles. Ranks of one slice see the same sums; the ranks of a model ask each other.
    """

    def __init__(self, model_comm: MPI.Comm) -> None:
        self.scale, self.good = START_SCALE, 0
        self._bad = np.zeros(1)
        self._ask = Sum(self._bad, model_comm)

    def judge(self, gradients: np.ndarray) -> bool:
        """Take the scale out of summed gradients, in place, and adapt it; False where this update must be left out.
        Collective over the ranks of a model."""
        np.multiply(gradients, gradients.dtype.type(1 / self.scale), out=gradients)
        self._bad[0] = not np.isfinite(np.dot(gradients, gradients))
        self._ask.run()
        if self._bad[0]:
            self.scale, self.good = max(self.scale / 2, LEAST_SCALE), 0
            return False
        self.good += 1
        if self.good >= GROWTH:
            self.scale, self.good = min(self.scale * 2, MOST_SCALE), 0
        return True


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


class LocalUpdate:
    """The optimizer runs on every rank, bucket by bucket as the sums arrive (Algorithms 1 and 3)."""

    def __init__(
        self, network: Network, comm: MPI.Comm, optimizer: Optimizer, clock: Clock, overlap: bool, half: bool,
        scale: LossScale | None,
    ) -> None:  # fmt: skip
        self._network, self._optimizer, self.loss_scale = network, optimizer, scale
        self.state = optimizer.init(network.flat_parameters)
        cut = buckets(network.layer_elements, 2 if half else network.dtype.itemsize)
        self._sums = GradientSums(network.flat_gradients, cut, comm, clock, overlap, half)
        self.gradient, self.poll = self._sums.gradient, self._sums.poll

    def share(self, samples: int) -> float:
        return samples if self.loss_scale is None else samples / self.loss_scale.scale

    def run(self, step: int) -> None:
        parameters, gradients = self._network.flat_parameters, self._network.flat_gradients
        if self.loss_scale is None:
            for _, start, stop in self._sums.finish():
                part = slice(start, stop)
                state = tuple(array[part] for array in self.state)
                self._optimizer.update(parameters[part], gradients[part], state, step)
            return
        for _ in self._sums.finish():
            pass
        if self.loss_scale.judge(gradients):
            self._optimizer.update(parameters, gradients, self.state, step)

    def fetch(self) -> State:
        return self.state

    def restore(self, state: State, step: int) -> None:
        for mine, array in zip(self.state, state):
            mine[...] = array


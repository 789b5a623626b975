"""Batch parallelism: the sum of all gradients over the ranks that hold the same slice (the paper, section 5,
Algorithm 1).

The flat gradients are summed in buckets of whole layers, from the last layer to the first. Beside computation, a bucket
is on its way from the moment its lowest layer's gradient is there; otherwise buckets go one by one after the backward
pass. Both give the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from .clock import Clock
from .communication import Sum

BUCKET_BYTES = 256 << 10


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


class BatchReduction:
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

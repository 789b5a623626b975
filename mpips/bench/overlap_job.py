"""The job of `mpips bench overlap`: a store, flat arrays that it exchanges, and layers that compute by sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpips.bench.overlap_settings import FORWARD
from mpips.bench.rounds import mark, marked
from mpips.overlap import measure
from mpips.overlap.messages import StoreMessages
from mpips.overlap.profile import Linear, Profile, bandwidth, create_profile
from mpips.store import create as processes

RATE = 1e-3
"""The optimizer's learning rate."""


class Job:
    """A store, flat arrays that are exchanged, and layers that sleep."""

    def __init__(self, servers: int, elements: list[int], asleep: bool = False) -> None:
        # Every key on all servers, so that none is busiest.
        self.kv = processes.create("dist_sync" if servers else "mpi_sync", servers=servers, big_array=1)
        assert self.kv.layout.workers is not None
        self.kv.set_optimizer("sgd", learning_rate=RATE)
        self.comm = self.kv.layout.workers
        self.asleep = asleep
        self.hold(elements)

    def hold(self, elements: list[int]) -> None:
        """Layers of so many parameters from now on."""
        self.elements = elements
        self.gradients = np.random.default_rng(self.kv.rank).normal(size=sum(elements)).astype(np.float32)
        self.parameters = np.zeros(sum(elements), np.float32)
        self.forward = self.backward = np.zeros(len(elements))
        self._before: dict[str, np.ndarray] = {}

    def wire(self, name: str) -> StoreMessages:
        return StoreMessages(self.kv, self.gradients, self.parameters, self.elements, name)

    def slowest(self, seconds: float) -> float:
        """The largest over all workers; they start together after it."""
        box = np.array([seconds])
        self.comm.Allreduce(box.copy(), box, op=MPI.MAX)
        return float(box[0])

    def agreed(self, values: Any) -> list[float]:
        """Rank 0's values."""
        box = np.array(values, np.float64)
        self.comm.Bcast(box)
        return box.tolist()

    def sleep_for(self, seconds: float, shares: np.ndarray) -> None:
        """Layers take so many seconds from now on, all together."""
        self.forward, self.backward = seconds * FORWARD * shares, seconds * (1 - FORWARD) * shares

    def compute_forward(self, layer: int) -> None:
        time.sleep(self.forward[layer - 1])

    def compute_backward(self, layer: int) -> None:
        time.sleep(self.backward[layer - 1])

    def costs(self, repeats: int) -> tuple[float, ...]:
        """Startup and seconds a byte of a push, then of a pull; rank 0's on all workers."""
        modes = (True,) if self.asleep else (True, False)
        push, pull = measure.message_costs(self.wire("measured"), self.slowest, repeats, modes)
        return tuple(self.agreed([*push, *pull]))

    def profile(self, costs: tuple[float, ...]) -> Profile:
        """What messages cost, and how long layers sleep on rank 0; the same on all workers."""
        a, b, startup, per_byte = costs
        names = [f"layer{number}" for number in range(1, len(self.elements) + 1)]
        forward, backward = self._clocked(self.compute_forward), self._clocked(self.compute_backward)
        network = Linear(a, b, self.kv.num_workers, measure.collective_of(self.kv))
        return create_profile(names, self.elements, forward, backward, network, startup, bandwidth(per_byte))

    def _clocked(self, compute: Callable[[int], None]) -> list[float]:
        """Seconds of every layer, as they are beside each other on all ranks: medians of 3."""
        times = np.empty((3, len(self.elements)))
        for row in times:
            self.slowest(0.0)
            for index in range(len(row)):
                begin = time.perf_counter()
                compute(index + 1)
                row[index] = time.perf_counter() - begin
        return self.agreed(np.median(times, axis=0))

    def change(self, number: int) -> None:
        """Some elements of the gradients, all over them, become this rank's of iteration `number`."""
        mark([self.gradients], self.kv.rank + number)

    def see(self, keys: str, number: int) -> None:
        """RuntimeError unless the parameters that iteration `number` has left are those before it and its own update.

        `keys`: whose they are. Their first iteration is taken as it is.
        """
        found = marked(self.parameters).copy()
        if keys in self._before:
            step = self._before[keys] - found
            wanted = RATE * sum(rank + number for rank in range(self.kv.num_workers))
            if not np.allclose(step, wanted, rtol=1e-2, atol=1e-6):
                wrong = step[np.argmax(np.abs(step - wanted))]
                raise RuntimeError(f"{keys}, iteration {number}: a parameter moved by {wrong:g}, not by {wanted:g}")
        self._before[keys] = found

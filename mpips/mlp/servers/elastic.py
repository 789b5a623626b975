"""Elastic averaging: a client trains by itself; every so many steps its weights and the servers' centre attract.

Source: MXNET-MPI, section 5 and equations 2 and 3 (`mpips.optimizers.Elastic1`, `Elastic2`).
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from mpips.optimizers.base import Optimizer
from mpips.optimizers.elastic import Elastic1, Elastic2

from mpips.mlp.clock import Clock
from mpips.mlp.data_parallel import LocalUpdate, LossScale
from mpips.mlp.intervals import interval
from mpips.mlp.mesh import Mesh
from mpips.mlp.network.network import Network
from mpips.mlp.servers.leaders import SliceGroup, WeightStore
from mpips.mlp.servers.placement import ServerOptions


class ElasticAveraging:
    """An `Update` inside the client, on the mean over the client's share of each minibatch; the centre now and then.

    `store` is None on a worker that does not speak to servers. Collective over the workers.
    """

    def __init__(
        self, store: WeightStore | None, group: SliceGroup, network: Network, mesh: Mesh, optimizer: Optimizer,
        clock: Clock, overlap: bool, asked: ServerOptions,
    ) -> None:  # fmt: skip
        self._clock, self._every, self._weights = clock, asked.every, network.flat_parameters
        self._ranks, self._members = mesh.batch, mesh.batch // asked.clients
        client, place = divmod(mesh.batch_index, self._members)
        self._first, self._samples = mesh.batch_index - place, 0
        comm = mesh.batch_comm.Split(client, place)
        self._local = LocalUpdate(network, comm, optimizer, clock, overlap, half=False, scale=None)
        self.loss_scale: LossScale | None = None
        self.fetch, self.restore, self.poll = self._local.fetch, self._local.restore, self._local.poll
        self._attract = Elastic2(alpha=asked.alpha)
        self._centre = np.empty_like(network.flat_parameters)
        self._group = group
        self._whole = group.whole(self._centre)
        self._centre[...] = self._weights
        group.gather(self._centre, self._whole)
        self._centres = group.keep(store, self._whole, Elastic1(alpha=asked.alpha))
        self._kv = store if self._centres else None

    def gradient(self, layer: int) -> None:
        """The gradients of a layer are summed over the client."""
        if self._samples:
            self._local.gradient(layer)

    def share(self, samples: int) -> float:
        """The samples of this client."""
        last = self._first + self._members - 1
        start, stop = interval(samples, self._ranks, self._first)[0], interval(samples, self._ranks, last)[1]
        self._samples = stop - start
        return max(1, self._samples)

    def run(self, step: int) -> None:
        if (step - 1) % self._every == 0:
            start = perf_counter()
            self._clock.sent()
            np.divide(self._weights, self._members, out=self._centre)  # a push sums over the client, who are equal
            self._group.gather(self._centre, self._whole)
            if self._kv is not None:
                names, arrays = list(self._centres), list(self._centres.values())
                self._kv.push(names, arrays)
                self._kv.pull(names, arrays)
            self._group.scatter(self._whole, self._centre)
            self._attract.update(self._weights, self._centre, (), 1)
            self._clock.arrived()
            self._clock.add("backward", start)
        if self._samples:
            self._local.run(step)

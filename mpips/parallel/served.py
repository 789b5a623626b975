"""Servers for clients that are model parallel inside, as the conclusion of the MXNET-MPI paper suggests.

A client is a grid of batch x model ranks. The workers of all clients that hold the same slice of the network share a
store, with servers of its own, so that each model rank pushes its own slice's gradients under keys of its own, and no
server ever holds what nobody pushes to it. Ranks: client by client, each as `Grid` numbers it, then the servers, dealt
to the slices in order.

sync     the servers sum over all clients and run the optimizer (mpi_sync); the same numbers as without servers
elastic  every client trains by itself; now and then its weights and the servers' centre attract each other (mpi_async,
         equations 2 and 3 of MXNET-MPI)
"""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpips.optimizers import Elastic1, Elastic2, Optimizer, State

from .agreement import TrainingError, agree
from .clock import Clock
from .grid import Grid
from .loss_scale import LossScale
from .network import Network
from .slices import interval, intervals
from .updates import Local, Update

if TYPE_CHECKING:
    from mpips.store import KVStore

STORES = {"sync": "mpi_sync", "elastic": "mpi_async"}
INTERVAL = 64  # steps between two exchanges of elastic averaging (MXNET-MPI, section 5)


class Servers:
    """The servers of a job: `count` of its last ranks, for `clients` equal clients.

    elastic: `every` steps a client and the centre move together by `alpha`. Every rank makes one, with the same
    arguments, calls `join`, and, on a worker, hands it to `train`.
    """

    def __init__(
        self, count: int, clients: int = 1, kind: str = "sync", every: int = INTERVAL, alpha: float = 0.5,
        comm: MPI.Comm | None = None,
    ) -> None:  # fmt: skip
        if kind not in STORES:
            raise TrainingError(f"servers of kind {kind!r}: choose one of {', '.join(STORES)}")
        if every < 1:
            raise TrainingError(f"elastic averaging every {every} steps: give at least 1")
        self.count, self.clients, self.kind, self.every, self.alpha = count, clients, kind, every, alpha
        self.comm = MPI.COMM_WORLD if comm is None else comm
        self._slice: MPI.Comm | None = None
        self._slice_servers = 0
        self.store: KVStore | None = None

    def join(self, batch: int, model: int) -> Grid:
        """The grid of all workers, clients x batch by model; on a server this call serves and ends in SystemExit.

        Collective over the job. TrainingError on every rank where the ranks do not fit, and on the servers with the
        sentence of `give_up`.
        """
        if problem := misfit(self.count, self.clients, batch, model, self.comm.size):
            raise TrainingError(problem)
        dealt = intervals(self.count, model)
        workers = self.comm.size - self.count
        server = self.comm.rank - workers
        place = next(m for m, (_, stop) in enumerate(dealt) if server < stop) if server >= 0 else self.comm.rank % model
        self._slice_servers = dealt[place][1] - dealt[place][0]
        role = self.comm.Split(int(server >= 0), self.comm.rank)
        self._slice = self.comm.Split(place, self.comm.rank)
        if server < 0:
            return Grid(self.clients * batch, model, role)
        agree(self.comm, None)
        self._create()
        raise AssertionError("a server leaves inside create")

    def give_up(self, sentence: str) -> None:
        """Tell the servers, which wait since `join`, that there will be no training; all workers call, then raise."""
        if self.store is None:
            agree(self.comm, sentence)

    def open(self) -> KVStore:
        """The store of this worker's slice. Collective over the job, the first time."""
        if self.store is None:
            agree(self.comm, None)
            self.store = self._create()
        return self.store

    def close(self) -> None:
        """Let the servers go; also done when the process ends. Collective over the workers."""
        if self.store is not None:
            self.store.close()

    def _create(self) -> KVStore:
        import mpips

        return mpips.create(STORES[self.kind], self._slice, servers=self._slice_servers, clients=self.clients)


def misfit(servers: int, clients: int, batch: int, model: int, ranks: int) -> str | None:
    """Why such a job does not fit its ranks; None where it does."""
    needed = clients * batch * model + servers
    if min(servers, clients, batch, model) < 1 or needed != ranks:
        return (
            f"{clients} clients of {batch}x{model} and {servers} servers need {needed} ranks, the job has {ranks}; "
            f"give another --ranks, --grid, --clients or --servers"
        )
    if servers < model:
        return f"{servers} servers for {model} slices of the network: every slice needs a server of its own"
    return None


def connect(servers: Servers, network: Network, grid: Grid, optimizer: Optimizer, clock: Clock) -> Update:
    """What updates a worker's slice. Collective over the job."""
    if network.specification.dtype == "mixed":
        servers.give_up("mixed precision has no servers: choose float32, or no servers")
        raise TrainingError("mixed precision has no servers: choose float32, or no servers")
    kind = Sync if servers.kind == "sync" else Elastic
    return kind(servers, network, grid, optimizer, clock)


class Sync:
    """Push gradients, pull weights: one key a layer of this rank's slice."""

    def __init__(self, servers: Servers, network: Network, grid: Grid, optimizer: Optimizer, clock: Clock) -> None:
        self._kv, self._clock = servers.open(), clock
        self.state: State = ()
        self.loss_scale: LossScale | None = None
        self._keys = _keys(network)
        self._gradients = _layers(network, network.flat_gradients)
        self._parameters = _layers(network, network.flat_parameters)
        self._kv.init(self._keys, self._parameters)
        self._kv.set_optimizer(optimizer)

    def gradient(self, layer: int) -> None:
        """Nothing is sent before the backward pass ends."""

    def poll(self) -> None:
        """Nothing is on its way."""

    def share(self, samples: int) -> float:
        return samples

    def run(self, step: int) -> None:
        start = perf_counter()
        self._kv.pushpull(self._keys, self._gradients, out=self._parameters)
        self._clock.add("backward", start)


class Elastic:
    """SGD inside the client, on the mean over the client's share of each minibatch; elastic averaging now and then."""

    def __init__(self, servers: Servers, network: Network, grid: Grid, optimizer: Optimizer, clock: Clock) -> None:
        self._kv, self._clock, self._every = servers.open(), clock, servers.every
        client = self._kv.layout.client
        assert client is not None
        self._local = Local(network, client, optimizer, clock, overlap=False, half=False, scale=None)
        self.state: State = self._local.state
        self.loss_scale: LossScale | None = None
        self._ranks, self._members, self._first = grid.batch, client.size, grid.batch_index - client.rank
        self._attract, self._samples = Elastic2(alpha=servers.alpha), 0
        self._keys = _keys(network)
        self._parameters = _layers(network, network.flat_parameters)
        self._centre = np.empty_like(network.flat_parameters)
        self._centres = _layers(network, self._centre)
        self._weights = network.flat_parameters
        self._kv.init(self._keys, self._parameters)
        self._kv.set_optimizer(Elastic1(alpha=servers.alpha))

    def gradient(self, layer: int) -> None:
        """Nothing is sent before the backward pass ends."""

    def poll(self) -> None:
        """Nothing is on its way."""

    def share(self, samples: int) -> float:
        """The samples of this client."""
        last = self._first + self._members - 1
        start, stop = interval(samples, self._ranks, self._first)[0], interval(samples, self._ranks, last)[1]
        self._samples = stop - start
        return max(1, self._samples)

    def run(self, step: int) -> None:
        if (step - 1) % self._every == 0:
            start = perf_counter()
            np.divide(self._weights, self._members, out=self._centre)  # a push sums over the client, who are equal
            self._kv.push(self._keys, self._centres)
            self._kv.pull(self._keys, self._centres)
            self._attract.update(self._weights, self._centre, (), 1)
            self._clock.add("backward", start)
        if self._samples:
            self._local.run(step)


def _keys(network: Network) -> list[str]:
    return [f"layer{layer}" for layer in range(len(network.splits))]


def _layers(network: Network, flat: np.ndarray) -> list[Any]:
    """Views of an array laid out as the flat parameters, one a layer."""
    cuts = np.cumsum([0, *network.layer_elements])
    return [flat[start:stop] for start, stop in pairwise(cuts)]

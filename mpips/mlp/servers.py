"""Keep the weights of a network on servers, for clients that are model parallel inside.

The conclusion of the MXNET-MPI paper suggests them. A client is a mesh of batch x model ranks. The slices of the
network are dealt to the servers: with at least as many servers as slices, each slice has servers of its own, and each
model rank pushes its own slice's gradients. With fewer, a server keeps several slices, for which one of their ranks
speaks, the leader (`SliceGroup`). So the workers that push to a server always hold the same slices, and no server holds
weights that nobody pushes to it. Ranks: client by client, each as `Mesh` numbers it, then the servers, dealt to the
groups of slices in order.

sync     the servers sum over all clients and run the optimizer (mpi_sync); the same numbers as without servers
elastic  every client trains by itself; now and then its weights and the servers' centre attract each other (mpi_async,
         equations 2 and 3 of MXNET-MPI)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from mpips.collectives import log
from mpips.collectives.fabric.tasks import Task
from mpips.collectives.kernels.quiet import quietly
from mpips.mlp.mesh import Mesh, TrainingError, agree, alike, counted, nodes
from mpips.mlp.network import Network, interval
from mpips.mlp.parallel import Clock, LocalUpdate
from mpips.optimizers.base import Optimizer, State, initial
from mpips.optimizers.elastic import INTERVAL, Elastic1, Elastic2
from mpips.store.api import KVStore
from mpips.store.create import create
from mpips.store.keys.key import Key
from mpips.store.runtime.engine import Handle
from mpips.store.worker.interface import States, Stored

STORES = {"sync": "mpi_sync", "elastic": "mpi_async"}
"""The kind of store behind each kind of servers."""
T = TypeVar("T")
LOG = log.get("mpips.mlp")


class Servers:
    """The servers of a job: `count` of its last ranks, for `clients` equal clients.

    elastic: `every` steps a client and the centre move together by `alpha`. Every rank makes one, with the same
    arguments, calls `join`, and, on a worker, hands it to `train`. TrainingError where an argument is out of range.
    """

    def __init__(
        self,
        count: int,
        clients: int = 1,
        kind: str = "sync",
        every: int = INTERVAL,
        alpha: float = 0.5,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        if kind not in STORES:
            raise TrainingError(f"servers of kind {kind!r}: choose one of {', '.join(STORES)}")
        if every < 1:
            raise TrainingError(f"elastic averaging every {every} steps: give at least 1")
        if not (math.isfinite(alpha) and 0 < alpha <= 1):
            raise TrainingError(f"elastic averaging by alpha {alpha}: give more than 0 and at most 1")
        self.count, self.clients, self.kind, self.every, self.alpha = count, clients, kind, every, alpha
        self.comm = MPI.COMM_WORLD if comm is None else comm
        self.between = False
        """Whether the ranks are on several nodes."""
        self._groups = 0
        """Into how many groups the slices are dealt; each has servers of its own."""
        self._members: MPI.Intracomm = MPI.COMM_NULL  # type: ignore[assignment]
        self._share = 0
        self._opened = self._gone = False
        self._store: KVStore | None = None
        """On a worker that speaks to servers, once opened."""

    def __str__(self) -> str:
        return (
            f"Servers(count={self.count}, clients={self.clients}, kind={self.kind}, every={self.every}, "
            f"alpha={self.alpha})"
        )

    def join(self, batch: int, model: int) -> Mesh:
        """Return the mesh of all workers, clients x batch by model; on a server this call serves and ends in
        SystemExit.

        Collective over the job. TrainingError on every rank where the ranks do not fit or ask for different jobs,
        and on the servers with the sentence of `give_up`.
        """
        rank, ranks = self.comm.rank, self.comm.size
        problem = servers_misfit(self.count, self.clients, batch, model, ranks)
        alike(self.comm, "join", {"servers": self, "grid of a client": f"{batch}x{model}"}, problem)
        self.between = nodes(self.comm) > 1
        self._groups = min(model, self.count)
        server, slice_ = rank - (ranks - self.count), rank % model
        mine = MPI.UNDEFINED  # the group of slices that this rank serves or speaks for
        for group in range(self._groups):
            start, stop = interval(self.count, self._groups, group)
            if start <= server < stop or (server < 0 and interval(model, self._groups, group)[0] == slice_):
                mine, self._share = group, stop - start
        role = self.comm.Split(int(server >= 0), rank)
        self._members = self.comm.Split(mine, rank)  # type: ignore[assignment]
        if server < 0:
            return Mesh(self.clients * batch, model, role)
        agree(self.comm, None)
        LOG.info("this server has group %d of the slices", mine)
        self._create()
        raise AssertionError("a server leaves inside create")

    def give_up(self, sentence: str) -> None:
        """Tell the servers, which wait since `join`, that there will be no training; all workers call, then raise."""
        if not (self._opened or self._gone):
            self._gone = True
            agree(self.comm, sentence)

    def connect(
        self, network: Network, mesh: Mesh, optimizer: Optimizer, clock: Clock, overlap: bool | None
    ) -> SynchronousUpdate | ElasticUpdate:
        """Return the update of a worker's slice. Collective over the job.

        `overlap`: whether gradients leave during the backward pass; None: where ranks are on several nodes.
        TrainingError on all workers and servers where they cannot serve this network.
        """
        problem = None
        if network.specification.dtype == "mixed":
            problem = "servers keep weights and take gradients in one dtype: choose float32, not mixed"
        elif overlap and self.kind == "sync" and self._groups < network.parts:
            problem = (
                f"{self.count} servers for {network.parts} slices: gradients pass through one rank "
                f"of several, all at once, so there is nothing to overlap; give a server for each slice"
            )
        if problem:
            self.give_up(problem)
            raise TrainingError(problem)
        if self._gone:
            raise TrainingError("the servers left when training was refused: make Servers and join them again")
        if not self._opened:
            agree(self.comm, None)
            self._opened = True
            if self._members != MPI.COMM_NULL:
                self._store = self._create()
        group = SliceGroup(network, mesh.model_comm, self._groups)
        beside = self.between if overlap is None else overlap
        if self.kind == "sync":
            return SynchronousUpdate(self._store, group, network, mesh, optimizer, clock, beside)
        return ElasticUpdate(self._store, group, network, mesh, optimizer, clock, beside, self)

    def close(self) -> None:
        """Let the servers go; also done when the process ends. Collective over the workers."""
        if self._store is not None:
            self._store.close()

    def _create(self) -> KVStore:
        return create(STORES[self.kind], self._members, servers=self._share, clients=self.clients)


def servers_misfit(servers: int, clients: int, batch: int, model: int, ranks: int) -> str | None:
    """Say why such a job does not fit its ranks; None where it does."""
    needed = clients * batch * model + servers
    if min(servers, clients, batch, model) < 1 or needed != ranks:
        return (
            f"{counted(clients, 'client')} of {batch}x{model} and {counted(servers, 'server')} need "
            f"{counted(needed, 'rank')}, the job has {ranks}; give another --ranks, --grid, --clients or --servers"
        )
    return None


class SliceGroup:
    """The ranks of one model, in `groups` groups of neighbours; the first of each, its leader, speaks to the servers.

    Everything here is collective over a group. Arrays are laid out as the flat parameters: a member's its own slice's,
    the leader's `whole` all members' one behind the other. A group of one copies nothing.
    """

    def __init__(self, network: Network, model_comm: MPI.Comm, groups: int) -> None:
        mine = [interval(model_comm.size, groups, group) for group in range(groups)]
        group = next(group for group, (_, stop) in enumerate(mine) if model_comm.rank < stop)
        self.first = mine[group][0]
        self._comm = model_comm.Split(group, model_comm.rank)
        self.single, self._leads = self._comm.size == 1, self._comm.rank == 0
        elements = np.array(network.layer_elements, np.int64)
        self._layers = np.empty((self._comm.size, len(elements)), np.int64)
        self._comm.Allgather(elements, self._layers)
        self._counts = self._layers.sum(axis=1).tolist()

    def whole(self, flat: np.ndarray) -> np.ndarray:
        """Return memory on the leader for all members' arrays like `flat`: `flat` itself if there is one member; else
        empty on the others."""
        return flat if self.single else np.empty(sum(self._counts) if self._leads else 0, flat.dtype)

    def gather(self, flat: np.ndarray, whole: np.ndarray) -> None:
        """Write whole = all members' `flat`."""
        if not self.single:
            self._comm.Gatherv(flat, self._parts(whole), root=0)

    def scatter(self, whole: np.ndarray, flat: np.ndarray) -> None:
        """Write every member's `flat` from `whole`."""
        if not self.single:
            self._comm.Scatterv(self._parts(whole), flat, root=0)

    def _parts(self, whole: np.ndarray) -> list[object] | None:
        return [whole, self._counts] if self._leads else None

    def keyed(self, whole: np.ndarray) -> dict[str, np.ndarray]:
        """Return views of `whole`, one for each slice's layer that is not empty, by the name of its key."""
        cuts = np.cumsum([0, *self._layers.ravel()]).tolist()
        names = [f"slice{self.first + member}.layer{layer}" for member, layer in np.ndindex(*self._layers.shape)]
        return {name: whole[start:stop] for name, (start, stop) in zip(names, pairwise(cuts)) if stop > start}

    def init_store(self, store: KVStore | None, whole: np.ndarray, optimizer: Optimizer) -> dict[str, np.ndarray]:
        """Let the servers behind `store` keep `whole`, updated by `optimizer`; the array of each of its keys.

        Empty where this rank does not speak to servers (`store` is None), and where there is nothing to keep: slices
        may be empty. Collective over the workers of the store.
        """
        named = {} if store is None else self.keyed(whole)
        if store is not None and named:
            store.init(list(named), list(named.values()))
            store.set_optimizer(optimizer)
        return named


class SynchronousUpdate:
    """An update through servers: push gradients, pull weights, one key a layer of each slice.

    `store` is None on a worker that does not speak to servers. Collective over the workers.
    """

    loss_scale = None

    def __init__(
        self,
        store: KVStore | None,
        group: SliceGroup,
        network: Network,
        mesh: Mesh,
        optimizer: Optimizer,
        clock: Clock,
        overlap: bool,
    ) -> None:
        self._mesh, self._network, self._optimizer, self._clock = mesh, network, optimizer, clock
        self._group, self._overlap = group, overlap and group.single
        self._gradients, self._weights = group.whole(network.flat_gradients), group.whole(network.flat_parameters)
        group.gather(network.flat_parameters, self._weights)
        self._in = group.init_store(store, self._weights, optimizer)
        self._kv = store if self._in else None
        self._out = group.keyed(self._gradients) if self._in else {}
        self._pushes: list[Handle] = []
        self._read = 0  # pushes, from the first on, that are known to have been read

    def gradient(self, layer: int) -> None:
        """Push the gradients of a layer, the first layers' with the highest priority."""
        key = f"slice{self._group.first}.layer{layer}"
        if self._kv is not None and self._overlap and key in self._out:
            start = perf_counter()
            self._pushes.append(self._kv.ipush(key, self._out[key], priority=-layer))
            self._clock.sent()
            self._clock.add("backward", start)

    def poll(self) -> None:
        while self._read < len(self._pushes) and self._pushes[self._read].test():
            self._read += 1
            self._clock.arrived()

    def divisor(self, samples: int) -> float:
        return samples

    def run(self, step: int) -> None:
        """Push what has not left, and pull the new weights."""
        with self._clock.waiting("backward"):
            if self._kv is not None and self._pushes:
                kv = self._kv
                pulls = [kv.ipull(key, array, priority=-number) for number, (key, array) in enumerate(self._in.items())]
                for handle in (*self._pushes, *pulls):
                    handle.wait()
                for _ in self._pushes[self._read :]:
                    self._clock.arrived()
                self._pushes.clear()
                self._read = 0
                return
            self._group.gather(self._network.flat_gradients, self._gradients)
            if self._kv is not None:
                self._kv.pushpull(list(self._out), list(self._out.values()), out=list(self._in.values()))
            self._group.scatter(self._weights, self._network.flat_parameters)

    def fetch(self) -> State:
        """Return the optimizer's state, which the servers send."""
        state = initial(self._optimizer, self._network.flat_parameters)
        wholes = [self._group.whole(array) for array in state]
        views = [self._group.keyed(whole) for whole in wholes]
        if state:
            found = self._run_on_servers("fetch", lambda stored, keys: stored.states(keys))
            if found is not None and self._mesh.batch_index == 0:
                for name, (_, arrays) in found.items():
                    for view, array in zip(views, arrays):
                        view[str(name)][...] = array
        for whole, array in zip(wholes, state):
            self._group.scatter(whole, array)
        return state

    def restore(self, state: State, step: int) -> None:
        """Send the servers such a state, after `step` updates."""
        wholes = [self._group.whole(array) for array in state]
        for whole, array in zip(wholes, state):
            self._group.gather(array, whole)
        views = [self._group.keyed(whole) for whole in wholes]
        states: States = {name: (step, [view[name] for view in views]) for name in self._out}
        if state:
            self._run_on_servers("restore", lambda stored, keys: stored.put_states(keys, states))

    def _run_on_servers(self, what: str, task: Callable[[Stored, list[Key]], Task[T]]) -> T | None:
        """Run a task of the leaders on the states of their servers, when all that was pushed has been applied."""
        found, problem = None, None
        if self._kv is not None:
            worker = self._kv.worker
            try:
                worker.settle()
                found = worker.run(what, task(worker.backend.stored, [worker.keys[name] for name in self._in]))
            except ValueError as error:
                problem = f"the servers' optimizer states: {error}"
        agree(self._mesh.comm, problem)
        return found


class ElasticUpdate(LocalUpdate):
    """An update inside the client, on the mean over the client's share of each minibatch; the centre now and then.

    Source: MXNET-MPI, section 5 and equations 2 and 3 (`mpips.optimizers.Elastic1`, `Elastic2`). `store` is None on a
    worker that does not speak to servers. Collective over the workers.
    """

    def __init__(
        self,
        store: KVStore | None,
        group: SliceGroup,
        network: Network,
        mesh: Mesh,
        optimizer: Optimizer,
        clock: Clock,
        overlap: bool,
        servers: Servers,
    ) -> None:
        self._clock, self._every, self._weights = clock, servers.every, network.flat_parameters
        self._ranks, self._members = mesh.batch, mesh.batch // servers.clients
        client, place = divmod(mesh.batch_index, self._members)
        self._first, self._samples = mesh.batch_index - place, 0
        super().__init__(network, mesh.batch_comm.Split(client, place), optimizer, clock, overlap)
        self._attract = Elastic2(alpha=servers.alpha)
        self._group, self._centre = group, network.flat_parameters.copy()
        self._whole = group.whole(self._centre)
        group.gather(self._centre, self._whole)
        self._centres = group.init_store(store, self._whole, Elastic1(alpha=servers.alpha))
        self._kv = store if self._centres else None

    def gradient(self, layer: int) -> None:
        if self._samples:
            super().gradient(layer)

    def divisor(self, samples: int) -> float:
        """Return the samples of this client."""
        last = self._first + self._members - 1
        start, stop = interval(samples, self._ranks, self._first)[0], interval(samples, self._ranks, last)[1]
        self._samples = stop - start
        return max(1, self._samples)

    def run(self, step: int) -> None:
        """Attract, where it is time; then update by the client's mean gradient."""
        if (step - 1) % self._every == 0:
            with self._clock.waiting("backward"):
                # A push sums over the client, whose members are equal.
                quietly(np.divide, self._weights, self._members, out=self._centre)
                self._group.gather(self._centre, self._whole)
                if self._kv is not None:
                    names, arrays = list(self._centres), list(self._centres.values())
                    self._kv.push(names, arrays)
                    self._kv.pull(names, arrays)
                self._group.scatter(self._whole, self._centre)
                self._attract.update(self._weights, self._centre, (), 1)
        if self._samples:
            super().run(step)

"""The servers of a job, for clients that are model parallel inside: joining, connecting a worker, and leaving.

The conclusion of the MXNET-MPI paper suggests them. A client is a mesh of batch x model ranks. The slices of the
network are dealt to the servers: with at least as many servers as slices, each slice has servers of its own, and each
model rank pushes its own slice's gradients. With fewer, a server keeps several slices, for which one of their ranks
speaks (`leaders`). So the workers that push to a server always hold the same slices, and no server holds what nobody
pushes to it. Ranks: client by client, each as `Mesh` numbers it, then the servers, dealt to the groups of slices in
order.

sync     the servers sum over all clients and run the optimizer (mpi_sync); the same numbers as without servers
elastic  every client trains by itself; now and then its weights and the servers' centre attract each other (mpi_async,
         equations 2 and 3 of MXNET-MPI)

Which ranks are servers, and for which slices: what `Servers` are asked to be, and how slices are dealt to them.

Synchronous servers: they sum gradients over all clients and run the optimizer; a worker pushes and pulls.

Elastic averaging: a client trains by itself; every so many steps its weights and the servers' centre attract.

Source: MXNET-MPI, section 5 and equations 2 and 3 (`mpips.optimizers.Elastic1`, `Elastic2`).

Groups of slices, where servers are fewer than slices: one rank of each, the leader, speaks to the servers for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpips.mlp.mesh import Mesh, TrainingError, agree, alike, counted, nodes
from mpips.mlp.network.layers import interval, intervals
from mpips.mlp.network.slice import Network
from mpips.mlp.parallel import Clock, LocalUpdate, LossScale, Update
from mpips.optimizers.base import Optimizer, State, initial
from mpips.optimizers.elastic import INTERVAL, Elastic1, Elastic2
from mpips.store.api import KVStore
from mpips.store.checkpoint.source import Handle, States, Store
from mpips.store.create import create


class Servers:
    """The servers of a job: `count` of its last ranks, for `clients` equal clients.

    elastic: `every` steps a client and the centre move together by `alpha`. Every rank makes one, with the same
    arguments, calls `join`, and, on a worker, hands it to `train`. TrainingError where an argument is out of range.
    """

    def __init__(
        self, count: int, clients: int = 1, kind: str = "sync", every: int = INTERVAL, alpha: float = 0.5,
        comm: MPI.Intracomm | None = None,
    ) -> None:  # fmt: skip
        self.options = ServerOptions(count, clients, kind, every, alpha)
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
        return f"Servers({', '.join(f'{name}={value}' for name, value in asdict(self.options).items())})"

    def join(self, batch: int, model: int) -> Mesh:
        """The mesh of all workers, clients x batch by model; on a server this call serves and ends in SystemExit.

        Collective over the job. TrainingError on every rank where the ranks do not fit or ask for different jobs,
        and on the servers with the sentence of `give_up`.
        """
        asked, ranks = self.options, self.comm.size
        problem = misfit(asked.count, asked.clients, batch, model, ranks)
        alike(self.comm, "join", {**self.arguments(), "the grid of a client": f"{batch}x{model}"}, problem)
        self.between = nodes(self.comm) > 1
        self._groups = min(model, asked.count)
        place = group_of(self.comm.rank, ranks, asked.count, model)
        serves = self.comm.rank >= ranks - asked.count
        role = self.comm.Split(int(serves), self.comm.rank)
        members = self.comm.Split(MPI.UNDEFINED if place is None else place[0], self.comm.rank)
        self._members = members  # type: ignore[assignment]
        self._share = 0 if place is None else place[1]
        if not serves:
            return Mesh(asked.clients * batch, model, role)
        agree(self.comm, None)
        self._create()
        raise AssertionError("a server leaves inside create")

    def arguments(self) -> dict[str, object]:
        """What must be the same on every rank, by name."""
        asked = self.options
        return {
            "the number of servers": asked.count, "the number of clients": asked.clients, "the averaging": asked.kind,
            "every": asked.every, "alpha": float(asked.alpha),
        }  # fmt: skip

    def give_up(self, sentence: str) -> None:
        """Tell the servers, which wait since `join`, that there will be no training; all workers call, then raise."""
        if not (self._opened or self._gone):
            self._gone = True
            agree(self.comm, sentence)

    def connect(
        self, network: Network, mesh: Mesh, optimizer: Optimizer, clock: Clock, overlap: bool | None
    ) -> Update:
        """What updates a worker's slice. `overlap`: whether gradients leave during the backward pass; None: where ranks
        are on several nodes. Collective over the job; TrainingError on all workers and servers where they cannot serve
        this network."""
        if problem := self._refusal(network, overlap):
            self.give_up(problem)
            raise TrainingError(problem)
        store, asked = self._open(), self.options
        group = SliceGroup(network, mesh.model_comm, self._groups)
        beside = self.between if overlap is None else overlap
        if asked.kind == "sync":
            return Synchronous(store, group, network, mesh, optimizer, clock, beside)
        return ElasticAveraging(store, group, network, mesh, optimizer, clock, beside, asked)

    def close(self) -> None:
        """Let the servers go; also done when the process ends. Collective over the workers."""
        if self._store is not None:
            self._store.close()

    def _refusal(self, network: Network, overlap: bool | None) -> str | None:
        if network.specification.dtype == "mixed":
            return "servers keep weights and take gradients in one dtype: choose float32, not mixed"
        if overlap and self.options.kind == "sync" and self._groups < network.exchange.parts:
            return (
                f"{self.options.count} servers for {network.exchange.parts} slices: gradients pass through one rank "
                f"of several, all at once, so there is nothing to overlap; give a server for each slice"
            )
        return None

    def _open(self) -> KVStore | None:
        """The store of this worker's group of slices, if it speaks for it. Collective over the job, the first time."""
        if self._gone:
            raise TrainingError("the servers left when training was refused: make Servers and join them again")
        if not self._opened:
            agree(self.comm, None)
            self._opened = True
            if self._members != MPI.COMM_NULL:
                self._store = self._create()
        return self._store

    def _create(self) -> KVStore:
        asked = self.options
        return create(STORES[asked.kind], self._members, servers=self._share, clients=asked.clients)


STORES = {"sync": "mpi_sync", "elastic": "mpi_async"}
"""The kind of store behind each kind of servers."""


@dataclass(frozen=True)
class ServerOptions:
    """The arguments of `Servers`; TrainingError where one is out of its range."""

    count: int
    clients: int = 1
    kind: str = "sync"
    every: int = INTERVAL
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in STORES:
            raise TrainingError(f"servers of kind {self.kind!r}: choose one of {', '.join(STORES)}")
        if self.every < 1:
            raise TrainingError(f"elastic averaging every {self.every} steps: give at least 1")
        if not (math.isfinite(self.alpha) and 0 < self.alpha <= 1):
            raise TrainingError(f"elastic averaging by alpha {self.alpha}: give more than 0 and at most 1")


def misfit(servers: int, clients: int, batch: int, model: int, ranks: int) -> str | None:
    """Why such a job does not fit its ranks; None where it does."""
    needed = clients * batch * model + servers
    if min(servers, clients, batch, model) < 1 or needed != ranks:
        return (
            f"{counted(clients, 'client')} of {batch}x{model} and {counted(servers, 'server')} need "
            f"{counted(needed, 'rank')}, the job has {ranks}; give another --ranks, --grid, --clients or --servers"
        )
    return None


def group_of(rank: int, ranks: int, servers: int, model: int) -> tuple[int, int] | None:
    """The group of slices that this rank of the job serves or speaks for, and how many servers that group has; None
    for a worker that speaks for none.

    Slices are dealt to min(model, servers) groups of neighbours, the servers (the last ranks) to the groups in order.
    """
    groups = min(model, servers)
    dealt = intervals(servers, groups)
    server, slice_ = rank - (ranks - servers), rank % model
    if server >= 0:
        group = next(g for g, (_, stop) in enumerate(dealt) if server < stop)
    elif led := [g for g in range(groups) if interval(model, groups, g)[0] == slice_]:
        group = led[0]
    else:
        return None
    return group, dealt[group][1] - dealt[group][0]


class Synchronous:
    """An `Update` through servers: push gradients, pull weights, one key a layer of each slice.

    `store` is None on a worker that does not speak to servers. Collective over the workers.
    """

    def __init__(
        self, store: WeightStore | None, group: SliceGroup, network: Network, mesh: Mesh, optimizer: Optimizer,
        clock: Clock, overlap: bool,
    ) -> None:  # fmt: skip
        self._mesh, self._network, self._optimizer, self._clock = mesh, network, optimizer, clock
        self.loss_scale: LossScale | None = None
        self._group = group
        self._overlap = overlap and group.alone
        self._gradients, self._weights = (
            group.whole(flat) for flat in (network.flat_gradients, network.flat_parameters)
        )
        group.gather(network.flat_parameters, self._weights)
        self._in = group.keep(store, self._weights, optimizer)
        self._kv = store if self._in else None
        self._out = group.keyed(self._gradients) if self._in else {}
        self._keys = list(self._out)
        self._pushes: list[Handle] = []
        self._read = 0  # pushes, from the first on, that are known to have been read

    def gradient(self, layer: int) -> None:
        """The gradients of a layer leave, the first layers' with the highest priority."""
        key = f"slice{self._group.first}.layer{layer}"
        if self._kv is not None and self._overlap and key in self._out:
            start = perf_counter()
            self._pushes.append(self._kv.ipush(key, self._out[key], priority=-layer))
            self._clock.sent()
            self._clock.add("backward", start)

    def poll(self) -> None:
        """Move on what has left."""
        while self._read < len(self._pushes) and self._pushes[self._read].test():
            self._read += 1
            self._clock.arrived()

    def share(self, samples: int) -> float:
        return samples

    def run(self, step: int) -> None:
        start = perf_counter()
        self._clock.sent()
        if self._kv is not None and self._pushes:
            kv = self._kv
            pulls = [kv.ipull(key, array, priority=-number) for number, (key, array) in enumerate(self._in.items())]
            for handle in (*self._pushes, *pulls):
                handle.wait()
            for _ in self._pushes[self._read :]:
                self._clock.arrived()
            self._pushes.clear()
            self._read = 0
        else:
            self._group.gather(self._network.flat_gradients, self._gradients)
            if self._kv is not None:
                self._kv.pushpull(self._keys, list(self._out.values()), out=list(self._in.values()))
            self._group.scatter(self._weights, self._network.flat_parameters)
        self._clock.arrived()
        self._clock.add("backward", start)

    def fetch(self) -> State:
        state = initial(self._optimizer, self._network.flat_parameters)
        wholes = [self._group.whole(array) for array in state]

        def work(store: Store) -> None:
            found = store.run("fetch", store.backend.stored.states([store.keys[name] for name in self._in]))
            if self._mesh.batch_index == 0:
                views = [self._group.keyed(whole) for whole in wholes]
                for name, (_, arrays) in found.items():
                    for view, array in zip(views, arrays):
                        view[str(name)][...] = array

        if state:
            self._together(work)
        for whole, array in zip(wholes, state):
            self._group.scatter(whole, array)
        return state

    def restore(self, state: State, step: int) -> None:
        wholes = [self._group.whole(array) for array in state]
        for whole, array in zip(wholes, state):
            self._group.gather(array, whole)

        def work(store: Store) -> None:
            views = [self._group.keyed(whole) for whole in wholes]
            states: States = {name: (step, [view[name] for view in views]) for name in self._keys}
            store.run("restore", store.backend.stored.put_states([store.keys[name] for name in self._keys], states))

        if state:
            self._together(work)

    def _together(self, work: Callable[[Store], None]) -> None:
        """Let the speakers of a group work with what their servers keep, when all that was pushed has been applied."""
        problem = None
        if self._kv is not None:
            try:
                self._kv.settings.settle()
                work(self._kv.settings)
            except ValueError as error:
                problem = f"the servers' optimizer states: {error}"
        agree(self._mesh.comm, problem)


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


class WeightStore(Protocol):
    """What is used of a `KVStore` that keeps weights. Arrays are 1-D views, one a key; see there."""

    @property
    def settings(self) -> Store:
        """What a checkpoint needs of it."""

    def init(self, key: Any, value: Any) -> None: ...

    def set_optimizer(self, optimizer: str | Optimizer) -> None: ...

    def push(self, key: Any, value: Any) -> None: ...

    def pull(self, key: Any, out: Any) -> None: ...

    def pushpull(self, key: Any, value: Any, out: Any = None) -> None: ...

    def ipush(self, key: Any, value: Any, priority: int = 0) -> Handle: ...

    def ipull(self, key: Any, out: Any, priority: int = 0) -> Handle: ...


class SliceGroup:
    """The ranks of one model, in `groups` groups of neighbours; the first of each is its leader.

    Everything here is collective over a group. Arrays are laid out as the flat parameters: a member's its own slice's,
    the leader's `whole` all members' one behind the other. A group of one copies nothing.
    """

    def __init__(self, network: Network, model_comm: MPI.Comm, groups: int) -> None:
        mine = [interval(model_comm.size, groups, g) for g in range(groups)]
        group = next(g for g, (_, stop) in enumerate(mine) if model_comm.rank < stop)
        self.first = mine[group][0]
        self._comm = model_comm.Split(group, model_comm.rank)
        self.alone = self._comm.size == 1
        self.leads = self._comm.rank == 0
        elements = np.array(network.layer_elements, np.int64)
        everyone = np.empty((self._comm.size, len(elements)), np.int64)
        self._comm.Allgather(elements, everyone)
        self._layers = everyone
        self._counts = everyone.sum(axis=1).tolist()

    def whole(self, flat: np.ndarray) -> np.ndarray:
        """Memory on the leader for all members' arrays like `flat`: `flat` itself if there is one member; else empty
        on the others."""
        return flat if self.alone else np.empty(sum(self._counts) if self.leads else 0, flat.dtype)

    def gather(self, flat: np.ndarray, whole: np.ndarray) -> None:
        """whole = all members' `flat`."""
        if not self.alone:
            kind = MPI._typedict[flat.dtype.char]
            self._comm.Gatherv(flat, [whole, self._counts, None, kind] if self.leads else None, root=0)

    def scatter(self, whole: np.ndarray, flat: np.ndarray) -> None:
        """Every member's `flat` from `whole`."""
        if not self.alone:
            kind = MPI._typedict[flat.dtype.char]
            self._comm.Scatterv([whole, self._counts, None, kind] if self.leads else None, flat, root=0)

    def keyed(self, whole: np.ndarray) -> dict[str, np.ndarray]:
        """Views of `whole`, one for each slice's layer that is not empty, by the name of its key."""
        cuts = np.cumsum([0, *self._layers.ravel()]).tolist()
        names = [f"slice{self.first + member}.layer{layer}" for member, layer in np.ndindex(*self._layers.shape)]
        return {name: whole[start:stop] for name, (start, stop) in zip(names, pairwise(cuts)) if stop > start}

    def keep(self, store: WeightStore | None, whole: np.ndarray, optimizer: Optimizer) -> dict[str, np.ndarray]:
        """Let the servers behind `store` keep `whole`, updated by `optimizer`; the array of each of its keys.

        Empty where this rank does not speak to servers (`store` is None), and where there is nothing to keep: slices
        may be empty. Collective over the workers of the store.
        """
        if store is None:
            return {}
        named = self.keyed(whole)
        if named:
            store.init(list(named), list(named.values()))
            store.set_optimizer(optimizer)
        return named

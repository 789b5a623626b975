"""Training with the weights on servers and several clients. A client is a mesh of batch x model ranks.

The conclusion of the MXNET-MPI paper suggests such model parallel clients. There are two kinds of servers:

- sync: the servers sum the gradients of all clients and run the optimizer (an mpi_sync store). Training gives the same
  numbers as without servers.
- elastic: every client trains by itself. From time to time its weights and a centre on the servers move towards each
  other (an mpi_async store; equations 2 and 3 of MXNET-MPI).

The slices of the network are dealt to the servers. With at least as many servers as slices, each slice has servers of
its own, and each model rank pushes the gradients of its slice. With fewer servers, neighbouring slices form a group
that shares a server, and one rank of the group, its leader, pushes for all of them (`SliceGroup`). So all workers that
push to a server hold the same slices, and a server holds no weights but theirs.

Ranks are numbered client by client, and within a client as in `Mesh`. The servers are the last ranks. They are dealt to
the groups of slices in order.
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
from mpips.mlp.clock import PhaseClock
from mpips.mlp.mesh import Mesh, TrainingError, agree, alike, counted, nodes
from mpips.mlp.network import Network, interval
from mpips.mlp.parallel import LocalUpdate
from mpips.optimizers.base import Optimizer, State, initial
from mpips.optimizers.elastic import INTERVAL, Elastic1, Elastic2
from mpips.store.api import KVStore
from mpips.store.create import create
from mpips.store.keys.key import Key
from mpips.store.runtime.engine import Handle
from mpips.store.worker.interface import StateAccess, States

# kind of servers -> kind of store
STORES = {"sync": "mpi_sync", "elastic": "mpi_async"}
T = TypeVar("T")
LOG = log.get("mpips.mlp")


class Servers:
    """The servers of a job.

    Every rank creates a `Servers` with the same arguments and calls `join`. On a server, `join` serves until the job
    ends. On a worker, `join` returns the mesh; give the mesh and the `Servers` to `train`.

    Args:
        count: Number of servers. They are the last ranks of the job.
        clients: Number of clients into which the workers are divided evenly.
        kind: "sync" or "elastic". Sync servers sum gradients and run the optimizer. Elastic servers keep a centre,
            towards which the clients' weights move.
        every: For "elastic": number of steps from one exchange with the centre to the next.
        alpha: For "elastic": weights and centre each move by this share, in (0, 1], of the distance between them.
        comm: The ranks of the job. Default: COMM_WORLD.

    Raises:
        TrainingError: If an argument is out of range.

    >>> servers = mpips.mlp.Servers(1, clients=2, kind="elastic", every=16)
    >>> def run(model, rows):  # on all ranks; only workers return from join()
    ...     mesh = servers.join(batch=1, model=1)
    ...     return mpips.mlp.train(model, rows, mesh, servers=servers, batch=40)
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
        self.count = count
        self.clients = clients
        self.kind = kind
        self.every = every
        self.alpha = alpha
        self.comm = MPI.COMM_WORLD if comm is None else comm
        # True if the ranks are on several nodes
        self.between = False
        # number of groups of slices; each group has servers of its own
        self._groups = 0
        # communicator of this rank's group, with its leaders and servers; null on a worker that does not lead a group
        self._members: MPI.Intracomm = MPI.COMM_NULL  # type: ignore[assignment]
        # number of servers of this rank's group
        self._share = 0
        # The servers wait in join() until training begins (`_opened`) or the workers give it up (`_gone`).
        self._opened = self._gone = False
        # the store; set only on a leader, once training has begun
        self._store: KVStore | None = None

    def __str__(self) -> str:
        return (
            f"Servers(count={self.count}, clients={self.clients}, kind={self.kind}, every={self.every}, "
            f"alpha={self.alpha})"
        )

    def join(self, batch: int, model: int) -> Mesh:
        """Return the mesh of all workers, (clients x batch) by model. On a server, serve instead. Collective.

        On a server this call ends in SystemExit when the job is done.

        Args:
            batch: Batch ranks of one client.
            model: Model ranks of one client.

        Raises:
            TrainingError: On every rank, if the number of ranks does not fit or ranks give different arguments. On the
                servers also if the workers call `give_up`, with its message.
        """
        rank, ranks = self.comm.rank, self.comm.size
        problem = servers_misfit(self.count, self.clients, batch, model, ranks)
        alike(self.comm, "join", {"servers": self, "grid of a client": f"{batch}x{model}"}, problem)
        self.between = nodes(self.comm) > 1
        self._groups = min(model, self.count)
        server, slice_ = rank - (ranks - self.count), rank % model
        # the group of slices that this rank serves or leads
        own_group = MPI.UNDEFINED
        for group in range(self._groups):
            start, stop = interval(self.count, self._groups, group)
            if start <= server < stop or (server < 0 and interval(model, self._groups, group)[0] == slice_):
                own_group, self._share = group, stop - start
        role = self.comm.Split(int(server >= 0), rank)
        self._members = self.comm.Split(own_group, rank)  # type: ignore[assignment]
        if server < 0:
            return Mesh(self.clients * batch, model, role)
        # Wait until the workers call give_up(), or connect(), which calls agree() without a problem.
        agree(self.comm, None)
        LOG.info("this server has group %d of the slices", own_group)
        self._create()
        raise AssertionError("a server leaves inside create")

    def give_up(self, sentence: str) -> None:
        """Release the servers from `join` because there will be no training. Collective over the workers.

        The servers raise TrainingError with `sentence` as its message, and the caller must then raise the same error.
        Once training has begun, this call has no effect.
        """
        if not (self._opened or self._gone):
            self._gone = True
            agree(self.comm, sentence)

    def connect(
        self, network: Network, mesh: Mesh, optimizer: Optimizer, clock: PhaseClock, overlap: bool | None
    ) -> LocalUpdate | SynchronousUpdate:
        """Open the store and return the object that updates this worker's slice.

        Collective over the workers, while the servers wait in `join`. If `overlap` is True, gradients are sent during
        the backward pass. If it is None, this happens only if the ranks are on several nodes. Raise TrainingError, on
        all workers and servers, if the servers cannot serve this network.
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
        members = mesh.batch // self.clients
        centre = Centre(self._store, group, network.flat_parameters, members, self, clock)
        return LocalUpdate(network, mesh, optimizer, clock, beside, clients=self.clients, exchange=centre.exchange)

    def close(self) -> None:
        """End the servers. Collective over the workers. Without this call, the servers end when the workers exit."""
        if self._store is not None:
            self._store.close()

    def _create(self) -> KVStore:
        return create(STORES[self.kind], self._members, servers=self._share, clients=self.clients)


def servers_misfit(servers: int, clients: int, batch: int, model: int, ranks: int) -> str | None:
    """Return an error message if the job does not have the number of ranks that these roles need, else None."""
    needed = clients * batch * model + servers
    if min(servers, clients, batch, model) < 1 or needed != ranks:
        return (
            f"{counted(clients, 'client')} of {batch}x{model} and {counted(servers, 'server')} need "
            f"{counted(needed, 'rank')}, the job has {ranks}; give another --ranks, --grid, --clients or --servers"
        )
    return None


class SliceGroup:
    """This rank's group of neighbouring model ranks, whose slices share servers.

    The first rank of a group is its leader, and only the leader communicates with the servers. Arrays called `flat` are
    laid out as a member's flat parameters. Only the leader has arrays called `whole`, which hold the flat arrays of all
    members one after another. A group of one rank copies nothing. Creating a group is collective, and so are `gather`
    and `scatter`.

    Args:
        groups: Number of groups into which the ranks of the model are divided.
    """

    def __init__(self, network: Network, model_comm: MPI.Comm, groups: int) -> None:
        bounds = [interval(model_comm.size, groups, group) for group in range(groups)]
        group = next(group for group, (_, stop) in enumerate(bounds) if model_comm.rank < stop)
        # model index of the leader
        self.first = bounds[group][0]
        self._comm = model_comm.Split(group, model_comm.rank)
        self.single = self._comm.size == 1
        self._leads = self._comm.rank == 0
        elements = np.array(network.layer_elements, np.int64)
        # (member, layer) -> number of parameters
        self._layers = np.empty((self._comm.size, len(elements)), np.int64)
        self._comm.Allgather(elements, self._layers)
        self._counts = self._layers.sum(axis=1).tolist()

    def whole(self, flat: np.ndarray) -> np.ndarray:
        """Allocate a `whole` array for arrays like `flat`.

        In a group of one rank, return `flat` itself. On members that do not lead, return an empty array.
        """
        return flat if self.single else np.empty(sum(self._counts) if self._leads else 0, flat.dtype)

    def gather(self, flat: np.ndarray, whole: np.ndarray) -> None:
        """Copy the `flat` of all members to the leader's `whole`."""
        if not self.single:
            self._comm.Gatherv(flat, self._parts(whole), root=0)

    def scatter(self, whole: np.ndarray, flat: np.ndarray) -> None:
        """Copy the leader's `whole` to the `flat` of all members."""
        if not self.single:
            self._comm.Scatterv(self._parts(whole), flat, root=0)

    def _parts(self, whole: np.ndarray) -> list[object] | None:
        return [whole, self._counts] if self._leads else None

    def keyed(self, whole: np.ndarray) -> dict[str, np.ndarray]:
        """Return key -> view of `whole`. Each non-empty layer of each member's slice has a key."""
        cuts = np.cumsum([0, *self._layers.ravel()]).tolist()
        names = [f"slice{self.first + member}.layer{layer}" for member, layer in np.ndindex(*self._layers.shape)]
        return {name: whole[start:stop] for name, (start, stop) in zip(names, pairwise(cuts)) if stop > start}

    def init_store(self, store: KVStore | None, whole: np.ndarray, optimizer: Optimizer) -> dict[str, np.ndarray]:
        """Create the keys of `whole` in the store, and set their optimizer. Return key -> view of `whole`.

        The result is empty if this rank does not lead (`store` is None) or all slices of the group are empty.
        Collective over the workers of the store.
        """
        named = {} if store is None else self.keyed(whole)
        if store is not None and named:
            store.init(list(named), list(named.values()))
            store.set_optimizer(optimizer)
        return named


class SynchronousUpdate:
    """Pushes gradients to sync servers, which update the weights, and pulls the new weights.

    Each layer of a slice has a key.
    It has the same methods as `LocalUpdate`.

    Args:
        store: None on a worker that does not lead its group.
        overlap: Push gradients during the backward pass. This has no effect if the group has several ranks.
    """

    # There is no loss scale, because servers do not support mixed precision.
    loss_scale = None

    def __init__(
        self,
        store: KVStore | None,
        group: SliceGroup,
        network: Network,
        mesh: Mesh,
        optimizer: Optimizer,
        clock: PhaseClock,
        overlap: bool,
    ) -> None:
        self._mesh = mesh
        self._network = network
        self._optimizer = optimizer
        self._clock = clock
        self._group = group
        self._overlap = overlap and group.single
        self._gradients = group.whole(network.flat_gradients)
        self._weights = group.whole(network.flat_parameters)
        group.gather(network.flat_parameters, self._weights)
        # key -> view into which the key is pulled; empty on a rank that holds no keys and so does not push or pull
        self._in = group.init_store(store, self._weights, optimizer)
        self._kv = store if self._in else None
        # key -> view that is pushed
        self._out = group.keyed(self._gradients) if self._in else {}
        # pushes of this step that servers may not have read yet
        self._unread: list[Handle] = []

    def gradient(self, layer: int) -> None:
        """Push the gradients of a layer. The first layers have priority, because the next step needs them first."""
        key = f"slice{self._group.first}.layer{layer}"
        if self._kv is not None and self._overlap and key in self._out:
            start = perf_counter()
            self._unread.append(self._kv.ipush(key, self._out[key], priority=-layer))
            self._clock.sent()
            self._clock.add("backward", start)

    def poll(self) -> None:
        while self._unread and self._unread[0].test():
            del self._unread[0]
            self._clock.arrived()

    def divisor(self, samples: int) -> float:
        return samples

    def run(self, step: int) -> None:
        """Push the gradients, unless gradient() has pushed them already, and pull the new weights."""
        with self._clock.waiting("backward"):
            if self._kv is not None and self._overlap:
                kv = self._kv
                pulls = [kv.ipull(key, array, priority=-number) for number, (key, array) in enumerate(self._in.items())]
                for push in self._unread:
                    push.wait()
                    self._clock.arrived()
                self._unread.clear()
                for pull in pulls:
                    pull.wait()
                return
            self._group.gather(self._network.flat_gradients, self._gradients)
            if self._kv is not None:
                self._kv.pushpull(list(self._out), list(self._out.values()), out=list(self._in.values()))
            self._group.scatter(self._weights, self._network.flat_parameters)

    def fetch(self) -> State:
        """Fetch the optimizer's state from the servers. The result is valid at batch index 0."""
        state = initial(self._optimizer, self._network.flat_parameters)
        wholes = [self._group.whole(array) for array in state]
        views = [self._group.keyed(whole) for whole in wholes]
        if state:
            states = self._run_on_servers("fetch", lambda stored, keys: stored.states(keys))
            if states is not None and self._mesh.batch_index == 0:
                for name, (_, arrays) in states.items():
                    for view, array in zip(views, arrays):
                        view[str(name)][...] = array
        for whole, array in zip(wholes, state):
            self._group.scatter(whole, array)
        return state

    def restore(self, state: State, step: int) -> None:
        """Load `state`, the optimizer's state after `step` updates, into the servers."""
        wholes = [self._group.whole(array) for array in state]
        for whole, array in zip(wholes, state):
            self._group.gather(array, whole)
        views = [self._group.keyed(whole) for whole in wholes]
        states: States = {name: (step, [view[name] for view in views]) for name in self._out}
        if state:
            self._run_on_servers("restore", lambda stored, keys: stored.put_states(keys, states))

    def _run_on_servers(self, what: str, task: Callable[[StateAccess, list[Key]], Task[T]]) -> T | None:
        """On leaders, run a task on the optimizer states of their servers, after all pushes have been applied.

        Return the result of the task, or None on ranks that do not lead. Collective over the workers. If the task fails
        on any rank, all workers raise TrainingError. `what` names the operation in messages.
        """
        result, problem = None, None
        if self._kv is not None:
            worker = self._kv.worker
            try:
                worker.settle()
                result = worker.run(what, task(worker.backend.stored, [worker.keys[name] for name in self._in]))
            except ValueError as error:
                problem = f"the servers' optimizer states: {error}"
        agree(self._mesh.comm, problem)
        return result


class Centre:
    """The centre of elastic averaging: weights that the servers keep. Creating it is collective over the workers.

    Source: MXNET-MPI, section 5 and equations 2 and 3 (`mpips.optimizers.Elastic1`, `Elastic2`).

    Args:
        store: None on a worker that does not lead its group.
        members: Batch ranks of a client.
    """

    def __init__(
        self,
        store: KVStore | None,
        group: SliceGroup,
        weights: np.ndarray,
        members: int,
        servers: Servers,
        clock: PhaseClock,
    ) -> None:
        self._group = group
        self._weights = weights
        self._members = members
        self._every = servers.every
        self._clock = clock
        self._attract = Elastic2(alpha=servers.alpha)
        # in an exchange, first the values that are pushed, then the centre that is pulled
        self._centre = weights.copy()
        self._whole = group.whole(self._centre)
        group.gather(self._centre, self._whole)
        self._centres = group.init_store(store, self._whole, Elastic1(alpha=servers.alpha))
        self._kv = store if self._centres else None

    def exchange(self, step: int) -> None:
        """If an exchange is due in this step, move the centre and this rank's weights towards each other. Blocking."""
        if (step - 1) % self._every:
            return
        with self._clock.waiting("backward"):
            # A push is summed over the members of a client. They have equal weights, so each pushes its share of them.
            quietly(np.divide, self._weights, self._members, out=self._centre)
            self._group.gather(self._centre, self._whole)
            if self._kv is not None:
                names, arrays = list(self._centres), list(self._centres.values())
                self._kv.push(names, arrays)
                self._kv.pull(names, arrays)
            self._group.scatter(self._whole, self._centre)
            self._attract.update(self._weights, self._centre, (), 1)

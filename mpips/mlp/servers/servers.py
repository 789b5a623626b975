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
"""

from __future__ import annotations

from dataclasses import asdict

from mpi4py import MPI

from mpips.optimizers.base import Optimizer
from mpips.optimizers.elastic import INTERVAL
from mpips.store.api import KVStore
from mpips.store.create import create

from mpips.mlp.agreement import TrainingError, agree, alike
from mpips.mlp.clock import Clock
from mpips.mlp.data_parallel import Update
from mpips.mlp.mesh import Mesh, nodes
from mpips.mlp.network.network import Network
from mpips.mlp.servers.elastic import ElasticAveraging
from mpips.mlp.servers.leaders import SliceGroup
from mpips.mlp.servers.placement import STORES, ServerOptions, group_of, misfit
from mpips.mlp.servers.synchronous import Synchronous


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

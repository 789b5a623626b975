"""Servers for clients that are model parallel inside, as the conclusion of the MXNET-MPI paper suggests.

A client is a grid of batch x model ranks. The slices of the network are dealt to the servers: with at least as many
servers as slices, each slice has servers of its own, and each model rank pushes its own slice's gradients; with fewer,
a server keeps several slices, for which one of their ranks speaks (`funnel`). So the workers that push to a server
always hold the same slices, and no server holds what nobody pushes to it. Ranks: client by client, each as `Grid`
numbers it, then the servers, dealt to the groups of slices in order.

sync     the servers sum over all clients and run the optimizer (mpi_sync); the same numbers as without servers
elastic  every client trains by itself; now and then its weights and the servers' centre attract each other (mpi_async,
         equations 2 and 3 of MXNET-MPI)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mpi4py import MPI

from .agreement import TrainingError, agree, alike, counted
from .communication import nodes
from .grid import Grid
from .slices import interval, intervals

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
        comm: MPI.Intracomm | None = None,
    ) -> None:  # fmt: skip
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
        self.groups = 0
        """Into how many groups the slices are dealt; each has servers of its own."""
        self._members: MPI.Intracomm = MPI.COMM_NULL  # type: ignore[assignment]
        self._share = 0
        self._opened = self._gone = False
        self.store: KVStore | None = None
        """On a worker that speaks to servers, once opened."""

    def join(self, batch: int, model: int) -> Grid:
        """The grid of all workers, clients x batch by model; on a server this call serves and ends in SystemExit.

        Collective over the job. TrainingError on every rank where the ranks do not fit or ask for different jobs,
        and on the servers with the sentence of `give_up`.
        """
        problem = misfit(self.count, self.clients, batch, model, self.comm.size)
        alike(self.comm, "join", {**self.arguments(), "the grid of a client": f"{batch}x{model}"}, problem)
        self.between = nodes(self.comm) > 1
        self.groups = min(model, self.count)
        dealt = intervals(self.count, self.groups)
        workers = self.comm.size - self.count
        server, slice_ = self.comm.rank - workers, self.comm.rank % model
        group = next(g for g, (_, stop) in enumerate(dealt) if server < stop) if server >= 0 else None
        if server < 0 and (led := [g for g in range(self.groups) if interval(model, self.groups, g)[0] == slice_]):
            group = led[0]
        self._share = dealt[group][1] - dealt[group][0] if group is not None else 0
        role = self.comm.Split(int(server >= 0), self.comm.rank)
        members = self.comm.Split(MPI.UNDEFINED if group is None else group, self.comm.rank)
        self._members = members  # type: ignore[assignment]
        if server < 0:
            return Grid(self.clients * batch, model, role)
        agree(self.comm, None)
        self._create()
        raise AssertionError("a server leaves inside create")

    def arguments(self) -> dict[str, object]:
        """What must be the same on every rank, by name."""
        return {
            "the number of servers": self.count, "the number of clients": self.clients, "the averaging": self.kind,
            "every": self.every, "alpha": float(self.alpha),
        }  # fmt: skip

    def give_up(self, sentence: str) -> None:
        """Tell the servers, which wait since `join`, that there will be no training; all workers call, then raise."""
        if not (self._opened or self._gone):
            self._gone = True
            agree(self.comm, sentence)

    def open(self) -> KVStore | None:
        """The store of this worker's group of slices, if it speaks for it. Collective over the job, the first time."""
        if self._gone:
            raise TrainingError("the servers left when training was refused: make Servers and join them again")
        if not self._opened:
            agree(self.comm, None)
            self._opened = True
            if self._members != MPI.COMM_NULL:
                self.store = self._create()
        return self.store

    def close(self) -> None:
        """Let the servers go; also done when the process ends. Collective over the workers."""
        if self.store is not None:
            self.store.close()

    def _create(self) -> KVStore:
        import mpips

        return mpips.create(STORES[self.kind], self._members, servers=self._share, clients=self.clients)


def misfit(servers: int, clients: int, batch: int, model: int, ranks: int) -> str | None:
    """Why such a job does not fit its ranks; None where it does."""
    needed = clients * batch * model + servers
    if min(servers, clients, batch, model) < 1 or needed != ranks:
        return (
            f"{counted(clients, 'client')} of {batch}x{model} and {counted(servers, 'server')} need "
            f"{counted(needed, 'rank')}, the job has {ranks}; give another --ranks, --grid, --clients or --servers"
        )
    return None

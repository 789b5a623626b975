"""Who is who: ranks become workers, clients, masters and servers. Each store has communicators of its own.

Workers are ranks 0..W-1, client c has the workers from c*W//C up to (c+1)*W//C, servers are the last ranks. Every
communicator of a store comes from here, and each epoch has communicators of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from collectives.network.drain import leave, part
from collectives.node.wait import Limits, drive, until
from mpips.keys.sharding import Interval, owners, split
from mpips.options import OptionError, Options
from mpips.runtime.rendezvous import Assembling, Room

WHAT = "mpips.create"
_arrivals: list[MPI.Request] = []
"""Under way; of who has stopped waiting, too, as the others may yet come."""


class _Card(msgspec.Struct, array_like=True):
    """What a rank brings to `create`: what it was asked for, or why it cannot."""

    kind: str
    options: dict[str, Any]
    refusal: str


@dataclass
class Layout:
    """One rank's view of the job. Ranks are those of `world`, a duplicate of the communicator given to `create`.

    The communicators are those of the present epoch: `again` replaces them.
    """

    kind: str
    options: Options
    rank: int
    num_workers: int
    num_servers: int
    clients: tuple[Interval, ...]
    nodes: tuple[int, ...]
    """The node of every rank, named by the lowest rank on it: MPI's own word, ranks that can share memory."""
    world: MPI.Intracomm
    workers: MPI.Intracomm | None = None
    """All workers, in rank order; None on a server."""
    client: MPI.Intracomm | None = None
    """The workers of this worker's client; None on a server."""
    servers: MPI.Intracomm | None = None
    """All servers; None on a worker."""

    @property
    def is_server(self) -> bool:
        """Whether this rank is one."""
        return self.rank >= self.num_workers

    @property
    def asynchronous(self) -> bool:
        """Whether each push counts at once, without a round of all workers."""
        return self.kind.endswith("_async")

    @property
    def survives(self) -> bool:
        """Whether the store goes on after a death."""
        return getattr(self.options, "spares", -1) >= 0

    @property
    def client_number(self) -> int:
        """The client of this worker."""
        return next(number for number, client in enumerate(self.clients) if self.rank < client.stop)

    @property
    def limits(self) -> Limits:
        """How long a wait may last."""
        return _limits(self.options)

    def groups(self) -> list[list[int]]:
        """The groups that contribute once to a round, each as the workers that own its slices."""
        return owners(self.clients, self.kind, self.options.masters)

    def server_rank(self, server: int) -> int:
        """The rank of a server in `world`."""
        return self.num_workers + server

    def same_node(self, a: int, b: int) -> bool:
        """Whether two ranks share a node."""
        return self.nodes[a] == self.nodes[b]

    def again(self) -> None:
        """Take new communicators for the next epoch, and give the old ones back with all that was sent on them.
        Collective over `world`, blocking."""
        old = self._communicators()
        self.world = self.world.Dup()
        self.begin()
        for comm in old:
            part(comm)

    def free(self) -> None:
        """Give the communicators back, as all ranks do, each when it likes. Does not block."""
        for comm in self._communicators():
            leave(comm)

    def begin(self) -> None:
        """Make the communicators of roles and clients. Collective over `world`, blocking."""
        group = _split(self.world, int(self.is_server), self.rank)
        if self.is_server:
            self.servers = group
        else:
            self.workers, self.client = group, _split(group, self.client_number, self.rank)

    def _communicators(self) -> list[MPI.Intracomm]:
        return [comm for comm in (self.client, self.workers, self.servers, self.world) if comm is not None]


def create(comm: MPI.Intracomm, kind: str, options: Options | None, refusal: str = "") -> Layout:
    """Agree on roles. Collective over `comm`, blocking; all ranks raise the same OptionError where some differ or one
    refuses. `options` is None where they could not be read."""
    limits = _limits(options or Options())
    _come(comm, limits)
    world = comm.Dup()
    if options is not None and not refusal:
        refusal = _check(kind, options, world.Get_size())
    try:
        _agree(Room(world), _Card(kind, {} if options is None else record(options), refusal), limits)
    except OptionError:
        part(world)
        raise
    assert options is not None
    size = world.Get_size()
    workers = options.workers_of(size)
    clients = tuple(split(Interval(0, workers), options.clients_of(kind, size)))
    nodes = _nodes(world, options.shared_memory)
    made = Layout(kind, options, world.Get_rank(), workers, options.servers, clients, nodes, world)
    made.begin()
    return made


def record(options: Options) -> dict[str, Any]:
    """Options as a message holds them."""
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def _limits(options: Options) -> Limits:
    return Limits(options.stall_seconds, options.timeout_seconds)


def _come(comm: MPI.Intracomm, limits: Limits) -> None:
    """Wait until all ranks have come. What makes communicators blocks in MPI, and must not before."""
    who = "all must call it, servers too, which leave when their last store is closed"
    what = f"{WHAT}, to which not all {comm.Get_size()} ranks have come ({who}),"
    request = comm.Ibarrier()
    _arrivals.append(request)
    drive(until(request.Test), Assembling(limits), what)
    _arrivals.remove(request)


def _check(kind: str, options: Options, size: int) -> str:
    try:
        options.clients_of(kind, size)
    except OptionError as error:
        return str(error)
    return ""


def _agree(room: Room, card: _Card, limits: Limits) -> None:
    encoded = room.exchange(msgspec.msgpack.encode(card), WHAT, Assembling(limits, room.missing))
    cards = [msgspec.msgpack.decode(data, type=_Card) for data in encoded]
    refused = [rank for rank, other in enumerate(cards) if other.refusal]
    if len(refused) == len(cards) and len({card.refusal for card in cards}) == 1:
        raise OptionError(cards[0].refusal)
    if refused:
        raise OptionError(f"rank {refused[0]}: {cards[refused[0]].refusal}")
    first = cards[0]
    for rank, other in enumerate(cards):
        if other.kind != first.kind:
            kinds = f"rank 0 asks for kind {first.kind!r}, rank {rank} for {other.kind!r}"
            raise OptionError(f"create: {kinds}; ask for the same on every rank")
        for name, value in first.options.items():
            if other.options[name] != value:
                raise OptionError(
                    f"create: option {name} is {value!r} on rank 0 and {other.options[name]!r} on rank {rank}; "
                    "give every rank the same"
                )


def _split(comm: MPI.Intracomm, number: int, rank: int) -> MPI.Intracomm:
    """The ranks of `comm` with this number, in order. Collective, blocking."""
    part = comm.Split(number, rank)
    assert isinstance(part, MPI.Intracomm)
    return part


def _nodes(world: MPI.Intracomm, shared_memory: bool) -> tuple[int, ...]:
    if not shared_memory:
        return tuple(range(world.Get_size()))
    node = world.Split_type(MPI.COMM_TYPE_SHARED, world.Get_rank())
    lowest, nodes = np.array([world.Get_rank()], np.int64), np.empty(world.Get_size(), np.int64)
    node.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    node.Free()
    world.Allgather(lowest, nodes)
    return tuple(nodes.tolist())

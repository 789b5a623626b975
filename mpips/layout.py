"""Who is who: ranks of a communicator become workers, clients, masters and servers, with a communicator for each group.

Workers are ranks 0..W-1, client c has the workers from c*W//C up to (c+1)*W//C, servers are the last ranks. Every
communicator of a store comes from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from mpips import meet
from mpips.meetings import Meetings
from mpips.options import OptionError, Options
from mpips.sharding import Interval, owners, split

if TYPE_CHECKING:
    from mpi4py import MPI


class _Card(msgspec.Struct, array_like=True):
    """What a rank brings to the meeting in `create`: what it was asked for, or why it cannot."""

    kind: str
    options: dict[str, int | float | str | bool]
    refusal: str


@dataclass(frozen=True)
class Layout:
    """One rank's view of the job. Ranks are those of `world`, a duplicate of the communicator given to `create`."""

    kind: str
    options: Options
    world: MPI.Comm
    rank: int
    num_workers: int
    num_servers: int
    clients: tuple[Interval, ...]
    nodes: tuple[int, ...]
    """The node of every rank, named by the lowest rank on it: MPI's own word, ranks that can share memory."""
    workers: MPI.Comm | None
    """All workers, in rank order; None on a server."""
    client: MPI.Comm | None
    """The workers of this worker's client; None on a server."""
    servers: MPI.Comm | None
    """All servers; None on a worker."""
    meetings: Meetings | None
    """Those of all workers; None on a server."""

    @property
    def is_server(self) -> bool:
        return self.rank >= self.num_workers

    @property
    def asynchronous(self) -> bool:
        return self.kind.endswith("_async")

    @property
    def client_number(self) -> int:
        """The client of this worker."""
        return next(number for number, client in enumerate(self.clients) if self.rank < client.stop)

    def groups(self) -> list[list[int]]:
        """The groups that contribute once to a round, each as the workers that own its slices."""
        return owners(self.clients, self.kind, self.options.masters)

    def server_rank(self, server: int) -> int:
        return self.num_workers + server

    def same_node(self, a: int, b: int) -> bool:
        return self.nodes[a] == self.nodes[b]

    def free(self, unfinished: bool = False) -> None:
        """Give the communicators back; collective over `world`. `unfinished`: MPI has to do with a collective that the
        workers that sum together have given up."""
        from collectives.network.drain import part

        summing = self.client if self.num_servers else self.workers
        for comm in (self.client, self.workers, self.servers, self.world):
            if comm is not None:
                part(comm, unfinished and comm is summing)


def create(comm: MPI.Comm, kind: str, options: Options | None, refusal: str = "") -> Layout:
    """Agree on roles. Collective over `comm`; all ranks raise the same OptionError where some differ or one refuses."""
    from mpi4py import MPI

    limits = options or Options()
    meet.come(comm, limits.stall_seconds, limits.timeout_seconds)
    world = comm.Dup()
    fields = {} if options is None else {name: getattr(options, name) for name in options.__dataclass_fields__}
    if options is not None and not refusal:
        refusal = _check(kind, options, world.Get_size())
    try:
        _agree(world, _Card(kind, fields, refusal))
    except OptionError:
        world.Free()
        raise
    assert options is not None
    rank, workers = world.Get_rank(), options.workers_of(world.Get_size())
    clients = tuple(split(Interval(0, workers), options.clients_of(kind, world.Get_size())))
    role = rank >= workers
    role_comm = world.Split(int(role), rank)
    client_comm = None
    if not role:
        number = next(number for number, client in enumerate(clients) if rank < client.stop)
        client_comm = role_comm.Split(number, rank)
    meetings = None if role else Meetings(role_comm, options.stall_seconds, options.timeout_seconds)
    return Layout(
        kind=kind, options=options, world=world, rank=rank, num_workers=workers, num_servers=options.servers,
        clients=clients, nodes=_nodes(world, options.shared_memory, MPI.COMM_TYPE_SHARED),
        workers=None if role else role_comm, client=client_comm, servers=role_comm if role else None,
        meetings=meetings,
    )  # fmt: skip


def _check(kind: str, options: Options, size: int) -> str:
    try:
        options.clients_of(kind, size)
    except OptionError as error:
        return str(error)
    return ""


def _agree(world: MPI.Comm, card: _Card) -> None:
    encoded = meet.exchange(world, msgspec.msgpack.encode(card), "mpips.create")
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


def _nodes(world: MPI.Comm, shared_memory: bool, shared: int) -> tuple[int, ...]:
    if not shared_memory:
        return tuple(range(world.Get_size()))
    node = world.Split_type(shared, world.Get_rank())
    mine = meet.exchange(node, b"%d" % world.Get_rank(), "mpips.create")[0]
    node.Free()
    return tuple(int(lowest) for lowest in meet.exchange(world, mine, "mpips.create"))

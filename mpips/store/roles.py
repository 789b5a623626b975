"""Roles of ranks (worker, client, server, spare) and their communicators: at `create`, and anew after each death.

Workers are ranks 0..W-1, client c has the workers from c*W//C up to (c+1)*W//C. Servers come after them, and spares are
the last ranks. Every communicator of a store comes from here, and each generation has its own.

Where a machine has more processes than cores, each process gets one core, in turn (`Seat`), unless a launcher has bound
any of them. A process that waits gives its core away at every look, which the kernel takes for work: it might leave
both servers on one core for seconds. In containers, or on hosts of a lab, nobody is bound.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from mpips.collectives.communicator import abandon
from mpips.collectives.fabric.failure import made
from mpips.collectives.fabric.requests import Roll, leave, part
from mpips.collectives.fabric.wait import Limits
from mpips.collectives.machine import Quota, bound_cores, find_quota, usable_cores
from mpips.store.keys.sharding import Interval, owners, split
from mpips.store.options import OptionError, Options
from mpips.store.recovery import membership as ring
from mpips.store.recovery.membership import Before, Roles, refusal, succession
from mpips.store.runtime.errors import LostError
from mpips.store.runtime.rendezvous import Gathering, MeetingPlace

WHAT = "mpips.create"
STORE = 1 << 63
"""Above the numbers of lanes that communicators have."""
_stores = itertools.count()


class _Card(msgspec.Struct, array_like=True):
    """Carry a rank's wishes to `create`, or the reason why it cannot come."""

    kind: str
    options: dict[str, Any]
    refusal: str
    lane: int


@dataclass
class Layout:
    """One rank's view of the job. Ranks are those of `world`, a duplicate of the communicator given to `create`.

    The communicators are those of the present generation: `again` replaces them.
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
    spares: int = 0
    """How many ranks wait to take the place of one that dies; the last of `world`."""
    workers: MPI.Intracomm | None = None
    """All workers, in rank order; None elsewhere."""
    client: MPI.Intracomm | None = None
    """The workers of this worker's client; None elsewhere."""
    sums: MPI.Intracomm | None = None
    """Those among whom the store itself sums pushes: all workers where it has no servers, the client in `mpi_*` kinds;
    else None. Its thread makes calls there beside the program's, which take `workers` and `client`."""
    servers: MPI.Intracomm | None = None
    """All servers, in rank order; None elsewhere."""
    before: Before | None = None
    """What its ranks were in the generation before; None in the first."""
    lane: int = STORE
    """What the recorder knows the store by, on all its ranks."""

    @property
    def is_server(self) -> bool:
        """Return whether this rank is one."""
        return 0 <= self.rank - self.num_workers < self.num_servers

    @property
    def is_worker(self) -> bool:
        """Return whether this rank is one."""
        return self.rank < self.num_workers

    @property
    def role(self) -> str:
        """Return what this rank is: "worker", "server" or "spare"."""
        return "worker" if self.is_worker else "spare" if self.is_spare else "server"

    @property
    def is_spare(self) -> bool:
        """Return whether this rank waits to take the place of one that dies."""
        return self.rank >= self.num_workers + self.num_servers

    @property
    def survives(self) -> bool:
        """Return whether the store goes on after a death."""
        return self.options.spares >= 0

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that have died at the end of the generation before, as they were numbered in it."""
        return () if self.before is None else self.before.lost

    @property
    def changed(self) -> bool:
        """Return whether its ranks are others than in the generation before."""
        before = self.before
        return before is not None and (bool(before.lost) or before.origin != tuple(range(len(self.nodes))))

    @property
    def fresh(self) -> bool:
        """Return whether this rank was a spare in the generation before, and now has a role."""
        before = self.before
        return (
            before is not None
            and not self.is_spare
            and (before.origin[self.rank] >= before.num_workers + before.num_servers)
        )

    @property
    def asynchronous(self) -> bool:
        """Return whether each push counts at once, without a round of all workers."""
        return self.kind.endswith("_async")

    @property
    def client_number(self) -> int:
        """The client of this worker."""
        return next(number for number, client in enumerate(self.clients) if self.rank < client.stop)

    @property
    def limits(self) -> Limits:
        """Return how long a wait may last."""
        return _limits(self.options)

    def groups(self) -> list[list[int]]:
        """The groups that contribute once to a round, each as the workers that own its slices."""
        return owners(self.clients, self.kind, self.options.masters)

    def server_rank(self, server: int) -> int:
        """The rank of a server in `world`."""
        return self.num_workers + server

    def same_node(self, a: int, b: int) -> bool:
        """Return whether two ranks share a node."""
        return self.nodes[a] == self.nodes[b]

    def again(self, left: MPI.Intracomm, grow: bool = False) -> None:
        """Take roles and communicators for the next generation, of the ranks of `left`: those of `world`, but for the
        dead, in order. Where a worker asks for it by `grow`, spares that are left become workers. The old communicators
        are the caller's to give back. Collective over `left`, blocking.

        LostError, on all alike, where the store cannot go on with them.
        """
        there = left.Get_group().Translate_ranks(None, self.world.Get_group())
        old = Roles(self.num_workers, self.num_servers, self.spares, self.clients)
        lost = tuple(sorted(set(range(old.size)) - set(there)))
        grows = np.array([grow], np.int8)
        if self.spares:
            left.Allreduce(MPI.IN_PLACE, grows, MPI.MAX)
        new = succession(old, lost, self.nodes, self.spares > 0 and bool(grows[0]), alone=self.kind != "mpi_sync")
        if why := refusal(old, new):
            raise LostError(f"recover: {why}")
        self.workers = self.client = self.servers = self.sums = None
        self.before = Before(new.origin, lost, self.num_workers, self.num_servers, self.nodes, old.clients, new.places)
        self.num_workers, self.num_servers, self.spares, clients = new.roles
        self.clients = tuple(Interval(*client) for client in clients)
        self.world = _split(left, 0, new.origin.index(self.rank))
        self.rank = self.world.Get_rank()
        nodes = [self.nodes[rank] for rank in new.origin]
        self.nodes = tuple(nodes.index(node) for node in nodes)  # the lowest rank on each
        self.begin()

    def free(self) -> None:
        """Give the communicators back, as all ranks do, each when it likes. Does not block."""
        for comm in self.communicators():
            leave(comm)

    def part(self) -> None:
        """Free the communicators, with all that was sent on them. Collective over `world`, blocking until all ranks
        have come."""
        for comm in self.communicators():
            part(comm)

    def abandon(self) -> None:
        """Free the communicators where ranks have died, and none of the others uses them any more. Does not block."""
        for comm in self.communicators():
            abandon(comm)

    def begin(self) -> None:
        """Make the communicators of roles and clients. Collective over `world`, blocking."""
        self.workers = self.client = self.servers = self.sums = None
        group = _split(self.world, int(self.is_server) + 2 * int(self.is_spare), self.rank)
        if self.is_server:
            self.servers = group
        elif not self.is_spare:
            self.workers, self.client = group, _split(group, self.client_number, self.rank)
            if not self.num_servers or self.kind.startswith("mpi_"):
                self.sums = made((self.client if self.num_servers else group).Dup())

    def communicators(self) -> list[MPI.Intracomm]:
        """Return all that this rank is in, those of fewer ranks first."""
        return [comm for comm in (self.sums, self.client, self.workers, self.servers, self.world) if comm is not None]


def create(comm: MPI.Intracomm, kind: str, options: Options | None, refusal: str = "") -> Layout:
    """Agree on roles. Collective over `comm`, blocking; all ranks raise the same OptionError where some differ or one
    refuses. `options` is None where they could not be read."""
    limits = _limits(options or Options())
    _come(comm, limits)
    world = made(comm.Dup())
    if options is not None and not refusal:
        try:
            options.clients_of(kind, world.Get_size())
        except OptionError as error:
            refusal = str(error)
    try:
        lane = STORE + (MPI.COMM_WORLD.Get_rank() << 32) + next(_stores)  # rank 0's becomes that of all
        lane = _agree(world, _Card(kind, {} if options is None else asdict(options), refusal, lane), limits)
    except OptionError:
        part(world)
        raise
    assert options is not None
    size = world.Get_size()
    workers = options.workers_of(size)
    clients = tuple(split(Interval(0, workers), options.clients_of(kind, size)))
    nodes = _nodes(world, options.shared_memory)
    if why := ring.refuse_mirrors(options.mirrors, options.spares, nodes[workers : workers + options.servers]):
        part(world)
        raise OptionError(why)
    spares = max(0, options.spares)
    layout = Layout(kind, options, world.Get_rank(), workers, options.servers, clients, nodes, world, spares, lane=lane)
    layout.begin()
    return layout


def _limits(options: Options) -> Limits:
    return Limits(options.stall_seconds, options.timeout_seconds)


def _come(comm: MPI.Intracomm, limits: Limits) -> None:
    """Wait until all ranks have come. What makes communicators blocks in MPI, and must not before."""
    who = "all must call it, servers too, which leave when their last store is closed"
    what = f"{WHAT}, to which not all {comm.Get_size()} ranks have come ({who}),"
    Roll(comm, what).wait(limits)


def _agree(world: MPI.Intracomm, card: _Card, limits: Limits) -> int:
    """Return the lane of the store that all ranks want alike; OptionError on all where they do not."""
    encoded = Gathering(world, limits).meet(msgspec.msgpack.encode(card), WHAT)
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
    return first.lane


def _split(comm: MPI.Intracomm, number: int, rank: int) -> MPI.Intracomm:
    """The ranks of `comm` with this number, in order. Collective, blocking."""
    part = made(comm.Split(number, rank))
    assert isinstance(part, MPI.Intracomm)
    return part


def _nodes(world: MPI.Intracomm, shared_memory: bool) -> tuple[int, ...]:
    if not shared_memory:
        return tuple(range(world.Get_size()))
    node = made(world.Split_type(MPI.COMM_TYPE_SHARED, world.Get_rank()))
    lowest, nodes = np.array([world.Get_rank()], np.int64), np.empty(world.Get_size(), np.int64)
    node.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    node.Free()
    world.Allgather(lowest, nodes)
    return tuple(nodes.tolist())


BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Another one for each start of a machine, and the same in all its containers."""
Cores = frozenset[int]


class Processor(msgspec.Struct, array_like=True, frozen=True):
    """Name the machine, cores and quota of a process."""

    machine: str
    cores: list[int]
    quota: Quota | None


def crowded(allowed: Sequence[Cores], quotas: Sequence[Quota | None] = ()) -> bool:
    """Return whether processes of a machine, which may use these cores within these quotas, are more than the cores."""
    return bound_cores(len(frozenset().union(*allowed)), quotas) < len(allowed)


def spread(allowed: Sequence[Cores]) -> list[int] | None:
    """A core for each process of a machine, from the cores that each may use; None where they stay as they are."""
    cores = sorted(allowed[0])
    if len(set(allowed)) > 1 or not 1 < len(cores) < len(allowed):
        return None
    return [cores[index % len(cores)] for index in range(len(allowed))]


class Seat:
    """The core of this process, until it leaves."""

    def __init__(self, layout: Layout, generation: MeetingPlace) -> None:
        """Collective over all ranks of the store, blocking. `shared`: some process has no core alone. Spares sleep, and
        do not count in that."""
        self.before: Cores = frozenset(os.sched_getaffinity(0))
        self.usable = usable_cores()
        mine = Processor(BOOT.read_text(), sorted(self.before), find_quota())
        said = generation.meet(msgspec.msgpack.encode(mine), "mpips.create", True)
        every = [msgspec.msgpack.decode(data, type=Processor) for data in said]
        here = [rank for rank, place in enumerate(every) if place.machine == mine.machine]
        allowed = [frozenset(every[rank].cores) for rank in here]
        alone = all(layout.same_node(rank, layout.rank) for rank in here)
        busy = [rank for rank in here if rank < layout.num_workers + layout.num_servers]
        busy = busy or here
        self.shared = crowded([frozenset(every[rank].cores) for rank in busy], [every[rank].quota for rank in busy])
        cores = spread(allowed) if alone else None
        self.own = frozenset([cores[here.index(layout.rank)]]) if cores else self.before
        self._take(self.own)

    def step_aside(self) -> None:
        """The calling thread leaves this process' core to its main thread, where it has but that one."""
        self._take(self.before - self.own or self.before)

    def leave(self) -> None:
        """The process runs where it ran before."""
        self._take(self.before)

    def _take(self, cores: Cores) -> None:
        if cores != frozenset(os.sched_getaffinity(0)):
            with suppress(OSError):  # where a container forbids it, all stays as it is
                os.sched_setaffinity(0, cores)

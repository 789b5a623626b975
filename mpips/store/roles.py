"""Roles of ranks (worker, client, server, spare) and their communicators: at `create`, and again after each death.

In the order of ranks, a job has W workers, then its servers, then its spares. Client c of C consists of workers c*W//C
up to, but not including, (c+1)*W//C. Every communicator of a store is made here. Each generation (the life of a store
between two failures) has its own communicators.

If a machine has more processes than cores, processes are bound to one core each, round robin (`CorePinning`), unless a
launcher has bound any of them. Without binding, the kernel might leave two servers on one core for seconds: a waiting
process polls, and yields its core after each poll, and the kernel counts this as work. In containers and on emulated
hosts processes are not bound.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import msgspec
import numpy as np
from mpi4py import MPI

from mpips.collectives.communicator import abandon
from mpips.collectives.fabric.failure import guard_comm
from mpips.collectives.fabric.requests import ArrivalBarrier, close_collectively, close_later
from mpips.collectives.fabric.wait import Limits
from mpips.collectives.machine import Quota, bound_cores, find_quota, usable_cores
from mpips.store.keys.sharding import Interval, owners, split
from mpips.store.options import OptionError, Options
from mpips.store.recovery import membership as ring
from mpips.store.recovery.membership import Before, Roles, map_ranks, refusal
from mpips.store.runtime.errors import LostError
from mpips.store.runtime.rendezvous import Gathering, MeetingPlace, agree

WHAT = "mpips.create"
# The first number of a store in the recorder (`Layout.lane`). Communicators have smaller numbers.
STORE = 1 << 63
_stores = itertools.count()


@dataclass
class Layout:
    """One rank's view of a store's ranks. Rank numbers are those of `world`, a duplicate of `create`'s communicator.

    The object shows the current generation. When the next generation begins, `rebuild_after_death` makes another
    layout, and `become` copies it into this object. So all code with a reference to this object sees the new
    generation.
    """

    kind: str
    options: Options
    rank: int
    num_workers: int
    num_servers: int
    clients: tuple[Interval, ...]
    # For each rank, the lowest rank on its node, which stands for the node. As in MPI, a node is a set of ranks that
    # can share memory.
    nodes: tuple[int, ...]
    world: MPI.Intracomm
    # number of ranks that wait to replace dead ranks; they are the last ranks of `world`
    spares: int = 0
    # all workers, in the order of ranks; None on other ranks
    workers: MPI.Intracomm | None = None
    # the workers of this worker's client; None on other ranks
    client: MPI.Intracomm | None = None
    # The ranks among which the store itself sums pushes: all workers if the store has no servers, the client in `mpi_*`
    # kinds, otherwise None. This is a separate communicator, because the communication thread may use it while the
    # program uses `workers` and `client`.
    sums: MPI.Intracomm | None = None
    # all servers, in the order of ranks; None on other ranks
    servers: MPI.Intracomm | None = None
    # the previous generation; None in the first
    before: Before | None = None
    # the number of this store in the recorder, which is the same on all ranks of the store
    lane: int = STORE

    @property
    def is_server(self) -> bool:
        return 0 <= self.rank - self.num_workers < self.num_servers

    @property
    def is_worker(self) -> bool:
        return self.rank < self.num_workers

    @property
    def role(self) -> str:
        """The role of this rank: "worker", "server" or "spare"."""
        return "worker" if self.is_worker else "spare" if self.is_spare else "server"

    @property
    def is_spare(self) -> bool:
        """True if this rank waits to take the place of a rank that dies."""
        return self.rank >= self.num_workers + self.num_servers

    @property
    def survives(self) -> bool:
        """True if the store survives a rank's death."""
        return self.options.spares >= 0

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that died in the previous generation, by their numbers in that generation."""
        return () if self.before is None else self.before.lost

    @property
    def changed(self) -> bool:
        """True if ranks have died or been renumbered since the previous generation."""
        before = self.before
        return before is not None and (bool(before.lost) or before.origin != tuple(range(len(self.nodes))))

    @property
    def fresh(self) -> bool:
        """True if this rank was a spare in the previous generation and is a worker or server now."""
        before = self.before
        return (
            before is not None
            and not self.is_spare
            and (before.origin[self.rank] >= before.num_workers + before.num_servers)
        )

    @property
    def asynchronous(self) -> bool:
        """True if each push is applied by itself, without waiting for a round of all workers."""
        return self.kind.endswith("_async")

    @property
    def client_number(self) -> int:
        """The number of this worker's client."""
        return next(number for number, client in enumerate(self.clients) if self.rank < client.stop)

    @property
    def limits(self) -> Limits:
        """The time after which a wait gives a warning, and the time after which it fails."""
        return _limits(self.options)

    def groups(self) -> list[list[int]]:
        """Return the groups of workers. Each group as a whole contributes once to a round (see `sharding.owners`)."""
        return owners(self.clients, self.kind, self.options.masters)

    def server_rank(self, server: int) -> int:
        """Return the rank of a server in `world`."""
        return self.num_workers + server

    def same_node(self, a: int, b: int) -> bool:
        return self.nodes[a] == self.nodes[b]

    def become(self, other: Layout) -> None:
        """Take over everything from another layout of the same store."""
        for field in fields(self):
            setattr(self, field.name, getattr(other, field.name))

    def rebuild_after_death(self, left: MPI.Intracomm, grow: bool = False) -> Layout:
        """Return the layout of the next generation, with new roles and communicators. Collective over `left`, blocking.

        This layout and its communicators stay as they are.

        Args:
            left: The ranks of `world` that are alive, in the same order.
            grow: If any worker passes True, spares that are not needed to replace dead ranks become workers.

        Raises:
            LostError: On all ranks, if the remaining ranks are not enough for the store.
        """
        there = left.Get_group().Translate_ranks(None, self.world.Get_group())
        old = Roles(self.num_workers, self.num_servers, self.spares, self.clients)
        lost = tuple(sorted(set(range(old.size)) - set(there)))
        grows = np.array([grow], np.int8)
        if self.spares:
            left.Allreduce(MPI.IN_PLACE, grows, MPI.MAX)
        new = map_ranks(old, lost, self.nodes, self.spares > 0 and bool(grows[0]), alone=self.kind != "mpi_sync")
        if why := refusal(old, new):
            raise LostError(f"recover: {why}")
        world = _split(left, 0, new.origin.index(self.rank))
        nodes = [self.nodes[rank] for rank in new.origin]
        layout = replace(
            self,
            rank=world.Get_rank(),
            num_workers=new.roles.num_workers,
            num_servers=new.roles.num_servers,
            spares=new.roles.spares,
            clients=tuple(Interval(*client) for client in new.roles.clients),
            # Name each node by the lowest new rank on it.
            nodes=tuple(nodes.index(node) for node in nodes),
            world=world,
            before=Before(new.origin, lost, self.num_workers, self.num_servers, self.nodes, old.clients, new.places),
        )
        layout.begin()
        return layout

    def free(self) -> None:
        """Mark the communicators for release. They are freed once all ranks have called this method. Does not block."""
        for comm in self.communicators():
            close_later(comm)

    def part(self) -> None:
        """Free the communicators, and discard messages on them that no rank has received.

        Collective over `world`; blocks until all ranks have called this method.
        """
        for comm in self.communicators():
            close_collectively(comm)

    def abandon(self) -> None:
        """Free the communicators after ranks have died.

        Call this only if no other rank uses them any more. Does not block.
        """
        for comm in self.communicators():
            abandon(comm)

    def begin(self) -> None:
        """Make the communicators of workers, servers and clients. Collective over `world`, blocking."""
        self.workers = self.client = self.servers = self.sums = None
        group = _split(self.world, int(self.is_server) + 2 * int(self.is_spare), self.rank)
        if self.is_server:
            self.servers = group
        elif not self.is_spare:
            self.workers, self.client = group, _split(group, self.client_number, self.rank)
            if not self.num_servers or self.kind.startswith("mpi_"):
                self.sums = guard_comm((self.client if self.num_servers else group).Dup())

    def communicators(self) -> list[MPI.Intracomm]:
        """Return all communicators that this rank is in, the smaller ones first."""
        return [comm for comm in (self.sums, self.client, self.workers, self.servers, self.world) if comm is not None]


def create(comm: MPI.Intracomm, kind: str, options: Options | None, refusal: str = "") -> Layout:
    """Agree on the roles of a new store. Collective over `comm`, blocking.

    Args:
        options: None if the options could not be read.
        refusal: The reason why this rank cannot join, or "".

    Raises:
        OptionError: On all ranks, if any rank has a `refusal`, or if kind or options differ between ranks.
    """
    limits = _limits(options or Options())
    _come(comm, limits)
    world = guard_comm(comm.Dup())
    if options is not None and not refusal:
        try:
            options.clients_of(kind, world.Get_size())
        except OptionError as error:
            refusal = str(error)
    lane = STORE + (MPI.COMM_WORLD.Get_rank() << 32) + next(_stores)
    items = [("kind", repr(kind))] + [(name, repr(value)) for name, value in asdict(options or Options()).items()]
    refused = OptionError(refusal) if refusal else None
    try:
        lanes = agree(Gathering(world, limits), WHAT, items, refused, "option", data=b"%d" % lane)
    except ValueError as error:
        close_collectively(world)
        raise OptionError(str(error)) from None
    assert options is not None
    size = world.Get_size()
    workers = options.workers_of(size)
    clients = tuple(split(Interval(0, workers), options.clients_of(kind, size)))
    nodes = _nodes(world, options.shared_memory)
    if why := ring.refuse_mirrors(options.mirrors, options.spares, nodes[workers : workers + options.servers]):
        close_collectively(world)
        raise OptionError(why)
    spares = max(0, options.spares)
    layout = Layout(kind, options, world.Get_rank(), workers, options.servers, clients, nodes, world, spares)
    # All ranks use the number that rank 0 has chosen for the store.
    layout.lane = int(lanes[0])
    layout.begin()
    return layout


def _limits(options: Options) -> Limits:
    return Limits(options.stall_seconds, options.timeout_seconds)


def _come(comm: MPI.Intracomm, limits: Limits) -> None:
    """Wait until all ranks have called `create`.

    The next step makes communicators, which blocks inside MPI without a time limit.
    """
    who = "all must call it, servers too, which leave when their last store is closed"
    what = f"{WHAT}, to which not all {comm.Get_size()} ranks have come ({who}),"
    ArrivalBarrier(comm, what).wait(limits)


def _split(comm: MPI.Intracomm, number: int, rank: int) -> MPI.Intracomm:
    """Return a communicator of the ranks that pass the same number, in the order of `rank`. Collective, blocking."""
    part = guard_comm(comm.Split(number, rank))
    assert isinstance(part, MPI.Intracomm)
    return part


def _nodes(world: MPI.Intracomm, shared_memory: bool) -> tuple[int, ...]:
    if not shared_memory:
        return tuple(range(world.Get_size()))
    node = guard_comm(world.Split_type(MPI.COMM_TYPE_SHARED, world.Get_rank()))
    lowest, nodes = np.array([world.Get_rank()], np.int64), np.empty(world.Get_size(), np.int64)
    node.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    node.Free()
    world.Allgather(lowest, nodes)
    return tuple(nodes.tolist())


# The content of this file is different after each boot of a machine. All containers on the machine see the same
# content.
BOOT = Path("/proc/sys/kernel/random/boot_id")
Cores = frozenset[int]


class Processor(msgspec.Struct, array_like=True, frozen=True):
    """The machine, cores and CPU quota of a process."""

    machine: str
    cores: list[int]
    quota: Quota | None


def crowded(allowed: Sequence[Cores], quotas: Sequence[Quota | None] = ()) -> bool:
    """True if a machine has more processes than cores.

    Only cores that the processes may use, within their quotas, count.

    Args:
        allowed: The cores that each process may use.
        quotas: The CPU quota of each process.
    """
    return bound_cores(len(frozenset().union(*allowed)), quotas) < len(allowed)


def spread(allowed: Sequence[Cores]) -> list[int] | None:
    """Choose a core for each process of a machine. Return None if the processes should not be bound.

    Args:
        allowed: The cores that each process may use. If these sets differ, a launcher has bound the processes.
    """
    cores = sorted(allowed[0])
    if len(set(allowed)) > 1 or not 1 < len(cores) < len(allowed):
        return None
    return [cores[index % len(cores)] for index in range(len(allowed))]


class CorePinning:
    """The binding of this process to one core, until `leave`.

    `shared` is True if the machine has more processes than cores.
    """

    def __init__(self, layout: Layout, generation: MeetingPlace) -> None:
        """Find a core for this process. Collective over all ranks of the store, blocking."""
        self.before: Cores = frozenset(os.sched_getaffinity(0))
        self.usable = usable_cores()
        mine = Processor(BOOT.read_text(), sorted(self.before), find_quota())
        said = generation.meet(msgspec.msgpack.encode(mine), "mpips.create", True)
        every = [msgspec.msgpack.decode(data, type=Processor) for data in said]
        here = [rank for rank, place in enumerate(every) if place.machine == mine.machine]
        allowed = [frozenset(every[rank].cores) for rank in here]
        alone = all(layout.same_node(rank, layout.rank) for rank in here)
        busy = [rank for rank in here if rank < layout.num_workers + layout.num_servers]
        # Do not count spares, because they sleep. But count them if a machine has only spares.
        busy = busy or here
        self.shared = crowded([frozenset(every[rank].cores) for rank in busy], [every[rank].quota for rank in busy])
        cores = spread(allowed) if alone else None
        self.own = frozenset([cores[here.index(layout.rank)]]) if cores else self.before
        self._take(self.own)

    def step_aside(self) -> None:
        """Let the calling thread run on other cores than the main thread, if this process may use others."""
        self._take(self.before - self.own or self.before)

    def leave(self) -> None:
        """Undo the binding: let the process run on all cores that it could use before."""
        self._take(self.before)

    def _take(self, cores: Cores) -> None:
        if cores != frozenset(os.sched_getaffinity(0)):
            # Some containers forbid a change of the binding. In this case leave the binding as it is.
            with suppress(OSError):
                os.sched_setaffinity(0, cores)

"""`recover()`: how a store continues after a failure or a death, and how a dead server's units are restored.

The next generation begins with all ranks that are left, or not at all. An attempt to begin it has seven steps:

    1 agree who is left         `renew`: all living ranks report that they continue, and get roles (`membership`)
    2 gather inventories        `Member.take_inventory`: what this rank holds; all ranks exchange their inventories
    3 choose the round          `plan.choose_rounds`: one round for all keys, if it can be restored
    4 plan                      `plan.make_plan`: pure data, the same on every rank
    5 move                      `Member.move`: copy or send the bytes as planned (`UnitMover`)
    6 rebuild                   `Member.rebuild`: connections, keys and units of the new generation
    7 begin the generation      all ranks agree that all have finished; otherwise all undo the attempt and try again

A *member* is one rank's part in a recovery: that of a server, a worker or a spare.

A dead server's units are restored as follows. All ranks of its node have its memory mapped, and a *ledger* in that
memory tells them where each unit is (`memory`). In step 2 the lowest rank that is left on the node brings an
*inventory* of the dead server's units, with the rounds that their *undo copies* can restore. In step 4 the *plan* names
that rank as the holder of these units, and assigns parts of them to the current servers. In step 5 a server that has
the memory mapped copies its parts itself. The holder sends the parts of the other servers.

If the whole node is lost, the copies of its *mirror* are used instead (`mirror`). In a store without servers every
worker has all keys, and one worker sends them to the workers that lack them (`ReplicaPlan`). A *service*, such as
tables, takes part in steps 2 to 5 through its `ServiceKind`. This module cannot decode the inventory and the plan of a
service.

A process may die at any moment. It may die while other ranks make new communicators, and these ranks then block inside
MPI. So a thread watches for deaths during that time (`collectives.fabric.failure.CommCreationGuard`). At the end all
ranks learn by MPI's uniform agreement whether all of them have finished, and all get the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Generic, TypeVar

import msgspec
import numpy as np
from mpi4py import MPI

from mpips.collectives import log
from mpips.collectives.errors import CollectiveError, StallError
from mpips.collectives.fabric.arena import Region
from mpips.collectives.fabric.failure import CommCreationGuard, find_deaths
from mpips.collectives.fabric.requests import collect_closed, cut_bytes, keep_until_complete, send
from mpips.collectives.recorder import own as recorder
from mpips.optimizers.base import initial
from mpips.optimizers.schedules import Groups
from mpips.store.keys.key import Array, Name
from mpips.store.recovery.memory import LastGeneration, NodeMemory, UnitMemory
from mpips.store.recovery.plan import (
    Inventory,
    RecoveryPlan,
    ServerReady,
    UnitPlan,
    UnitSlice,
    UnitSource,
    choose_rounds,
    make_plan,
)
from mpips.store.roles import Layout
from mpips.store.runtime.errors import LostError, StoreError, of_kind, uninterrupted
from mpips.store.runtime.generation import FREEING_SECONDS, NEVER, Generation
from mpips.store.server.service import FoundService, OldMemory, Service
from mpips.store.server.unit import Unit
from mpips.store.services import KINDS
from mpips.store.transport.frames import Created, dtype_of
from mpips.store.transport.lines import Connection, Line, connect

T = TypeVar("T")
WHAT = "recover"
SLEEP_SECONDS = 0.01
# tag of messages with old values, on the store's communicator
TAG = 5
MESSAGE_BYTES = 64 << 20
LOG = log.get("mpips.store")
# The outcome of an attempt. MPI_Comm_agree takes the AND of all ranks' outcomes, so the worst wins: FAILED (raise),
# then DIED (try again), then DONE.
DONE, DIED, FAILED = 0b11, 0b10, 0b00


def recover(
    generation: Generation, join: Callable[[], Member[T]], known: Container[Name] = (), grow: bool = False
) -> tuple[Member[T], T] | None:
    """Begin the next generation of a store with the ranks and data that are left.

    Collective over all living ranks of the store, blocking.

    Args:
        join: Returns this rank's `Member`. Called once the rank has its role.
        known: On a worker: the keys whose `init` has finished.
        grow: True if remaining spares become workers.

    Returns:
        This rank's member, and what the member's `rebuild` has returned. None as in `renew`.

    Raises:
        StoreError, StoreStallError: As in `renew`.
    """
    begun_at = time.monotonic()
    LOG.info("recovery of generation %d is asked for", generation.number)
    ring, sequence = recorder.begin_rare("recovery", f"of generation {generation.number}")

    def rebuild() -> tuple[Member[T], T]:
        layout, member = generation.layout, join()
        inventories = _gather(generation, member.take_inventory(known), Inventory)  # 2 gather inventories
        services = _find_services(layout, inventories)
        synchronous, replicas = not layout.asynchronous, not layout.num_servers
        choice = choose_rounds(inventories, synchronous, replicas, services.values())  # 3 choose the round
        plan = make_plan(layout, inventories, choice, member.lines, services)  # 4 plan
        ready = _gather(generation, member.move(plan), ServerReady)  # 5 move
        servers = ready[layout.num_workers : layout.num_workers + layout.num_servers]
        return member, member.rebuild(plan, servers)  # 6 rebuild

    begun = renew(generation, rebuild, grow)  # 1 agree who is left, and 7 begin the generation
    if begun is not None:
        member, layout = begun[0], generation.layout
        member.commit()
        LOG.info(
            "recovered in %.3f s, %d bytes moved: %d workers, %d servers, %d spares; dead since the last "
            "generation: %s",
            time.monotonic() - begun_at,
            member.nbytes,
            layout.num_workers,
            layout.num_servers,
            layout.spares,
            layout.lost or "none",
        )
        ring.end(sequence)
    return begun


def _gather(generation: Generation, own: T, kind: type[T]) -> list[T]:
    """Exchange a value between all ranks. Return the values of all ranks in rank order. Collective, blocking."""
    return [
        msgspec.msgpack.decode(data, type=kind) for data in generation.meet(msgspec.msgpack.encode(own), WHAT, True)
    ]


def _find_services(layout: Layout, inventories: Sequence[Inventory]) -> dict[str, FoundService]:
    """Combine the inventories of all ranks for each service that some worker knows."""
    services = {}
    for kind in KINDS:
        if any(kind.name in inventory.known for inventory in inventories):
            known = [
                None if inventory.keys is None else inventory.known.get(kind.name, b"") for inventory in inventories
            ]
            held = [inventory.held.get(kind.name, b"") for inventory in inventories]
            services[kind.name] = kind.find(layout, known, held, [inventory.mapped for inventory in inventories])
    return services


def former_rank(layout: Layout) -> int:
    """Return this process's rank in the last generation, or -1 if it was neither a worker nor a server."""
    before = layout.before
    if before is None:
        return layout.rank
    rank = before.origin[layout.rank]
    return rank if rank < before.num_workers + before.num_servers else -1


# ---- 1 and 7: a generation begins with all ranks that are left, or not at all


def renew(generation: Generation, rebuild: Callable[[], T], grow: bool = False) -> T | None:
    """Begin the next generation, and return the result of `rebuild`.

    Collective over all ranks of the store, blocking. The layout gets new communicators
    (`Layout.rebuild_after_death`). Messages on the old communicators are dropped.

    If the store survives deaths, `rebuild` may be called several times, once in each attempt. So it must not change the
    old state that it needs.

    Args:
        grow: True if remaining spares become workers. It is enough if one worker passes True.

    Returns:
        The result of `rebuild`. None on a server or spare if the store ends instead.

    Raises:
        StoreError: On a worker, if another worker closes the store, or too few ranks are left.
        StoreStallError: A rank has not called this function within the limits. Call again to continue waiting.
    """
    if generation.over is None:
        generation.end("recover", CollectiveError(f"rank {generation.layout.rank} calls recover"))
    layout, barrier = generation.layout, generation.barrier
    limits = generation.limits if layout.is_worker else NEVER

    def begin() -> list[T]:
        if layout.survives:
            return _begin_with_survivors(generation, rebuild, grow)
        return _begin_with_all(generation, rebuild)

    try:
        while not (why := barrier.wait_until_all_would(limits)):
            with uninterrupted():
                if not (why := barrier.wait_until_all_go(limits)) and (begun := begin()):
                    return begun[0]
    except StallError as error:
        raise of_kind(error) from None
    if layout.is_worker:
        raise StoreError(f"{why}: the store cannot be recovered")
    return None


def _begin_with_all(generation: Generation, rebuild: Callable[[], T]) -> list[T]:
    """Begin the generation with the same ranks. Return the result of `rebuild` in a list."""
    layout, old = generation.layout, replace(generation.layout)
    layout.become(old.rebuild_after_death(old.world))
    old.part()
    generation.advance()
    collect_closed(FREEING_SECONDS)
    return [rebuild()]


def _begin_with_survivors(generation: Generation, rebuild: Callable[[], T], grow: bool) -> list[T]:
    """Begin the generation with the living ranks. Return the result of `rebuild` in a list, or [] to try again.

    If a process dies during the attempt, every other rank gets an error sooner or later, and all must try again. If a
    rank raises although nobody has died, all ranks raise. The old state stays until all ranks have finished the
    attempt, and is restored if they do not finish.
    """
    layout, barrier = generation.layout, generation.barrier
    # everything that an attempt replaces
    old, old_present = replace(layout), generation.present
    left = old.world.Shrink()
    assert isinstance(left, MPI.Intracomm)
    with suppress(MPI.Exception):
        # When this call returns, all ranks have made the communicator `left`. `CommCreationGuard` must not revoke
        # `left` earlier: Open MPI crashes if a communicator is revoked while other ranks are still making it.
        old.world.Agree(DONE)
    results: list[T] = []
    verdict, raised = DONE, None
    try:
        with CommCreationGuard(left) as making:
            layout.become(old.rebuild_after_death(left, grow))
            generation.advance()
            with generation.failing(WHAT):
                results.append(rebuild())
        # A process has died after this rank's last step. Another rank may not have finished its last step by then, so
        # discard this attempt.
        if making.broken:
            verdict = DIED
    except Exception as error:
        raised = error
        verdict = DIED if not isinstance(error, LostError) and find_deaths(left) else FAILED
    # The ranks first wait for each other outside of MPI. If they waited long inside the agreement, and a rank died
    # meanwhile, other ranks might never return from the agreement (Open MPI 5.0.11).
    barrier.wait_until_all_have_tried()
    try:
        verdict = left.Agree(verdict)
    except MPI.Exception:
        # MPI raises this on all ranks if a process has died.
        verdict = DIED
    if verdict == DONE:
        old.abandon() if layout.lost else old.free()
        collect_closed()
        return results
    if layout.world is not old.world:
        layout.abandon()
    layout.become(old)
    generation.present = old_present
    LOG.info("an attempt at generation %d has failed: %s", generation.number + 1, raised)
    if verdict == FAILED:
        raise raised or LostError("recover: another rank could not go on, as its own error says")
    return []


def wait_for_role(generation: Generation, join: Callable[[], Member[T]]) -> tuple[Member[T], T] | None:
    """Wait as a spare until this rank gets a role. Blocking.

    The rank sleeps, checks the generation now and then, and takes part in every recovery. Return the rank's member and
    what the member's `rebuild` has returned, or None if the store ends.
    """
    while not generation.barrier.is_closing():
        try:
            generation.look()
        except CollectiveError as error:
            generation.end("the wait of a spare", error)
        if generation.over is None:
            time.sleep(SLEEP_SECONDS)
            continue
        became = recover(generation, join)
        if became is None or not generation.layout.is_spare:
            return became
    return None


# ---- 2, 5 and 6: the part of one rank


class Member(Generic[T]):
    """One rank's part in a recovery: that of a server, a worker or a spare.

    The methods may be called again in another attempt, so they must keep the old state until `commit`. A subclass for
    each role adds what the role holds.

    Args:
        memory: The memory of the servers on this node, which outlives the servers.
    """

    # the place of this rank's own ledger, if the rank is a server with a ledger
    ledger: Region | None = None

    def __init__(self, layout: Layout, generation: Generation, memory: NodeMemory | None = None) -> None:
        self.layout = layout
        self.generation = generation
        self.memory = memory or NodeMemory()
        self._last: LastGeneration[NodeMemory] = LastGeneration()
        # bytes that this rank sent and received in the last attempt
        self.nbytes = 0

    @property
    def lines(self) -> Sequence[Line | None]:
        """A worker's connections to the servers. On other ranks a None for each server."""
        return [None] * self.layout.num_servers

    @property
    def old_memory(self) -> NodeMemory:
        """The memory of the last generation's servers. It is the same in every attempt to begin the next generation."""
        return self._last.get_or_save(self.generation.number, self.memory)

    def connect(self) -> Connection:
        """Connect workers and servers again, and map the memory of this node's servers. Collective, blocking."""
        connection = connect(self.layout, self.generation, self.generation.wait, self.ledger)
        self.new_memory = NodeMemory(connection.ledgers)
        return connection

    def take_inventory(self, known: Container[Name]) -> Inventory:
        """Connect again, and return what this rank holds. Collective.

        A worker reports only the keys in `known`.
        """
        old = self.old_memory
        if self.layout.num_servers:
            self.connection = self.connect()
        described = {kind.name: kind.describe(self.old_service(kind.name)) for kind in KINDS}
        held = {name: data for name, data in described.items() if data}
        return Inventory(old.owners(self.layout, self.generation.number), old.ranks, held=held)

    def old_service(self, name: str) -> OldMemory:
        """Return what this rank can read of a service's content at the end of the last generation."""
        layout, old, number = self.layout, self.old_memory, self.generation.number
        assert layout.before is not None
        described = old.described(layout, number)
        return OldMemory(layout.before, former_rank(layout), lambda rank: old.service_of(rank, name, number), described)

    def move(self, plan: RecoveryPlan) -> ServerReady:
        """Do step 5 on this rank: send old values to the servers that need them, and receive the values that it needs.

        Collective, blocking. Return this rank's message about its new units. Only a server's message has content.
        """
        self.run_movers(plan)
        return ServerReady()

    def read_old(self, piece: UnitSlice) -> list[Array]:
        """Return the values and the optimizer state of a unit of the last generation that this rank can read.

        The caller must not change the arrays.
        """
        return self.old_memory.arrays_of(piece.owner, piece.unit, piece.before, self.generation.number)

    def run_movers(
        self,
        plan: RecoveryPlan,
        units: Sequence[Unit] = (),
        old_units: Sequence[Unit] = (),
        services: Mapping[str, Service] | None = None,
    ) -> None:
        """Send old values to the servers that need them. On a server, also fill its new units and services.

        Collective, blocking. Old values are those of the last generation. This rank can read old values in its own
        memory, and in the memory of other servers of its node, even of dead ones. The plan says which of them this rank
        sends.

        Args:
            plan: The plan of the recovery, which is the same on every rank.
            units: On a server, its units in the next generation, in the order of the plan.
            old_units: On a server, its units in the last generation. The plan lets it keep the arrays of some of them.
            services: On a server, its services in the next generation, such as tables, by name.
        """
        layout, own = self.layout, services or {}
        unit_mover = UnitMover(plan, layout, self.read_old, units, old_units)
        movers = [
            kind.move(plan.services[kind.name], layout, self.old_service(kind.name), own.get(kind.name))
            for kind in KINDS
            if kind.name in plan.services
        ]

        def is_over() -> bool:
            # Make a list, so that every mover is called and advances.
            over = [mover.is_over() for mover in movers]
            return unit_mover.is_over() and all(over)

        try:
            self.generation.wait(is_over, WHAT)
        finally:
            keep_until_complete(request for mover in movers for request in mover.under_way)
        unit_mover.finish()
        self.nbytes = unit_mover.nbytes + sum(mover.nbytes for mover in movers)

    def rebuild(self, plan: RecoveryPlan, ready: Sequence[ServerReady]) -> T:
        """Build this rank's part of the next generation, and return it. Local.

        Args:
            ready: The message of each server about its new units.
        """
        raise NotImplementedError

    def commit(self) -> None:
        """Free the old state, which was kept for a further attempt. Called when the generation has begun. Local."""
        if self.layout.num_servers:
            self.memory = self.new_memory
        self._last.forget()


class StandBy(Member[None]):
    """The part of a spare in a recovery. It keeps the memory of this node's servers mapped, to read it for other ranks.

    The constructor is collective with the constructors of workers and servers, blocking.
    """

    def __init__(self, layout: Layout, generation: Generation) -> None:
        super().__init__(layout, generation)
        if layout.num_servers:
            self.connect()
            self.memory = self.new_memory

    def rebuild(self, plan: RecoveryPlan, ready: Sequence[ServerReady]) -> None:
        """Do nothing, because this rank stays a spare."""


# ---- 5: copy or send the bytes as planned


def make_units(
    plan: RecoveryPlan, rank: int, memory: UnitMemory, groups: Groups, old_units: Sequence[Unit]
) -> tuple[list[Unit], Created]:
    """Make the units of the server `rank` in the next generation, without values. Also return where workers find them.

    Args:
        old_units: The units that this server had in the last generation.
    """
    planned = [unit for unit in plan.units if unit.server == rank]
    adopted = {unit.card.number: old_units[unit.sources[0].slice.unit] for unit in planned if unit.adopted}
    return memory.make([unit.card for unit in planned], groups, adopted)


class UnitMover:
    """Sends values of old units that other ranks need from this rank, and fills this rank's own new units.

    Old units are those of the last generation. The constructor posts all messages, and copies into the new units what
    this rank can read itself. When `is_over` returns True, call `finish`.

    Args:
        read: `Member.read_old`. It returns the values and the optimizer state of an old unit.
        units: The new units of this server, in the order of the plan.
        old_units: The units that this server had in the last generation.
    """

    def __init__(
        self,
        plan: RecoveryPlan,
        layout: Layout,
        read: Callable[[UnitSlice], list[Array]],
        units: Sequence[Unit] = (),
        old_units: Sequence[Unit] = (),
    ) -> None:
        self._plan = plan
        self._comm = layout.world
        self._read = read
        self._requests: list[MPI.Request] = []
        # bytes that this rank sends and receives
        self.nbytes = 0
        # (plan, new unit, a list with the arrays of the optimizer's state from each source)
        self._filled: list[tuple[UnitPlan, Unit, list[list[Array]]]] = []
        self._send(layout.rank)
        own = [planned for planned in plan.units if planned.server == layout.rank]
        for planned, unit in zip(own, units, strict=True):
            if planned.adopted:
                _adopt(planned, old_units[planned.sources[0].slice.unit], unit)
            else:
                self._filled.append((planned, unit, [self._fill(unit, source) for source in planned.sources]))

    def is_over(self) -> bool:
        """True once all messages have been sent and received."""
        return MPI.Request.Testall(self._requests)

    def finish(self) -> None:
        """Set the round of each new unit. All messages must have arrived."""
        for planned, unit, states in self._filled:
            steps = [_step(self._plan, source) for source in planned.sources]
            state, step = _join_states(unit, planned.sources, states, steps)
            unit.begin_at(planned.round, planned.pushes, state, step, planned.torn)

    def _old_arrays(self, source: UnitSource) -> list[Array]:
        """Return the old values and optimizer state of the elements that a source names. Do not change the arrays."""
        piece, start = source.slice, self._plan.copy_of(source).start
        return [array[piece.start - start : piece.stop - start] for array in self._read(piece)]

    def _send(self, rank: int) -> None:
        """Begin to send what other ranks need from this rank's memory. The messages keep their arrays alive."""
        for planned in self._plan.units:
            for source in planned.sources:
                if source.sent and source.holder == rank:
                    for array in self._old_arrays(source):
                        for data in cut_bytes(array, MESSAGE_BYTES):
                            self.nbytes += data.nbytes
                            self._requests.append(send(self._comm, data, planned.server, TAG))

    def _fill(self, unit: Unit, source: UnitSource) -> list[Array]:
        """Copy values from one source into the unit, or begin to receive the values.

        Return the arrays of the optimizer's state; [] if there is no state yet.
        """
        values = unit.stored[source.slice.start - unit.start : source.slice.stop - unit.start]
        if not source.sent:
            old, *state = self._old_arrays(source)
            values[...] = old
            return state
        names = [] if _step(self._plan, source) is None else self._plan.copy_of(source).states
        state = [np.empty(values.shape, dtype_of(name)) for name in names]
        for array in (values, *state):
            for data in cut_bytes(array, MESSAGE_BYTES):
                self.nbytes += data.nbytes
                self._requests.append(self._comm.Irecv(data, source.holder, TAG))
        return state


def _adopt(plan: UnitPlan, old: Unit, unit: Unit) -> None:
    """Let a new unit take over the arrays of this server's old unit.

    If the plan takes the old unit at the round before its newest, first put the old unit back to that round.
    """
    if plan.sources[0].slice.before:
        assert old.undo is not None
        old.undo.go_back()
        old.go_to_undo_copy()
        old.round = plan.round
    slots = 0 if unit.optimizer is None else len(initial(unit.optimizer, unit.stored[:0]))
    state, step = (old.state, old.step) if slots == len(old.state or ()) else (None, 0)
    unit.begin_at(plan.round, plan.pushes, state, step, plan.torn)


def _join_states(
    unit: Unit, sources: Sequence[UnitSource], states: Sequence[list[Array]], steps: Sequence[int | None]
) -> tuple[list[Array] | None, int]:
    """Join the optimizer's state of all sources. Return (state, step), or (None, 0) if there is no state.

    If some slices have state and others do not, those without state get fresh state.
    """
    known = [step for step in steps if step is not None]
    if not known or unit.optimizer is None:
        return None, 0
    probe = initial(unit.optimizer, unit.stored[:0])
    joined = unit.undo.state if unit.undo else [np.empty(unit.stored.shape, array.dtype) for array in probe]
    for source, state, step in zip(sources, states, steps, strict=True):
        first, last = source.slice.start - unit.start, source.slice.stop - unit.start
        given = initial(unit.optimizer, unit.stored[first:last]) if step is None else state
        if [array.dtype for array in given] != [array.dtype for array in joined]:
            # The state belongs to another optimizer, because the old server had not received the last change.
            return None, 0
        for array, values in zip(joined, given, strict=True):
            array[first:last] = values
    return joined, max(known)


def _step(plan: RecoveryPlan, source: UnitSource) -> int | None:
    """Return the optimizer's step of a source's old unit at the round that the plan has chosen."""
    return plan.copy_of(source).rounds[int(source.slice.before)].step

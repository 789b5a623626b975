"""`recover()`: how a store goes on after a failure or a death, and how a dead server's shard comes back.

The next generation begins with all ranks that are left, or not at all:

    1 agree who is left         `renew`: all ranks that live say that they go on, and get roles (`membership`)
    2 gather what each holds    `Member.take_inventory`, then all ranks exchange their inventories
    3 choose the round          `plan.choose_rounds`: one for all keys, if it can be restored
    4 plan                      `plan.make_plan`: pure data, the same on every rank
    5 transfer                  `Member.transfer`: bytes go where the plan says (`UnitTransfer`)
    6 rebuild                   `Member.rebuild`: lines, keys and units of the new generation
    7 begin the generation      all agree that all have finished; if not, all put everything back and try again

How a dead server's shard comes back: all ranks of its node have its memory mapped, and a ledger in that memory says
what lies where (`memory`). In step 2 the lowest rank left on the node reports what the dead server had and at which
rounds. In step 4 the plan names that rank as the holder of these units, and cuts them for the present servers. In step
5 a server that has the memory mapped copies them itself; to other servers the holder sends them.

If the whole node is lost, the copies of its mirror are used instead (`mirror`). In a store without servers every worker
has everything, and one of them gives it to the others (`ReplicaPlan`).

A process may die at any moment, also while the others make new communicators, which blocks in MPI. So a thread watches
for deaths meanwhile (`collectives.fabric.failure.Making`), and at the end MPI's uniform agreement tells all ranks alike
whether everybody has finished.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec
import numpy as np
from mpi4py import MPI

from mpips.collectives import log
from mpips.collectives.errors import CollectiveError, StallError
from mpips.collectives.fabric.arena import Region
from mpips.collectives.fabric.failure import CommCreationGuard, find_deaths
from mpips.collectives.fabric.requests import collect_closed, keep_until_complete, send
from mpips.collectives.recorder import own as recorder
from mpips.optimizers.base import initial
from mpips.optimizers.schedules import Groups
from mpips.store.keys.key import Array, Name
from mpips.store.recovery.memory import LastGeneration, NodeMemory, SurvivingUnit, UnitMemory, arrays_of_unit
from mpips.store.recovery.mirror import MirroredUnits
from mpips.store.recovery.plan import (
    Inventory,
    Placed,
    RecoveryPlan,
    Transfer,
    UnitPlan,
    choose_rounds,
    make_plan,
)
from mpips.store.roles import Layout
from mpips.store.runtime.errors import LostError, StoreError, of_kind, uninterrupted
from mpips.store.runtime.generation import FREEING_SECONDS, NEVER, Generation
from mpips.store.server.unit import Unit
from mpips.store.transport.frames import Created, dtype_of
from mpips.store.transport.lines import Connection, Line, connect
from mpips.store.transport.pending import cut_bytes
from mpips.tables.journal import Journal
from mpips.tables.plan import RowSource
from mpips.tables.transfer import NewRows, RowTransfer

T = TypeVar("T")
WHAT = "recover"
SLEEP_SECONDS = 0.01
# of messages with old values, on the store's communicator
TAG = 5
MESSAGE_BYTES = 64 << 20
LOG = log.get("mpips.store")
# The outcome of an attempt. MPI_Comm_agree takes the AND of all ranks' outcomes, so the worst wins: FAILED (raise),
# then DIED (try again), then DONE.
DONE, DIED, FAILED = 0b11, 0b10, 0b00


def recover(
    generation: Generation, join: Callable[[], Member[T]], known: Container[Name] = (), grow: bool = False
) -> tuple[Member[T], T] | None:
    """Begin the next generation of a store with what is left.

    Collective over all ranks of the store that live, blocking.

    Args:
        join: Returns this rank's member of the recovery. Called once the rank has its role.
        known: This worker's keys whose `init` is over.
        grow: Spares that are left become workers.

    Returns:
        This rank's member, and what its `rebuild` returned. None as in `renew`.

    Raises:
        StoreError, StoreStallError: As in `renew`.
    """
    begun_at = time.monotonic()
    LOG.info("recovery of generation %d is asked for", generation.number)
    ring, sequence = recorder.begin_rare("recovery", f"of generation {generation.number}")

    def rebuild() -> tuple[Member[T], T]:
        layout, member = generation.layout, join()
        inventories = _gather(generation, member.take_inventory(known), Inventory)  # 2 gather what each holds
        before = layout.before
        servers = layout.num_servers if before is None else before.num_servers
        synchronous, replicas = not layout.asynchronous, not layout.num_servers
        choice = choose_rounds(inventories, synchronous, replicas, servers)  # 3 choose the round
        plan = make_plan(layout, inventories, choice, member.lines)  # 4 plan
        placed = _gather(generation, member.transfer(plan), Placed)  # 5 transfer
        filled = placed[layout.num_workers : layout.num_workers + layout.num_servers]
        return member, member.rebuild(plan, filled)  # 6 rebuild

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


def _gather(generation: Generation, mine: T, kind: type[T]) -> list[T]:
    """Exchange a value between all ranks. Return them in rank order. Collective, blocking."""
    told = generation.meet(msgspec.msgpack.encode(mine), WHAT, True)
    return [msgspec.msgpack.decode(data, type=kind) for data in told]


def former_rank(layout: Layout) -> int:
    """Return the rank that this one had in the last generation, or -1 if it was neither worker nor server."""
    before = layout.before
    if before is None:
        return layout.rank
    rank = before.origin[layout.rank]
    return rank if rank < before.num_workers + before.num_servers else -1


# ---- 1 and 7: a generation begins with all ranks that are left, or not at all


def renew(generation: Generation, rebuild: Callable[[], T], grow: bool = False) -> T | None:
    """Begin the next generation, and return what `rebuild` returns in it.

    Collective over all ranks of the store, blocking. The layout gets new communicators (`Layout.again`); what was sent
    on the old ones is dropped.

    If the store survives deaths, `rebuild` may be called several times, once in each attempt. What it needs must stay
    until this function returns.

    Args:
        grow: On any worker: spares that are left become workers.

    Returns:
        None on a server or spare if the store ends instead.

    Raises:
        StoreError: On a worker, if another one closes the store, or too few ranks are left.
        StoreStallError: A rank has not called this within the limits. Calling again waits on for it.
    """
    if generation.over is None:
        generation.end("recover", CollectiveError(f"rank {generation.rank} calls recover"))
    layout, succession = generation.layout, generation.succession
    limits = generation.limits if layout.is_worker else NEVER

    def begin() -> list[T]:
        if layout.survives:
            return _begin_with_survivors(generation, rebuild, grow)
        return _begin_with_all(generation, rebuild)

    try:
        while not (why := succession.wait_until_all_would(limits)):
            with uninterrupted():
                if not (why := succession.wait_until_all_go(limits)) and (begun := begin()):
                    return begun[0]
    except StallError as error:
        raise of_kind(error) from None
    if layout.is_worker:
        raise StoreError(f"{why}: the store cannot be recovered")
    return None


def _begin_with_all(generation: Generation, rebuild: Callable[[], T]) -> list[T]:
    """Begin the generation with the same ranks. Return the result of `rebuild` in a list."""
    old = copy.copy(generation.layout)
    generation.layout.again(old.world)
    old.part()
    generation.advance()
    collect_closed(FREEING_SECONDS)
    return [rebuild()]


def _begin_with_survivors(generation: Generation, rebuild: Callable[[], T], grow: bool) -> list[T]:
    """Begin the generation with the ranks that live. Return the result of `rebuild` in a list; [] to try again.

    If a process dies meanwhile, every other rank raises sooner or later, and the attempt is to be repeated. If a rank
    raises although all live, all raise. What was there before stays until all ranks have finished, and is put back if
    they have not.
    """
    layout, old, put_back = generation.layout, copy.copy(generation.layout), generation.put_back()
    succession = generation.succession
    left = old.world.Shrink()
    assert isinstance(left, MPI.Intracomm)
    with suppress(MPI.Exception):
        # When this returns, all ranks have made `left`. Before that `Making` must not revoke it: Open MPI crashes if a
        # communicator is revoked while others are still making it.
        old.world.Agree(DONE)
    results: list[T] = []
    verdict, raised = DONE, None
    try:
        with CommCreationGuard(left) as making:
            layout.again(left, grow)
            generation.advance()
            with generation.failing(WHAT):
                results.append(rebuild())
        # Somebody died after this rank's last step, but perhaps within the last step of another rank. So nothing of
        # this attempt can be used.
        if making.broken:
            verdict = DIED
    except Exception as error:
        raised = error
        verdict = DIED if not isinstance(error, LostError) and find_deaths(left) else FAILED
    # Ranks wait for each other outside of MPI first. If they waited long in the agreement, and a rank died there, Open
    # MPI 5.0.11 might leave another rank in it for ever.
    succession.wait_until_all_have_tried()
    try:
        verdict = left.Agree(verdict)
    except MPI.Exception:
        # raised on all ranks alike: somebody has died
        verdict = DIED
    if verdict == DONE:
        old.abandon() if layout.lost else old.free()
        collect_closed()
        return results
    if layout.world is not old.world:
        layout.abandon()
    vars(layout).update(vars(old))
    put_back()
    LOG.info("an attempt at generation %d has failed: %s", generation.number + 1, raised)
    if verdict == FAILED:
        raise raised or LostError("recover: another rank could not go on, as its own error says")
    return []


def wait_for_role(generation: Generation, join: Callable[[], Member[T]]) -> tuple[Member[T], T] | None:
    """Wait as a spare until this rank gets a role. Blocking.

    The rank sleeps, looks now and then, and takes part in every recovery. Return its member and what it is then, or
    None if the store ends.
    """
    while not generation.succession.is_closing():
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

    Its methods may be called again in another attempt, so they must leave the old state in place until `commit`.
    Subclasses add what their role has.

    Args:
        memory: The memory of the servers on this node, which outlives them.
    """

    # where this rank's own ledger lies, if it is a server that keeps one
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
        """A worker's lines to the servers. On other ranks a None for each server."""
        return [None] * self.layout.num_servers

    @property
    def old_memory(self) -> NodeMemory:
        """The memory of the last generation's servers. It is the same in every attempt to begin the next one."""
        return self._last.before(self.generation.number, self.memory)

    def connect(self) -> Connection:
        """Connect workers and servers anew, and map the memory of this node's servers. Collective, blocking."""
        connection = connect(self.layout, self.generation, self.generation.wait, self.ledger)
        self.new_memory = NodeMemory(connection.ledgers)
        return connection

    def take_inventory(self, known: Container[Name]) -> Inventory:
        """Connect anew, and return what this rank holds. Collective.

        A worker reports those of its keys that are in `known`.
        """
        old = self.old_memory
        if self.layout.num_servers:
            self.connection = self.connect()
        return Inventory(old.shelves(self.layout, self.generation.number), old.ranks)

    def transfer(self, plan: RecoveryPlan) -> Placed:
        """Send what others need, and receive what this rank needs. Collective, blocking."""
        self.move(plan, ReachableMemory(self.old_memory, self.generation.number))
        return Placed()

    def move(
        self, plan: RecoveryPlan, reached: ReachableMemory, units: Sequence[Unit] = (), tables: NewRows | None = None
    ) -> None:
        """Send what others need from memory that this rank reaches, and fill its own new `units` and `tables`.

        Collective, blocking.
        """
        layout = self.layout
        moved = UnitTransfer(plan, layout, reached, units)
        rows = RowTransfer(plan.tables, layout.world, reached.journal, tables)
        try:
            # `&` and not `and`: both must be called for both to advance.
            self.generation.wait(lambda: rows.is_over() & moved.is_over(), WHAT)
        finally:
            keep_until_complete(rows.under_way)
        moved.finish()
        self.nbytes = moved.nbytes + rows.nbytes

    def rebuild(self, plan: RecoveryPlan, placed: Sequence[Placed]) -> T:
        """Become what the plan says, and return that. `placed` has an entry for each server. Local."""
        raise NotImplementedError

    def commit(self) -> None:
        """Drop what was kept for another attempt, because the generation has begun. Local."""
        if self.layout.num_servers:
            self.memory = self.new_memory
        self._last.forget()


class StandBy(Member[None]):
    """A spare, as long as it is one. It keeps the memory of servers mapped for the others.

    It is made while workers and servers are made: collective with them, blocking.
    """

    def __init__(self, layout: Layout, generation: Generation) -> None:
        super().__init__(layout, generation)
        if layout.num_servers:
            self.connect()
            self.memory = self.new_memory

    def rebuild(self, plan: RecoveryPlan, placed: Sequence[Placed]) -> None:
        """Stay a spare."""


# ---- 5: bytes go where the plan says


class ReachableMemory:
    """The memory that this rank can read in a recovery.

    It consists of its own units, those of servers whose memory is mapped here, and the copies that it keeps as a
    mirror.

    Args:
        node: The mapped memory of servers.
        generation: The generation that is to begin.
        units: This rank's units, if it was a server.
        owner: The rank that it had as a server; -1 if it was none.
        copies: The copies that it keeps as a mirror.
        tables: Returns the journal of a table that this rank had or keeps as a mirror.
    """

    def __init__(
        self,
        node: NodeMemory,
        generation: int,
        units: Sequence[Unit] = (),
        owner: int = -1,
        copies: MirroredUnits | None = None,
        tables: Callable[[RowSource, str], Journal] | None = None,
    ) -> None:
        self.units = units
        self._owner = owner
        self._node = node
        self._generation = generation
        self._copies = copies
        self._tables = tables

    def arrays_of(self, owner: int, index: int, before: bool) -> list[Array]:
        """Return values and state of a unit. The caller must not change them.

        `before`: as of the round before the newest.
        """
        if owner >= 0 and owner == self._owner:
            return arrays_of_unit(self.units[index], before)
        if owner < 0:
            assert self._copies is not None
            return self._copies.arrays_of(index, before)
        return self._node.arrays_of(owner, index, before, self._generation)

    def journal(self, source: RowSource, table: str) -> Journal:
        """Return the journal of a server's rows of a table. The caller must not change it."""
        if source.shelf < 0 or source.shelf == self._owner:
            assert self._tables is not None
            return self._tables(source, table)
        return self._node.journal(source.owner, table, self._generation)


def make_units(
    plan: RecoveryPlan, rank: int, memory: UnitMemory, groups: Groups, reached: ReachableMemory
) -> tuple[list[Unit], Created]:
    """Make the units that the server `rank` will have, still to be filled. Also return where workers find them."""
    mine = [one for one in plan.units if one.server == rank]
    adopted = {one.card.number: reached.units[one.transfers[0].part.unit] for one in mine if one.adopted}
    return memory.make([one.card for one in mine], groups, adopted)


class UnitTransfer:
    """The unit transfers of one rank: it sends what others need, and fills its own new units.

    The constructor posts all messages, and copies what this rank can read itself. When `is_over` returns True, call
    `finish`.

    Args:
        units: The new units of this server, in the order of the plan.
    """

    def __init__(
        self, plan: RecoveryPlan, layout: Layout, reached: ReachableMemory, units: Sequence[Unit] = ()
    ) -> None:
        self._plan = plan
        self._comm = layout.world
        self._reached = reached
        self._requests: list[MPI.Request] = []
        # bytes that this rank sends and receives
        self.nbytes = 0
        self._left: list[tuple[UnitPlan, Unit, list[list[Array]]]] = []
        self._send(layout.rank)
        mine = [one for one in plan.units if one.server == layout.rank]
        for one, unit in zip(mine, units, strict=True):
            if one.adopted:
                _adopt(one, reached.units[one.transfers[0].part.unit], unit)
            else:
                self._left.append((one, unit, [self._take(unit, transfer) for transfer in one.transfers]))

    def is_over(self) -> bool:
        """True once all messages have been sent and received."""
        return MPI.Request.Testall(self._requests)

    def finish(self) -> None:
        """Put the new units at their rounds. All messages must have come."""
        for one, unit, states in self._left:
            steps = [_step(self._plan, transfer) for transfer in one.transfers]
            state, step = _join_states(unit, one.transfers, states, steps)
            unit.begin_at(one.round, one.pushes, state, step, one.torn)

    def _send(self, rank: int) -> None:
        """Begin to send what other ranks need of this rank's memory. The messages keep their arrays alive."""
        for one in self._plan.units:
            for transfer in one.transfers:
                if transfer.sent and transfer.holder == rank:
                    part, start = transfer.part, self._plan.holding(transfer).start
                    for array in self._reached.arrays_of(part.owner, part.unit, part.before):
                        for data in cut_bytes(array[transfer.start - start : transfer.stop - start], MESSAGE_BYTES):
                            self.nbytes += data.nbytes
                            self._requests.append(send(self._comm, data, one.server, TAG))

    def _take(self, unit: Unit, transfer: Transfer) -> list[Array]:
        """Copy values into the unit, or begin to receive them.

        Return the arrays of state; [] if there is no state yet.
        """
        holding, part = self._plan.holding(transfer), transfer.part
        values = unit.stored[transfer.start - unit.start : transfer.stop - unit.start]
        if not transfer.sent:
            first, last = transfer.start - holding.start, transfer.stop - holding.start
            there, *state = self._reached.arrays_of(part.owner, part.unit, part.before)
            values[...] = there[first:last]
            return [array[first:last] for array in state]
        names = [] if _step(self._plan, transfer) is None else holding.states
        state = [np.empty(values.shape, dtype_of(name)) for name in names]
        for array in (values, *state):
            for data in cut_bytes(array, MESSAGE_BYTES):
                self.nbytes += data.nbytes
                self._requests.append(self._comm.Irecv(data, transfer.holder, TAG))
        return state


def _adopt(plan: UnitPlan, old: Unit, unit: Unit) -> None:
    """Let a new unit take over the arrays of this server's old one.

    If the plan takes the old one as of the round before, it is put back first.
    """
    if plan.transfers[0].part.before:
        assert isinstance(old, SurvivingUnit)
        old.undo.go_back()
        old.go_back_to(old.undo.standings()[0][1])
        old.round = plan.round
    slots = 0 if unit.optimizer is None else len(initial(unit.optimizer, unit.stored[:0]))
    state, step = (old.state, old.step) if slots == len(old.state or ()) else (None, 0)
    unit.begin_at(plan.round, plan.pushes, state, step, plan.torn)


def _join_states(
    unit: Unit, transfers: Sequence[Transfer], states: Sequence[list[Array]], steps: Sequence[int | None]
) -> tuple[list[Array] | None, int]:
    """Put the optimizer's state together from all transfers. Return it and its step; (None, 0) if there is none.

    Parts that have no state yet begin with a fresh one if others have state.
    """
    known = [step for step in steps if step is not None]
    if not known or unit.optimizer is None:
        return None, 0
    probe = initial(unit.optimizer, unit.stored[:0])
    mine = unit.undo.state if unit.undo else [np.empty(unit.stored.shape, array.dtype) for array in probe]
    for transfer, state, step in zip(transfers, states, steps, strict=True):
        first, last = transfer.start - unit.start, transfer.stop - unit.start
        given = initial(unit.optimizer, unit.stored[first:last]) if step is None else state
        if [array.dtype for array in given] != [array.dtype for array in mine]:
            # The state belongs to another optimizer, because this server has not heard of the last change.
            return None, 0
        for array, part in zip(mine, given, strict=True):
            array[first:last] = part
    return mine, max(known)


def _step(plan: RecoveryPlan, transfer: Transfer) -> int | None:
    return plan.holding(transfer).standings[int(transfer.part.before)][1]

"""`recover()`: a store goes on after a failure or a death. The next generation begins with all ranks left, or none.

    1 agree who is left         `renew`: all that live say that they go on, and take roles (`membership`)
    2 gather what each holds    `Member.take_inventory`, and one exchange (`inventory`)
    3 choose the round          `plan.choose_rounds`: one for all keys, if it can be had
    4 plan                      `plan.make_plan`: pure data, the same on every rank
    5 transfer                  `Member.transfer`: bytes go where the plan says (`transfer`)
    6 rebuild                   `Member.rebuild`: lines, keys and units of the new generation
    7 begin the generation      all agree that all have come through; else all is put back, and tried again

Members are servers, workers with servers, workers without (replicas) and spares. A process may die at any moment, also
while the others make new communicators, which blocks in MPI. So a thread watches
(`collectives.fabric.failure.Making`), and at the end all agree, uniformly, whether everybody has come through.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from mpi4py import MPI

from collectives.errors import CollectiveError, StallError
from collectives.fabric.failure import Making, deaths
from collectives.fabric.requests import sweep
from mpips.store.keys.key import Name
from mpips.store.recovery.inventory import Inventory
from mpips.store.recovery.memory import LastGeneration, NodeMemory
from mpips.store.recovery.plan import Member, Placed, RecoveryPlan, choose_rounds, make_plan
from mpips.store.recovery.transfer import ReachableMemory, UnitTransfer
from mpips.store.roles import Layout
from mpips.store.runtime.errors import LostError, StoreError, of_kind, uninterrupted
from mpips.store.runtime.generation import FREEING_SECONDS, NEVER, Generation
from mpips.store.transport.lines import connect

T = TypeVar("T")
WHAT = "recover"
SLEEP_SECONDS = 0.01
LOG = logging.getLogger("mpips.store")
DONE, DIED, FAILED = 0b11, 0b10, 0b00
"""How an attempt has ended. Of all ranks' words the bits that all have count."""


def recover(
    generation: Generation, join: Callable[[], Member[T]], known: Container[Name] = (), grow: bool = False
) -> tuple[Member[T], T] | None:
    """Begin the next generation of a store with what is left; return this rank's member, and what it is then.

    `join` returns the member, when this rank knows its role. `known`: this worker's keys whose `init` is over. `grow`:
    spares that are left become workers. Collective over all ranks of the store that live, blocking. Raises and returns
    None as `renew` does.
    """
    begun_at = time.monotonic()

    def rebuild() -> tuple[Member[T], T]:
        layout, member = generation.layout, join()
        said = _gather(generation, member.take_inventory(known), Inventory)  # 2 gather what each holds
        choice = choose_rounds(said, not layout.asynchronous, not layout.num_servers)  # 3 choose the round
        plan = make_plan(layout, said, choice, member.lines)  # 4 plan
        placed = _gather(generation, member.transfer(plan), Placed)  # 5 transfer
        servers = placed[layout.num_workers : layout.num_workers + layout.num_servers]
        return member, member.rebuild(plan, servers)  # 6 rebuild

    begun = renew(generation, rebuild, grow)  # 1 agree who is left, and 7 begin the generation
    if begun is not None:
        begun[0].commit()
        layout, seconds = generation.layout, time.monotonic() - begun_at
        LOG.info(
            "rank %d: recovered in %.3f s: %d workers, %d servers, %d spares; dead since the last generation: %s",
            layout.rank, seconds, layout.num_workers, layout.num_servers, layout.spares, layout.lost or "none",
        )  # fmt: skip
    return begun


def _gather(generation: Generation, mine: T, kind: type[T]) -> list[T]:
    """Return what each rank says, in rank order. Collective, blocking."""
    told = generation.meet(msgspec.msgpack.encode(mine), WHAT, True)
    return [msgspec.msgpack.decode(data, type=kind) for data in told]


def former_rank(layout: Layout) -> int:
    """Return the rank that this one had in the generation before; -1 where it was neither worker nor server."""
    before = layout.before
    if before is None:
        return layout.rank
    rank = before.origin[layout.rank]
    return rank if rank < before.num_workers + before.num_servers else -1


# ---- 1 and 7: a generation begins with all ranks that are left, or with none


def renew(generation: Generation, rebuild: Callable[[], T], grow: bool = False) -> T | None:
    """Begin the next generation, and return what `rebuild` does in it. Collective over all ranks of the store,
    blocking: the layout's communicators are new ones (`Layout.again`), and what was sent on the old ones is dropped.

    Where the store survives deaths, `rebuild` may be called in several attempts. Nothing that it needs may go before
    this returns. If a worker asks for it by `grow`, spares that are left become workers.

    StoreError on a worker where another closes the store instead, or what is left does not suffice; elsewhere None.
    StoreStallError where one has not come within the limits; a later call waits on for it.
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
    """Begin the generation on the same ranks; return what `rebuild` does."""
    old = copy.copy(generation.layout)
    generation.layout.again(old.world)
    old.part()
    generation.advance()
    sweep(FREEING_SECONDS)
    return [rebuild()]


def _begin_with_survivors(generation: Generation, rebuild: Callable[[], T], grow: bool) -> list[T]:
    """Begin the generation on the ranks that live; return [] where one has died meanwhile.

    Where a process dies, the others raise sooner or later, and it is to be tried again. Where one raises though all
    live, all raise. What was before stays until all have come through, and is put back where not.
    """
    layout, old, put_back = generation.layout, copy.copy(generation.layout), generation.put_back()
    left = old.world.Shrink()
    assert isinstance(left, MPI.Intracomm)
    with suppress(MPI.Exception):
        old.world.Agree(DONE)  # all have it: nobody may revoke it before
    results: list[T] = []
    verdict, raised = DONE, None
    try:
        with Making(left):
            layout.again(left, grow)
            generation.advance()
            with generation.failing(WHAT):
                results.append(rebuild())
    except Exception as error:
        raised = error
        verdict = DIED if not isinstance(error, LostError) and deaths(left) else FAILED
    try:
        verdict = left.Agree(verdict)
    except MPI.Exception:  # uniformly, too: somebody has died
        verdict = DIED
    if verdict == DONE:
        old.abandon() if layout.lost else old.free()
        sweep()
        return results
    if layout.world is not old.world:
        layout.abandon()
    vars(layout).update(vars(old))
    put_back()
    LOG.info("rank %d: an attempt at generation %d has failed: %s", generation.rank, generation.number + 1, raised)
    if verdict == FAILED:
        raise raised or LostError("recover: another rank could not go on, as its own error says")
    return []


# ---- spares


def wait_for_role(generation: Generation, join: Callable[[], Member[T]]) -> tuple[Member[T], T] | None:
    """Wait as a spare until this rank has a role; return its member, and what it is then; None where the store ends.

    It sleeps, looks now and then, and takes part in every recovery. Blocking.
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


class StandBy:
    """A spare while it is one: it keeps the memory of servers for the others.

    Made while workers and servers begin: collective with them, blocking.
    """

    def __init__(self, layout: Layout, generation: Generation) -> None:
        self._layout, self._generation = layout, generation
        self._now = self._next = self._map_servers()
        self._last: LastGeneration[NodeMemory] = LastGeneration()

    def _map_servers(self) -> NodeMemory:
        if not self._layout.num_servers:
            return NodeMemory({})
        return NodeMemory(connect(self._layout, self._generation, self._generation.wait).ledgers)

    @property
    def lines(self) -> Sequence[Any]:
        """See `Member`: a spare has none."""
        return [None] * self._layout.num_servers

    def held(self) -> NodeMemory:
        """Return what this rank keeps, in every attempt to begin the next generation."""
        return self._last.before(self._generation.number, self._now)

    def take_inventory(self, known: Container[Name]) -> Inventory:
        """See `Member`."""
        held, self._next = self.held(), self._map_servers()
        return Inventory(held.shelves(self._layout, self._generation.number), held.ranks)

    def transfer(self, plan: RecoveryPlan) -> Placed:
        """See `Member`."""
        moved = UnitTransfer(plan, self._layout, ReachableMemory(self.held(), self._generation.number))
        self._generation.wait(moved.is_over, WHAT)
        return Placed()

    def rebuild(self, plan: RecoveryPlan, placed: Sequence[Placed]) -> None:
        """See `Member`: it stays a spare."""
        self._now = self._next

    def commit(self) -> None:
        """See `Member`."""
        self._last.forget()

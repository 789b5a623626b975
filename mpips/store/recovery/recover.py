"""`recover()`: the next generation of a store begins, with all ranks that are left, or with none.

All say first that they go on (`runtime.generation.Succession`). Where the store survives deaths, it goes on with the
ranks that live. A process may die at any moment, also while the others make new communicators, which blocks in MPI. So
a thread watches (`collectives.network.failures.Making`), and at the end all agree, uniformly, whether everybody has
come through; if not, all is put back, and tried again.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from mpi4py import MPI

from collectives.errors import CollectiveError, StallError
from collectives.network.drain import sweep
from collectives.network.failures import Making, deaths
from mpips import compression
from mpips.compression import Compressor
from mpips.optimizers import Groups, decode, decode_numbers
from mpips.store.keys.key import Rounds
from mpips.store.recovery import plan as planning
from mpips.store.recovery.memory import LastGeneration, NodeMemory, decode_settings
from mpips.store.recovery.plan import Inventory, RecoveryPlan
from mpips.store.recovery.transfer import ReachableMemory, sends
from mpips.store.roles import Layout
from mpips.store.runtime.errors import LostError, StoreError, of_kind, uninterrupted
from mpips.store.runtime.generation import FREEING_SECONDS, NEVER, Generation
from mpips.store.runtime.rendezvous import MeetingPlace
from mpips.store.transport import frames
from mpips.store.transport.frames import Change, Created
from mpips.store.transport.lines import connect

T = TypeVar("T")


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
    try:
        while not (why := succession.wait_until_all_would(limits)):
            with uninterrupted():
                if not (why := succession.wait_until_all_go(limits)) and (begun := _begin(generation, rebuild, grow)):
                    return begun[0]
    except StallError as error:
        raise of_kind(error) from None
    if layout.is_worker:
        raise StoreError(f"{why}: the store cannot be recovered")
    return None


def _begin(generation: Generation, rebuild: Callable[[], T], grow: bool) -> list[T]:
    return _attempt(generation, rebuild, grow) if generation.layout.survives else _with_all(generation, rebuild)


def _with_all(generation: Generation, rebuild: Callable[[], T]) -> list[T]:
    """Begin it on the same ranks; what `rebuild` has returned."""
    old = copy.copy(generation.layout)
    generation.layout.again(old.world)
    old.part()
    generation.advance()
    sweep(FREEING_SECONDS)
    return [rebuild()]


def _attempt(generation: Generation, rebuild: Callable[[], T], grow: bool) -> list[T]:
    """Begin it on the ranks that live; [] where one has died meanwhile. What was before stays until all have come
    through, and is put back where not."""
    layout, old, put_back = generation.layout, copy.copy(generation.layout), generation.put_back()

    def make(left: MPI.Intracomm) -> T:
        layout.again(left, grow)
        generation.advance()
        with generation.failing("recover"):
            return rebuild()

    verdict, results, error = attempt(old.world, make)
    if verdict == DONE:
        old.abandon() if layout.lost else old.free()
        sweep()
        return results
    if layout.world is not old.world:
        layout.abandon()
    vars(layout).update(vars(old))
    put_back()
    if verdict == FAILED:
        raise error or LostError("recover: another rank could not go on, as its own error says")
    return []


DONE, DIED, FAILED = 0b11, 0b10, 0b00
"""How an attempt has ended. Of all ranks' words the bits that all have count."""


class Attempt(NamedTuple, Generic[T]):
    """What came of it: `verdict` is the same on all ranks that live, `results` and `error` are this rank's."""

    verdict: int
    results: list[T]
    error: BaseException | None


def attempt(world: MPI.Intracomm, make: Callable[[MPI.Intracomm], T]) -> Attempt[T]:
    """Shrink `world` to the ranks that live, and call `make` with that. Collective over these ranks, blocking.

    `make` meets the others, on communicators that it passes through `failures.made`. Where a process dies meanwhile it
    raises, on all ranks sooner or later, and the verdict is DIED: to be tried again. Where it raises though all live,
    on whatever rank, that is FAILED.
    """
    left = world.Shrink()
    assert isinstance(left, MPI.Intracomm)
    with suppress(MPI.Exception):
        world.Agree(DONE)  # all have it: nobody may revoke it before
    results: list[T] = []
    raised: BaseException | None = None
    try:
        with Making(left):
            results.append(make(left))
    except Exception as error:
        raised = error
    return Attempt(_agreed(left, DONE if raised is None else _verdict(left, raised)), results, raised)


def _verdict(left: MPI.Intracomm, error: BaseException) -> int:
    return DIED if not isinstance(error, LostError) and deaths(left) else FAILED


def _agreed(left: MPI.Intracomm, verdict: int) -> int:
    try:
        return left.Agree(verdict)
    except MPI.Exception:  # uniformly, too: somebody has died
        return DIED


WHAT = "recover"
REFUSALS = (ValueError, TypeError)


class Placed(msgspec.Struct, array_like=True):
    """Where a server's units lie; and why it refuses the change of settings that the end of the generation
    interrupted."""

    where: Created | None = None
    refusal: str = ""


class Outlook(msgspec.Struct):
    """What all ranks have said, and what follows from it."""

    said: list[Inventory]
    plan: RecoveryPlan

    @property
    def change(self) -> Change | None:
        """A change of settings that no worker knows to be made everywhere: servers make it once more."""
        begun = max(self.said, key=lambda one: one.changes[0])
        made = max(one.changes[1] for one in self.said)
        if not begun.changes[2] or made >= begun.changes[0]:
            return None
        return frames.decode_request(begun.changes[2])  # type: ignore[return-value]

    def settings(self) -> tuple[Groups, Compressor | None]:
        """Optimizers and compression of a server, before that change."""
        own = (shelf for one in self.said for shelf in one.shelves if not shelf.is_copy)
        shelves = sorted(own, key=lambda shelf: shelf.owner)
        return decode_settings(shelves[0].settings) if shelves else (Groups(), None)

    def after(self, refusals: Sequence[str]) -> tuple[Groups, Compressor | None, tuple[int, int, bytes]]:
        """The same with that change, if the servers have not refused it; and how many changes workers have begun and
        made, with the last one."""
        groups, compressor = self.settings()
        begun, made, last = max((one.changes for one in self.said), key=lambda changes: changes[0])
        change = self.change
        if change is None:
            return groups, compressor, (begun, begun, last)
        if all(refusals):
            return groups, compressor, (made, made, b"")
        if any(refusals):
            raise CollectiveError(f"servers differ: {next(filter(None, refusals))}; others have done it")
        return groups, changed(groups, compressor, change), (begun, begun, last)

    def rounds(self) -> Rounds:
        """At which round keys stand; in an asynchronous store, how many pushes of this worker are in them."""
        found = self.plan.found
        rounds = Rounds({key.name: key.round for key in self.plan.keys})
        rounds.torn = tuple(name for name, chosen in found.keys.items() if chosen.torn)
        rounds.step = found.step
        return rounds


def former(layout: Layout) -> int:
    """The rank that this one had in the generation before; -1 where it was neither worker nor server."""
    before = layout.before
    if before is None:
        return layout.rank
    rank = before.origin[layout.rank]
    return rank if rank < before.num_workers + before.num_servers else -1


def outlook(layout: Layout, generation: MeetingPlace, mine: Inventory, lines: Sequence[Any]) -> Outlook:
    """Learn what all have, and plan. Collective over workers and servers, blocking. See `plan.make`."""
    told = generation.meet(msgspec.msgpack.encode(mine), WHAT, True)
    said = [msgspec.msgpack.decode(data, type=Inventory) for data in told]
    return Outlook(said, planning.make(layout, said, lines))


def place(layout: Layout, generation: MeetingPlace, mine: Placed) -> list[Placed]:
    """What all servers say. Collective over workers and servers, blocking."""
    told = generation.meet(msgspec.msgpack.encode(mine), WHAT, True)
    servers = map(layout.server_rank, range(layout.num_servers))
    return [msgspec.msgpack.decode(told[server], type=Placed) for server in servers]


def changed(groups: Groups, compressor: Compressor | None, change: Change) -> Compressor | None:
    """Make a change of settings in `groups`; the compression after it."""
    if isinstance(change, frames.SetOptimizer):
        groups.set(decode(change.optimizer), change.keys)
    elif isinstance(change, frames.UpdateOptimizer):
        with suppress(*REFUSALS):
            groups.update(decode_numbers(change.numbers), change.keys)
    else:
        return compression.create(change.options)
    return compressor


SLEEP_SECONDS = 0.01


def wait(generation: Generation, rebuild: Callable[[], list[T]], committed: Callable[[], None]) -> T | None:
    """Wait until this rank has a role, and return what it is then; None where the store ends. Blocking.

    `rebuild` is this rank's part in an attempt to begin the next generation: what the rank has become, or [] where it
    stays a spare. `committed` is called when a generation has begun.
    """
    while not generation.succession.is_closing():
        try:
            generation.look()
        except CollectiveError as error:
            generation.end("the wait of a spare", error)
        if generation.over is None:
            time.sleep(SLEEP_SECONDS)
            continue
        became = renew(generation, rebuild)
        if became is None:
            return None
        committed()
        if became:
            return became[0]
    return None


class StandBy:
    """What a spare of a store with servers does while it is one: it keeps their memory for the others.

    Made while workers and servers begin: collective with them, blocking.
    """

    def __init__(self, layout: Layout, generation: Generation) -> None:
        self._layout, self._generation = layout, generation
        self._now = NodeMemory(connect(layout, generation).ledgers)
        self._settled: LastGeneration[NodeMemory] = LastGeneration()

    def held(self) -> NodeMemory:
        """What it keeps, in every attempt to begin the next generation."""
        return self._settled.before(self._generation.number, self._now)

    def rebuild(self) -> None:
        """Take part in the others' beginning of the next generation, and stay a spare. Collective, blocking."""
        layout, generation, held = self._layout, self._generation, self.held()
        ledgers = connect(layout, generation).ledgers
        mine = Inventory(held.shelves(layout, generation.number), held.ranks)
        found = outlook(layout, generation, mine, [None] * layout.num_servers)
        requests = sends(found.plan, layout, ReachableMemory([], -1, held, generation.number))
        place(layout, generation, Placed())
        generation.wait(lambda: MPI.Request.Testall(requests), WHAT)
        self._now = NodeMemory(ledgers)

    def committed(self) -> None:
        """The next generation has begun: what was before may go."""
        self._settled.begun()

"""All that belongs to a communicator; when a rank fails, it tells its node by the board and others by notes.

A failure is told by `fabric.board` on a node, by `network.control` between nodes. It is made at the first call and
lives until it fails: then it is over on all ranks, which raise the same sentence, and `renew` begins another on the
same ranks.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives import log
from mpips.collectives.errors import CollectiveError, MismatchError, given_up, of_caller, warn
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import Region
from mpips.collectives.fabric.board import NUMBERS, Board, Ending, unreachable
from mpips.collectives.fabric.failure import failed, made
from mpips.collectives.fabric.layout import (
    DEPARTURES,
    ORDERED_STORES,
    PROGRAM_ENDED,
    ROWS_AT,
    SLOTS_AT,
    NodeMemory,
    area_bytes,
    clear,
)
from mpips.collectives.fabric.process_memory import OutOfReach, open_to_all
from mpips.collectives.fabric.requests import TAGS, Collectives, Lanes, Roll, leave, ranks_of_job, sweep
from mpips.collectives.fabric.wait import NAP_AFTER_BETWEEN_NODES, Limits, drive, limits, until
from mpips.collectives.machine import Quota, bound_cores, find_quota
from mpips.collectives.network.control import Control
from mpips.collectives.recorder import own as recorder
from mpips.collectives.recorder import tracing
from mpips.collectives.schedule.catalog import see_named
from mpips.collectives.tuner import table
from mpips.collectives.tuner.table import TuningTable

LOG = log.get("mpips.collectives")
MOST_CORES = 4096
CARRYING_SECONDS = 3.0  # at most, to carry through a call of MPI's own that is given up
NO_QUOTA = (0, 0)
FREED = "the communicator has been freed, or renewed: use one that is still there, and make plans on it anew"
COME = "let all call it, or name a communicator of those that do (beside a store with servers kv.layout.workers)"
OURS = "mpips "
"""Names of our own threads begin so."""
ONE_THREAD = "let one thread make all calls on a communicator, and give others one of their own, comm.Dup()"
_recent: tuple[MPI.Comm | None, Communicator | None] = (None, None)
"""The last answer of `communicator`, which is mostly the next one too."""
_alive: WeakSet[Communicator] = WeakSet()
_making: dict[int, threading.Lock] = {}
"""By the handle of a communicator: two threads of this process may make its first call."""
_threads_expected = False
"""Whether a thread of ours makes calls beside the program's; see `beside`."""
_kept_for_good: list[Any] = []


@cache
def _key() -> int:
    """Under what communicators keep theirs. Made at first use, so that importing this module starts no MPI."""
    return MPI.Comm.Create_keyval(delete_fn=lambda comm, key, kept: kept.close())


class Between:
    """Wait for ranks of other nodes: both the notes and the board may say that the generation has ended."""

    nap_after = NAP_AFTER_BETWEEN_NODES

    def __init__(self, board: Board, control: Control) -> None:
        self._board, self._control, self.limits = board, control, control.limits
        self.late = control.late

    def look(self, waited: float) -> None:
        self._control.look(waited)
        self._board.hear(waited)


class Communicator:
    """One communicator, from its first call to its end. `board` is that of this node's ranks; `control` is None where
    that is all ranks. `names`: its ranks as sentences are to name them. Making it is collective, blocking."""

    def __init__(
        self, comm: MPI.Intracomm, known_table: TuningTable | None = None, names: Sequence[int] | None = None
    ) -> None:
        tracing.begin(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        self.comm = made(comm.Dup())
        self.names = range(comm.size) if names is None else names
        self.rank, self.size = comm.rank, comm.size
        self.limits = limits()
        self.node, memory, on_node = _node_memory(self.comm)
        self.node_of, spare = self._nodes(min(on_node))
        self._spare = made(comm.Dup()) if spare else None
        """For `beside`. Made here, by all ranks: its thread must not make it of what the program's uses."""
        self.nodes = len(set(self.node_of))
        self.board = Board(memory, [self.names[rank] for rank in on_node], self.limits)
        self.across = self._across()
        self.control = Control(made(self.comm.Dup()), self.limits, self.names) if self.nodes > 1 else None
        self.generation = Between(self.board, self.control) if self.control is not None else self.board
        self.table = known_table or table.shared(self.comm, partial(table.usable, see_named))
        self.ending = Ending(self._end)
        self.open = True
        self.started: list[Any] = []
        """Operations of `Plan.start` that are not done, in order."""
        self.plans: dict[Any, Any] = {}
        """Plans by the identity of their array, as `plan.PlanCache` finds them."""
        self.cache: Any = None
        self.own = Collectives(self.comm)
        """MPI's own collectives of calls."""
        self.lanes = Lanes(self.comm, self.across)
        """What messages of one-shot calls go over."""
        self.all_lanes = [self.lanes]
        recorder.add_communicator(self.board.marks.identity, ranks_of_job(self.comm, range(self.size)))
        self.plan_lanes, self.tags_dealt = self.lanes, 0
        """What messages of plans go over, and the tags dealt on it, which keep them apart."""
        self.caller, self.inside = 0, False
        """The thread that has made the last call, and whether it is in one: see `change_caller`."""
        self.of_threads = False
        """Whether threads of ours take turns here."""
        self._callers: WeakSet[threading.Thread] = WeakSet()
        self._kept: list[Any] = []
        self._pid = os.getpid()
        _alive.add(self)

    def lies_within(self, look: Callable[[float], None]) -> None:
        """Every wait here calls `look(seconds waited)`, which raises where a larger generation has ended."""
        self.board.beyond = look

    def patient(self, stall_seconds: float, timeout_seconds: float) -> None:
        """Set how long a wait may last before it warns, and before it raises (0: never)."""
        self.limits = self.board.limits = self.generation.limits = Limits(stall_seconds, timeout_seconds)
        if self.control is not None:
            self.control.limits = self.limits

    @property
    def over(self) -> CollectiveError | None:
        """Return what every call raises since the communicator has ended."""
        return self.ending.over

    def check(self) -> None:
        """Raise where the communicator is over, with the sentence that ended it, or freed."""
        if self.over is not None:
            raise type(self.over)(str(self.over))
        if not self.open:
            raise MismatchError(FREED)

    def change_caller(self, thread: int, what: str) -> None:
        """Another thread than the last one makes a call. CollectiveError, on all ranks, while the last one is in a call
        of its own. A RuntimeWarning where the program's threads call by turns: ranks may order them unlike."""
        before = self.caller
        if self.inside:
            rank, one, other = self.names[self.rank], thread_name(thread), thread_name(before)
            error = CollectiveError(
                f"rank {rank}: thread {one!r} calls {what} while thread {other!r} is in a call "
                f"on the same communicator: {ONE_THREAD}"
            )
            raise self.fail(what, error)
        self.caller = thread
        here = threading.current_thread()
        if here in self._callers and not self.of_threads:
            one = thread_name(before)
            self.of_threads = bool(one)  # it is there still, and this is said once
            if one and not (one.startswith(OURS) or here.name.startswith(OURS)):
                turns = f"threads {one!r} and {here.name!r} make calls on one communicator by turns"
                warn(f"{turns}, and ranks whose turns differ get each other's results: {ONE_THREAD}")
        self._callers.add(here)

    @contextmanager
    def entered(self, what: str) -> Iterator[None]:
        """This thread is in a call."""
        if self.caller != (thread := threading.get_ident()):
            self.change_caller(thread, what)
        outer, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = outer

    @property
    def next_number(self) -> int:
        """Return the number that the next call will have here, the same on all ranks."""
        return (self.board.number if self.control is None else self.control.number) + 1 & NUMBERS

    def agree(self, text: str) -> None:
        """Collective, blocking: MismatchError on every rank unless all bring the same text."""
        self.check()
        with self.entered(text), self.failing(text):
            self.run(self.agreed(text), text)

    def agreed(self, text: str) -> Iterator[None]:
        """Meet all ranks, beside others' steps. MismatchError on every rank unless all bring the same text."""
        if self.size > 1:
            yield from (self.board if self.control is None else self.control).agreed(text)

    def run(self, steps: Iterator[None], what: str) -> None:
        """Run an operation to its end."""
        drive(steps, self.generation, what, min(self.board.spins, 16))

    def hear(self, waited: float) -> None:
        """Raise where the communicator has ended; beside compute, through which an operation has waited so long."""
        self.generation.look(waited)

    def listen(self, waited: float = 0.0) -> None:
        """Raise where the communicator has ended, or a process of the node has; for a rank that is in no operation."""
        if self.control is not None:
            self.control.look(waited)
        self.board.hear(waited)

    def told(self) -> bool:
        """Return whether a rank has told this one that the communicator has ended."""
        return bool(self.board.poison.flag[0]) or (self.control is not None and self.control.over)

    def hold(self) -> None:
        """See anew whether operations may begin by a fast path."""
        self.board.hold(bool(self.started or self.over is not None or not self.open))

    @contextmanager
    def failing(self, what: str, *kept: object) -> Iterator[None]:
        """Whatever is raised within ends the communicator."""
        try:
            yield
        except BaseException as error:
            raise self.fail(what, error, *kept) from None

    @contextmanager
    def preparing(self, what: str) -> Iterator[None]:
        """Errors of arguments raised within are this rank's alone; whatever else is raised ends the communicator."""
        try:
            yield
        except Exception as error:
            if isinstance(error, MemoryError):
                raise self.fail(what, error) from None
            raise of_caller(error) from None
        except BaseException as error:
            raise self.fail(what, error) from None

    def fail(self, what: str, error: BaseException, *kept: object) -> BaseException:
        """`what` has raised here: end the communicator for all ranks; the error to raise. `kept` is not dropped, as
        others, or MPI, may still touch it. Blocks for some seconds at most, until nobody touches this rank's arrays."""
        if self.over is not None or not self.open:
            return error
        self._kept.append(kept)
        try:
            told = self.ending.end(_told(self, what, error))
            LOG.info("the communicator of %d ranks has ended: %s", self.size, told)
            recorder.fails(str(told))
        finally:
            self.started = []
            self.hold()
        return told if isinstance(error, (CollectiveError, MPI.Exception)) else error

    def _end(self, told: CollectiveError) -> CollectiveError:
        ended = self.board.end(told, str(told))
        if self.control is not None:
            ended = self.control.end(ended, str(ended))
        if self.control is not None or self.board.shared(self.own.number):
            self.own.carry_through(self.ended, CARRYING_SECONDS)
        return ended

    def deal(self, tags: int) -> None:
        """A plan has taken so many tags; it keeps its lanes where the next one gets others. Collective."""
        self.tags_dealt += tags
        if self.tags_dealt > TAGS // 2:
            across = None if self.across is None else self.across.Dup()
            self.plan_lanes, self.tags_dealt = Lanes(self.comm.Dup(), across), 0
            self.all_lanes.append(self.plan_lanes)

    def close(self) -> None:
        """Close with the user's communicator, which is freed or renewed. Collective; blocks nowhere, as each rank may
        do so when it likes. Messages may still be under way: what carries them goes when they have come."""
        if not self.open:
            return
        self.open = False
        self.hold()
        self.started = []
        self.own.keep()
        if MPI.Is_finalized():
            return
        if self.cache is not None:
            self.cache.free()
        self.board.marks.close()
        self.board.memory.close()
        self.node.Free()
        for comm in self._carriers():
            leave(comm, self._kept, self.own.begun if comm is self.comm else 0)
        self._kept = []

    def abandon(self) -> None:
        """Drop it, as all ranks do that are left, and none looks at it any more: others have died. MPI keeps its
        communicators, and what it may still write to."""
        if self.open:
            self.open = False
            self.hold()
            self.started = []
            self.own.keep()
            if self.cache is not None:
                self.cache.free()
            self.board.marks.close()
            self.board.memory.abandon()
            if self._spare is not None:
                abandon(self._spare)
            _kept_for_good.append(self._kept)

    def leave(self, how: int = PROGRAM_ENDED) -> None:
        """This rank's program ends, or what the communicator is for."""
        if self.open and self._pid == os.getpid() and not MPI.Is_finalized():  # a child that was forked is no rank
            self.board.leave(how)
            if self.control is not None:
                self.control.leave(how)

    def beside(self) -> MPI.Intracomm:
        """See `beside`. Collective at first, blocking; the first call of all ranks comes from the other thread."""
        if self._spare is None:  # it was made before such a thread was expected
            self._spare = made(self.comm.Dup())
        inner: Any = self._spare.Get_attr(_key())
        if not isinstance(inner, Communicator):
            self._spare.Set_name(self.comm.Get_name())
            inner = communicator(self._spare, self.table, self.names)
            inner.patient(*self.limits)
            inner.of_threads = True
        return self._spare

    def ended(self) -> dict[int, str]:
        """Ranks that have left, or whose process has ended; and how, as far as it is known here. Looks at messages."""
        return self.board.ended() | (self.control.ended() if self.control is not None else {})

    def _carriers(self) -> Iterator[MPI.Comm]:
        """The communicators of its own that messages go over."""
        if self.control is not None:
            yield self.control.comm
        if self._spare is not None:
            yield self._spare
        for lanes in self.all_lanes:
            yield from (comm for comm in lanes if comm is not None)

    def _nodes(self, first: int) -> tuple[list[int], bool]:
        """For each rank the lowest rank of its node; and whether some rank expects calls of another thread."""
        everybody = np.empty((self.size, 2), np.int64)
        self.comm.Allgather(np.array([first, _threads_expected], np.int64), everybody)
        return everybody[:, 0].tolist(), bool(everybody[:, 1].any())

    def _across(self) -> MPI.Comm | None:
        """The ranks with this one's place in their nodes, one a node; None where nodes differ in size. Collective."""
        if self.nodes == 1 or len({self.node_of.count(node) for node in self.node_of}) > 1:
            return None
        return made(self.comm.Split(self.board.rank, self.rank))


def thread_name(thread: int) -> str:
    """The name of a thread of this process by its number; "" where it has ended."""
    return next((one.name for one in threading.enumerate() if one.ident == thread), "")


def _told(kept: Communicator, what: str, error: BaseException) -> CollectiveError:
    """Return what all ranks raise where `what` has raised this on one."""
    if isinstance(error, OutOfReach):
        return CollectiveError(unreachable(kept.board, error))
    dead = failed(kept.comm) if isinstance(error, MPI.Exception) else []
    if dead:
        return CollectiveError(f"{what}: rank {kept.names[dead[0]]} is needed, and {DEPARTURES[0]}")
    return given_up(kept.names[kept.rank], what, error)


def communicator(
    comm: MPI.Comm | None, known_table: TuningTable | None = None, names: Sequence[int] | None = None
) -> Communicator:
    """Return what is kept for `comm` (None: COMM_WORLD). The first call for a communicator is collective, blocking.

    StallError there means that a rank had not come within the limits of the environment; a later call waits on for it.
    `known_table`, the same on all ranks, counts in the first call, in place of the user's; `names` there are its ranks
    as sentences are to name them.
    """
    global _recent
    before, known = _recent
    if comm is before and known is not None and known.open:
        return known
    found = _found(MPI.COMM_WORLD if comm is None else comm, known_table, names)
    _recent = (comm, found)
    return found


def expect_threads() -> None:
    """From now on a thread of ours makes calls beside the program's: what is made for a communicator has `beside`."""
    global _threads_expected
    _threads_expected = True


def beside(comm: MPI.Comm | None) -> MPI.Intracomm:
    """Return a communicator of the same ranks (None: COMM_WORLD) for the calls of a thread of ours.

    Calls on one communicator come in one order on all ranks. What a thread calls beside the program comes earlier or
    later than the program's calls on each rank, so it takes another communicator. It ends with `comm`, and `renew` of
    that renews it.
    """
    return communicator(comm).beside()


def _see_comm(comm: object) -> None:
    if not isinstance(comm, MPI.Comm):
        given = f"comm {comm!r} is of type {type(comm).__name__}"
        raise of_caller(TypeError(f"{given}: pass a communicator of mpi4py, or None for COMM_WORLD"))


def _found(comm: MPI.Comm, known_table: TuningTable | None, names: Sequence[int] | None) -> Communicator:
    _see_comm(comm)
    try:
        found: Any = comm.Get_attr(_key())
    except MPI.Exception:
        raise MismatchError(FREED) from None
    if isinstance(found, Communicator):
        return found
    if not isinstance(comm, MPI.Intracomm):
        raise MismatchError("an intercommunicator has no collectives here: merge it first")
    with _making.setdefault(comm.handle, threading.Lock()):
        found = comm.Get_attr(_key())  # another thread may have made it meanwhile
        return found if isinstance(found, Communicator) else _open(comm, found, known_table, names)


def abandon(comm: MPI.Comm) -> None:
    """Drop what is kept for `comm`, of whose ranks some have died, as all others do. Does not block."""
    found = comm.Get_attr(_key())
    if found is not None:
        if isinstance(found, Communicator):
            found.abandon()
        comm.Delete_attr(_key())


def renew(comm: MPI.Comm | None = None) -> None:
    """Begin another communicator on the same ranks, after one has ended: calls on `comm` work again. Collective,
    blocking: all ranks of `comm` call. Plans of the old one stay over: make them anew.

    StallError where a rank has not come within the limits of the environment; a later call waits on for it.
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    _see_comm(comm)
    found = comm.Get_attr(_key())
    if isinstance(found, Communicator):
        found.open, found.ending.over = False, found.over or CollectiveError("it has been renewed")
        found.hold()
        assert isinstance(comm, MPI.Intracomm)  # see `_found`
        comm.Set_attr(_key(), _Arrival(comm, found))
    made = communicator(comm)
    made.check()
    recorder.goes_well()


class _Arrival:
    """All ranks' coming to a communicator. What makes something of it, as `Dup` does, blocks in MPI, and must not
    before all are there. A rank that gave up waiting has come all the same."""

    limits = Limits()
    nap_after = NAP_AFTER_BETWEEN_NODES

    def __init__(self, comm: MPI.Intracomm, old: Communicator | None = None) -> None:
        self.old = old
        name = f"{comm.Get_name() or 'a communicator'} of {comm.size} ranks"
        self._what = f"the first collective on {name} ({COME})" if old is None else f"renew of {name}"
        self._roll = Roll(comm, self._what)

    def wait(self) -> None:
        """Blocking; StallError after the limit of the environment."""
        self.limits = limits()
        drive(until(self._roll.request.Test), self, self._what)

    def look(self, waited: float) -> None:
        """There is no generation yet that could end, but what is renewed knows whose program has ended."""
        for rank, how in (self.old.ended() if self.old is not None else {}).items():
            raise CollectiveError(f"rank {rank} cannot come to renew: {how}")
        self._roll.look(waited)

    def late(self) -> list[int]:
        """See `Roll`."""
        return self._roll.late()

    def close(self) -> None:
        """MPI completes a barrier under way by itself."""


def _open(
    comm: MPI.Intracomm, arrival: _Arrival | None, known_table: TuningTable | None, names: Sequence[int] | None
) -> Communicator:
    """Wait for all ranks, from where an earlier call gave up, and make what is kept."""
    if arrival is None:
        arrival = _Arrival(comm)
        comm.Set_attr(_key(), arrival)
    arrival.wait()
    old = arrival.old
    if old is not None:  # all have come: nobody touches its memory any more
        old.open = True
        old.close()
        names = old.names
    sweep()
    made = Communicator(comm, known_table, names)
    comm.Set_attr(_key(), made)
    return made


def _node_memory(comm: MPI.Intracomm) -> tuple[MPI.Comm, NodeMemory, list[int]]:
    """The ranks that share memory with this one, their areas, and their numbers; this rank alone where they cannot."""
    node = made(comm.Split_type(MPI.COMM_TYPE_SHARED))
    memory = open_memory(node)
    if memory is None:
        node.Free()
        node = made(comm.Split(comm.rank))
        memory = open_memory(node)
        if memory is None:
            raise CollectiveError("a rank cannot map its own shared memory: raise ulimit -n (files) and ulimit -v")
    names = np.empty(node.size, np.int64)
    node.Allgather(np.array([comm.rank], np.int64), names)
    return node, memory, names.tolist()


def open_memory(node: MPI.Comm, fenced: bool = not ORDERED_STORES) -> NodeMemory | None:
    """Collective over `node`: one area each. None, on every rank, when some rank cannot map another's area."""
    clear()
    mine = arena.empty(area_bytes(node.size), np.uint8)
    mine[:SLOTS_AT] = mine[ROWS_AT:] = 0
    regions = np.empty((node.size, len(Region._fields)), np.int64)
    node.Allgather(np.array(arena.locate(mine), np.int64), regions)
    places = [Region(*map(int, region)) for region in regions]
    areas, poison_fd = _attach(places)
    opened = np.array([len(areas)], np.int64)
    node.Allreduce(MPI.IN_PLACE, opened, MPI.MIN)
    if opened[0] < node.size:
        if poison_fd is not None:
            os.close(poison_fd)
        return None
    assert poison_fd is not None
    fence = None
    if fenced:
        assert isinstance(node, MPI.Intracomm)
        fence = MPI.Win.Create(np.zeros(8, np.uint8), comm=node)
        fence.Lock_all(MPI.MODE_NOCHECK)
    areas[node.rank] = mine  # keeps it alive
    return NodeMemory(
        node.rank,
        areas,
        [place.pid for place in places],
        cores=_cores(node),
        reachable=open_to_all(node),
        fence=fence,
        poison_fd=poison_fd,
        identity=abs(hash(places[0])) or 1,
    )


def _attach(places: Sequence[Region]) -> tuple[list[NDArray[np.uint8]], int | None]:
    """All areas, and the file of the first; fewer where one cannot be mapped."""
    try:
        first = os.open(f"/proc/{places[0].pid}/fd/{places[0].fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return [], None
    try:
        return [arena.attach(place) for place in places], first
    except CollectiveError:
        return [], first


def _cores(node: MPI.Comm) -> int:
    """On how many the ranks of a node may run, all together; collective over it."""
    cores = np.zeros(MOST_CORES, np.uint8)
    cores[[core for core in os.sched_getaffinity(0) if core < MOST_CORES]] = 1
    node.Allreduce(MPI.IN_PLACE, cores, MPI.MAX)
    quotas = np.empty((node.size, len(Quota._fields)), np.int64)
    node.Allgather(np.array(find_quota() or NO_QUOTA, np.int64), quotas)
    known = [None if tuple(one) == NO_QUOTA else Quota(*map(int, one)) for one in quotas]
    return bound_cores(int(np.count_nonzero(cores)), known)


if MPI.Is_initialized() and not MPI.Is_finalized():
    tracing.begin(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)  # so that others hear of its end, also before a collective


@atexit.register
def leave_all(but: Collection[MPI.Comm] = ()) -> None:
    """Tell others that this rank's program ends; not those of the communicators `but`, which are needed yet."""
    needed = [comm.Get_attr(_key()) for comm in but if comm != MPI.COMM_NULL]
    for kept in list(_alive):
        if kept not in needed:
            kept.leave()

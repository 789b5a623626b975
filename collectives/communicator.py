"""The state that we keep for an MPI communicator, from its first call until a rank fails or the user frees it.

The first call on an MPI communicator makes a `Communicator`, and later calls find that object as an attribute of the
MPI communicator. When a rank fails, the `Communicator` ends: all ranks raise the same error, in this call or the next,
and `renew` makes a new `Communicator` for the same ranks. The life of a `Communicator` is called a *generation*. A rank
that fails tells the ranks of its own node through the board (a table in shared memory, `fabric.board`), and the ranks
of other nodes by notes (small messages, `network.control`).
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
from mpips.collectives.errors import CollectiveError, MismatchError, error_for_all, of_caller, warn
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import Region
from mpips.collectives.fabric.board import NUMBERS, Board, GenerationEnd, describe_unreachable
from mpips.collectives.fabric.failure import dead_ranks, guard_comm
from mpips.collectives.fabric.layout import (
    DEPARTURES,
    ORDERED_STORES,
    PROGRAM_ENDED,
    ROWS_AT,
    SLOTS_AT,
    NodeAreas,
    area_bytes,
    free_closed,
)
from mpips.collectives.fabric.process_memory import OutOfReach, all_reachable
from mpips.collectives.fabric.requests import (
    TAGS,
    ArrivalBarrier,
    Lanes,
    NativeCollectives,
    close_later,
    collect_closed,
    ranks_of_job,
)
from mpips.collectives.fabric.wait import NAP_AFTER_BETWEEN_NODES, Limits, drive, read_limits, wait_until
from mpips.collectives.machine import Quota, bound_cores, find_quota
from mpips.collectives.network.control import Control
from mpips.collectives.recorder import own as recorder
from mpips.collectives.recorder import tracing
from mpips.collectives.schedule.catalog import check_algorithm
from mpips.collectives.tuner import table
from mpips.collectives.tuner.table import TuningTable

LOG = log.get("mpips.collectives")
# core numbers at or above this are not counted
MOST_CORES = 4096
# the longest time that a failing rank spends on completing an MPI collective; see `requests.NativeCollectives`
CARRYING_SECONDS = 3.0
NO_QUOTA = (0, 0)
FREED = "the communicator has been freed or renewed: use another one, and make new plans on it"
LET_ALL_CALL = (
    "all its ranks must call it; for fewer, pass a communicator of those, as kv.layout.workers in a store with servers"
)
# The names of the threads that this package starts begin with this.
THREAD_PREFIX = "mpips "
ONE_THREAD = (
    "make all calls on a communicator from one thread, and give each other thread a copy of its own, comm.Dup()"
)
# A cache of the last argument and result of `communicator`, because most programs use a single communicator.
_recent: tuple[MPI.Comm | None, Communicator | None] = (None, None)
_alive: WeakSet[Communicator] = WeakSet()
# handle of a communicator -> a lock for its first call, which two threads of this process may make at the same time
_first_call_locks: dict[int, threading.Lock] = {}
# True if a thread of this package will make calls at the same time as the program's threads; see `comm_for_thread`
_threads_expected = False
# memory of abandoned communicators, to which MPI may still write
_kept_for_good: list[Any] = []


@cache
def _key() -> int:
    """The attribute key under which an MPI communicator keeps its `Communicator`.

    It is made at first use, so that importing this module does not start MPI.
    """
    return MPI.Comm.Create_keyval(delete_fn=lambda comm, key, kept: kept.close())


class MultiNodeGroup:
    """The `RankGroup` of a communicator whose ranks are on several nodes.

    The end of the generation may be announced on the node's board or by a note from another node, so `look` checks
    both.
    """

    nap_after = NAP_AFTER_BETWEEN_NODES

    def __init__(self, board: Board, control: Control) -> None:
        self._board = board
        self._control = control
        self.limits = control.limits
        self.late = control.late

    def look(self, waited: float) -> None:
        self._control.look(waited)
        self._board.look_at_all(waited)


class Communicator:
    """Everything that we keep for an MPI communicator, from its first call until it fails or is freed.

    The constructor is collective and blocking.

    Args:
        known_table: The tuning table, the same on all ranks. None: all ranks use the table that rank 0 loads.
        names: For each rank of `comm`, the number that error messages show. None: they show the ranks of `comm`.
    """

    def __init__(
        self, comm: MPI.Intracomm, known_table: TuningTable | None = None, names: Sequence[int] | None = None
    ) -> None:
        tracing.begin(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        self.comm = guard_comm(comm.Dup())
        self.names = range(comm.size) if names is None else names
        self.rank = comm.rank
        self.size = comm.size
        self.limits = read_limits()
        # the MPI communicator of the ranks that share memory with this rank
        self.node, memory, on_node = _node_memory(self.comm)
        # for each rank the lowest rank of its node
        self.node_of, spare = self._find_nodes(min(on_node))
        # The communicator that `comm_for_thread` returns. The program's thread makes it, because the thread that will
        # use it must not call Dup on the communicator that the program's thread uses.
        self._spare = guard_comm(comm.Dup()) if spare else None
        # number of nodes
        self.nodes = len(set(self.node_of))
        self.board = Board(memory, [self.names[rank] for rank in on_node], self.limits)
        self.across = self._make_across()
        # None if all ranks are on one node
        self.control = Control(guard_comm(self.comm.Dup()), self.limits, self.names) if self.nodes > 1 else None
        self.generation = MultiNodeGroup(self.board, self.control) if self.control is not None else self.board
        self.table = known_table or table.broadcast_table(self.comm, partial(table.load_or_warn, check_algorithm))
        self.ending = GenerationEnd(self._end)
        # False once the user's communicator has been freed or renewed
        self.open = True
        # the runs of plans that `Plan.start` has begun and that are not done yet, in the order in which they began
        self.started: list[Any] = []
        # plans by the `id` of their arrays; see `plan.PlanCache`
        self.plans: dict[Any, Any] = {}
        self.cache: Any = None
        # runs the MPI library's own collectives
        self.native = NativeCollectives(self.comm)
        # the communicators for messages of one-shot calls
        self.lanes = Lanes(self.comm, self.across)
        # every `Lanes` that this object has made, to be freed at the end
        self.all_lanes = [self.lanes]
        recorder.add_communicator(self.board.marks.identity, ranks_of_job(self.comm, range(self.size)))
        # the communicators for messages of plans; `count_tags` replaces them by new ones when they run out of tags
        self.plan_lanes = self.lanes
        # the number of tags that plans have taken on `plan_lanes`; see `count_tags`
        self.tags_dealt = 0
        # the thread that made the last call; see `change_caller`
        self.caller = 0
        # True while the thread `caller` is in its call
        self.inside = False
        # True if several threads are known to take turns on this communicator: then `change_caller` does not warn
        self.of_threads = False
        # all threads that have made a call on this communicator
        self._callers: WeakSet[threading.Thread] = WeakSet()
        # arrays of failed calls, which other ranks or MPI may still access
        self._kept: list[Any] = []
        self._pid = os.getpid()
        _alive.add(self)

    def set_enclosing_look(self, look: Callable[[float], None]) -> None:
        """Make every wait on this communicator also call `look(seconds waited)`.

        A parameter store calls this for each of its communicators. Its `look` raises if the store's own generation has
        ended, which ends the generations of its communicators.
        """
        self.board.enclosing_look = look

    def set_limits(self, stall_seconds: float, timeout_seconds: float) -> None:
        """Set the time after which a wait warns, and the time after which it raises StallError (0: never)."""
        self.limits = self.board.limits = self.generation.limits = Limits(stall_seconds, timeout_seconds)
        if self.control is not None:
            self.control.limits = self.limits

    @property
    def end_error(self) -> CollectiveError | None:
        """The error that every call raises once the communicator has ended. None until then."""
        return self.ending.error

    def check(self) -> None:
        """Raise the error that ended the communicator, if any. Raise MismatchError if the communicator was freed."""
        if self.end_error is not None:
            raise type(self.end_error)(str(self.end_error))
        if not self.open:
            raise MismatchError(FREED)

    def change_caller(self, thread: int, what: str) -> None:
        """Handle a call, named `what`, if a different thread made the previous call.

        If the previous thread is still in its call, all ranks raise CollectiveError. If threads of the program take
        turns, warn: on another rank the threads may take turns in a different order, and then calls that do not belong
        together are matched. If one thread takes over from another for good, do not warn.
        """
        before = self.caller
        if self.inside:
            rank, caller, other = self.names[self.rank], thread_name(thread), thread_name(before)
            error = CollectiveError(
                f"rank {rank}: thread {caller!r} calls {what} while thread {other!r} is in a call "
                f"on the same communicator: {ONE_THREAD}"
            )
            raise self.fail(what, error)
        self.caller = thread
        current = threading.current_thread()
        if current in self._callers and not self.of_threads:
            other = thread_name(before)
            # If the other thread has ended, its name is "": this thread has taken over for good. Warn only once.
            self.of_threads = bool(other)
            if other and not (other.startswith(THREAD_PREFIX) or current.name.startswith(THREAD_PREFIX)):
                turns = f"threads {other!r} and {current.name!r} take turns to make calls on one communicator"
                warn(f"{turns}, and ranks whose turns differ get each other's results: {ONE_THREAD}")
        self._callers.add(current)

    @contextmanager
    def entered(self, what: str) -> Iterator[None]:
        """A context in which this thread counts as being in a call."""
        if self.caller != (thread := threading.get_ident()):
            self.change_caller(thread, what)
        outer, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = outer

    @property
    def next_number(self) -> int:
        """The number that the next call on this communicator will have. It is the same on all ranks."""
        return (self.board.number if self.control is None else self.control.number) + 1 & NUMBERS

    def agree(self, text: str) -> None:
        """Raise MismatchError on every rank unless all ranks call with the same text. Collective and blocking."""
        self.check()
        with self.entered(text), self.failing(text):
            self.run(self.agreed(text), text)

    def agreed(self, text: str) -> Iterator[None]:
        """Like `agree`, but as a generator that yields whenever it has to wait."""
        if self.size > 1:
            yield from (self.board if self.control is None else self.control).agreed(text)

    def run(self, steps: Iterator[None], what: str) -> None:
        """Run the steps of an operation to their end. Blocking. `what` names the operation in errors."""
        drive(steps, self.generation, what, self.board.spins)

    def look(self, waited: float) -> None:
        """Raise if the communicator has ended, or if a rank for which this one waits has died or left.

        Called for an operation that runs while the program computes. `waited` is the number of seconds for which that
        operation has waited so far.
        """
        self.generation.look(waited)

    def look_at_all(self, waited: float = 0.0) -> None:
        """Raise if the communicator has ended, or if any process of this node has died.

        Called when this rank is in no operation.
        """
        if self.control is not None:
            self.control.look(waited)
        self.board.look_at_all(waited)

    def end_announced(self) -> bool:
        """True if another rank has announced that the communicator has ended. Does not raise."""
        return bool(self.board.poison.flag[0]) or (self.control is not None and self.control.has_ended)

    def update_fast_paths(self) -> None:
        """Permit fast paths, or forbid them, depending on the current state of this communicator.

        A fast path must not overtake started operations, and must not begin on a communicator that has ended or was
        freed.
        """
        self.board.hold_fast_paths(bool(self.started or self.end_error is not None or not self.open))

    @contextmanager
    def failing(self, what: str, *kept: object) -> Iterator[None]:
        """A context in which any exception ends the communicator. See `fail`."""
        try:
            yield
        except BaseException as error:
            raise self.fail(what, error, *kept) from None

    @contextmanager
    def preparing(self, what: str) -> Iterator[None]:
        """A context for checking arguments and compiling.

        An Exception counts as an argument error and concerns only this rank. A MemoryError, and an interrupt such as
        Ctrl-C, ends the communicator.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, MemoryError):
                raise self.fail(what, error) from None
            raise of_caller(error) from None
        except BaseException as error:
            raise self.fail(what, error) from None

    def fail(self, what: str, error: BaseException, *kept: object) -> BaseException:
        """End the communicator for all ranks, because `what` raised `error` on this rank. Return the error to raise.

        Blocks until no other rank accesses this rank's arrays any more, but only for a few seconds.

        Args:
            kept: Objects to keep alive, because other ranks or MPI may still touch their memory.
        """
        if self.end_error is not None or not self.open:
            if self.end_error is not None and isinstance(error, MPI.Exception):
                # The message of `end_error` tells more than MPI's own error.
                return type(self.end_error)(str(self.end_error))
            return error
        self._kept.append(kept)
        try:
            shared_error = self.ending.end(_error_of_failure(self, what, error))
            LOG.info("the communicator of %d ranks has ended: %s", self.size, shared_error)
            recorder.write_failure(str(shared_error))
        finally:
            self.started = []
            self.update_fast_paths()
        return shared_error if isinstance(error, (CollectiveError, MPI.Exception)) else error

    def _end(self, error: CollectiveError) -> CollectiveError:
        """Tell the other ranks about `error`. Return the error that all ranks raise: that of the first rank to fail."""
        ended = self.board.end(error, str(error))
        if self.control is not None:
            ended = self.control.end(ended, str(ended))
        if self.control is not None or self.board.all_entered(self.native.number):
            self.native.carry_through(self.gone_ranks, CARRYING_SECONDS)
        return ended

    def count_tags(self, tags: int) -> None:
        """Count the tags that a new plan has taken. Collective.

        When plans have taken more than half of the tags, later plans get new communicators, on which all tags are free.
        """
        self.tags_dealt += tags
        if self.tags_dealt > TAGS // 2:
            across = None if self.across is None else self.across.Dup()
            self.plan_lanes = Lanes(self.comm.Dup(), across)
            self.tags_dealt = 0
            self.all_lanes.append(self.plan_lanes)

    def close(self) -> None:
        """Free all resources of this object. Called when the user's communicator is freed or renewed.

        Collective, but never blocks, because ranks may free their communicators at different times. Messages may still
        be in flight, so the communicators that carry them are freed later (`requests.close_later`).
        """
        if not self.open:
            return
        self.open = False
        self.update_fast_paths()
        self.started = []
        self.native.keep()
        if MPI.Is_finalized():
            return
        if self.cache is not None:
            self.cache.free()
        self.board.close()
        self.node.Free()
        for comm in self._message_comms():
            close_later(comm, self._kept, self.native.begun if comm is self.comm else 0)
        self._kept = []

    def abandon(self) -> None:
        """Abandon the communicator after ranks have died. All surviving ranks must call this.

        Its MPI communicators are never freed, and memory to which MPI may still write is never freed either.
        """
        if self.open:
            self.open = False
            self.update_fast_paths()
            self.started = []
            self.native.keep()
            if self.cache is not None:
                self.cache.free()
            self.board.marks.close()
            self.board.memory.abandon()
            if self._spare is not None:
                abandon(self._spare)
            _kept_for_good.append(self._kept)

    def leave(self, how: int = PROGRAM_ENDED) -> None:
        """Tell the other ranks that this rank will make no more calls. `how` is a key of `DEPARTURES`."""
        # A forked child is not a rank.
        if self.open and self._pid == os.getpid() and not MPI.Is_finalized():
            self.board.leave(how)
            if self.control is not None:
                self.control.leave(how)

    def comm_for_thread(self) -> MPI.Intracomm:
        """Do the work of the function `comm_for_thread`.

        The first call is collective and blocking. Every rank makes it from this package's own thread.
        """
        # None if this communicator was made before `expect_threads` was called.
        if self._spare is None:
            self._spare = guard_comm(self.comm.Dup())
        inner: Any = self._spare.Get_attr(_key())
        if not isinstance(inner, Communicator):
            self._spare.Set_name(self.comm.Get_name())
            inner = communicator(self._spare, self.table, self.names)
            inner.set_limits(*self.limits)
            inner.of_threads = True
        return self._spare

    def gone_ranks(self) -> dict[int, str]:
        """Return the ranks that are known to have left or died: rank -> how, in words. Reads notes from other nodes."""
        return self.board.gone_ranks() | (self.control.gone_ranks() if self.control is not None else {})

    def _message_comms(self) -> Iterator[MPI.Comm]:
        """Yield the MPI communicators of this object on which messages may be in flight."""
        if self.control is not None:
            yield self.control.comm
        if self._spare is not None:
            yield self._spare
        for lanes in self.all_lanes:
            yield from (comm for comm in lanes if comm is not None)

    def _find_nodes(self, first: int) -> tuple[list[int], bool]:
        """Return for each rank the lowest rank of its node, and True if any rank has called `expect_threads`.

        Collective. `first` is the lowest rank of this node.
        """
        everybody = np.empty((self.size, 2), np.int64)
        self.comm.Allgather(np.array([first, _threads_expected], np.int64), everybody)
        return everybody[:, 0].tolist(), bool(everybody[:, 1].any())

    def _make_across(self) -> MPI.Comm | None:
        """Make a communicator of one rank from each node: those with the same node-local rank as this rank. Collective.

        Return None if the nodes have different numbers of ranks.
        """
        if self.nodes == 1 or len({self.node_of.count(node) for node in self.node_of}) > 1:
            return None
        return guard_comm(self.comm.Split(self.board.rank, self.rank))


def thread_name(thread: int) -> str:
    """Return the name of the thread with this identifier, or "" if it has ended."""
    return next((running.name for running in threading.enumerate() if running.ident == thread), "")


def _error_of_failure(home: Communicator, what: str, error: BaseException) -> CollectiveError:
    """Return the error that all ranks raise when `what` has raised `error` on this rank."""
    if isinstance(error, OutOfReach):
        return CollectiveError(describe_unreachable(home.board, error))
    dead = dead_ranks(home.comm) if isinstance(error, MPI.Exception) else []
    if dead:
        return CollectiveError(f"{what}: rank {home.names[dead[0]]} is needed, and {DEPARTURES[0]}")
    return error_for_all(home.names[home.rank], what, error)


def communicator(
    comm: MPI.Comm | None, known_table: TuningTable | None = None, names: Sequence[int] | None = None
) -> Communicator:
    """Return the `Communicator` of an MPI communicator (None: COMM_WORLD).

    The first call for an MPI communicator makes the `Communicator`, and is collective and blocking. That call raises
    StallError if a rank does not arrive within MPIPS_TIMEOUT_SECONDS; a later call resumes the wait for that rank.
    `known_table` and `names` (see `Communicator`) have an effect in the first call only.
    """
    global _recent
    before, known = _recent
    if comm is before and known is not None and known.open:
        return known
    home = _find_or_make(MPI.COMM_WORLD if comm is None else comm, known_table, names)
    _recent = (comm, home)
    return home


def expect_threads() -> None:
    """Announce that a thread of this package will make calls at the same time as the program's threads.

    Each `Communicator` that is made from now on also makes a second MPI communicator for that thread; see
    `comm_for_thread`.
    """
    global _threads_expected
    _threads_expected = True


def comm_for_thread(comm: MPI.Comm | None) -> MPI.Intracomm:
    """Return a second communicator of the ranks of `comm` (None: COMM_WORLD), for calls of this package's own thread.

    All ranks must make the calls on a communicator in the same order. But the calls of this package's thread come at
    different moments on each rank, between different calls of the program. So this thread uses a communicator of its
    own. That communicator ends together with `comm`, and `renew(comm)` renews both.
    """
    return communicator(comm).comm_for_thread()


def _check_comm(comm: object) -> None:
    if not isinstance(comm, MPI.Comm):
        given = f"comm {comm!r} is of type {type(comm).__name__}"
        raise of_caller(TypeError(f"{given}: pass a communicator of mpi4py, or None for COMM_WORLD"))


def _find_or_make(comm: MPI.Comm, known_table: TuningTable | None, names: Sequence[int] | None) -> Communicator:
    _check_comm(comm)
    try:
        attached: Any = comm.Get_attr(_key())
    except MPI.Exception:
        raise MismatchError(FREED) from None
    if isinstance(attached, Communicator):
        return attached
    if not isinstance(comm, MPI.Intracomm):
        raise MismatchError("an intercommunicator has no collectives here: merge it first")
    with _first_call_locks.setdefault(comm.handle, threading.Lock()):
        # Another thread may have made the `Communicator` while this thread waited for the lock.
        attached = comm.Get_attr(_key())
        return (
            attached if isinstance(attached, Communicator) else _make_communicator(comm, attached, known_table, names)
        )


def abandon(comm: MPI.Comm) -> None:
    """Abandon the `Communicator` of `comm` after ranks have died. All surviving ranks call this. Does not block."""
    attached = comm.Get_attr(_key())
    if attached is not None:
        if isinstance(attached, Communicator):
            attached.abandon()
        comm.Delete_attr(_key())


def renew(comm: MPI.Comm | None = None) -> None:
    """Make `comm` usable again after a call on it has failed.

    Collective and blocking: all ranks of `comm` call it. Plans that were made before stay unusable; make new ones.

    Args:
        comm: The mpi4py communicator on which calls raise CollectiveError. None stands for COMM_WORLD.

    Raises:
        StallError: A rank did not call `renew` within MPIPS_TIMEOUT_SECONDS. Calling `renew` or any collective on
            `comm` again resumes the wait for that rank.
        CollectiveError: A rank will never call `renew`, because its program or its process has ended.
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    _check_comm(comm)
    old = comm.Get_attr(_key())
    if isinstance(old, Communicator):
        old.open, old.ending.error = False, old.end_error or CollectiveError("it has been renewed")
        old.update_fast_paths()
        # `_find_or_make` has refused communicators of any other type.
        assert isinstance(comm, MPI.Intracomm)
        comm.Set_attr(_key(), _ArrivalWait(comm, old))
    new = communicator(comm)
    new.check()
    recorder.clear_failures()


class _ArrivalWait:
    """The wait until all ranks have made their first call on a communicator, or have called `renew`.

    MPI calls that make communicators, such as `Dup`, block without a time limit until all ranks have called them. So we
    make such MPI calls only once all ranks are known to have arrived. Until then this object is an attribute of the MPI
    communicator, so that a later call can resume a wait that timed out. A rank whose own wait timed out counts as
    arrived.
    """

    limits = Limits()
    nap_after = NAP_AFTER_BETWEEN_NODES

    def __init__(self, comm: MPI.Intracomm, old: Communicator | None = None) -> None:
        self.old = old
        name = f"{comm.Get_name() or 'a communicator'} of {comm.size} ranks"
        self._what = f"the first collective on {name} ({LET_ALL_CALL})" if old is None else f"renew of {name}"
        self._barrier = ArrivalBarrier(comm, self._what)

    def wait(self) -> None:
        """Wait until all ranks have arrived. Blocking. Raises StallError after MPIPS_TIMEOUT_SECONDS."""
        self.limits = read_limits()
        drive(wait_until(self._barrier.is_over), self, self._what)

    def look(self, waited: float) -> None:
        """Raise CollectiveError if a rank can no longer arrive."""
        # The new communicator does not exist yet. But the old one, if there is one, knows which ranks have left.
        for rank, how in (self.old.gone_ranks() if self.old is not None else {}).items():
            raise CollectiveError(f"rank {rank} can no longer call renew: {how}")
        self._barrier.look(waited)

    def late(self) -> list[int]:
        return self._barrier.late()

    def close(self) -> None:
        """Do nothing: MPI completes the barrier by itself. Called when the user's communicator is freed."""


def _make_communicator(
    comm: MPI.Intracomm, arrival: _ArrivalWait | None, known_table: TuningTable | None, names: Sequence[int] | None
) -> Communicator:
    """Wait for all ranks, and make the `Communicator`. `arrival`: the unfinished wait of an earlier call, or None."""
    if arrival is None:
        arrival = _ArrivalWait(comm)
        comm.Set_attr(_key(), arrival)
    arrival.wait()
    old = arrival.old
    if old is not None:
        # All ranks have called `renew`, so no rank touches the memory of the old communicator any more.
        old.open = True
        old.close()
        names = old.names
    collect_closed()
    home = Communicator(comm, known_table, names)
    comm.Set_attr(_key(), home)
    return home


def _node_memory(comm: MPI.Intracomm) -> tuple[MPI.Comm, NodeAreas, list[int]]:
    """Make the communicator of the ranks that share memory with this one, and map their areas. Collective.

    An area is the part of shared memory that a rank writes (`fabric.layout`). If any of these ranks cannot map the area
    of another one, each rank counts as a node of its own.

    Returns:
        The communicator of the node, the areas, and the rank in `comm` of each of the node's ranks.
    """
    node = guard_comm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    memory = open_memory(node)
    if memory is None:
        node.Free()
        node = guard_comm(comm.Split(comm.rank))
        memory = open_memory(node)
        if memory is None:
            raise CollectiveError("a rank cannot map its own shared memory: raise ulimit -n (files) and ulimit -v")
    names = np.empty(node.size, np.int64)
    node.Allgather(np.array([comm.rank], np.int64), names)
    return node, memory, names.tolist()


def open_memory(node: MPI.Comm, fenced: bool = not ORDERED_STORES) -> NodeAreas | None:
    """Make this rank's area of shared memory and map the areas of the other ranks. Collective over `node`.

    Returns None on every rank if any rank cannot map the area of another.

    Args:
        fenced: Use MPI_Win_sync as memory fence around signals, for processors that may reorder stores.
    """
    free_closed()
    area = arena.empty(area_bytes(node.size), np.uint8)
    area[:SLOTS_AT] = area[ROWS_AT:] = 0
    regions = np.empty((node.size, len(Region._fields)), np.int64)
    node.Allgather(np.array(arena.locate(area), np.int64), regions)
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
    # The array from `arena.empty` keeps the area alive. The attached array would not.
    areas[node.rank] = area
    return NodeAreas(
        node.rank,
        areas,
        [place.pid for place in places],
        cores=_count_cores(node),
        reachable=all_reachable(node),
        fence=fence,
        poison_fd=poison_fd,
        identity=abs(hash(places[0])) or 1,
    )


def _attach(places: Sequence[Region]) -> tuple[list[NDArray[np.uint8]], int | None]:
    """Map all areas. Return them, and a descriptor of the file that holds the first rank's area.

    `fabric.board.Poison` needs the descriptor. If an area cannot be mapped, the list is empty. If the first rank's file
    cannot be opened, the descriptor is None.
    """
    try:
        first = os.open(f"/proc/{places[0].pid}/fd/{places[0].fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return [], None
    try:
        return [arena.attach(place) for place in places], first
    except CollectiveError:
        return [], first


def _count_cores(node: MPI.Comm) -> int:
    """Return the number of cores that the ranks of a node may use together. Collective over `node`."""
    cores = np.zeros(MOST_CORES, np.uint8)
    cores[[core for core in os.sched_getaffinity(0) if core < MOST_CORES]] = 1
    node.Allreduce(MPI.IN_PLACE, cores, MPI.MAX)
    quotas = np.empty((node.size, len(Quota._fields)), np.int64)
    node.Allgather(np.array(find_quota() or NO_QUOTA, np.int64), quotas)
    known = [None if tuple(row) == NO_QUOTA else Quota(*map(int, row)) for row in quotas]
    return bound_cores(int(np.count_nonzero(cores)), known)


# Open this rank's page (the file of its recorder) already at import. Then even a rank that ends before its first
# collective records that it has ended, and the other ranks do not wait for it.
if MPI.Is_initialized() and not MPI.Is_finalized():
    tracing.begin(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)


@atexit.register
def leave_all(but: Collection[MPI.Comm] = ()) -> None:
    """Tell the other ranks of all communicators, except the communicators in `but`, that this rank's program ends.

    A store that closes at exit passes its communicators as `but`: it still needs the other ranks until it has closed.
    """
    needed = [comm.Get_attr(_key()) for comm in but if comm != MPI.COMM_NULL]
    for home in list(_alive):
        if home not in needed:
            home.leave()

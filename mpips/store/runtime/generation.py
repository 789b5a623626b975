"""A generation: the life of a store from its creation, or from a recovery, to the next failure.

A generation ends for all ranks together, and all raise the same error message. Then all ranks begin the next
generation, or all leave. The ranks of a node share memory with a flag and the error message, which `collectives` keeps
for the store's communicator. Between nodes, ranks send messages (notes). The rank that finds a failure calls `end`.
Every wait checks the flag, and raises the error. After the end the ranks tell each other whether they continue
(`NextGenerationBarrier`). `recovery.recover` makes the next generation.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from mpi4py import MPI

from mpips.collectives import log
from mpips.collectives.clock import Clock
from mpips.collectives.communicator import Communicator, communicator
from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric.failure import dead_ranks
from mpips.collectives.fabric.layout import CLOSED, DEPARTURES
from mpips.collectives.fabric.requests import collect_closed
from mpips.collectives.fabric.tasks import Task
from mpips.collectives.fabric.wait import (
    LOOK_SECONDS,
    NAP_AFTER_BETWEEN_NODES,
    NAP_AFTER_ON_NODE,
    Limits,
    check_in_time,
    drive,
    wait_until,
)
from mpips.collectives.recorder import own as recorder
from mpips.store.roles import Layout
from mpips.store.runtime.errors import LostError, StoreError, of_kind, uninterrupted
from mpips.store.runtime.rendezvous import LAST_WORD_SECONDS, LeftRanks, MeetingRoom, Watch

# seconds for which a rank that closes the store waits for other ranks if the generation has already ended
CLOSING_SECONDS = 5.0
FREEING_SECONDS = 1.0
# A wait that lasts longer than LONG_SECONDS also calls the functions in `checks`, every CHECK_SECONDS.
LONG_SECONDS, CHECK_SECONDS = 0.2, 0.1
BARRIER_TAG = 4
WOULD, GOES, TRIED, LEAVES = b"would go on", b"goes on", b"has tried", b"leaves"
NEVER = Limits(math.inf, 0.0)
LOG = log.get("mpips.store")


class PresentGeneration:
    """Everything that belongs to a single generation. Each attempt to begin the next generation makes a new object.

    The constructor is collective over `layout.world`.

    Args:
        number: The number of generations of this store that have ended before.
        on_end: See `Generation.on_end`.
    """

    def __init__(self, layout: Layout, limits: Limits, number: int, on_end: Iterable[Callable[[], None]] = ()) -> None:
        self.number = number
        self.on_end = [*on_end]
        # True if all ranks of the store share memory
        one_node = len(set(layout.nodes)) == 1
        self.nap_after = NAP_AFTER_ON_NODE if one_node else NAP_AFTER_BETWEEN_NODES
        # the record that `collectives` keeps for the store's communicator
        self.home = communicator(layout.world)
        self.home.set_limits(*limits)
        self.flag: memoryview = self.home.board.poison.flag
        # the records for smaller communicators of the store, see `Generation.within`
        self.inner: list[Communicator] = []
        # the error that every call raises once the generation is over
        self.over: StoreError | None = None
        # True while a task of this rank is in a meeting
        self.meeting = False
        # meetings of all ranks, and of the workers
        self.everybody = MeetingRoom(layout.world)
        self.workers = None if layout.workers is None else MeetingRoom(layout.workers)
        # the barrier in which the ranks agree, after this generation, to begin the next one or to leave
        self.barrier = NextGenerationBarrier(layout.world, partial(_gone, layout.world, self.home), layout.survives)


class Generation:
    """The current generation of one store, as one rank sees it. The constructor is collective over `layout.world`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        # stall_seconds and timeout_seconds of the store's options
        self.limits = layout.limits
        # Functions that are called in long waits. Each raises CollectiveError if this rank waits for something that can
        # no longer happen.
        self.checks: list[Callable[[], None]] = []
        # time.monotonic() of the last checks
        self._checked = 0.0
        # The name of the collective call in which this worker waits for other workers. "" once it has told them how far
        # it has pushed.
        self.undescribed = ""
        # True while this rank checks the generation from within a blocking collective of a smaller communicator
        self.inside = False
        # held by the thread that receives notes from other nodes
        self._hearing = threading.Lock()
        # held by the thread that ends the generation
        self._ending = threading.RLock()
        self._closed = False
        # everything that the next generation replaces
        self.present = PresentGeneration(layout, self.limits, 0)
        self._log_begin()

    @property
    def number(self) -> int:
        """The number of generations of this store that have ended before."""
        return self.present.number

    @property
    def flag(self) -> memoryview:
        """flag[0] is not 0 once the generation has ended on this node. The next generation has another flag."""
        return self.present.flag

    @property
    def over(self) -> StoreError | None:
        """The error that every call raises once the generation is over."""
        return self.present.over

    @property
    def barrier(self) -> NextGenerationBarrier:
        """The barrier in which the ranks agree, after this generation, to begin the next one or to leave."""
        return self.present.barrier

    @property
    def on_end(self) -> list[Callable[[], None]]:
        """Functions that are called once when this rank learns that the generation is over, before it raises an error.

        These functions wait until no other rank reads this rank's arrays any more, and finish work that other ranks
        rely on.
        """
        return self.present.on_end

    # ---- its end

    def check(self) -> None:
        """Raise StoreError if the generation has ended on this node. Cheap: sends and receives nothing."""
        present = self.present
        if (present.over is not None or present.flag[0]) and not present.meeting:
            raise self._error()

    def look(self, waited: float = 0.0) -> None:
        """Raise StoreError if the generation has ended.

        Also receive notes from other nodes, and notice processes that have ended.

        Args:
            waited: Seconds that the caller has waited so far.
        """
        if not self.present.meeting:
            self._look(waited)

    def _look(self, waited: float) -> None:
        """Do what `look` does, even while this rank is in a meeting.

        `look` does nothing during a meeting, because a meeting may still be completed after the generation has ended.
        The meeting calls `_look` itself and decides what to do with the error.
        """
        if self.over is not None or self.flag[0]:
            raise self._error()
        # If the lock is held, another thread is receiving notes.
        if not self._hearing.locked():
            with self._hearing:
                try:
                    self.present.home.look_at_all(waited)
                    if waited > LONG_SECONDS and (now := time.monotonic()) > self._checked + CHECK_SECONDS:
                        self._checked = now
                        for check in self.checks:
                            check()
                except CollectiveError as error:
                    raise of_kind(error) from None

    def end(self, what: str, error: BaseException) -> BaseException:
        """End the generation for all ranks, because the call `what` has raised `error` on this rank.

        Idempotent. Blocks for some seconds at most, until no other rank touches this rank's arrays.

        Returns:
            The exception to raise. If the error comes from `collectives`, MPI or the generation, this is a StoreError
            with the message that all ranks raise. Otherwise it is `error` itself.
        """
        # Another thread may end the generation at the same time.
        with self._ending:
            if self.over is not None and isinstance(error, StoreError):
                return error
            if self.over is None:
                with uninterrupted():
                    self._end(what, error)
        # A LostError is returned unchanged. It says that too few ranks or too little data are left, so callers do not
        # try to recover again. After the StoreError that `_error` returns they would try again.
        if isinstance(error, LostError):
            return error
        return self._error() if isinstance(error, (CollectiveError, MPI.Exception)) else error

    def _end(self, what: str, error: BaseException) -> None:
        home = self.present.home
        if isinstance(error, CollectiveError) and not home.end_announced() and what not in str(error):
            error = of_kind(error, f"{what}: {error}")
        if home.end_error is None:
            home.fail(what, error)
        assert home.end_error is not None
        over = self.present.over = of_kind(home.end_error)
        recorder.write_failure(str(over))
        LOG.info("generation %d has ended: %s", self.number, over)
        for inner in self.present.inner:
            inner.fail(what, over)
        for step in self.on_end:
            # The rank that the step waits for may have died.
            with suppress(MPI.Exception):
                step()

    def _error(self) -> StoreError:
        return of_kind(self.over if self.over is not None else self.present.home.board.poison.error())

    @contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """End the generation if the block raises anything."""
        try:
            yield
        except BaseException as error:
            raise self.end(what, error) from None

    def gone(self) -> dict[int, str]:
        """Return the ranks that, as far as this rank knows, have closed the store or ended. Each value says how."""
        return _gone(self.layout.world, self.present.home)

    # ---- waits

    def wait(self, ready: Callable[[], object], what: str, late: Callable[[], Sequence[int]] = tuple) -> None:
        """Wait until `ready()` is true. Blocking.

        Meanwhile check the generation. After `stall_seconds` warn, and after `timeout_seconds` raise StallError, which
        names the ranks of `late()`.
        """
        drive(wait_until(ready), Watch(self.limits, self.look, late, self.present.nap_after), what)

    def within(self, comm: MPI.Intracomm, names: Sequence[int] = ()) -> Communicator:
        """Return the record that `collectives` keeps for a smaller communicator of the store, such as the workers'.

        Waits on this communicator have the store's limits, and also end with the generation. The first call is
        collective over `comm`.

        Args:
            names: For each rank of `comm`, its rank in `layout.world`.
        """
        self.check()
        home = communicator(comm, names=names or None)
        if home not in self.present.inner:
            home.set_limits(*self.limits)
            home.set_enclosing_look(self._look_inside)
            self.present.inner.append(home)
        return home

    def _look_inside(self, waited: float) -> None:
        self.inside = True
        try:
            self.look(waited)
        finally:
            self.inside = False

    def meet(self, payload: bytes, what: str, everybody: bool = False) -> list[bytes]:
        """Return each worker's payload (`everybody`: each rank's), in the order of ranks. Collective, blocking.

        Raises:
            StoreError: The generation has ended.
            StallError: Some ranks have not come within the limit. The error names these ranks.
        """
        room = self._room(everybody)
        with self._in_meeting(room, what):
            return room.exchange(payload, what, self._watch(room, what))

    def meeting(self, payload: bytes, what: str) -> Task[list[bytes]]:
        """Hold a meeting of the workers as a task.

        Other tasks run meanwhile, because late workers may depend on them.
        """
        room = self._room(False)
        watch = self._watch(room, what)
        clock, due = Clock(), time.monotonic() + LOOK_SECONDS
        room.begin(payload)
        # The thread that runs this task must not check the generation, because the meeting itself checks it.
        self.present.meeting = True
        try:
            with self._in_meeting(room, what):
                while room.missing():
                    if (now := time.monotonic()) >= due:
                        due, waited = now + LOOK_SECONDS, clock.seconds()
                        watch.look(waited)
                        check_in_time(what, waited, watch)
                    yield False
        finally:
            self.present.meeting = False
        return room.end()

    @contextmanager
    def _in_meeting(self, room: MeetingRoom, what: str) -> Iterator[None]:
        self.undescribed = what if room is self.present.workers else ""
        try:
            yield
        finally:
            self.undescribed = ""

    def _watch(self, room: MeetingRoom, what: str) -> Watch:
        """Return the rules for a wait in a meeting: check the generation, and raise if a missing rank has left."""
        presence = LeftRanks(what)

        def look(waited: float) -> None:
            try:
                self._look(waited)
            except StoreError:
                # The rank that ended the generation may have completed this meeting first. If so, all payloads have
                # arrived or are on their way. So wait a moment for missing payloads before raising the error.
                clock = Clock()
                while room.missing():
                    if clock.seconds() > LAST_WORD_SECONDS:
                        raise
                    time.sleep(LOOK_SECONDS)
                return
            presence.see(room.missing(), self.gone())

        return Watch(self.limits, look, room.missing, self.present.nap_after)

    def words(self) -> list[bytes]:
        """For each worker, return its last payload for a meeting of the workers that this worker has not completed.

        The entry is b"" for a worker without such a payload. Does not block.
        """
        assert self.present.workers is not None
        self.present.workers.missing()
        return self.present.workers.last_words()

    def describe_wait(self, word: bytes) -> None:
        """Tell the other workers how far this worker has pushed, while it waits in a meeting. Does not block."""
        assert self.present.workers is not None
        self.present.workers.describe_wait(word)
        self.undescribed = ""

    def waits_elsewhere(self) -> dict[int, bytes]:
        """Return the reports of workers that wait in a meeting to which this worker has not come. Does not block."""
        return {} if self.present.workers is None else self.present.workers.waits_elsewhere()

    def _room(self, everybody: bool) -> MeetingRoom:
        room = self.present.everybody if everybody else self.present.workers
        assert room is not None, "servers meet everybody, or nobody"
        self.check()
        return room

    # ---- from generation to generation, see `recovery.recover`

    def advance(self) -> None:
        """Begin the next generation on the layout's new communicators. Collective, blocking."""
        now = self.present
        self.present = PresentGeneration(self.layout, self.limits, now.number + 1, now.on_end)
        self._log_begin()

    def _log_begin(self) -> None:
        layout = self.layout
        log.rank_state.take(layout.role, layout.rank - layout.num_workers if layout.is_server else layout.rank)
        log.rank_state.generation = self.number
        recorder.clear_failures()
        LOG.info(
            "generation %d has begun, of a %s store: %d workers, %d servers, %d spares",
            self.number,
            layout.kind,
            layout.num_workers,
            layout.num_servers,
            layout.spares,
        )

    def close(self) -> None:
        """Close the store on this rank: wait for the other ranks, and free all communicators.

        Collective over all ranks of the store. If the generation is over, wait for some seconds at most.
        """
        if self._closed:
            return
        self._closed = True
        for home in (*self.present.inner, self.present.home):
            home.leave(CLOSED)
        self.barrier.leave()
        try:
            if self.over is None:
                with self.failing("close"):
                    self.barrier.wait_until_all_left(math.inf, self.look)
        # The generation has ended during the wait.
        except CollectiveError:
            pass
        all_left = self.barrier.wait_until_all_left(CLOSING_SECONDS)
        self.layout.free()
        collect_closed(FREEING_SECONDS if all_left else 0.0)
        LOG.info("the store is closed")


def _gone(world: MPI.Comm, home: Communicator) -> dict[int, str]:
    return dict.fromkeys(dead_ranks(world), DEPARTURES[0]) | home.gone_ranks()


class NextGenerationBarrier:
    """The barrier after a generation. In it all ranks agree to begin the next generation together, or to leave.

    Making new communicators blocks in MPI until all ranks take part. So a rank must not begin before it knows that all
    others will take part:

    1. Each rank tells all other ranks that it is ready to continue.
    2. When all ranks have told a rank that they are ready, it tells them that it continues. From then on it must not
       leave.
    3. When all ranks have told a rank that they continue, it begins to make communicators.

    Args:
        gone: Returns the ranks that have left, and how.
        survives: True if the store continues after a death. "All ranks" then means all living ranks.
    """

    def __init__(self, comm: MPI.Comm, gone: Callable[[], dict[int, str]], survives: bool) -> None:
        self._room = MeetingRoom(comm, BARRIER_TAG)
        self._gone = gone
        self._survives = survives
        self._last_word = b""
        self._attempt = 0

    def is_due(self) -> bool:
        """True if another rank wants to continue, or has left. Does not block."""
        self._room.missing()
        return any(self._room.last_words()) or bool(self._gone())

    def is_closing(self) -> bool:
        """True if another rank leaves. Does not block."""
        self._room.missing()
        return LEAVES in self._room.last_words() or DEPARTURES[CLOSED] in self._gone().values()

    def wait_until_all_would(self, limits: Limits) -> str:
        """Wait until all ranks are ready to continue (step 2). Return "", or the reason why they cannot continue.

        Raise StallError after the time limit. A later call continues the wait.
        """
        return self._wait(limits, WOULD, WOULD, GOES)

    def wait_until_all_go(self, limits: Limits) -> str:
        """Wait until all ranks continue (step 3). Return "", or the reason why they cannot continue.

        After this call a rank must take part in the attempt. If the attempt fails, another one may follow.
        """
        why = self._why_not() or self._wait(limits, GOES, GOES)
        self._attempt += not why
        return why

    def wait_until_all_have_tried(self) -> None:
        """Wait until all living ranks have finished an attempt, whether it succeeded or not."""
        self._wait(NEVER, TRIED, TRIED, WOULD, GOES)

    def leave(self) -> None:
        """Tell the other ranks that this rank leaves. Does not block."""
        self._say(LEAVES)

    def wait_until_all_left(self, seconds: float, look: Callable[[float], None] = lambda waited: None) -> bool:
        """Wait until all ranks have left, for `seconds` at most. Return True if all ranks have closed the store.

        Args:
            look: Called now and then with the seconds waited so far.
        """
        clock = Clock()

        def over() -> bool:
            return clock.seconds() > seconds or not set(self._others(LEAVES)) - self._gone().keys()

        drive(wait_until(over), Watch(NEVER, look, lambda: self._others(LEAVES)), "close")
        gone = self._gone()
        return all(gone.get(rank) == DEPARTURES[CLOSED] for rank in self._others(LEAVES))

    def _wait(self, limits: Limits, word: bytes, *words: bytes) -> str:
        """Send `word` to the other ranks, and wait until the last word of every rank is one of `words`. Blocking.

        Every word is sent with the number of the attempt, so that words of an earlier attempt are ignored. Return "",
        or the reason why the ranks cannot continue together.
        """
        present = [each + b" %d" % self._attempt for each in words]

        def late() -> list[int]:
            """Return the ranks, except those known to be dead, whose last word is not one of the expected words."""
            others = self._others(*present)
            return [rank for rank in others if rank not in self._dead()] if others and self._survives else others

        self._say(word + b" %d" % self._attempt)
        drive(wait_until(lambda: self._why_not() or not late()), Watch(limits, late=late), "recover")
        return self._why_not()

    def _say(self, word: bytes) -> None:
        if self._last_word != word:
            self._last_word = word
            self._room.begin(word)

    def _others(self, *words: bytes) -> list[int]:
        """Return the ranks whose last word is not one of these words. Does not block."""
        self._room.missing()
        return [rank for rank, word in enumerate(self._room.last_words()) if word not in words]

    def _dead(self) -> set[int]:
        """Return the ranks that have died, in a store that continues after a death."""
        return {rank for rank, how in self._gone().items() if self._survives and how == DEPARTURES[0]}

    def _why_not(self) -> str:
        """Return the reason why the ranks cannot continue together, or ""."""
        for rank in sorted(set(range(self._room.size)) - set(self._others(LEAVES))):
            return f"rank {rank} has closed the store"
        needed = {rank: how for rank, how in self._gone().items() if rank not in self._dead()}
        return next((f"rank {rank} is needed, and {how}" for rank, how in needed.items()), "")

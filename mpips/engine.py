"""Operations under way, off the training thread: dependencies first, then priority, errors where the user waits.

An operation is a function, or a generator that yields whenever it has to wait, True where it has gone on since it last
did; it names what it reads and what it mutates (MXNET-MPI, section 3.1, `Engine.push(fn, read, mutate)`, sections 4.2.2
and 4.2.3 for pushes and pulls). At most one thread advances operations at a time: the communication thread, which
sleeps between two looks, or a thread inside `wait()`, which looks without sleeping at first and so answers sooner. So
MPI_THREAD_SERIALIZED is enough as long as the program's own MPI calls happen while nothing is under way or inside
`engine.paused()`; under MPI_THREAD_MULTIPLE they may happen any time.

Collectives on one communicator must start in one order everywhere, so operations that use one mutate it: the order then
is the program's, whatever the threads do.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from typing import Any

from mpips.dependencies import Tracker
from mpips.meet import Pause

Task = Generator[bool | None, None, Any]
Work = Task | Callable[[], Any]

DUTY = 24
"""The communication thread sleeps this many times as long as a look took: 1 / (1 + 24) = 4 % of a core."""
WAKE = 2e-5
"""What a look costs beside itself: falling asleep and waking up, seconds."""
LONGEST_SLEEP = 1e-3
"""However long a look took. A collective of many rounds needs a look a round."""
QUIET, QUIET_SLEEP, QUIET_DUTY = 0.1, (4e-3, 8e-3), 32
"""After so many seconds in which nothing ended it sleeps longer: looks and wakes then take 1 / 33 of its time."""
PATIENCE, NOTICE = 0.02, 0.1
"""Seconds that a wait looks by itself; a longer one leaves it to the communication thread, and notices stalls."""


class DependencyError(RuntimeError):
    """An operation was not run, since one that should have written what it uses failed."""


class Handle:
    """An operation under way. `wait()` returns its result when it has ended; both methods raise what made it fail."""

    def __init__(
        self, engine: Engine, work: Work, mutates: frozenset[Hashable], what: str, cause: Handle | None
    ) -> None:
        self._engine, self._work = engine, work
        self.mutates, self.what = mutates, what
        self.cause = cause
        """A failed operation because of which this one must not run."""
        self.done = False
        """Whether it has ended, and the engine knows what follows from that."""
        self.over = False
        """Whether its work is over; for the engine."""
        self.started = self.ended = 0.0
        """time.perf_counter() when it was first looked at and when it ended."""
        self.error: BaseException | None = None
        self._result: Any = None

    def __repr__(self) -> str:
        return f"<{self.what}, {'done' if self.done else 'under way'}>"

    def test(self) -> bool:
        """Make everything go on a little; whether this operation has ended. Does not block."""
        if not self.done:
            self._engine.progress(wait=False)
        if self.done:
            self._engine.observed(self)
        return self.done

    def wait(self) -> Any:
        """Block until the operation has ended; what it returned."""
        if not self.done:
            self._engine.drive(self)
        self._engine.observed(self)
        return self._result

    def step(self) -> bool:
        """Advance to the next wait; whether the operation has ended. Called by the engine."""
        self.started = self.started or time.perf_counter()
        try:
            if self.cause is not None:
                raise DependencyError(f"{self.what} was not run: {self.cause.what} failed: {self.cause.error}")
            if callable(self._work):
                self._result = self._work()
                if not isinstance(self._result, Generator):
                    return self._end(None)
                self._work = self._result
            next(self._work)
        except StopIteration as stop:
            self._result = stop.value
            return self._end(None)
        except BaseException as error:
            self._end(error)
            if isinstance(error, KeyboardInterrupt):
                raise
            return True
        return False

    def _end(self, error: BaseException | None) -> bool:
        if not callable(self._work):
            self._work.close()
        self._work, self.error = _nothing, error
        self.ended = time.perf_counter()
        self.over = True
        return True


class Engine:
    """All operations under way on this process.

    background: whether a communication thread advances them; without it they advance inside `test`, `wait`, `progress`.
    A wait that lasts `stall_seconds` warns, `timeout_seconds` raises StallError (0: never).
    """

    def __init__(self, stall_seconds: float = 60.0, timeout_seconds: float = 0.0, background: bool = True) -> None:
        self._stall, self._timeout, self._background = stall_seconds, timeout_seconds, background
        self._state = threading.Condition()
        self._tracker: Tracker[Handle] = Tracker()
        self._poisoned: dict[Hashable, Handle] = {}
        self._failed: list[Handle] = []
        self._driver = threading.Lock()
        self._looking = 0
        """Identity of the thread that is inside an operation."""
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._closing = False
        self.look: Callable[[float], None] | None = None
        """Called now and then during every long wait, by the thread that waits."""

    # ---- operations

    def push(
        self,
        work: Work,
        reads: Iterable[Hashable] = (),
        mutates: Iterable[Hashable] = (),
        priority: int = 0,
        what: str = "operation",
    ) -> Handle:
        """Add an operation and return at once. `reads`, `mutates`: any hashable names.

        It starts when no earlier operation under way mutates what it uses or uses what it mutates; higher priority is
        looked at first. If an operation fails, those that use what it should have mutated are not run and raise
        DependencyError, until the failure has been raised by `wait`, `test` or `finish`.
        """
        return self._add(work, frozenset(reads), frozenset(mutates), frozenset(), priority, what)

    def submit(self, keys: Sequence[Hashable], task: Task, priority: int, what: str) -> Handle:
        """Add an operation that runs after the earlier ones on the same keys, whether those failed or not."""
        handle = self._add(task, frozenset(), frozenset(), frozenset(keys), priority, what)
        if not self._background:
            self.progress()
        return handle

    def run(
        self,
        keys: Sequence[Hashable],
        task: Task,
        priority: int,
        what: Callable[[], str],
        look: Callable[[float], None] | None = None,
    ) -> None:
        """Do it, blocking; directly where nothing else is under way: then a long wait calls `look(seconds)`."""
        if len(self._tracker):
            self.submit(keys, task, priority, what()).wait()
            return
        try:
            for _ in task:
                break
            else:
                return
            pause = self.pause(what, look)
            for moved in task:
                pause.restart() if moved else pause()
        finally:
            task.close()  # at once, not when the last who holds the error forgets it

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not len(self._tracker)

    def finish(self) -> None:
        """Wait for everything under way, then raise the first failure that nobody has seen yet."""
        while True:
            with self._state:
                left = self._tracker.ready()
                failed = list(self._failed)
            if left:
                self.drive(left[0])
            elif failed:
                self.observed(failed[0])
            else:
                return

    # ---- going on

    def progress(self, wait: bool = True) -> bool:
        """Look once at everything that may go on; whether something ended. `wait`: for another thread's look to end."""
        if not self._driver.acquire(blocking=wait):
            return False
        try:
            return self._look()
        finally:
            self._driver.release()

    def drive(self, handle: Handle) -> None:
        """Make everything go on until the operation has ended, the communication thread standing aside at first."""
        if self._looking == threading.get_ident():
            raise RuntimeError(f"an operation waits for {handle.what}: name what it needs in `reads` instead")
        pause = self.pause(lambda: handle.what)
        deadline = time.monotonic() + PATIENCE
        with self._aside():
            while not handle.done and (self._thread is None or time.monotonic() < deadline):
                if not self._look():
                    pause()
        while not handle.done:
            with self._state:
                self._state.wait_for(lambda: handle.done, NOTICE)
            pause()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Nothing goes on inside: for MPI calls of the program's own under MPI_THREAD_SERIALIZED."""
        return self._aside()

    def pause(self, describe: Callable[[], str], look: Callable[[float], None] | None = None) -> Pause:
        # The servers know best who is missing and speak at stall_seconds; this is for what they cannot see.
        return Pause(describe, 1.5 * self._stall, 1.5 * self._timeout, look or self._look_aside)

    def _look_aside(self, waited: float) -> None:
        """Call `look` while the communication thread stands aside."""
        if self.look is not None and self._driver.acquire(blocking=False):
            try:
                self.look(waited)
            finally:
                self._driver.release()

    def observed(self, handle: Handle) -> None:
        """Raise what made an ended operation fail; what it should have mutated may be used again from now on."""
        if handle.error is None:
            return
        with self._state:
            self._failed = [other for other in self._failed if handle not in (other, other.cause)]
            self._poisoned = {name: by for name, by in self._poisoned.items() if by is not handle}
        raise handle.error

    def close(self) -> None:
        """Stop the communication thread; operations under way stay where they are."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.close)

    # ---- inside

    def _add(
        self,
        work: Work,
        reads: frozenset[Hashable],
        mutates: frozenset[Hashable],
        orders: frozenset[Hashable],
        priority: int,
        what: str,
    ) -> Handle:
        with self._state:
            cause = next((self._poisoned[name] for name in reads | mutates if name in self._poisoned), None)
            handle = Handle(self, work, mutates, what, cause)
            self._tracker.add(handle, reads, mutates | orders, priority)
            if self._background and self._thread is None:
                self._start()
            self._state.notify_all()
        return handle

    def _look(self) -> bool:
        """Step what may go on, in order of priority, until something ends: that may free what has a higher one."""
        with self._state:
            ready = self._tracker.ready()
        self._looking = threading.get_ident()
        try:
            return any(self._step(handle) for handle in ready)
        finally:
            self._looking = 0

    def _step(self, handle: Handle) -> bool:
        try:
            return handle.step()
        finally:
            if handle.over:
                self._ended(handle)

    def _ended(self, handle: Handle) -> None:
        with self._state:
            if handle.error is not None:
                cause = handle.cause or handle
                self._failed.append(handle)
                self._poisoned |= dict.fromkeys(handle.mutates, cause)
                for later in self._tracker.behind(handle, handle.mutates):
                    later.cause = later.cause or cause
            self._tracker.remove(handle)
            handle.done = True
            self._state.notify_all()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        with self._state:
            self._waiting += 1
        try:
            with self._driver:
                yield
        finally:
            with self._state:
                self._waiting -= 1
                self._state.notify_all()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._communicate, name="mpips communication", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before MPI is finalised

    def _communicate(self) -> None:
        """The communication thread: sleep while there is nothing to do, or while somebody waits and looks himself."""
        last, used = 0.0, time.thread_time()  # when something was added or ended; CPU seconds
        while True:
            with self._state:
                if not len(self._tracker):
                    last = 0.0
                self._state.wait_for(lambda: self._closing or (len(self._tracker) and not self._waiting))
                if self._closing:
                    return
            begin = time.perf_counter()
            last = last or begin
            if self.progress():
                last = begin
                continue
            before, used = used, time.thread_time()
            if begin - last < QUIET:
                time.sleep(min(DUTY * (WAKE + time.perf_counter() - begin), LONGEST_SLEEP))
            else:
                time.sleep(min(max(QUIET_DUTY * (used - before), QUIET_SLEEP[0]), QUIET_SLEEP[1]))


def _nothing() -> None:
    """The work of an ended operation: its arrays may go."""

"""Operations of a store beside compute: in order on each key, then by priority, with errors where the user waits.

An operation is a task (`collectives.fabric.tasks`) that names what it takes turns on: its keys, communicators, names
of the user's (MXNET-MPI, sections 3.1, 4.2.2 and 4.2.3, orders operations by the variables that they read and mutate;
every operation of a store mutates its keys). At most one thread advances operations at a time: the communication
thread, or a thread inside `wait()`, which looks without sleeping at first and so answers sooner. Whoever advances
operations also looks at the generation, and nobody else calls MPI then. So MPI_THREAD_SERIALIZED is enough as long as
the program's own MPI calls happen while nothing is under way; under MPI_THREAD_MULTIPLE they may happen any time.

Collectives on one communicator must start in one order everywhere. Operations that use one take turns on it, so the
order is the program's, whatever the threads do. An operation that fails ends the generation, and with it all others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Sequence
from typing import Any, Protocol

from mpips.collectives.errors import Uncopied
from mpips.collectives.fabric import wait
from mpips.collectives.fabric.tasks import Task, nothing
from mpips.collectives.fabric.wait import Limits
from mpips.store.runtime.errors import refused
from mpips.store.runtime.rendezvous import Watch

PATIENCE, NOTICE = 0.02, 0.1
"""Seconds that a wait looks by itself; a longer one leaves it to the communication thread, and notices stalls."""
GRACE_SECONDS = 0.5
LOOK_SECONDS = 2e-3
"""Between two looks at the generation that send and receive; its flag is read at every look."""
DUTY = 24
"""The thread sleeps this many times as long as a look took: 1 / (1 + 24) = 4 % of a core."""
WAKE = 2e-5
"""Seconds that a look costs in addition: falling asleep and waking up."""
LONGEST_SLEEP = 1e-3
"""However long a look took. A collective of many rounds needs a look a round."""
QUIET, QUIET_SLEEP, QUIET_DUTY = 0.1, (4e-3, 8e-3), 32
"""After so many seconds in which nothing ended it sleeps longer: looks and wakes then take 1 / 33 of its time."""


class Ending(Protocol):
    """The end of all operations at once: a store's generation (`runtime.generation`), as they see it."""

    limits: Limits

    def check(self) -> None: ...

    def look(self, waited: float = 0.0) -> None: ...

    def end(self, what: str, error: BaseException) -> BaseException: ...


class Handle(Uncopied):
    """An operation under way. `wait()` returns its result when it has ended; both methods raise what made it fail."""

    def __init__(
        self, engine: Engine, task: Task[Any], orders: Collection[Hashable], what: str, detached: bool
    ) -> None:
        self._engine, self._task, self.orders, self.what = engine, task, orders, what
        self.detached = detached
        """Whether only `close` waits for it."""
        self.done = False
        """Whether it has ended, and the engine knows what follows from that."""
        self.over = False
        """Whether its task is over; for the engine."""
        self.started = self.ended = 0.0
        """time.perf_counter() when it was first looked at and when it ended."""
        self.error: BaseException | None = None
        self._result: object = None

    def __repr__(self) -> str:
        return f"<{self.what}, {'done' if self.done else 'under way'}>"

    def test(self) -> bool:
        """Make everything go on a little; whether this operation has ended. Does not block."""
        if not self.done:
            self._engine.progress(wait=False)
        if self.done:
            self._engine.raise_failure(self)
        return self.done

    def wait(self) -> Any:
        """Block until the operation has ended; what it returned."""
        if not self.done:
            self._engine.drive(self)
        self._engine.raise_failure(self)
        return self._result

    def step(self) -> None:
        """Advance to the next wait; for the engine. An interrupt that comes meanwhile is raised here, too."""
        self.started = self.started or time.perf_counter()
        try:
            next(self._task)
        except StopIteration as end:
            self._result = end.value
            self.stop(None)
        except BaseException as error:
            self.stop(error if refused(error) else self._engine.generation.end(self.what, error))
            if isinstance(error, KeyboardInterrupt):
                raise

    def stop(self, error: BaseException | None) -> None:
        """End the operation, with this error or none; for the engine. Its task closes, so that its arrays may go."""
        self._task.close()
        self._task, self.error = nothing(), error
        self.ended = time.perf_counter()
        self.over = True


class Turns:
    """The turns of operations: those go on that are first on each of their names, the highest priority first.

    Not thread-safe. Priority only chooses among those that may go on: it never overtakes an earlier one on a name.
    """

    def __init__(self) -> None:
        self.under_way: dict[int, Handle] = {}
        """All that were added and not yet removed, in program order; empty where there are none."""
        self._queues: dict[Hashable, deque[Handle]] = {}
        self._held: dict[int, int] = {}
        """On how many names an operation is not the first, by its identity."""
        self._places: dict[int, tuple[int, int]] = {}
        self._ready: list[Handle] = []
        self._count = 0

    def add(self, handle: Handle, priority: int) -> None:
        """Add the next operation in program order."""
        self._count += 1
        name = id(handle)
        self._places[name] = -priority, self._count
        self.under_way[name] = handle
        queues = [self._queues.setdefault(order, deque()) for order in handle.orders]
        self._held[name] = sum(1 for queue in queues if queue)
        for queue in queues:
            queue.append(handle)
        if not self._held[name]:
            self._make_ready(handle)

    def ready(self) -> list[Handle]:
        """Return those that nothing holds back, in the order in which they should be given attention."""
        return self._ready[:]

    def remove(self, handle: Handle) -> None:
        """Remove a ready operation that has ended: what comes next on its names may go on."""
        name = id(handle)
        del self.under_way[name], self._held[name], self._places[name]
        self._ready.remove(handle)
        for order in handle.orders:
            queue = self._queues[order]
            queue.popleft()
            if not queue:
                del self._queues[order]
                continue
            first = queue[0]
            self._held[id(first)] -= 1
            if not self._held[id(first)]:
                self._make_ready(first)

    def clear(self) -> None:
        """Remove them all."""
        for each in (self.under_way, self._queues, self._held, self._places, self._ready):
            each.clear()

    def _make_ready(self, handle: Handle) -> None:
        insort(self._ready, handle, key=lambda other: self._places[id(other)])


class Engine:
    """All operations under way on this process.

    `generation`: that of the store; its limits warn, and raise StallError, in waits that last too long. `background`:
    whether a communication thread advances operations; without it they advance inside `test`, `wait`, `progress`. Its
    methods may be called from any thread.
    """

    def __init__(self, generation: Ending, background: bool = True) -> None:
        self.generation = generation
        self._lock = threading.RLock()
        """That of `_changed`. An interrupt as a condition is entered would leave it taken, but not as a lock is."""
        self._changed = threading.Condition(self._lock)
        """Notified when something was added or has ended, or a wait is over."""
        self._turns = Turns()
        self.under_way = self._turns.under_way
        """Empty where nothing is under way."""
        self._failed: list[Handle] = []
        """Those whose failure nobody has seen."""
        self._since = 0.0
        """time.monotonic() when something began or ended last."""
        self._driver = threading.Lock()
        self._owner = 0
        """Identity of the thread that may advance operations."""
        self.blocked: tuple[Collection[Hashable], Callable[[], str]] | None = None
        """What the program waits for: the names on which that takes turns, and what it is."""
        self._due = 0.0
        """time.monotonic() when the generation is looked at again."""
        self._background = background
        self._thread: threading.Thread | None = None
        self._waiting: set[int] = set()
        """Threads that look themselves."""

    # ---- operations

    def submit(
        self, orders: Sequence[Hashable], task: Task[Any], priority: int, what: str, detached: bool = False
    ) -> Handle:
        """Add an operation, which runs after the earlier ones on the same names, and return at once. If it fails it
        ends the generation. `detached`: `finish` does not wait for it unless it is asked to."""
        handle = Handle(self, task, dict.fromkeys(orders), what, detached)
        with self._lock:
            if not self.under_way:
                self._since = time.monotonic()
            self._turns.add(handle, priority)
            self._changed.notify_all()
        if not self._background:
            self.progress()
        elif self._thread is None or self._thread.ident is None:  # an interrupt came before it began
            # A daemon: whoever owns the engine closes it before MPI is finalised.
            self._thread = threading.Thread(target=self._run, name="mpips communication", daemon=True)
            self._thread.start()
        return handle

    def run(self, orders: Sequence[Hashable], task: Task[Any], priority: int, what: Callable[[], str]) -> None:
        """Run a task, blocking; directly where nothing else is under way. Raises what it does, or the generation."""
        if self.under_way:
            self.submit(orders, task, priority, what()).wait()
            return
        self.generation.check()  # what needs nobody's answer, as a read of memory, would never hear of its end
        try:
            for _ in task:
                break
            else:
                return
            self.blocked = orders, what
            over = False

            def stretch() -> Iterator[None]:
                """Step the task up to where it has gone on: from there another wait begins."""
                nonlocal over
                for moved in task:
                    if moved:
                        return
                    yield
                over = True

            while not over:
                wait.drive(stretch(), self._watch(self.generation.look), what())
        finally:
            self.blocked = None
            task.close()  # at once, not when the last who holds the error forgets it

    def finish(self, detached: bool = False) -> None:
        """Wait for everything under way, `detached` too or not, then raise the first failure that nobody has seen."""
        while True:
            with self._lock:
                every = [handle for handle in self.under_way.values() if detached or not handle.detached]
                handle = next(iter(every or self._failed), None)
            if handle is None:
                return
            if handle.done:
                self.raise_failure(handle)
            else:
                self.drive(handle)

    def forget(self) -> None:
        """Give up what is under way, and failures that nobody has seen, as the generation has ended."""
        with self._alone():
            self._give_up(RuntimeError("the generation has ended"))
            self._failed = []

    def close(self) -> None:
        """Stop the communication thread; operations under way stay where they are, and go on inside `wait` alone."""
        with self._lock:
            self._background = False
            self._changed.notify_all()
        if self._thread is not None and self._thread.ident not in (None, threading.get_ident()):
            self._thread.join()

    # ---- going on

    def names_in_use(self) -> set[Hashable]:
        """Return the names on which operations under way take turns."""
        with self._lock:
            return {name for handle in self.under_way.values() for name in handle.orders}

    def progress(self, wait: bool = True) -> bool:
        """Look once at everything that may go on; whether something ended. `wait`: for another thread's look to end."""
        if not wait and self._driver.locked():
            return False
        with self._driver:
            self._owner = threading.get_ident()
            try:
                return self._look()
            finally:
                self._owner = 0

    def drive(self, handle: Handle) -> None:
        """Make everything go on until the operation has ended, the communication thread standing aside at first."""
        steps = self._steps(handle)
        self.blocked = handle.orders, lambda: handle.what
        try:
            wait.drive(steps, self._watch(self._look_around), handle.what, 1)
        except BaseException as error:
            raise self.generation.end(handle.what, error) from None
        finally:
            self.blocked = None
            steps.close()

    def raise_failure(self, handle: Handle) -> None:
        """Raise what made an ended operation fail; `finish` does not raise it again."""
        if handle.error is not None:
            with self._lock:
                self._failed = [other for other in self._failed if other is not handle]
            raise handle.error

    # ---- inside

    def _steps(self, handle: Handle) -> Generator[None, None, None]:
        deadline = time.monotonic() + PATIENCE
        with self._alone():
            while not handle.done and (not self._background or time.monotonic() < deadline):
                if not self._look():
                    yield
        while not handle.done:
            with self._lock:
                self._changed.wait_for(lambda: handle.done, NOTICE)
            yield

    def _watch(self, look: Callable[[float], None]) -> Watch:
        """Return how this engine waits. Servers and collectives, which know who is late, end a wait that is too long a
        little before it does."""
        stall, timeout = self.generation.limits
        return Watch(Limits(stall, timeout and 1.1 * timeout + GRACE_SECONDS), look)

    def _look_around(self, waited: float) -> None:
        """Look at the generation from a wait, unless the thread that advances operations does."""
        if self._owner == threading.get_ident():
            self.generation.look(waited)
        elif not self._driver.locked():
            with self._driver:  # to acquire it without blocking is not safe from interrupts
                self.generation.look(waited)

    def _look(self) -> bool:
        """Step what may go on, in order of priority, until something ends: that may free what has a higher one."""
        now = time.monotonic()
        try:
            if now < self._due:
                self.generation.check()
            else:
                self._due = now + LOOK_SECONDS
                self.generation.look(now - self._since)
        except Exception as error:
            self._give_up(self.generation.end("operations under way", error))
            return True
        with self._lock:
            ready = self._turns.ready()
        return any(self._step(handle) for handle in ready)

    def _step(self, handle: Handle) -> bool:
        try:
            handle.step()
        finally:
            if handle.over:
                with self._lock:
                    if handle.error is not None:
                        self._failed.append(handle)
                    self._turns.remove(handle)
                    self._since = time.monotonic()
                    handle.done = True
                    self._changed.notify_all()
        return handle.over

    def _give_up(self, error: BaseException) -> None:
        """End everything under way with this error."""
        with self._lock:
            handles = list(self.under_way.values())
        for handle in handles:
            handle.stop(error)
        with self._lock:
            self._turns.clear()
            self._failed += handles
            for handle in handles:
                handle.done = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let nobody else advance operations inside: the communication thread begins no look."""
        with self._lock:
            self._waiting.add(threading.get_ident())
        try:
            with self._driver:
                self._owner = threading.get_ident()
                try:
                    yield
                finally:
                    self._owner = 0
        finally:
            with self._lock:
                self._waiting.discard(threading.get_ident())
                self._changed.notify_all()

    def _run(self) -> None:
        """Advance operations that nobody waits for, and sleep between two looks; the communication thread."""
        last, used = 0.0, time.thread_time()  # when something was added or ended; CPU seconds
        while True:
            with self._lock:
                if not self.under_way:
                    last = 0.0
                self._changed.wait_for(lambda: not self._background or (self.under_way and not self._waiting))
                if not self._background:
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

"""Operations under way, off the training thread: dependencies first, then priority, errors where the user waits.

An operation is a function, or a task (`runtime.tasks`); it names what it reads and what it mutates (MXNET-MPI, section
3.1, `Engine.push(fn, read, mutate)`, sections 4.2.2 and 4.2.3 for pushes and pulls). At most one thread advances
operations at a time: the communication thread (`runtime.background`), or a thread inside `wait()`, which looks without
sleeping at first and so answers sooner. Whoever advances operations also looks at the generation, and nobody else
calls MPI
then. So MPI_THREAD_SERIALIZED is enough as long as the program's own MPI calls happen while nothing is under way or
inside `engine.paused()`; under MPI_THREAD_MULTIPLE they may happen any time.

Collectives on one communicator must start in one order everywhere, so operations that use one mutate it: the order then
is the program's, whatever the threads do. An operation of the store that fails ends the generation, and with it all
others.

Operations that were started: the handle of each, and which are under way, which have failed, which must not run.

Which operations may run now: those that no earlier conflicting one holds back, the highest priority first. Pure.

An operation names what it reads and what it mutates (MXNET-MPI, section 3.1: `Engine.push(fn, read, mutate)`). Two
operations conflict where one mutates what the other reads or mutates; conflicting operations run in program order, all
others in any order. Priority only chooses among those that may run: it never overtakes a dependency.

The communication thread: it advances operations that nobody waits for, and sleeps between two looks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import insort
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from collectives.errors import Uncopied
from collectives.fabric import wait
from collectives.fabric.wait import Limits
from mpips.store.runtime.tasks import Task

__all__ = ["Alone", "DependencyError", "Engine", "Generation", "Handle", "Work"]

PATIENCE, NOTICE = 0.02, 0.1
"""Seconds that a wait looks by itself; a longer one leaves it to the communication thread, and notices stalls."""
GRACE_SECONDS = 0.5
LOOK_SECONDS = 2e-3
"""Between two looks at the generation that send and receive; its flag is read at every look."""


class Generation(Protocol):
    """What the engine needs of the store's generation (`runtime.generation`)."""

    limits: Limits

    def check(self) -> None: ...

    def look(self, waited: float) -> None: ...

    def end(self, what: str, error: BaseException) -> BaseException: ...


class Alone:
    """The generation of an engine without a store: it never ends."""

    def __init__(self, stall_seconds: float = 60.0, timeout_seconds: float = 0.0) -> None:
        self.limits = Limits(stall_seconds, timeout_seconds)

    def check(self) -> None:
        """Nothing has ended."""

    def look(self, waited: float) -> None:
        """Nothing has ended."""

    def end(self, what: str, error: BaseException) -> BaseException:
        """There is nobody to tell."""
        return error


class Engine:
    """All operations under way on this process.

    `generation`: that of the store; its limits warn, and raise StallError, in waits that last too long. `background`:
    whether a communication thread advances operations; without it they advance inside `test`, `wait`, `progress`.
    """

    def __init__(self, generation: Generation | None = None, background: bool = True) -> None:
        self.generation: Generation = generation or Alone()
        self._handles = Handles()
        self.under_way = self._handles.under_way
        """Empty where nothing is under way."""
        self._driver = threading.Lock()
        self._owner = self._looking = 0
        """Identities of the thread that may advance operations, and of the one that is inside one."""
        self.blocked: tuple[Collection[Hashable], Callable[[], str]] | None = None
        """What the program waits for: the names on which that takes turns, and what it is."""
        self._due = 0.0
        """time.monotonic() when the generation is looked at again."""
        self._background: Background | None = None
        if background:
            self._background = Background(
                self._handles.lock, self._handles.changed, self.under_way, self.progress
            )

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
        handle = Handle(self, work, frozenset(mutates), what, False)
        return self._add(handle, frozenset(reads), (), priority)

    def submit(
        self, keys: Sequence[Hashable], task: Task[Any], priority: int, what: str, detached: bool = False
    ) -> Handle:
        """Add an operation of the store, which runs after the earlier ones on the same keys. If it fails it ends the
        generation. `detached`: only `close` waits for it, not `finish`."""
        handle = Handle(self, task, frozenset(), what, True)
        handle.detached, handle.orders = detached, keys
        self._add(handle, frozenset(), keys, priority)
        if self._background is None:
            self.progress()
        return handle

    def run(self, keys: Sequence[Hashable], task: Task[Any], priority: int, what: Callable[[], str]) -> None:
        """Do it, blocking; directly where nothing else is under way. Raises what the task does, or the generation."""
        if self.under_way:
            self.submit(keys, task, priority, what()).wait()
            return
        try:
            for _ in task:
                break
            else:
                return
            self.blocked = keys, what
            stretch = _Stretch(task)
            while not stretch.over:
                wait.drive(iter(stretch), _Watch(self.generation.limits, self.generation.look), what())
        finally:
            self.blocked = None
            task.close()  # at once, not when the last who holds the error forgets it

    def finish(self, detached: bool = False) -> None:
        """Wait for everything under way, `detached` too or not, then raise the first failure that nobody has seen."""
        while (handle := self._handles.first(detached) or self._handles.first_failed()) is not None:
            if handle.done:
                self.observed(handle)
            else:
                self.drive(handle)

    def forget(self) -> None:
        """The generation has ended: give up what is under way, and failures that nobody has seen."""
        with self._aside():
            self._handles.give_up(RuntimeError("the generation has ended"), forget=True)

    # ---- going on

    def ordered(self) -> set[Hashable]:
        """Return the names on which operations under way take turns."""
        return self._handles.ordered()

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
        if self._looking == threading.get_ident():
            raise RuntimeError(f"an operation waits for {handle.what}: name what it needs in `reads` instead")
        steps = self._driving(handle)
        self.blocked = handle.orders, lambda: handle.what
        try:
            wait.drive(steps, _Watch(self.generation.limits, self._look_around), handle.what, 1)
        except BaseException as error:
            raise self.failed(handle, error) from None
        finally:
            self.blocked = None
            steps.close()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Nothing goes on inside: for MPI calls of the program's own under MPI_THREAD_SERIALIZED."""
        return self._aside()

    def observed(self, handle: Handle) -> None:
        """Raise what made an ended operation fail; what it should have mutated may be used again from now on."""
        if handle.error is not None:
            self._handles.seen(handle)
            raise handle.error

    def failed(self, handle: Handle, error: BaseException) -> BaseException:
        """The operation, or who waits for it, has raised this: what it is to raise."""
        return self.generation.end(handle.what, error) if handle.ends else error

    def close(self) -> None:
        """Stop the communication thread; operations under way stay where they are, and go on inside `wait` alone."""
        if self._background is not None:
            self._background.close()
            self._background = None

    # ---- inside

    def _add(self, handle: Handle, reads: frozenset[Hashable], orders: Iterable[Hashable], priority: int) -> Handle:
        self._handles.add(handle, reads, orders, priority)
        if self._background is not None:
            self._background.start()
        return handle

    def _driving(self, handle: Handle) -> Generator[None, None, None]:
        deadline = time.monotonic() + PATIENCE
        with self._aside():
            while not handle.done and (self._background is None or time.monotonic() < deadline):
                if not self._look():
                    yield
        while not handle.done:
            with self._handles.lock:
                self._handles.changed.wait_for(lambda: handle.done, NOTICE)
            yield

    def _look_around(self, waited: float) -> None:
        """Look at the generation from a wait, unless the thread that advances operations does."""
        if self._owner == threading.get_ident():
            self.generation.look(waited)
        elif not self._driver.locked():
            with self._driver:  # to acquire it without blocking is not safe from interrupts
                self.generation.look(waited)

    def _look(self) -> bool:
        """Step what may go on, in order of priority, until something ends: that may free what has a higher one."""
        try:
            self._see_generation()
        except Exception as error:
            self._handles.give_up(self.generation.end("operations under way", error))
            return True
        self._looking = threading.get_ident()
        try:
            return any(self._step(handle) for handle in self._handles.ready())
        finally:
            self._looking = 0

    def _see_generation(self) -> None:
        now = time.monotonic()
        if now < self._due:
            self.generation.check()
        else:
            self._due = now + LOOK_SECONDS
            self.generation.look(now - self._handles.since)

    def _step(self, handle: Handle) -> bool:
        try:
            handle.step()
        finally:
            if handle.over:
                self._handles.ended(handle)
        return handle.over

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Nobody else advances operations inside."""
        others = contextlib.nullcontext() if self._background is None else self._background.aside()
        with others, self._driver:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = 0


class _Watch:
    """How a wait of this engine looks around (`collectives.fabric.wait.Generation`). Servers and collectives, which
    know who is late, end a wait that is too long a little before it does."""

    nap_after = wait.NAP_AFTER_BETWEEN_NODES

    def __init__(self, limits: Limits, look: Callable[[float], None]) -> None:
        timeout = limits.timeout_seconds
        self.limits, self.look = Limits(limits.stall_seconds, timeout and 1.1 * timeout + GRACE_SECONDS), look

    def late(self) -> Sequence[int]:
        """Who is waited for is not known here."""
        return ()


class _Stretch:
    """The steps of a task up to where it has gone on: from there another wait begins."""

    def __init__(self, task: Task[Any]) -> None:
        self._task, self.over = task, False

    def __iter__(self) -> Iterator[None]:
        for moved in self._task:
            if moved:
                return
            yield
        self.over = True


Work = Task[Any] | Callable[[], Any]


class DependencyError(RuntimeError):
    """An operation was not run, since one that should have written what it uses failed."""


class Driver(Protocol):
    """The engine, as a handle sees it."""

    def progress(self, wait: bool = True) -> bool: ...

    def drive(self, handle: Handle) -> None: ...

    def observed(self, handle: Handle) -> None: ...

    def failed(self, handle: Handle, error: BaseException) -> BaseException:
        """The operation has raised this: what its handle is to raise."""
        ...


class Handle(Uncopied):
    """An operation under way. `wait()` returns its result when it has ended; both methods raise what made it fail."""

    def __init__(self, engine: Driver, work: Work, mutates: frozenset[Hashable], what: str, ends: bool) -> None:
        self._engine, self._work = engine, work
        self.mutates, self.what = mutates, what
        self.ends = ends
        """Whether its failure ends the generation."""
        self.orders: Collection[Hashable] = ()
        """Names on which it takes turns with others; for the engine."""
        self.cause: Handle | None = None
        """A failed operation because of which this one must not run."""
        self.done = False
        """Whether it has ended, and the engine knows what follows from that."""
        self.over = False
        """Whether its work is over; for the engine."""
        self.detached = False
        """Whether only `close` waits for it."""
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

    def step(self) -> None:
        """Advance to the next wait. Called by the engine; an interrupt that comes meanwhile is raised here, too."""
        self.started = self.started or time.perf_counter()
        try:
            if self.cause is not None:
                raise DependencyError(f"{self.what} was not run: {self.cause.what} failed: {self.cause.error}")
            if callable(self._work):
                self._result = self._work()
                if not isinstance(self._result, Generator):
                    self.stop(None)
                    return
                self._work = self._result
            next(self._work)
        except StopIteration as end:
            self._result = end.value
            self.stop(None)
        except BaseException as error:
            self.stop(self._engine.failed(self, error))
            if isinstance(error, KeyboardInterrupt):
                raise

    def stop(self, error: BaseException | None) -> None:
        """It has ended, or is given up; what it holds may go."""
        if not callable(self._work):
            self._work.close()
        self._work, self.error = _nothing, error
        self.ended = time.perf_counter()
        self.over = True


class Handles:
    """The operations of an engine. Its methods may be called from any thread.

    If an operation fails, those that use what it should have mutated must not run, until somebody has seen the failure.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """That of `changed`. An interrupt as a condition is entered would leave it taken, but not as a lock is."""
        self.changed = threading.Condition(self.lock)
        """Notified when something was added or has ended."""
        self._tracker: Tracker[Handle] = Tracker()
        self.under_way = self._tracker.nodes
        """Empty where nothing is under way."""
        self.since = 0.0
        """time.monotonic() when something began or ended last."""
        self._poisoned: dict[Hashable, Handle] = {}
        self._failed: list[Handle] = []

    def add(self, handle: Handle, reads: Iterable[Hashable], orders: Iterable[Hashable], priority: int) -> None:
        """The next operation in program order. `orders`: names on which it takes turns with others, failed or not."""
        with self.lock:
            used = frozenset(reads) | handle.mutates
            handle.cause = next((self._poisoned[name] for name in used if name in self._poisoned), None)
            if not self.under_way:
                self.since = time.monotonic()
            self._tracker.add(handle, reads, handle.mutates | frozenset(orders), priority)
            self.changed.notify_all()

    def ready(self) -> list[Handle]:
        """Those that nothing holds back, in the order in which they should be given attention."""
        with self.lock:
            return self._tracker.ready()

    def first(self, detached: bool) -> Handle | None:
        """The first in program order that is under way, `detached` ones left out or not."""
        with self.lock:
            return next((handle for handle in self._tracker.items() if detached or not handle.detached), None)

    def ordered(self) -> set[Hashable]:
        """Return the names on which those under way take turns."""
        with self.lock:
            return {name for handle in self._tracker.items() for name in handle.orders}

    def first_failed(self) -> Handle | None:
        """The first failure that nobody has seen."""
        with self.lock:
            return self._failed[0] if self._failed else None

    def ended(self, handle: Handle) -> None:
        """A ready operation is over."""
        with self.lock:
            if handle.error is not None:
                cause = handle.cause or handle
                self._failed.append(handle)
                self._poisoned |= dict.fromkeys(handle.mutates, cause)
                for later in self._tracker.behind(handle, handle.mutates):
                    later.cause = later.cause or cause
            self._tracker.remove(handle)
            self.since = time.monotonic()
            handle.done = True
            self.changed.notify_all()

    def seen(self, handle: Handle) -> None:
        """Somebody has seen its failure: what it should have mutated may be used again from now on."""
        with self.lock:
            self._failed = [other for other in self._failed if handle not in (other, other.cause)]
            self._poisoned = {name: by for name, by in self._poisoned.items() if by is not handle}

    def give_up(self, error: BaseException, forget: bool = False) -> None:
        """End everything under way with this error. `forget`: nobody is to hear of that, or of other failures."""
        with self.lock:
            handles = self._tracker.items()
        for handle in handles:
            handle.stop(error)
        with self.lock:
            self._tracker.clear()
            self._failed = [] if forget else [*self._failed, *handles]
            if forget:
                self._poisoned = {}
            for handle in handles:
                handle.done = True
            self.changed.notify_all()


def _nothing() -> None:
    """The work of an ended operation: its arrays may go."""


T = TypeVar("T")


@dataclass(eq=False)
class _Node(Generic[T]):
    item: T
    order: tuple[float, int]
    """Ascending: higher priority first, then program order."""
    reads: frozenset[Hashable]
    mutates: frozenset[Hashable]
    blockers: set[_Node[T]] = field(default_factory=set)
    dependents: list[_Node[T]] = field(default_factory=list)


@dataclass
class _Variable(Generic[T]):
    """What was added last for one variable: its writer, and the readers since."""

    writer: _Node[T] | None = None
    readers: list[_Node[T]] = field(default_factory=list)


class Tracker(Generic[T]):
    """Operations that were added and not yet removed. Not thread-safe; items are compared by identity."""

    def __init__(self) -> None:
        self.nodes: dict[int, _Node[T]] = {}
        """By the identity of their items; for whoever asks often whether there are any."""
        self._variables: dict[Hashable, _Variable[T]] = {}
        self._ready: list[_Node[T]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self.nodes)

    def add(
        self, item: T, reads: Iterable[Hashable] = (), mutates: Iterable[Hashable] = (), priority: float = 0
    ) -> None:
        """The next operation in program order. A variable both read and mutated counts as mutated."""
        written = frozenset(mutates)
        node = _Node(item, (-priority, self._count), frozenset(reads) - written, written)
        self._count += 1
        self.nodes[id(item)] = node
        for name in node.reads:
            variable = self._variables.setdefault(name, _Variable())
            self._block(node, variable.writer)
            variable.readers.append(node)
        for name in node.mutates:
            variable = self._variables.setdefault(name, _Variable())
            for earlier in (variable.writer, *variable.readers):
                self._block(node, earlier)
            variable.writer, variable.readers = node, []
        if not node.blockers:
            insort(self._ready, node, key=lambda other: other.order)

    def items(self) -> list[T]:
        """All of them, in program order."""
        return [node.item for node in self.nodes.values()]

    def clear(self) -> None:
        """Forget them all."""
        self.nodes.clear()
        self._variables.clear()
        self._ready.clear()

    def ready(self) -> list[T]:
        """Operations that nothing holds back, in the order in which they should be given attention."""
        return [node.item for node in self._ready]

    def remove(self, item: T) -> None:
        """A ready operation has ended: what waited for it may go on. KeyError if unknown, ValueError if not ready."""
        node = self.nodes[id(item)]
        if node.blockers:
            raise ValueError(f"{item!r} cannot have ended: it waits for {len(node.blockers)} operations before it")
        del self.nodes[id(item)]
        self._ready.remove(node)
        for later in node.dependents:
            later.blockers.remove(node)
            if not later.blockers:
                insort(self._ready, later, key=lambda other: other.order)
        for name in node.reads | node.mutates:
            self._forget(name, node)

    def behind(self, item: T, through: Iterable[Hashable]) -> list[T]:
        """Operations that wait for `item`, directly, because of one of the variables `through`; in program order."""
        names = frozenset(through)
        later = [node for node in self.nodes[id(item)].dependents if names & (node.reads | node.mutates)]
        return [node.item for node in sorted(later, key=lambda node: node.order[1])]

    @staticmethod
    def _block(node: _Node[T], earlier: _Node[T] | None) -> None:
        if earlier is not None and earlier is not node and earlier not in node.blockers:
            node.blockers.add(earlier)
            earlier.dependents.append(node)

    def _forget(self, name: Hashable, node: _Node[T]) -> None:
        variable = self._variables[name]
        if variable.writer is node:
            variable.writer = None
        elif node in variable.readers:
            variable.readers.remove(node)
        if variable.writer is None and not variable.readers:
            del self._variables[name]


DUTY = 24
"""The thread sleeps this many times as long as a look took: 1 / (1 + 24) = 4 % of a core."""
WAKE = 2e-5
"""What a look costs beside itself: falling asleep and waking up, seconds."""
LONGEST_SLEEP = 1e-3
"""However long a look took. A collective of many rounds needs a look a round."""
QUIET, QUIET_SLEEP, QUIET_DUTY = 0.1, (4e-3, 8e-3), 32
"""After so many seconds in which nothing ended it sleeps longer: looks and wakes then take 1 / 33 of its time."""


class Background:
    """One thread, started when it is first needed. `progress()` looks at everything once and says whether something
    ended; `under_way` is empty where there is nothing to look at; `changed`, of `lock`, is notified when that may have
    changed."""

    def __init__(
        self, lock: contextlib.AbstractContextManager[Any], changed: threading.Condition, under_way: Sized,
        progress: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._lock, self._changed, self._under_way, self._progress = lock, changed, under_way, progress
        self._thread: threading.Thread | None = None
        self._waiting: set[int] = set()
        """Threads that look themselves."""
        self._closing = False

    def start(self) -> None:
        """Start it, if it does not run yet. It is a daemon: whoever owns it closes it before MPI is finalised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpips communication", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop it, and wait until it has stopped."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """It begins no look inside, as somebody else looks."""
        with self._lock:
            self._waiting.add(threading.get_ident())
        try:
            yield
        finally:
            with self._lock:
                self._waiting.discard(threading.get_ident())
                self._changed.notify_all()

    def _run(self) -> None:
        last, used = 0.0, time.thread_time()  # when something was added or ended; CPU seconds
        while True:
            with self._lock:
                if not self._under_way:
                    last = 0.0
                self._changed.wait_for(lambda: self._closing or (self._under_way and not self._waiting))
                if self._closing:
                    return
            begin = time.perf_counter()
            last = last or begin
            if self._progress():
                last = begin
                continue
            before, used = used, time.thread_time()
            if begin - last < QUIET:
                time.sleep(min(DUTY * (WAKE + time.perf_counter() - begin), LONGEST_SLEEP))
            else:
                time.sleep(min(max(QUIET_DUTY * (used - before), QUIET_SLEEP[0]), QUIET_SLEEP[1]))

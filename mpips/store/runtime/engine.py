"""Run operations of a store while the program computes: in program order on each key, otherwise by priority.

An operation is a task (`collectives.fabric.tasks`) with a set of names: its keys, its communicators, and names that the
user gives. If it fails, its `wait()` raises the error. Operations with a common name run one after the other, in
program order. (MXNET-MPI, sections 3.1, 4.2.2 and 4.2.3, orders operations by the variables that they read and write.
Every operation of a store writes its keys.)

At most one thread advances operations at a time: the communication thread, or a thread inside `wait()`. A thread inside
`wait()` at first polls without sleeping, so that `wait()` returns sooner. The thread that advances operations also
checks whether the store's generation has ended (the generation is the life of the store until a failure). No other
thread calls MPI at that time. So MPI_THREAD_SERIALIZED is enough if the program makes its own MPI calls only while no
operation is running. With MPI_THREAD_MULTIPLE the program may make MPI calls at any time.

Collectives on one communicator must start in the same order on all ranks. The communicator is one of the operation's
names, so operations that use it run in program order, whichever thread advances them. An operation that fails ends the
generation, and thus all other operations.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Sequence
from typing import Any, Protocol

from mpips.collectives.errors import NotCopyable
from mpips.collectives.fabric import wait
from mpips.collectives.fabric.tasks import Task, empty_task
from mpips.collectives.fabric.wait import Limits
from mpips.store.runtime.errors import refused
from mpips.store.runtime.rendezvous import Watch

# A thread that waits polls operations itself for PATIENCE seconds. Then it leaves them to the communication thread, and
# wakes up every NOTICE seconds to notice stalls.
PATIENCE, NOTICE = 0.02, 0.1
GRACE_SECONDS = 0.5
# seconds between two full checks of the generation, which send and receive; every poll reads the generation's flag
LOOK_SECONDS = 2e-3
# After a poll the communication thread sleeps 24 times as long as the poll took: it uses 1 / (1 + 24) = 4 % of a core.
DUTY = 24
# seconds of CPU time that it takes to fall asleep and wake up, in addition to the time of a poll
WAKE = 2e-5
# The longest sleep in seconds, however long a poll took. A collective of many rounds needs a poll for each round.
LONGEST_SLEEP = 1e-3
# If no operation has ended for QUIET seconds, the thread sleeps longer: polling and waking up then take 1 / 33 of its
# time.
QUIET, QUIET_SLEEP, QUIET_DUTY = 0.1, (4e-3, 8e-3), 32


class Ending(Protocol):
    """The part of a store's generation (`runtime.generation`) that the engine uses.

    Operations end with the generation.
    """

    limits: Limits

    def check(self) -> None: ...

    def look(self, waited: float = 0.0) -> None: ...

    def end(self, what: str, error: BaseException) -> BaseException: ...


class Handle(NotCopyable):
    """An operation that runs while the program computes. `ipush`, `ipull` and `ipushpull` return it.

    `wait()` blocks until the operation has ended, and returns its result. `test()` returns True once the operation has
    ended. Both raise its error if it has failed.
    """

    def __init__(
        self, engine: Engine, task: Task[Any], orders: Collection[Hashable], what: str, detached: bool
    ) -> None:
        self._engine = engine
        self._task = task
        self.orders = orders
        self.what = what
        # True if only `close` waits for the operation
        self.detached = detached
        # True once the operation has ended, and later operations may run
        self.done = False
        # True once its task has ended; only the engine uses this
        self.over = False
        # time.perf_counter() when the operation was first advanced, and when it ended
        self.started = self.ended = 0.0
        self.error: BaseException | None = None
        self._result: object = None

    def __repr__(self) -> str:
        return f"<{self.what}, {'done' if self.done else 'under way'}>"

    def test(self) -> bool:
        """Advance all operations a little, without blocking. Return True if this operation has ended.

        Raises the error of this operation if it has failed.
        """
        if not self.done:
            self._engine.progress(wait=False)
        if self.done:
            self._engine.raise_failure(self)
        return self.done

    def wait(self) -> Any:
        """Block until this operation has ended, and return its result. Raises its error if it has failed."""
        if not self.done:
            self._engine.drive(self)
        self._engine.raise_failure(self)
        return self._result

    def step(self) -> None:
        """Advance the task to its next wait. Only the engine calls this.

        A KeyboardInterrupt makes the operation fail, and is raised.
        """
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
        """End the operation, with an error or None. Only the engine calls this. Closing the task frees its arrays."""
        self._task.close()
        self._task, self.error = empty_task(), error
        self.ended = time.perf_counter()
        self.over = True


class Turns:
    """The queues of operations, one for each name.

    An operation may run if it is the first in all of its queues. Of the operations that may run, those of higher
    priority run first. Priority never lets an operation overtake an earlier one with a common name. Not thread-safe.
    """

    def __init__(self) -> None:
        # all operations that were added and not removed, in program order
        self.under_way: dict[int, Handle] = {}
        self._queues: dict[Hashable, deque[Handle]] = {}
        # id of an operation -> the number of queues in which it waits behind another operation
        self._held: dict[int, int] = {}
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
        """Return the operations that may run, highest priority first."""
        return self._ready[:]

    def remove(self, handle: Handle) -> None:
        """Remove an operation that has ended. The next operations in its queues may then run."""
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
        """Remove all operations."""
        for each in (self.under_way, self._queues, self._held, self._places, self._ready):
            each.clear()

    def _make_ready(self, handle: Handle) -> None:
        insort(self._ready, handle, key=lambda other: self._places[id(other)])


class Engine:
    """All operations of one store on this process that have not ended. Methods may be called from any thread.

    Args:
        generation: The store's generation. Its limits say when a wait warns and when it raises StallError.
        background: True if a communication thread advances operations. Otherwise operations advance only inside `test`,
            `wait` and `progress`.
    """

    def __init__(self, generation: Ending, background: bool = True) -> None:
        self.generation = generation
        # The lock of `_changed`. Always enter this lock, and not the condition: an interrupt while a condition is being
        # entered would leave the condition locked.
        self._lock = threading.RLock()
        # notified when an operation is added or ends, or when a wait is over
        self._changed = threading.Condition(self._lock)
        self._turns = Turns()
        # the operations that have not ended
        self.under_way = self._turns.under_way
        # failed operations whose error has not been raised yet
        self._failed: list[Handle] = []
        # time.monotonic() when an operation began or ended last
        self._since = 0.0
        self._driver = threading.Lock()
        # identity of the thread that may advance operations
        self._owner = 0
        # the operation that the program waits for: its names, and a function that returns its description; None without
        # a wait
        self.blocked: tuple[Collection[Hashable], Callable[[], str]] | None = None
        # time.monotonic() of the next full check of the generation
        self._due = 0.0
        self._background = background
        self._thread: threading.Thread | None = None
        # threads that advance operations themselves
        self._waiting: set[int] = set()

    # ---- operations

    def submit(
        self, orders: Sequence[Hashable], task: Task[Any], priority: int, what: str, detached: bool = False
    ) -> Handle:
        """Add an operation, and return at once. It runs after all earlier operations with a common name.

        If the operation fails, it ends the generation.

        Args:
            orders: The names of the operation.
            what: The description of the operation in error messages.
            detached: True if `finish` waits for the operation only with `detached=True`.
        """
        handle = Handle(self, task, dict.fromkeys(orders), what, detached)
        with self._lock:
            if not self.under_way:
                self._since = time.monotonic()
            self._turns.add(handle, priority)
            self._changed.notify_all()
        if not self._background:
            self.progress()
        # The thread has no identity if an interrupt came before the thread began.
        elif self._thread is None or self._thread.ident is None:
            # A daemon thread, because the owner of the engine stops it (`close`) before MPI is finalised.
            self._thread = threading.Thread(target=self._run, name="mpips communication", daemon=True)
            self._thread.start()
        return handle

    def run(self, orders: Sequence[Hashable], task: Task[Any], priority: int, what: Callable[[], str]) -> None:
        """Run a task, blocking. If no other operation is running, run the task directly in this thread.

        Raises the error of the task or of the generation.
        """
        if self.under_way:
            self.submit(orders, task, priority, what()).wait()
            return
        # A task that needs no answer, such as a read of memory, would never notice that the generation has ended.
        self.generation.check()
        try:
            for _ in task:
                break
            else:
                return
            self.blocked = orders, what
            over = False

            def stretch() -> Iterator[None]:
                """Advance the task until it makes progress. The time limit of the next wait starts there."""
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
            # Close the task now. Otherwise the task would keep its arrays alive as long as the error exists.
            task.close()

    def finish(self, detached: bool = False) -> None:
        """Wait for all operations that have not ended. Then raise the first error that has not been raised yet.

        Args:
            detached: True to wait also for detached operations.
        """
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
        """Forget all operations, and errors that have not been raised yet, after the generation has ended."""
        with self._alone():
            self._give_up(RuntimeError("the generation has ended"))
            self._failed = []

    def close(self) -> None:
        """Stop the communication thread. Operations that have not ended then advance only inside `wait`."""
        with self._lock:
            self._background = False
            self._changed.notify_all()
        if self._thread is not None and self._thread.ident not in (None, threading.get_ident()):
            self._thread.join()

    # ---- advancing operations

    def names_in_use(self) -> set[Hashable]:
        """Return the names of all operations that have not ended."""
        with self._lock:
            return {name for handle in self.under_way.values() for name in handle.orders}

    def progress(self, wait: bool = True) -> bool:
        """Advance every operation that may run by one step. Return True if an operation has ended.

        Args:
            wait: What to do while another thread advances operations. True: wait for it. False: return False at once.
        """
        if not wait and self._driver.locked():
            return False
        with self._driver:
            self._owner = threading.get_ident()
            try:
                return self._look()
            finally:
                self._owner = 0

    def drive(self, handle: Handle) -> None:
        """Advance all operations until this one has ended. At first this thread does so itself (see PATIENCE)."""
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
        """Raise the error of an operation that has failed. `finish` does not raise it again."""
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
        """Return the rules for waits in this engine.

        The time limit is a little longer than the store's limit. So servers and collectives end a wait before the
        engine does. Their errors are better, because they know which ranks are late.
        """
        stall, timeout = self.generation.limits
        return Watch(Limits(stall, timeout and 1.1 * timeout + GRACE_SECONDS), look)

    def _look_around(self, waited: float) -> None:
        """Check the generation during a wait, unless another thread is advancing operations and checks it."""
        if self._owner == threading.get_ident():
            self.generation.look(waited)
        elif not self._driver.locked():
            # Do not use `acquire(blocking=False)`: an interrupt just after it would leave the lock held.
            with self._driver:
                self.generation.look(waited)

    def _look(self) -> bool:
        """Advance operations that may run, by priority, until one ends.

        Then an operation of higher priority may be able to run.
        """
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
        """End all operations with this error."""
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
        """Inside the block no other thread advances operations, and the communication thread does not try to."""
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
        """The body of the communication thread: advance operations, and sleep between the polls."""
        # when an operation was last added or ended, and this thread's CPU seconds at the last look
        last, used = 0.0, time.thread_time()
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

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
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from collectives.fabric import wait
from collectives.fabric.wait import Limits
from mpips.store.runtime.background import Background
from mpips.store.runtime.handles import DependencyError, Handle, Handles, Work
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

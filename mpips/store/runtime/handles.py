"""Operations that were started: the handle of each, and which are under way, which have failed, which must not run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterable
from typing import Any, Protocol

from collectives.errors import Uncopied
from mpips.store.runtime.dependencies import Tracker
from mpips.store.runtime.tasks import Task

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

"""Operations under way: each is a generator that yields when it has to wait; operations on one key run in program order.

One thread talks to MPI: the one that calls the store. Whatever it waits for, everything else under way goes on too, the
highest priority first. A blocking call with nothing else under way runs its generator directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

from mpips.meet import Pause

Task = Generator[None, None, Any]


class Handle:
    """An operation under way. `wait()` returns when it has ended and raises what made it fail; `test()` does not block."""

    def __init__(self, engine: Engine, keys: Sequence[Hashable], task: Task, priority: int, what: str) -> None:
        self._engine, self._keys, self._task = engine, tuple(keys), task
        self.priority, self.what = priority, what
        self.done = False
        self._error: BaseException | None = None

    def test(self) -> bool:
        """Make everything go on a little; whether this operation has ended. Raises what made it fail."""
        if not self.done:
            self._engine.progress()
        self._raise()
        return self.done

    def wait(self) -> None:
        """Block until the operation has ended."""
        if not self.done:
            pause = self._engine.pause(lambda: self.what)
            while not self.done:
                if not self._engine.progress():
                    pause()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def step(self) -> None:
        """Run the generator up to its next wait; called by the engine."""
        try:
            next(self._task)
        except StopIteration:
            self.done = True
        except Exception as error:
            self._error = error
            self.done = True


class Engine:
    """All operations under way on this process."""

    def __init__(self, stall_seconds: float, timeout_seconds: float) -> None:
        self._stall, self._timeout = stall_seconds, timeout_seconds
        self._queues: dict[Hashable, deque[Handle]] = {}
        self._active: list[Handle] = []

    def pause(self, describe: Callable[[], str]) -> Pause:
        # The servers know best who is missing and speak at stall_seconds; this is for what they cannot see.
        return Pause(describe, 1.5 * self._stall, 1.5 * self._timeout)

    def run(self, keys: Sequence[Hashable], task: Task, priority: int, what: Callable[[], str]) -> None:
        """Do it, blocking."""
        if self._active:
            self.submit(keys, task, priority, what()).wait()
            return
        for _ in task:
            break
        else:
            return
        pause = self.pause(what)
        for _ in task:
            pause()

    def submit(self, keys: Sequence[Hashable], task: Task, priority: int, what: str) -> Handle:
        """Start it; it goes on inside later calls."""
        handle = Handle(self, keys, task, priority, what)
        for key in keys:
            self._queues.setdefault(key, deque()).append(handle)
        self._active.append(handle)
        self._active.sort(key=lambda other: -other.priority)
        self._step(handle)
        return handle

    def progress(self) -> bool:
        """Step everything that may go on; whether something ended."""
        ended = False
        for handle in tuple(self._active):
            ended |= self._step(handle)
        return ended

    def finish(self) -> None:
        """Wait for everything under way."""
        for handle in tuple(self._active):
            handle.wait()

    def _step(self, handle: Handle) -> bool:
        if handle.done or any(self._queues[key][0] is not handle for key in handle._keys):
            return False
        handle.step()
        if handle.done:
            self._active.remove(handle)
            for key in handle._keys:
                queue = self._queues[key]
                queue.popleft()
                if not queue:
                    del self._queues[key]
        return handle.done

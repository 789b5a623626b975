"""Threads of a server that share a long sum. A share of it takes some 50 us, so little may go by around it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

Work = Callable[[int, int], None]


class _Task:
    """What is to be done: `work(item, thread)` for every item that is left."""

    def __init__(self, work: Work, items: Iterable[int]) -> None:
        self._work, self._left = work, deque(items)
        self.errors: list[Exception] = []

    def front(self) -> None:
        """Item after item from the front, as thread 0."""
        try:
            self._take(0, self._left.popleft)
        finally:
            self._left.clear()  # where it has raised, the others are to end

    def back(self, thread: int) -> None:
        """Item after item from the back."""
        try:
            self._take(thread, self._left.pop)
        except Exception as error:
            self.errors.append(error)
            self._left.clear()

    def _take(self, thread: int, take: Callable[[], int]) -> None:
        while True:
            try:
                item = take()
            except IndexError:
                return
            self._work(item, thread)


class Team:
    """The calling thread, number 0, and `threads - 1` more, of which each calls `begin` first; they end with it."""

    def __init__(self, threads: int, begin: Callable[[], None] | None = None) -> None:
        self.threads = threads
        self._others = [_Other(number, begin) for number in range(1, threads)]
        for other in self._others:
            weakref.finalize(self, other.give, None)

    def share(self, work: Work, items: Iterable[int]) -> None:
        """`work(item, thread)` for every item. Thread 0 takes them from the front, the others from the back.
        Blocking; raises what one of them raises, after all have ended. A thread that wakes up when nothing is
        left is not waited for."""
        task = _Task(work, items)
        for other in self._others:
            other.give(task)
        try:
            task.front()
        finally:
            for other in self._others:
                other.settle()
        for error in task.errors:
            raise error


class _Other:
    """One of the others; its thread begins when it is first needed. Who waits for it sleeps: who looked again and again
    would keep the interpreter from it."""

    def __init__(self, number: int, begin: Callable[[], None] | None) -> None:
        self._number, self._begin = number, begin
        self._gate, self._busy = threading.Lock(), threading.Lock()
        self._gate.acquire()
        self._tasks: deque[_Task | None] = deque(maxlen=1)
        self._begun = False

    def give(self, task: _Task | None) -> None:
        """Take part in a task; None: no more follow."""
        if not self._begun:
            if task is None:
                return
            self._begun = True
            threading.Thread(target=self._run, daemon=True).start()
        self._tasks.append(task)
        if self._gate.locked():
            self._gate.release()

    def settle(self) -> None:
        """Take back a task that it has not begun, or wait until it has ended its part."""
        self._tasks.clear()
        with self._busy:
            pass

    def _run(self) -> None:
        if self._begin is not None:
            self._begin()
        while True:
            self._gate.acquire()
            with self._busy:
                try:
                    task = self._tasks.popleft()
                except IndexError:
                    continue
                if task is None:
                    return
                task.back(self._number)
                del task  # nothing of it stays here: it holds a server's memory

"""Threads of a server that share the blocks of a long sum. A block takes some 50 us, so little may go by around it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

Work = Callable[[int, int], None]


class Team:
    """The calling thread, number 0, and `threads - 1` more, of which each calls `begin` first; they end with it."""

    def __init__(self, threads: int, begin: Callable[[], None] | None = None) -> None:
        self.threads = threads
        self._others = [_Other(number, begin) for number in range(1, threads)]
        for other in self._others:
            weakref.finalize(self, other.end)

    def share(self, work: Work, blocks: Iterable[int]) -> None:
        """`work(block, thread)` for every block. Thread 0 takes them from the front, the others from the back.
        Blocking; raises what one of them raises, after all have ended."""
        left = deque(blocks)
        for other in self._others:
            other.go(work, left)
        try:
            _take(work, 0, left.popleft)
        except BaseException:
            left.clear()
            raise
        finally:
            errors = [other.wait() for other in self._others]
        for error in filter(None, errors):
            raise error


def _take(work: Work, thread: int, take: Callable[[], int]) -> None:
    """Block after block, until there is none left."""
    while True:
        try:
            block = take()
        except IndexError:
            return
        work(block, thread)


class _Other:
    """One of the others; its thread begins when it is first needed. Who waits for it sleeps: who looked again and again
    would keep the interpreter from it."""

    def __init__(self, number: int, begin: Callable[[], None] | None) -> None:
        self._number, self._begin = number, begin
        self._gate, self._done = threading.Lock(), threading.Lock()
        self._gate.acquire()
        self._done.acquire()
        self._task: tuple[Work, deque[int]] | None = None
        self._error: Exception | None = None
        self._begun = False

    def go(self, work: Work, left: deque[int]) -> None:
        self._task, self._error = (work, left), None
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, daemon=True).start()
        self._gate.release()

    def wait(self) -> Exception | None:
        """Until it finds nothing left; what it has raised."""
        self._done.acquire()
        return self._error

    def end(self) -> None:
        """No more tasks follow."""
        if self._begun:
            self._gate.release()

    def _run(self) -> None:
        if self._begin is not None:
            self._begin()
        while True:
            self._gate.acquire()
            task, self._task = self._task, None  # nothing of it stays here: it holds a server's memory
            if task is None:
                return
            try:
                _take(task[0], self._number, task[1].pop)
            except Exception as error:
                self._error = error
                task[1].clear()
            del task
            self._done.release()

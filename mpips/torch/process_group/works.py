"""Operations under way: done at once in the caller's thread, or by one communication thread, in program order.

Collectives of one group start one after the other, in the order in which the program made them. Those of other groups,
sends and receives go on beside them: groups overlap, and each rank may call them in an order of its own. The thread
sleeps while there is nothing to do.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from torch.futures import Future

from collectives.communicator import Communicator

YIELD_SECONDS, NAP_SECONDS = 2e-3, 2e-5
"""How long the thread only gives way between two looks at what goes on, and how long it sleeps afterwards."""
Steps = Generator[None, None, Any]
"""An operation that yields whenever it has to wait; it returns the result."""


def in_steps(begun: Any) -> Steps:
    """A collective (`collectives.Plan`) that has begun, to its end."""
    while not begun.test():
        yield
    begun.wait()


class Job:
    """One operation: `run` does it, blocking; `steps` does the same beside others. `line`: what it takes turns on with
    others, its communicator; None for sends and receives."""

    def __init__(
        self, run: Callable[[], Any], steps: Callable[[], Steps], line: Communicator | None, keep: object = None
    ) -> None:
        self.run, self.steps, self.line = run, steps, line
        self.keep = keep
        """Tensors that must live as long as the operation."""
        self.result: Any = None
        """What the future gives, in place of what the operation returns."""
        self.future: Future[Any] = Future()

    def end(self, result: Any) -> None:
        """It is done."""
        self.keep = None
        self.future.set_result(result if self.result is None else self.result)

    def fail(self, error: BaseException) -> None:
        """It has raised."""
        self.keep = None
        self.future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


class Communication:
    """Runs jobs. One for each process; not for threads of the user's beside each other."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._busy = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def do(self, job: Job, beside: bool) -> Future[Any]:
        """Do it: now, blocking, where it need not go on `beside` the caller and nothing is under way; else by the
        thread. What it raises now is raised here."""
        with self._state:
            if beside or self._busy or self._jobs:
                self._jobs.append(job)
                if self._thread is None:
                    self._start()
                self._state.notify_all()
                return job.future
            self._busy = True
        try:
            with np.errstate(all="ignore"):  # as PyTorch computes
                job.end(job.run())
        finally:
            with self._state:
                self._busy = False
                self._state.notify_all()
        return job.future

    def close(self) -> None:
        """End the thread when what is under way has ended or failed. Blocks for 2 seconds at most."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="mpips torch", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        np.seterr(all="ignore")
        while True:
            with self._state:
                self._state.wait_for(lambda: self._closing or (self._jobs and not self._busy))
                if self._closing:
                    return
                self._busy = True
            try:
                self._go_on()
            finally:
                with self._state:
                    self._busy = False
                    self._state.notify_all()

    def _go_on(self) -> None:
        """Do what there is, until nothing is left. No job is waited for by itself: another rank may wait in another."""
        under_way: list[tuple[Job, Steps]] = []
        moved = time.monotonic()
        while (job := self._next(under_way)) or under_way:
            if job is not None:
                under_way.append((job, job.steps()))
            left = [(each, steps) for each, steps in under_way if not _stepped(each, steps)]
            if job is not None or len(left) < len(under_way):
                moved = time.monotonic()
            elif time.monotonic() - moved < YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(NAP_SECONDS)
            under_way = left

    def _next(self, under_way: list[tuple[Job, Steps]]) -> Job | None:
        """The next job that may begin: those of one line wait for the one before."""
        taken = {job.line for job, _ in under_way} - {None}
        with self._state:
            for place, job in enumerate(self._jobs):
                if job.line not in taken:
                    del self._jobs[place]
                    return job
                taken.add(job.line)
        return None


communication = Communication()
"""That of this process."""


def _stepped(job: Job, steps: Steps) -> bool:
    """Take it one step further; whether it has ended."""
    try:
        next(steps)
    except StopIteration as stop:
        job.end(stop.value)
    except Exception as error:
        job.fail(error)
    else:
        return False
    return True


class Found:
    """From whom a message of any rank came."""

    rank = -1


class Work(torch._C._distributed_c10d.Work):
    """What c10d hands to its users: unlike PyTorch's own wrapper of a future, `wait` raises what the operation has."""

    def __init__(self, future: Future[Any], found: Found | None = None) -> None:
        super().__init__()
        self._future, self._found = future, found

    def wait(self, timeout: Any = None) -> bool:
        """Blocking; `timeout` is that of the group."""
        self._future.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> Any:
        """What the operation has raised, or None."""
        if self._future.done():
            try:
                self._future.value()
            except Exception as error:
                return error
        return None

    def result(self) -> Any:
        return self._future.wait()

    def source_rank(self) -> int:
        """From whom a receive of any rank had its message."""
        return -1 if self._found is None else self._found.rank

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A future that has failed in C++ too, where the operation has: Python's exceptions are mere values there."""
        fine = self._future.done() and self.exception() is None
        return self._future if fine else self._future.then(_value)


def _value(future: Future[Any]) -> Any:
    return future.wait()

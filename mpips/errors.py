"""Errors that their sentence explains to the caller: ours are the words, the lines to be shown are the caller's."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def of_caller(error: E) -> E:
    """Mark an error as such a one. Where nobody catches it, it is shown with the caller's lines alone, and once for all
    ranks that have its sentence (`mpips.lastwords`). CollectiveError and OptionError are marked as classes."""
    error.of_caller = True  # type: ignore[attr-defined]
    return error

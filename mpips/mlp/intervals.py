"""Balanced half-open intervals: who holds which rows, columns and samples."""

from __future__ import annotations


def interval(count: int, parts: int, index: int) -> tuple[int, int]:
    """Slice `index` of `count` items cut into `parts` contiguous slices whose lengths differ by at most one.

    The first ``count % parts`` slices are the longer ones; with fewer items than parts the last slices are empty.
    """
    if not 0 <= index < parts:
        raise ValueError(f"slice {index} of {parts} parts does not exist")
    short, longer = divmod(count, parts)
    start = index * short + min(index, longer)
    return start, start + short + (index < longer)


def intervals(count: int, parts: int) -> list[tuple[int, int]]:
    """All slices of `count` items cut into `parts`, in order."""
    return [interval(count, parts, index) for index in range(parts)]

"""What `mpips bench allreduce` and its like are asked for, checked before anything starts."""

from __future__ import annotations

from typing import Any, NamedTuple

import click
import numpy as np

from collectives.benchmark import rivals
from collectives.benchmark.report import BUS_FACTOR
from collectives.benchmark.sizes import parse_counts, split_words
from collectives.call import REDUCING
from collectives.machine import memory
from collectives.operations import operation
from collectives.schedule import catalog
from collectives.schedule.model import parse

BESIDE = "beside the MPI's own best call in the same run. Times are of one call on the slowest rank."
CASES = {
    **{kind: f"Time {kind} over the ranks of the job, {BESIDE}" for kind in BUS_FACTOR},
    "pt2pt": "Time a ping-pong of ranks 0 and 1 by size.",
    "iallreduce": "Measure how much of an allreduce hides behind compute of the same length, as the OSU benchmarks do.",
}
"""What each measures."""
PLANS = ("auto", "shared_memory", "native")  # algorithms outside the catalog
CALLS = ("one_shot", "gloo")  # that cannot be started and waited for
ARRAYS = ("ordinary", "empty")


class Wanted(NamedTuple):
    """The words of the command line, understood."""

    dtype: np.dtype[Any]
    counts: list[int]
    algorithms: list[str]
    arrays: list[str]


def check(
    ranks: int, *, collective: str, sizes: str, algorithms: str, arrays: str, dtype: str, op: str, **_: Any
) -> Wanted:
    """What the command line means for that many ranks; click.UsageError where it cannot be. Starts no MPI."""
    try:
        element = _element(dtype)
        if collective in (*REDUCING, "iallreduce"):
            operation(op, element)
        counts = parse_counts(sizes, element.itemsize, element.name)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    largest = max(counts) * element.itemsize
    kinds, names = split_words(arrays), split_words(algorithms)
    if unknown := [kind for kind in kinds if kind not in ARRAYS]:
        raise click.UsageError(f"--arrays {unknown[0]!r} is none of {', '.join(ARRAYS)}")
    if not kinds or not names:
        raise click.UsageError(f"--{'algorithms' if kinds else 'arrays'} names none")
    if collective == "iallreduce" and ranks < 2:
        raise click.UsageError("an allreduce beside compute needs two ranks: --ranks 2")
    if collective == "pt2pt":
        if ranks < 2:
            raise click.UsageError("a ping-pong needs two ranks: --ranks 2")
        _fits(sizes, largest, 1)
        return Wanted(element, counts, [], [])
    for name in names:
        if reason := _refusal(collective, name, ranks):
            raise click.UsageError(f"--algorithms {name}: {reason}")
    _fits(sizes, largest, 1 if collective == "iallreduce" else least_arrays(collective, kinds))
    return Wanted(element, counts, names, kinds)


def least_arrays(kind: str, arrays: list[str]) -> int:
    """How many arrays of the larger buffer's size a rank holds at once, at least, while these are timed: those of each
    kind, and the two of the bare copy."""
    return 2 + len(set(arrays)) * (2 if kind in ("reduce", "alltoall") else 1)


def _fits(sizes: str, largest: int, arrays: int) -> None:
    try:
        memory.check(f"--sizes {sizes}", largest, arrays, memory.ranks_here())
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _refusal(collective: str, algorithm: str, ranks: int) -> str | None:
    kind, others = ("allreduce", PLANS) if collective == "iallreduce" else (collective, PLANS + CALLS)
    if algorithm in others:
        return None
    try:
        name, parameters = parse(algorithm)
    except ValueError as error:
        return str(error)
    if name not in catalog.names(kind):
        choices = [other for other in others if other != "gloo" or kind in rivals.GLOO_KINDS]
        return f"{name!r} is no algorithm for {collective}: choose one of {', '.join([*choices, *catalog.names(kind)])}"
    if name == "hierarchical" and "local" not in parameters:
        return None  # the ranks of a node are known in the job alone
    return catalog.serves(kind, algorithm, ranks)


def _element(dtype: str) -> np.dtype[Any]:
    if dtype == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ValueError("bfloat16 needs the package ml_dtypes: pip install ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)
    try:
        element = np.dtype(dtype)
    except TypeError:
        element = np.dtype(object)
    if element.kind not in "biufc":
        raise ValueError(f"--dtype {dtype!r} is no type of numbers, such as float32, float16, bfloat16, float64, int32")
    return element

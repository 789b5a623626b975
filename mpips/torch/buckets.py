"""Which gradients travel together: cuts of the parameters in the order in which they become ready. Pure.

A bucket is a run of parameters; its allreduce starts when the last of its gradients is there. Buckets come from the
partition problem of MG-WFBP (`mpips.overlap.problem`), whose layers are counted from the front of the model: the other
way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

from mpips.overlap.problem import Problem
from mpips.overlap.strategies import PARTITIONS

STRATEGIES = tuple(PARTITIONS)
CHOICES = f"auto, {', '.join(STRATEGIES)}, or a number of MiB"


class Costs(NamedTuple):
    """An allreduce of M bytes takes alpha + beta M seconds."""

    alpha: float
    beta: float


class Bucket(NamedTuple):
    """Parameters [first, last) in the order of readiness."""

    first: int
    last: int


def see(asked: Any) -> None:
    """TypeError or ValueError where this is neither a word nor a number of MiB above 0."""
    if isinstance(asked, str):
        return
    if isinstance(asked, bool) or not isinstance(asked, Real):
        raise TypeError(f"buckets is of type {type(asked).__name__}: pass {CHOICES}")
    if not float(asked) > 0:
        raise ValueError(f"buckets is {asked}: pass {CHOICES} above 0")


def cut(nbytes: Sequence[int], ready: Sequence[float], costs: Costs, strategy: str) -> list[Bucket]:
    """Buckets by a strategy of `mpips.overlap`: `nbytes` of each gradient and the second at which it is ready, both in
    the order of readiness. ValueError for an unknown strategy."""
    if strategy not in PARTITIONS:
        raise ValueError(f"buckets={strategy!r} is unknown: choose {CHOICES}")
    if not nbytes:
        return []
    compute = [max(0.0, after - before) for before, after in pairwise([0.0, *ready])]
    problem = Problem.of(compute[::-1], costs.alpha, [costs.beta * n for n in nbytes[::-1]])
    count = len(nbytes)
    return [Bucket(count - last, count - first + 1) for first, last in PARTITIONS[strategy](problem)[::-1]]


def by_bytes(nbytes: Sequence[int], most: float) -> list[Bucket]:
    """Buckets of at most so many bytes; a gradient that is longer is one by itself."""
    found: list[Bucket] = []
    first, held = 0, 0
    for index, n in enumerate(nbytes):
        if index > first and held + n > most:
            found.append(Bucket(first, index))
            first, held = index, 0
        held += n
    return [*found, Bucket(first, len(nbytes))] if nbytes else []


def apart(buckets: Sequence[Bucket], kinds: Sequence[object]) -> list[Bucket]:
    """The same, cut again where the kind (the dtype) of the parameters changes."""
    found = []
    for first, last in buckets:
        inner = [index for index in range(first + 1, last) if kinds[index] != kinds[index - 1]]
        found += [Bucket(*ends) for ends in pairwise([first, *inner, last])]
    return found

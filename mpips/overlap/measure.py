"""The profile of a job, measured on its own ranks: what messages cost, and how long the layers compute.

Messages cost what they cost in the job: sent in a row, the next one under way when the last one ends, on as many layers
as there are. In an iteration some of them go on beside compute, looked at by the communication thread now and then,
and some while the training thread waits and looks itself, which is faster; so half of the measurements are made while
it sleeps, half while it waits, and the mean counts. What is measured is a run, a list of groups, and its seconds from
the first start to the last end; the costs of one message follow from runs of different numbers and sizes (fit.py).
Everything that needs MPI comes from the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from . import fit
from .model import LayeredModel
from .profile import PARAMETER_BYTES
from .stage import Groups
from .stopwatch import Stopwatch

POLL_SECONDS = 5e-4
SHARE = 3  # part of the layers that shorter runs have


class Waited(Protocol):
    """A message under way."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> object: ...


Start = Callable[[Groups], Sequence[Waited]]
"""Starts the messages of a run, in order, and returns at once; the run has ended when all handles have."""


def runs(elements: Sequence[int]) -> tuple[Groups, ...]:
    """What is sent: all layers one by one, in a few groups and in one; a third of the layers one by one and in one."""
    layers = len(elements)
    few = max(1, layers // SHARE)
    singles = tuple((layer, layer) for layer in range(1, layers + 1))
    groups = tuple((first, min(first + few - 1, layers)) for first in range(1, layers + 1, few))
    return tuple(dict.fromkeys((singles, groups, ((1, layers),), singles[:few], ((1, few),))))


def seconds(
    start: Start, wanted: Sequence[Groups], slowest: Callable[[float], float], repeats: int = 5,
    modes: Sequence[bool] = (True, False),
) -> list[float]:  # fmt: skip
    """The slowest worker's seconds for each run: medians over `repeats` with the training thread asleep and with it
    waiting, and the mean of the two; `modes` are whether it is asleep. Collective, blocking.

    `slowest(seconds)` is the largest of all workers', and brings them together.
    """
    times = np.empty((repeats + 1, len(modes), len(wanted)))
    for repeat, mode, index in np.ndindex(times.shape):  # the first repeat warms up
        slowest(0.0)
        begin = time.perf_counter()
        handles = start(wanted[index])
        while modes[mode] and not all(handle.done for handle in handles):
            time.sleep(POLL_SECONDS)
        for handle in handles:
            handle.wait()
        times[repeat, mode, index] = slowest(time.perf_counter() - begin)
    return np.median(times[1:], axis=0).mean(axis=0).tolist()


def costs(elements: Sequence[int], wanted: Sequence[Groups], times: Sequence[float]) -> tuple[float, float]:
    """(startup seconds, seconds a byte) of a message, from the seconds of runs."""
    numbers = [len(groups) for groups in wanted]
    nbytes = [sum(group_bytes(elements, *group) for group in groups) for groups in wanted]
    if len(set(np.divide(nbytes, numbers))) == 1:
        return float(np.median(np.divide(times, numbers))), 0.0  # one layer: nothing to divide
    return fit.costs(numbers, nbytes, times)


def group_bytes(elements: Sequence[int], first: int, last: int) -> float:
    """Bytes of the layers first..last."""
    return float(PARAMETER_BYTES * sum(elements[first - 1 : last]))


def compute(model: LayeredModel, x: np.ndarray, y: np.ndarray, repeats: int = 3) -> tuple[list[float], list[float]]:
    """(forward, backward) seconds of every layer on a batch, medians (`Stopwatch.seconds`). Only gradients are
    written."""
    watch = Stopwatch(len(model.layer_elements))
    found = []
    for _ in range(repeats):
        watch.step(model, x, y, _nothing, _nothing)
        found.append(watch.seconds())
    forward, backward = np.median(found, axis=0)
    return forward.tolist(), backward.tolist()


def _nothing(layer: int) -> None:
    """A hook that does nothing."""

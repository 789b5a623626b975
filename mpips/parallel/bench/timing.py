"""Timing of several contenders in one run: alternating rounds, in each of which the slowest rank counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI


class Contender(NamedTuple):
    """A step, and whether all ranks take it or rank 0 alone while the others sleep."""

    name: str
    step: Callable[[], object]
    everyone: bool


def compare(contenders: list[Contender], comm: MPI.Comm, seconds: float, rounds: int) -> dict[str, np.ndarray]:
    """Seconds of a step of each contender in each of `rounds` rounds, which take about `seconds` in all. Collective.

    Every other round goes through the contenders backwards, so that what changes slowly on the machine favours none.
    """
    steps = {each.name: _calibrate(each, comm, seconds / rounds / len(contenders)) for each in contenders}
    times: dict[str, list[float]] = {each.name: [] for each in contenders}
    for number in range(rounds):
        for each in contenders[:: -1 if number % 2 else 1]:
            times[each.name].append(_round(each, comm, steps[each.name]) / steps[each.name])
    return {name: np.array(values) for name, values in times.items()}


def _calibrate(each: Contender, comm: MPI.Comm, seconds: float) -> int:
    """How many steps take about this long, after a warm-up."""
    _round(each, comm, 3)
    count = np.array([max(1, int(3 * seconds / _round(each, comm, 3)))], np.int64)
    comm.Bcast(count)
    return int(count[0])


def _round(each: Contender, comm: MPI.Comm, steps: int) -> float:
    """Seconds of so many steps, of the slowest rank."""
    _meet(comm)
    start = time.perf_counter()
    if each.everyone or comm.rank == 0:
        for _ in range(steps):
            each.step()
    spent = np.array([time.perf_counter() - start])
    _meet(comm)
    comm.Allreduce(MPI.IN_PLACE, spent, MPI.MAX)
    return float(spent[0])


def _meet(comm: MPI.Comm) -> None:
    """A barrier whose waiting ranks sleep, so that they leave the cores and the memory to those that compute."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)

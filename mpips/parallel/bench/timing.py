"""Timing of several contenders in one run: alternating rounds, the slowest rank counts, medians over rounds."""

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


def compare(contenders: list[Contender], comm: MPI.Comm, seconds: float, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each contender: `rounds` rounds of about `seconds` in all. Collective."""
    steps = {each.name: _calibrate(each, comm, seconds / rounds / len(contenders)) for each in contenders}
    times: dict[str, list[float]] = {each.name: [] for each in contenders}
    for _ in range(rounds):
        for each in contenders:
            times[each.name].append(_round(each, comm, steps[each.name]) / steps[each.name])
    return {name: float(np.median(values)) for name, values in times.items()}


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

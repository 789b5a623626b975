"""Timing of several contenders in one run, which take turns: what changes slowly on a machine then favours none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI


class Contender(NamedTuple):
    """A step, and whether all ranks take it or rank 0 alone while the others sleep."""

    name: str
    step: Callable[[], object]
    everyone: bool


def alternate(turns: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds that each turn says it took, in each of `rounds` rounds. Every other round goes backwards."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            times[name].append(turns[name]())
    return {name: np.array(values) for name, values in times.items()}


def seconds_of(step: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def compare(contenders: list[Contender], comm: MPI.Comm, seconds: float, rounds: int) -> dict[str, np.ndarray]:
    """Seconds of a step of each contender in each of `rounds` rounds, which take about `seconds` in all. Of a round the
    slowest rank counts. Collective."""
    share = seconds / rounds / len(contenders)
    steps = {each.name: _calibrate(each, comm, share) for each in contenders}
    times = alternate({each.name: partial(_round, each, comm, steps[each.name]) for each in contenders}, rounds)
    return {name: values / steps[name] for name, values in times.items()}


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
    spent, everybody = np.array([time.perf_counter() - start]), np.empty(comm.size)
    _meet(comm)
    comm.Allgather(spent, everybody)
    return float(everybody.max())


def _meet(comm: MPI.Comm) -> None:
    """A barrier whose waiting ranks sleep, so that they leave the cores and the memory to those that compute."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)

"""Time callables in turns, so that every ratio comes from one run: short calls of all ranks, long steps of contenders.

`measure`: a sample is the mean time of one call over a short batch, on the slowest rank. In every round all candidates
have a turn, a barrier before each, in an order drawn anew: what a call finds in the caches depends on the one before.

`compare_steps`: contenders take turns for a share of a second, and may be rank 0 alone while the others sleep. What
changes slowly on a machine then favours none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpips.collectives.kernels import engine

BATCH_SECONDS = 2e-3  # long beside the time between a barrier's first rank and its last, and beside a call of which the
# caches hold what the candidate before has left
WARM_CALLS = 10
SETTLE_SECONDS = 60.0  # for kernels that the calls have asked for
LEAST_SAMPLES = 5
MOST_SAMPLES = 200


class Timing(NamedTuple):
    """Seconds of one call: fastest sample, median, 99th percentile; and the number of samples."""

    least: float
    median: float
    p99: float
    samples: int


def measure(comm: MPI.Comm, candidates: Sequence[Callable[[], object]], budget_s: float) -> list[Timing]:
    """Return timings of the candidates, equal on every rank. Collective and blocking, for about `budget_s` seconds in
    all."""
    if not candidates:
        return []
    batch = [_batch(comm, run) for run in candidates]
    cost = sum(seconds * calls for seconds, calls in batch)
    rounds = int(min(MOST_SAMPLES, max(LEAST_SAMPLES, budget_s / max(cost, 1e-9))))
    local = np.zeros((len(candidates), rounds))
    orders = np.random.default_rng(0)  # the same on all ranks
    for turn in range(rounds):
        for which in orders.permutation(len(candidates)):
            local[which, turn] = _sample(comm, candidates[which], batch[which][1])
    slowest = np.empty_like(local)
    comm.Allreduce(local, slowest, op=MPI.MAX)
    return [Timing(row.min(), float(np.median(row)), float(np.percentile(row, 99)), rounds) for row in slowest]


def _batch(comm: MPI.Comm, run: Callable[[], object]) -> tuple[float, int]:
    """Return (seconds of one call, calls a batch), after warming up; agreed over all ranks."""
    for _ in range(WARM_CALLS):
        run()
    engine.settle(SETTLE_SECONDS)
    calls = 1
    while True:
        seconds = np.array([_sample(comm, run, calls)])
        comm.Allreduce(MPI.IN_PLACE, seconds, op=MPI.MAX)
        if seconds[0] * calls >= BATCH_SECONDS or calls >= 4096:
            return float(seconds[0]), calls
        calls *= 2


def _sample(comm: MPI.Comm, run: Callable[[], object], calls: int) -> float:
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def ping_pong(comm: MPI.Comm, x: np.ndarray[Any, Any], budget_s: float, other: int = 1) -> dict[str, Timing]:
    """Return one-way times between ranks 0 and `other`, of "blocking" and of "persistent" messages.

    Half of the round trip counts. Collective: the other ranks only wait. ValueError with one rank.
    """
    if comm.size < 2:
        raise ValueError("a point-to-point case needs two ranks: start it with --ranks 2")
    here, plays = comm.rank, comm.rank in (0, other)
    partner = (other - here) if plays else MPI.PROC_NULL
    send, receive = comm.Send_init(x, partner), comm.Recv_init(x, partner)
    first, second = (send, receive) if here == 0 else (receive, send)

    def blocking() -> None:
        if here == 0:
            comm.Send(x, other)
            comm.Recv(x, other)
        elif here == other:
            comm.Recv(x, 0)
            comm.Send(x, 0)

    def persistent() -> None:
        if plays:
            for request in (first, second):
                request.Start()
                request.Wait()

    try:
        timings = measure(comm, [blocking, persistent], budget_s)
    finally:
        send.Free()
        receive.Free()
    half = [Timing(t.least / 2, t.median / 2, t.p99 / 2, t.samples) for t in timings]
    return {"blocking": half[0], "persistent": half[1]}


class Contender(NamedTuple):
    """A step, and whether all ranks take it or rank 0 alone while the others sleep."""

    name: str
    step: Callable[[], object]
    everyone: bool


def take_turns(turns: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, np.ndarray]:
    """Return seconds that each turn says it took, in each of `rounds` rounds. Every other round goes backwards."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            times[name].append(turns[name]())
    return {name: np.array(values) for name, values in times.items()}


def time_call(step: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def compare_steps(contenders: list[Contender], comm: MPI.Comm, seconds: float, rounds: int) -> dict[str, np.ndarray]:
    """Return seconds of a step of each contender in each of `rounds` rounds, which take about `seconds` in all. Of a
    round the slowest rank counts. Collective."""
    share = seconds / rounds / len(contenders)
    steps = {each.name: _count_steps(each, comm, share) for each in contenders}
    times = take_turns({each.name: partial(_time_steps, each, comm, steps[each.name]) for each in contenders}, rounds)
    return {name: values / steps[name] for name, values in times.items()}


def _count_steps(each: Contender, comm: MPI.Comm, seconds: float) -> int:
    """Return how many steps take about this long, after a warm-up."""
    _time_steps(each, comm, 3)
    count = np.array([max(1, int(3 * seconds / _time_steps(each, comm, 3)))], np.int64)
    comm.Bcast(count)
    return int(count[0])


def _time_steps(each: Contender, comm: MPI.Comm, steps: int) -> float:
    """Return seconds of so many steps, of the slowest rank."""
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
    """Meet all ranks; those that wait sleep, and leave the cores and the memory to those that compute."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)

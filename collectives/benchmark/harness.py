"""Time several callables in alternation, so that they can be compared within one run: short calls, or long steps.

`measure` is for short calls that all ranks make. A sample is the mean time of a call in a short batch, on the slowest
rank. In every round each candidate runs one batch, after a barrier. Each round has a new random order, because the data
that a candidate leaves in the caches affects the next one.

`compare_steps` is for long steps, which run on all ranks or only on rank 0. Each contender's turn lasts a fraction of a
second, so slow changes in the speed of the machine affect all contenders alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpips.collectives.kernels import engine

# The duration of a batch. It is long compared with the differences in time at which ranks leave a barrier, and with the
# first call of a batch, which finds the previous candidate's data in the caches.
BATCH_SECONDS = 2e-3
WARM_CALLS = 10
# longest wait for the compilation of kernels that the calls have requested
SETTLE_SECONDS = 60.0
LEAST_SAMPLES = 5
MOST_SAMPLES = 200


class Timing(NamedTuple):
    """The seconds of one call: fastest sample, median and 99th percentile; and the number of samples."""

    least: float
    median: float
    p99: float
    samples: int


def measure(comm: MPI.Comm, candidates: Sequence[Callable[[], object]], budget_s: float) -> list[Timing]:
    """Time candidates in alternation. Collective and blocking, for about `budget_s` seconds in all.

    Return the timing of each candidate, the same on every rank.
    """
    if not candidates:
        return []
    batch = [_batch(comm, run) for run in candidates]
    cost = sum(seconds * calls for seconds, calls in batch)
    rounds = int(min(MOST_SAMPLES, max(LEAST_SAMPLES, budget_s / max(cost, 1e-9))))
    local = np.zeros((len(candidates), rounds))
    # seeded, because all ranks must draw the same orders
    orders = np.random.default_rng(0)
    for turn in range(rounds):
        for index in orders.permutation(len(candidates)):
            local[index, turn] = _sample(comm, candidates[index], batch[index][1])
    slowest = np.empty_like(local)
    comm.Allreduce(local, slowest, op=MPI.MAX)
    return [Timing(row.min(), float(np.median(row)), float(np.percentile(row, 99)), rounds) for row in slowest]


def _batch(comm: MPI.Comm, run: Callable[[], object]) -> tuple[float, int]:
    """Warm a candidate up. Return the seconds of a call and the number of calls in a batch, the same on all ranks."""
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
    """Time messages between rank 0 and rank `other`. Collective and blocking; all remaining ranks only wait.

    Args:
        comm: The ranks.
        x: The message. It is overwritten by the message that comes back.
        budget_s: The seconds to spend.
        other: The partner of rank 0.

    Returns:
        The one-way times (half of the round trip) of "blocking" and of "persistent" messages.

    Raises:
        ValueError: There is only one rank.
    """
    if comm.size < 2:
        raise ValueError("a point-to-point case needs two ranks: start it with --ranks 2")
    rank, plays = comm.rank, comm.rank in (0, other)
    partner = (other - rank) if plays else MPI.PROC_NULL
    send, receive = comm.Send_init(x, partner), comm.Recv_init(x, partner)
    first, second = (send, receive) if rank == 0 else (receive, send)

    def blocking() -> None:
        if rank == 0:
            comm.Send(x, other)
            comm.Recv(x, other)
        elif rank == other:
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
    """A step to time. If `everyone` is False, only rank 0 runs the step, while the other ranks sleep."""

    name: str
    step: Callable[[], object]
    everyone: bool


def take_turns(turns: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, np.ndarray]:
    """Call every function of `turns` once in each of `rounds` rounds, in reverse order in every other round.

    Each function returns a number of seconds. Return for each name the array of these numbers, one per round.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            times[name].append(turns[name]())
    return {name: np.array(values) for name, values in times.items()}


def time_call(step: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def compare_steps(contenders: list[Contender], comm: MPI.Comm, seconds: float, rounds: int) -> dict[str, np.ndarray]:
    """Time the steps of contenders in alternation. Collective and blocking, for about `seconds` in all.

    Return for each contender the mean seconds per step in each of `rounds` rounds, on the slowest rank of that round.
    """
    share = seconds / rounds / len(contenders)
    steps = {each.name: _count_steps(each, comm, share) for each in contenders}
    times = take_turns({each.name: partial(_time_steps, each, comm, steps[each.name]) for each in contenders}, rounds)
    return {name: values / steps[name] for name, values in times.items()}


def _count_steps(each: Contender, comm: MPI.Comm, seconds: float) -> int:
    """Warm a contender up, and return the number of its steps that take about `seconds`, the same on all ranks."""
    _time_steps(each, comm, 3)
    count = np.array([max(1, int(3 * seconds / _time_steps(each, comm, 3)))], np.int64)
    comm.Bcast(count)
    return int(count[0])


def _time_steps(each: Contender, comm: MPI.Comm, steps: int) -> float:
    """Return the seconds that `steps` steps take on the slowest rank."""
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
    """Wait for all ranks. Waiting ranks sleep, and so leave the cores to the ranks that compute."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)

"""Times calls in alternation, so that they can be compared within one run, and fits alpha and beta to their times.

In every round each call runs one batch, that is, it is repeated several times. All ranks begin a batch together. A
batch is long compared with the differences between the times at which ranks begin it. It is also long compared with its
first call, which finds another call's data in the caches. Each round has a new random order, so that a call does not
always follow the same other call. Slow changes in the speed of the machine affect all calls alike. The caller may give
the arrays new values before each batch: a copy of unchanged memory can come from a cache.

Calls may be as short as a microsecond or as long as a second, and may run on all ranks or only on some. Alpha (seconds
for each message) and beta (seconds for each byte) are the parameters of the cost model (`simulator.cost`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.kernels import engine
from mpips.collectives.simulator.cost import LinkCost, fit

# A batch lasts at least this long, unless it has MOST_CALLS calls.
BATCH_SECONDS = 2e-3
MOST_CALLS = 4096
WARM_CALLS = 3
LEAST_ROUNDS, MOST_ROUNDS = 5, 200
# how often a rank that takes no part in a call checks whether the other ranks have finished the call
LOOK_SECONDS = 5e-4

# a call to time; its result is ignored
TimedCall: TypeAlias = Callable[[], object]


class Timing(NamedTuple):
    """The seconds that a call takes. Each round gives one value: the mean of a batch of calls, on the slowest rank."""

    rounds: NDArray[np.float64]

    @property
    def least(self) -> float:
        return float(self.rounds.min())

    @property
    def median(self) -> float:
        return float(np.median(self.rounds))

    @property
    def p99(self) -> float:
        """The 99th percentile."""
        return float(np.percentile(self.rounds, 99))


def measure(
    comm: MPI.Comm,
    calls: Sequence[TimedCall | None],
    seconds: float,
    rounds: int | None = None,
    load: bool = True,
    renew: TimedCall | None = None,
) -> list[Timing]:
    """Time calls in alternation. Collective and blocking, for about `seconds` in all.

    Args:
        comm: The ranks.
        calls: The calls, in the same order on all ranks. A rank that takes no part in a call passes None instead, and
            sleeps while the other ranks make the call, so that they can use its core.
        seconds: The time to spend.
        rounds: The number of rounds. Their batches then share `seconds`. Default: batches of `BATCH_SECONDS`, and as
            many rounds as `seconds` allow, at least `LEAST_ROUNDS` and at most `MOST_ROUNDS`.
        load: First load the kernels that the calls need, or compile them.
        renew: Runs before each batch. Its time does not count.

    Returns:
        The timing of each call, the same on every rank.
    """
    if not calls:
        return []
    share = 0.0 if rounds is None else seconds / rounds / len(calls)
    for call in calls:
        _sample(comm, call, WARM_CALLS)
    if load:
        engine.load_all()
    batches = [_batch(comm, call, share) for call in calls]
    if rounds is None:
        cost = sum(each * count for each, count in batches)
        rounds = int(min(MOST_ROUNDS, max(LEAST_ROUNDS, seconds / max(cost, 1e-9))))
    samples = np.zeros((len(calls), rounds))
    # seeded, because all ranks must draw the same orders
    orders = np.random.default_rng(0)
    for turn in range(rounds):
        for which in orders.permutation(len(calls)):
            if renew is not None:
                renew()
            samples[which, turn] = _sample(comm, calls[which], batches[which][1])
    comm.Allreduce(MPI.IN_PLACE, samples, op=MPI.MAX)
    return [Timing(row) for row in samples]


def measure_costs(comm: MPI.Comm, calls: Mapping[int, TimedCall], seconds: float = 0.0) -> LinkCost:
    """Time calls that differ in their number of bytes, and fit alpha and beta to the medians. Collective and blocking.

    The calls use only kernels that are already loaded, because a training step should not wait for a compilation.

    Args:
        comm: The ranks.
        calls: The number of bytes -> the call. There must be at least two calls.
        seconds: The time to spend. Default: as little as possible.
    """
    timings = measure(comm, list(calls.values()), seconds, load=False)
    return fit([(nbytes, timing.median) for nbytes, timing in zip(calls, timings, strict=True)])


def _batch(comm: MPI.Comm, call: TimedCall | None, share: float) -> tuple[float, int]:
    """Return the seconds that a call takes, and the number of calls in a batch. Both are the same on all ranks.

    A batch should take `share` seconds, but at least `BATCH_SECONDS`.
    """
    count = 1
    while True:
        seconds = np.array([_sample(comm, call, count)])
        comm.Allreduce(MPI.IN_PLACE, seconds, op=MPI.MAX)
        if seconds[0] * count >= BATCH_SECONDS or count >= MOST_CALLS:
            return float(seconds[0]), max(count, int(share / max(seconds[0], 1e-9)))
        count *= 2


def _sample(comm: MPI.Comm, call: TimedCall | None, count: int) -> float:
    """Make `count` calls, which all ranks begin together. Return this rank's mean seconds for a call."""
    _meet(comm, asleep=call is None)
    start = time.perf_counter()
    if call is not None:
        for _ in range(count):
            call()
    spent = time.perf_counter() - start
    _meet(comm, asleep=call is None)
    return spent / count


def _meet(comm: MPI.Comm, asleep: bool) -> None:
    """Wait for all ranks. A rank that waits `asleep` leaves its core to ranks that compute."""
    request = comm.Ibarrier()
    while asleep and not request.Test():
        time.sleep(LOOK_SECONDS)
    request.Wait()


def ping_pong(comm: MPI.Comm, x: NDArray[Any], seconds: float, other: int = 1) -> dict[str, Timing]:
    """Time messages between rank 0 and rank `other`. Collective and blocking; all other ranks sleep.

    Args:
        comm: The ranks.
        x: The message. It is overwritten by the message that comes back.
        seconds: The time to spend.
        other: The partner of rank 0.

    Returns:
        The one-way times (half of the round trip) of "blocking" and of "persistent" messages.

    Raises:
        ValueError: There is only one rank.
    """
    if comm.size < 2:
        raise ValueError("a point-to-point case needs two ranks: start it with --ranks 2")
    calls: dict[str, TimedCall | None] = {"blocking": None, "persistent": None}
    requests: list[MPI.Prequest] = []
    if comm.rank in (0, other):
        partner = other - comm.rank
        requests = [comm.Send_init(x, partner), comm.Recv_init(x, partner)]
        moves: list[Callable[..., object]] = [comm.Send, comm.Recv]
        if comm.rank == other:
            # This rank receives first.
            requests.reverse()
            moves.reverse()

        def blocking() -> None:
            for move in moves:
                move(x, partner)

        def persistent() -> None:
            for request in requests:
                request.Start()
                request.Wait()

        calls = {"blocking": blocking, "persistent": persistent}
    try:
        timings = measure(comm, list(calls.values()), seconds)
    finally:
        for request in requests:
            request.Free()
    return {name: Timing(timing.rounds / 2) for name, timing in zip(calls, timings)}

"""BML on a BCube(n, k) of p = n^k ranks: exchanges digit by digit, on k lanes that keep all k NICs of a rank busy.

Source: BML paper (Wang et al., "BML: a high-performance, low-cost gradient synchronization algorithm for DML training",
NeurIPS 2018), section 3.2, Algorithm 1 and figure 4.

A rank is a number of k digits to base n. Its neighbours of level l are the n-1 ranks that differ from it only in digit
l.

Steps: lane t (the paper's thread t) cuts its 1/k of the vector into p chunks and takes the levels t, t+1, ..., t+k-1
mod k. In each step of the aggregation, which handles one level, a rank splits the chunks that it still holds into n
parts. It sends to each of its neighbours of that level the part with the neighbour's digit, and receives the part with
its own digit from each of them. So it keeps 1/n of its chunks, summed over n times as many ranks. After k steps the
rank holds one chunk, summed over all ranks. The broadcast then takes the steps in the reverse order, and sends the
finished chunks to all ranks.

Chunks of lane t are numbered by the digits of their owner, digit t first, then t+1, and so on. So the chunks that a
rank still holds are always one interval, each step cuts this interval into n, and every message is one contiguous
block. In reduce_scatter and allgather chunk r must be rank r's block. So these kinds have one lane, which takes the
levels from the highest down.

n = 3, k = 2, rank 0 (digits 0,0); (partner, chunks sent), aggregation | broadcast:

    lane 0:  (1,3-5) (2,6-8)   (3,1) (6,2) | (3,0) (6,0)   (1,0-2) (2,0-2)
    lane 1:  (3,3-5) (6,6-8)   (1,1) (2,2) | (1,0) (2,0)   (3,0-2) (6,0-2)

Cost, on BCube(n, k): 2k(n-1) alpha + 2(p-1)/(kp) n_bytes beta + (p-1)/p n_bytes gamma. Each NIC sends 1/k of the bytes
that the ring sends. If a rank has only one NIC, all lanes together send as many bytes as the ring, in k(n-1) instead of
p-1 messages.
Limits: p = n^k, or any product of radices through `over`. Memory: (n-1)/n of a lane's share, for each lane.

With `depth` d, the share of every thread is cut into d lanes with the same order of levels. While ranks wait for the
slowest neighbour between two steps of one lane, messages of another lane use the link.
"""

from __future__ import annotations

from functools import partial
from math import prod

from mpips.collectives.schedule.model import (
    MOST_LANES,
    Index,
    Lane,
    Round,
    Schedule,
    ScheduleStep,
    Steps,
    chunks_at,
    in_series,
)

KINDS = ("allreduce", "reduce_scatter", "allgather")


def reduce_scatter(radices: tuple[int, ...], order: tuple[int, ...], rank: Index) -> Steps:
    """Aggregate: each rank ends up with the sum of one chunk, whose digits are those of the rank.

    Args:
        radices: The radix of each digit, the least significant digit first.
        order: The levels, i.e. the indexes of the digits, in the order in which the steps handle them.
        rank: A rank, or all ranks.
    """
    for w in range(len(order)):
        yield ScheduleStep(radices[order[w]] - 1, partial(_exchange, radices, order, w, rank, True))


def allgather(radices: tuple[int, ...], order: tuple[int, ...], rank: Index) -> Steps:
    """Give every rank the sums of all chunks: exchange chunks level by level, in the reverse of `order`."""
    for w in reversed(range(len(order))):
        yield ScheduleStep(radices[order[w]] - 1, partial(_exchange, radices, order, w, rank, False))


def _exchange(radices: tuple[int, ...], order: tuple[int, ...], w: int, rank: Index, aggregate: bool, i: int) -> Round:
    """Return round i of step w: send to the neighbour whose digit is higher by i+1, receive from the one lower by i+1.

    The digit is that of the step's level, order[w], and is taken modulo its radix. `aggregate` is True if received
    chunks are added.
    """
    level = order[w]
    n, stride = radices[level], prod(radices[:level])
    size = prod(radices[later] for later in order[w + 1 :])
    held = 0
    for earlier in order[:w]:
        held = (held * radices[earlier]) + rank // prod(radices[:earlier]) % radices[earlier]
    held = held * n * size
    digit = rank // stride % n
    to_digit, from_digit = (digit + i + 1) % n, (digit - i - 1) % n
    own = chunks_at(held + digit * size, size)
    send, receive = (
        (chunks_at(held + to_digit * size, size), own)
        if aggregate
        else (own, chunks_at(held + from_digit * size, size))
    )
    return Round(rank + (to_digit - digit) * stride, send, rank + (from_digit - digit) * stride, receive, aggregate)


def over(kind: str, radices: tuple[int, ...], lanes: int, name: str) -> Schedule:
    """Build the exchange for ranks whose digits have any radices, such as the slots, edges and pods of a fat-tree.

    Args:
        kind: One of `KINDS`.
        radices: The radix of each digit, the least significant digit first. Their product is the number of ranks.
        lanes: The number of lanes of an allreduce. The other kinds have one lane.
        name: The name of the schedule.
    """
    levels = len(radices)
    if kind == "allreduce":
        orders = [tuple((t + w) % levels for w in range(levels)) for t in range(lanes)]
    else:
        orders = [tuple(reversed(range(levels)))]
    p = prod(radices)
    chosen = {"allreduce": (reduce_scatter, allgather), "reduce_scatter": (reduce_scatter,), "allgather": (allgather,)}
    stages = [in_series(*(partial(stage, radices, order) for stage in chosen[kind])) for order in orders]
    return Schedule(kind, name, p, tuple(Lane(p, stage) for stage in stages))


def build(kind: str, p: int, n: int = 0, k: int = 0, depth: int = 1) -> Schedule:
    """Build BML over n^k = p ranks. `shape` computes n or k if it is 0.

    `depth`, from 1 to `MOST_LANES`, has an effect only in allreduce.
    """
    if not 1 <= depth <= MOST_LANES:
        raise ValueError(f"bcube needs a depth of 1 to {MOST_LANES}, not {depth}")
    n, k = shape(p, n, k)
    deeper = f",depth={depth}" if depth > 1 else ""
    return over(kind, (n,) * k, depth * k, f"bcube(n={n},k={k}{deeper})")


def shape(p: int, n: int = 0, k: int = 0) -> tuple[int, int]:
    """Return n and k with n^k = p. Compute the one that is 0. If both are 0, k is the smallest of 2, 3, ... that fits.

    Raises:
        ValueError: No n and k fit.
    """
    if not n and not k:
        return _least_levels(p)
    n = n or round(p ** (1 / k))
    k = k or next(k for k in range(1, p + 1) if n**k >= p or n == 1)
    # 2^bit_length is already above p. So a huge k is refused without computing a huge power.
    if n ** min(k, p.bit_length()) != p:
        raise ValueError(f"bcube(n={n},k={k}) is for {n}^{k} ranks, not for {p}: choose n and k with n^k = {p}")
    return n, k


def _least_levels(p: int) -> tuple[int, int]:
    for k in range(2, p.bit_length()):
        n = round(p ** (1 / k))
        if n**k == p:
            return n, k
    if p == 1:
        return 1, 1
    raise ValueError(
        f"bcube needs p = n^k ranks with k of at least 2, which {p} is not: give n={p}, k=1 for one level, or choose "
        "another algorithm"
    )

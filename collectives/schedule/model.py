"""The model of a schedule, as data that the proof, the simulator and the executors read.

A schedule has lanes, a lane has steps, a step has rounds, and a round moves chunks:

    schedule  p ranks, a kind (allreduce, ...), and lanes.
    lane      an equal share of the vector, cut into chunks, and a sequence of steps. Lanes touch different elements,
              so they may run at the same time.
    step      a set of rounds that do not depend on each other: the messages of all rounds may be in flight at once. A
    rank starts the next
              step of the lane when it has finished all rounds of the current step. A step sends the values that the
              chunks held when the step began.
    round     a rank sends one interval of chunks to at most one partner, and receives one interval of chunks from at
              most one partner. The values received are added to its own chunks, or overwrite them. Sender and receiver
              of a message have it at the same place: in the same lane, step and round of their programs.

The steps of a lane are computed from the rank by plain arithmetic. The same code takes an int (an executor needs the
few rounds of one rank) or `numpy.arange(p)` (proof and simulator need all ranks at once).

The sender and the receiver of a round name the same chunks, except in alltoall: there the sender names blocks of its
input and the receiver blocks of its output. The block that a rank keeps for itself is not a message.

A *stage* is a function that yields the steps of a rank. Stages of broadcast and reduce number the ranks from the root
on. `Schedule.steps` turns these numbers into real ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

KINDS = ("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce", "alltoall")
# kind -> number of ranks p -> busbw / algbw, as nccl-tests defines this ratio in doc/PERFORMANCE.md. algbw counts the
# bytes of the larger buffer.
BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "allreduce": lambda p: 2 * (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "allgather": lambda p: (p - 1) / p,
    "alltoall": lambda p: (p - 1) / p,
    "broadcast": lambda p: 1.0,
    "reduce": lambda p: 1.0,
}
NOBODY = -1
# the largest number of lanes of a schedule; more lanes do not make any collective faster
MOST_LANES = 1024

# an int (one rank), or an int64 array with one entry for each rank (all ranks at once)
Index: TypeAlias = Any


class ChunkInterval(NamedTuple):
    """Chunks start, start + 1, ..., stop - 1 of a lane."""

    start: Index
    stop: Index


class Round(NamedTuple):
    """One exchange: an interval to send and an interval to receive.

    Attributes:
        send_to: The rank to send to. If it is NOBODY, nothing is sent, and `send` is ignored.
        send: The chunks to send.
        receive_from: The rank to receive from. If it is NOBODY, nothing is received, and `receive` is ignored.
        receive: The chunks to receive.
        add: True if the received values are added (by the operation of the collective) to the rank's own values, False
            if they overwrite them.
    """

    send_to: Index
    send: ChunkInterval
    receive_from: Index
    receive: ChunkInterval
    add: bool

    def over(self, p: int) -> Round:
        """Return the round with every field as an array that has an entry for each of p ranks."""

        def spread(field: Index) -> Index:
            return np.broadcast_to(np.asarray(field, dtype=np.int64), (p,))

        return Round(
            spread(self.send_to),
            ChunkInterval(*map(spread, self.send)),
            spread(self.receive_from),
            ChunkInterval(*map(spread, self.receive)),
            self.add,
        )


@dataclass(frozen=True)
class ScheduleStep:
    """A step of `count` rounds. `make` makes each round on demand, because p - 1 rounds of p ranks take much memory."""

    count: int
    make: Callable[[int], Round]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Round]:
        return map(self.make, range(self.count))

    def map(self, change: Callable[[Round], Round]) -> ScheduleStep:
        """Return the step with every round changed by `change`."""
        return ScheduleStep(self.count, lambda i: change(self.make(i)))


Steps: TypeAlias = Iterator[ScheduleStep]
# a function that yields the steps of a rank (an int), or of all ranks at once (an array)
Stage: TypeAlias = Callable[[Index], Steps]


@dataclass(frozen=True)
class Lane:
    """A share of the vector, and the steps that reduce or move it.

    Attributes:
        chunks: The number of chunks of the share.
        stage: Yields the steps of a rank.
        turn: Lanes with the same turn use the wire together. Step s of a lane with turn 1 uses the wire after step s of
            the lanes with turn 0, and so on, so that one lane adds while another lane is on the wire.
    """

    chunks: int
    stage: Stage
    turn: int = 0


class RankStep(NamedTuple):
    """One step of one rank: its number among all steps of the lane, and the rounds in which this rank takes part."""

    number: int
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class Schedule:
    """A collective of `kind` over ranks 0 .. p-1. `name` is the algorithm with its parameters."""

    kind: str
    name: str
    p: int
    lanes: tuple[Lane, ...]
    root: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown collective {self.kind!r}: choose one of {', '.join(KINDS)}")
        if self.p < 1 or not 0 <= self.root < self.p:
            raise ValueError(f"{self.name}: need p >= 1 and 0 <= root < p, but p is {self.p} and root {self.root}")

    def __str__(self) -> str:
        root = f" root={self.root}" if self.kind in ("broadcast", "reduce") else ""
        return f"{self.kind} {self.name} p={self.p}{root}"

    def steps(self, lane: int, rank: Index) -> Steps:
        """Return the steps of a lane for a rank (an int, or numpy.arange(p)), with real ranks as partners."""
        stage = self.lanes[lane].stage
        if self.root == 0:
            return stage(rank)
        change = partial(_rename_partners, lambda member: (member + self.root) % self.p)
        return (step.map(change) for step in stage((rank - self.root) % self.p))

    def program(self, rank: int) -> tuple[tuple[RankStep, ...], ...]:
        """Return for each lane the steps in which a rank takes part, with ints in all fields, for executors."""
        return tuple(tuple(self._rank_steps(lane, int(rank))) for lane in range(len(self.lanes)))

    def _rank_steps(self, lane: int, rank: int) -> Iterator[RankStep]:
        for index, step in enumerate(self.steps(lane, rank)):
            rounds = tuple(r for r in step if r.send_to != NOBODY or r.receive_from != NOBODY)
            if rounds:
                yield RankStep(index, rounds)

    def offsets(self, n: int, lane: int) -> NDArray[np.int64]:
        """Return the first element of each chunk of a lane in a vector of n elements, followed by the end of the lane.

        The array has one entry more than the lane has chunks. Chunks may be empty.
        """
        chunks = np.arange(self.lanes[lane].chunks + 1, dtype=np.int64)
        first, last = cut(n, len(self.lanes), lane), cut(n, len(self.lanes), lane + 1)
        offsets: NDArray[np.int64] = first + cut(last - first, len(chunks) - 1, chunks)
        return offsets


def parse(algorithm: str) -> tuple[str, dict[str, Any]]:
    """Split "bcube(n=3,k=2)" into ("bcube", {"n": 3, "k": 2}).

    Raises:
        ValueError: The text is not written like this.
    """
    match = re.fullmatch(r"(\w+)(?:\(((?:\w+=\w+[,\s]*)*)\))?", algorithm.strip())
    if not match:
        raise ValueError(f"algorithm {algorithm!r} is not written as name or name(parameter=value, ...)")
    name, inside = match.groups()
    pairs = re.findall(r"(\w+)=(\w+)", inside or "")
    return name, {key: int(value) if value.isdecimal() else value for key, value in pairs}


def extent(offsets: NDArray[np.int64], interval: ChunkInterval) -> tuple[int, int]:
    """Return [start, stop), the elements of an interval of chunks. `offsets` comes from `Schedule.offsets`."""
    return int(offsets[interval.start]), int(offsets[interval.stop])


def overlap(extent: tuple[int, int], others: Iterable[tuple[int, int]]) -> bool:
    """True if the elements `extent` = [start, stop) overlap any of `others`."""
    return any(max(extent[0], start) < min(extent[1], stop) for start, stop in others)


def in_rank_order(rank: int, terms: Iterable[int]) -> list[tuple[int, int]]:
    """Order the additions on `rank` so that the sum has the same bits as if ranks were added from the lowest up.

    So the bits of an element do not depend on the rank that sums it. The vectors of lower ranks are added to each
    other first, and their sum is then added to the vector of `rank`. This order gives the right bits because x + y has
    the same bits as y + x.

    Args:
        rank: The rank that sums; its own vector is part of the sum.
        terms: The other ranks whose vectors are summed.

    Returns:
        Pairs (to, of) of ranks, in order: add the vector of rank `of` to the vector of rank `to`. The vector of `rank`
        ends up with the sum.
    """
    first, *before = sorted(term for term in terms if term < rank) or [rank]
    own = [] if first == rank else [(rank, first)]
    return [(first, term) for term in before] + own + [(rank, term) for term in sorted(terms) if term > rank]


def cut(n: int, parts: int, part: Index) -> Index:
    """Return the first element of a part when n elements are cut into `parts` parts; `part == parts` gives n.

    Sizes of parts differ by at most one element, and the larger parts come first. Rank r's block in reduce_scatter and
    allgather is [cut(n,p,r), cut(n,p,r+1)).
    """
    size, larger = divmod(n, parts)
    return part * size + where(part < larger, part, larger)


def where(condition: Index, a: Index, b: Index) -> Index:
    """Return `a if condition else b`, element by element if the condition is an array."""
    return np.where(condition, a, b) if isinstance(condition, np.ndarray) else a if condition else b


def chunks_at(index: Index, count: Index = 1) -> ChunkInterval:
    """Return the interval of `count` chunks that begins with chunk `index`."""
    return ChunkInterval(index, index + count)


def one_round(round_: Round) -> ScheduleStep:
    """Return a step of one round."""
    return ScheduleStep(1, lambda _: round_)


def in_series(*stages: Stage) -> Stage:
    """Join stages into one stage that runs them in series. For example, reduce-scatter and allgather give allreduce."""
    return lambda rank: chain.from_iterable(stage(rank) for stage in stages)


def in_group(stage: Stage, member: Index, name: Callable[[Index], Index], size: int = 1, first: Index = 0) -> Steps:
    """Run a stage within a group of ranks: return its steps with the ranks and chunks of the whole schedule.

    Args:
        stage: A stage over the ranks of the group, which it numbers from 0.
        member: The number of this rank within its group.
        name: A function from the number of a rank within the group to its real rank.
        size: The number of chunks of the whole schedule that one chunk of the stage consists of.
        first: The chunk of the whole schedule at which chunk 0 of the stage begins.
    """

    def interval(part: ChunkInterval) -> ChunkInterval:
        return ChunkInterval(first + part.start * size, first + part.stop * size)

    def change(r: Round) -> Round:
        r = _rename_partners(name, r)
        return r._replace(send=interval(r.send), receive=interval(r.receive))

    return (step.map(change) for step in stage(member))


def folded(stage: Stage, p: int, q: int, chunks: int) -> Stage:
    """Make an allreduce over p ranks from an allreduce over q ranks, where q <= p <= 2q.

    The first 2(p - q) ranks form pairs. The even rank of a pair gives its vector to the odd rank before the stage, and
    gets the result after the stage.

    Args:
        stage: The allreduce over q ranks.
        p: The number of ranks.
        q: The number of ranks that take part in `stage`.
        chunks: The number of chunks of the lane.
    """
    return partial(_fold, stage, p - q, ChunkInterval(0, chunks)) if p > q else stage


def _fold(stage: Stage, extra: int, whole: ChunkInterval, rank: Index) -> Steps:
    # During the stage, the even rank of a pair is idle, and the odd rank takes part for both.
    paired = rank < 2 * extra
    retired, active = paired & (rank % 2 == 0), paired & (rank % 2 == 1)
    to_active, to_retired = where(retired, rank + 1, NOBODY), where(active, rank - 1, NOBODY)
    yield one_round(Round(to_active, whole, to_retired, whole, add=True))
    member = where(paired, rank // 2, rank - extra)
    for step in in_group(stage, member, lambda m: where(m < extra, 2 * m + 1, m + extra)):
        yield step.map(partial(_skip_retired, retired))
    yield one_round(Round(to_retired, whole, to_active, whole, add=False))


def _skip_retired(retired: Index, r: Round) -> Round:
    send_to, receive_from = where(retired, NOBODY, r.send_to), where(retired, NOBODY, r.receive_from)
    return r._replace(send_to=send_to, receive_from=receive_from)


def _rename_partners(name: Callable[[Index], Index], r: Round) -> Round:
    """Replace each partner of a round by `name(partner)`. NOBODY stays NOBODY."""
    return r._replace(
        send_to=where(r.send_to == NOBODY, NOBODY, name(r.send_to)),
        receive_from=where(r.receive_from == NOBODY, NOBODY, name(r.receive_from)),
    )

"""The model of a schedule: lanes of steps of rounds of chunks, the data that proof, simulator and executors read.

    schedule  p ranks, a kind (allreduce, ...), and lanes.
    lane      an equal share of the vector, cut into chunks, and a sequence of steps. Lanes touch different elements,
              so they may run beside each other.
    step      a set of rounds that do not depend on each other: all may be in flight at once. The next step of the lane
              starts, on a rank, when that rank has finished all rounds of this one. What a step sends is what the
              chunks held when the step began.
    round     a rank sends one interval of chunks to at most one partner, and receives one interval of chunks from at
              most one partner, to add to its own or to copy over it. Round i of step s of lane l on the sender is
              round i of step s of lane l on the receiver.

The steps of a lane are a function of the rank in plain arithmetic. The same text takes an int (an executor wants the
few rounds of one rank) and `numpy.arange(p)` (proof and simulator want all ranks at once).

In every kind but alltoall sender and receiver name the same chunks. In alltoall the sender names blocks of its input
and the receiver blocks of its output, and the block that a rank keeps is no message.

Ranks are counted from the root in broadcast and reduce, and `Schedule.steps` turns them into real ones.
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
BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "allreduce": lambda p: 2 * (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "allgather": lambda p: (p - 1) / p,
    "alltoall": lambda p: (p - 1) / p,
    "broadcast": lambda p: 1.0,
    "reduce": lambda p: 1.0,
}
"""busbw / algbw over p ranks, as nccl-tests define it (doc/PERFORMANCE.md there); `bytes` is the larger buffer."""
NOBODY = -1
MOST_LANES = 1024  # more make no collective faster

Index: TypeAlias = Any
"""An int (one rank) or an int64 array with one entry for each rank (all ranks at once)."""


class Interval(NamedTuple):
    """Chunks start, start + 1, ..., stop - 1 of a lane."""

    start: Index
    stop: Index


class Round(NamedTuple):
    """One exchange. A partner of NOBODY means none, and then its interval has no meaning."""

    send_to: Index
    send: Interval
    receive_from: Index
    receive: Interval
    add: bool
    """True: what comes in is added (the operation of the collective); False: it replaces what was there."""

    def over(self, p: int) -> Round:
        """Return the round with every field spread over p ranks."""

        def spread(field: Index) -> Index:
            return np.broadcast_to(np.asarray(field, dtype=np.int64), (p,))

        return Round(
            spread(self.send_to),
            Interval(*map(spread, self.send)),
            spread(self.receive_from),
            Interval(*map(spread, self.receive)),
            self.add,
        )


@dataclass(frozen=True)
class Step:
    """`count` rounds, each made when asked for, so that a step of p - 1 rounds, for all ranks, takes little memory."""

    count: int
    make: Callable[[int], Round]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Round]:
        return map(self.make, range(self.count))

    def map(self, change: Callable[[Round], Round]) -> Step:
        """Return the step with every round changed by `change`."""
        return Step(self.count, lambda i: change(self.make(i)))


Steps: TypeAlias = Iterator[Step]
Stage: TypeAlias = Callable[[Index], Steps]
"""From the rank (an int, or all ranks) to the steps it takes."""


@dataclass(frozen=True)
class Lane:
    """A share of the vector and the steps that serve it. Lanes of one `turn` use the wire together; a lane of turn 1
    takes each of its steps after the same step of turn 0, and so on: while one is on the wire the other adds."""

    chunks: int
    stage: Stage
    turn: int = 0


class RankStep(NamedTuple):
    """One step as one rank takes it: its number among all steps of the lane, and the rounds in which the rank acts."""

    number: int
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class Schedule:
    """A collective of `kind` over ranks 0 .. p-1; `name` holds the algorithm and its parameters."""

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
        """The steps of `lane` for `rank` (an int, or numpy.arange(p)), with real ranks as partners."""
        stage = self.lanes[lane].stage
        if self.root == 0:
            return stage(rank)
        change = partial(_renamed, lambda member: (member + self.root) % self.p)
        return (step.map(change) for step in stage((rank - self.root) % self.p))

    def program(self, rank: int) -> tuple[tuple[RankStep, ...], ...]:
        """For each lane, the steps in which `rank` acts, all fields ints: what an executor compiles."""
        return tuple(tuple(self._acts(lane, int(rank))) for lane in range(len(self.lanes)))

    def _acts(self, lane: int, rank: int) -> Iterator[RankStep]:
        for index, step in enumerate(self.steps(lane, rank)):
            rounds = tuple(r for r in step if r.send_to != NOBODY or r.receive_from != NOBODY)
            if rounds:
                yield RankStep(index, rounds)

    def offsets(self, n: int, lane: int) -> NDArray[np.int64]:
        """Return where the chunks of `lane` begin in a vector of n elements: chunks + 1 numbers, from the lane's first
        to one past its last. Chunks may be empty."""
        chunks = np.arange(self.lanes[lane].chunks + 1, dtype=np.int64)
        first, last = cut(n, len(self.lanes), lane), cut(n, len(self.lanes), lane + 1)
        offsets: NDArray[np.int64] = first + cut(last - first, len(chunks) - 1, chunks)
        return offsets


def parse(algorithm: str) -> tuple[str, dict[str, Any]]:
    """("bcube", {"n": 3, "k": 2}) from "bcube(n=3,k=2)"; ValueError where it is not so written."""
    match = re.fullmatch(r"(\w+)(?:\(((?:\w+=\w+[,\s]*)*)\))?", algorithm.strip())
    if not match:
        raise ValueError(f"algorithm {algorithm!r} is not written as name or name(parameter=value, ...)")
    name, inside = match.groups()
    pairs = re.findall(r"(\w+)=(\w+)", inside or "")
    return name, {key: int(value) if value.isdecimal() else value for key, value in pairs}


def extent(offsets: NDArray[np.int64], interval: Interval) -> tuple[int, int]:
    """First element of an interval of one rank, and one past its last; `offsets` as from `Schedule.offsets`."""
    return int(offsets[interval.start]), int(offsets[interval.stop])


def overlap(extent: tuple[int, int], others: Iterable[tuple[int, int]]) -> bool:
    """Return whether elements [start, stop) share one with any of the others."""
    return any(max(extent[0], start) < min(extent[1], stop) for start, stop in others)


def in_rank_order(rank: int, terms: Iterable[int]) -> list[tuple[int, int]]:
    """Additions (to, of) that leave with `rank` the sum of its own vector and those of other ranks in `terms`, as if
    added from the lowest rank up.

    So the bits of an element do not depend on who owns it. x + y is y + x bit by bit; where several come before
    `rank`, they are added to each other first.
    """
    first, *before = sorted(term for term in terms if term < rank) or [rank]
    own = [] if first == rank else [(rank, first)]
    return [(first, term) for term in before] + own + [(rank, term) for term in sorted(terms) if term > rank]


def cut(n: int, parts: int, part: Index) -> Index:
    """First element of `part` when n elements are cut into `parts` parts whose sizes differ by one at most, the larger
    first; `part == parts` gives n. Rank r's block in reduce_scatter and allgather is [cut(n,p,r), cut(n,p,r+1))."""
    size, larger = divmod(n, parts)
    return part * size + where(part < larger, part, larger)


def where(condition: Index, a: Index, b: Index) -> Index:
    """`a if condition else b`, for ints and for arrays."""
    return np.where(condition, a, b) if isinstance(condition, np.ndarray) else a if condition else b


def one(index: Index, count: Index = 1) -> Interval:
    """`count` chunks from chunk `index` on."""
    return Interval(index, index + count)


def single(round_: Round) -> Step:
    """A step of one round."""
    return Step(1, lambda _: round_)


def series(*stages: Stage) -> Stage:
    """One stage after another: allreduce = series(reduce-scatter, allgather)."""
    return lambda rank: chain.from_iterable(stage(rank) for stage in stages)


def within(stage: Stage, member: Index, name: Callable[[Index], Index], size: int = 1, first: Index = 0) -> Steps:
    """The steps of a group's stage as steps of the whole: `member` is the number that the rank has in its group and
    `name` gives back a member's rank; each chunk of the group is `size` chunks of the whole, from `first` on."""

    def interval(part: Interval) -> Interval:
        return Interval(first + part.start * size, first + part.stop * size)

    def change(r: Round) -> Round:
        r = _renamed(name, r)
        return r._replace(send=interval(r.send), receive=interval(r.receive))

    return (step.map(change) for step in stage(member))


def folded(stage: Stage, p: int, q: int, chunks: int) -> Stage:
    """An allreduce over p ranks from `stage`, which is one over q <= p <= 2q ranks, in a lane of so many chunks."""
    return partial(_fold, stage, p - q, Interval(0, chunks)) if p > q else stage


def _fold(stage: Stage, extra: int, whole: Interval, rank: Index) -> Steps:
    paired = rank < 2 * extra
    retired, active = paired & (rank % 2 == 0), paired & (rank % 2 == 1)
    to_active, to_retired = where(retired, rank + 1, NOBODY), where(active, rank - 1, NOBODY)
    yield single(Round(to_active, whole, to_retired, whole, add=True))
    member = where(paired, rank // 2, rank - extra)
    for step in within(stage, member, lambda m: where(m < extra, 2 * m + 1, m + extra)):
        yield step.map(partial(_standing_by, retired))
    yield single(Round(to_retired, whole, to_active, whole, add=False))


def _standing_by(retired: Index, r: Round) -> Round:
    to, come = where(retired, NOBODY, r.send_to), where(retired, NOBODY, r.receive_from)
    return r._replace(send_to=to, receive_from=come)


def _renamed(name: Callable[[Index], Index], r: Round) -> Round:
    """Return the round between other ranks; NOBODY stays nobody."""
    return r._replace(
        send_to=where(r.send_to == NOBODY, NOBODY, name(r.send_to)),
        receive_from=where(r.receive_from == NOBODY, NOBODY, name(r.receive_from)),
    )

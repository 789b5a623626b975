"""Proves that a schedule is correct, or names its fault: an unmatched message, a race, a lost or doubled summand.

Tests prove every schedule of the catalogue. Calls do not check their schedules. `check` executes the schedule
symbolically: instead of numbers, every chunk of every rank holds the set of ranks whose contributions are in the chunk.
It raises ScheduleError, with lane, step, round, rank and chunk, at the first

- message without a counterpart: partners that do not name each other, intervals that differ or lie outside the lane;
- race: a chunk that one round overwrites while another round of the same step sends, adds to or overwrites it;
- contribution that is added twice, lost by an overwrite, or sent by a rank that holds nothing yet;
- rank that does not have, at the end, the result that the kind of collective promises.

If every message has a counterpart, the schedule has no deadlock: each message is at the same place (lane, step, round)
in the programs of its two ranks, and all rounds of a step are in flight together. Take the unfinished step with the
lowest number: both ranks have begun each of its messages, so the step finishes.

A set is a bit mask of 64 ranks. With more than 64 ranks, each rank first gets a random number, and a chunk holds the
sum of these numbers modulo 2^64 instead of a set: the probability that a wrong sum looks right is about 2^-63. Only if
a sum is wrong, the schedule is executed again with masks, 64 ranks at a time, to name the fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.schedule.model import NOBODY, ChunkInterval, Round, Schedule

Array = NDArray[np.int64]
Masks = NDArray[np.uint64]
GROUP = 64


class ScheduleError(ValueError):
    """Raised for a schedule whose result is not what its kind promises. The text says where the fault is."""


class _Place(NamedTuple):
    schedule: Schedule
    lane: int
    step: int
    round: int

    def fault(self, text: str) -> ScheduleError:
        return ScheduleError(f"{self.schedule}: lane {self.lane}, step {self.step}, round {self.round}: {text}")


def check(schedule: Schedule) -> None:
    """Prove that a schedule gives the result that its kind promises. The memory grows with p x chunks.

    Raises:
        ScheduleError: The schedule has a fault.
    """
    if schedule.kind in ("reduce_scatter", "allgather", "alltoall"):
        chunks = tuple(lane.chunks for lane in schedule.lanes)
        if chunks != (schedule.p,):
            raise ScheduleError(f"{schedule}: needs one lane of p chunks, chunk r being rank r's block, not {chunks}")
    for lane in range(len(schedule.lanes)):
        if schedule.kind == "alltoall":
            _run_alltoall(schedule, lane)
        elif schedule.p <= GROUP:
            _run_masks(schedule, lane, 0)
        else:
            _run_sums(schedule, lane)


def _run_masks(schedule: Schedule, lane: int, first: int) -> None:
    """Execute a lane with sets (bit masks) that show which of ranks first .. first+63 contribute to each chunk."""
    ranks = np.arange(schedule.p)
    inside = (ranks >= first) & (ranks < first + GROUP)
    weight = np.where(inside, np.uint64(1) << ((ranks - first) % GROUP).astype(np.uint64), np.uint64(0))
    state, goal = _initial(schedule, lane, weight), _final(schedule, lane, weight, np.bitwise_or.reduce(weight))
    whole = schedule.p <= GROUP
    for place, r, held, received, cells in _walk(schedule, lane, state):
        if whole and not received.all():
            rank, chunk = cells.first(received == 0)
            source = r.receive_from[rank]
            raise place.fault(f"rank {rank} gets chunk {chunk} from rank {source}, which holds nothing there")
        wrong = held & received if r.add else held & ~received
        if wrong.any():
            rank, chunk = cells.first(wrong != 0)
            what = f"rank {rank} {'adds' if r.add else 'copies'} chunk {chunk} from rank {r.receive_from[rank]}"
            blame = "brings a second time" if r.add else "loses"
            who = _members(wrong[wrong != 0][0], first)
            raise place.fault(f"{what}, which {blame} the contributions of ranks {who}")
        cells.put(held | received if r.add else received)
    _compare(schedule, lane, state, goal, first)


def _run_sums(schedule: Schedule, lane: int) -> None:
    """Execute a lane with sums of random numbers. If a sum is wrong, execute it with masks to find the fault."""
    weight = np.random.default_rng(0).integers(0, 2**64, schedule.p, dtype=np.uint64)
    state, goal = _initial(schedule, lane, weight), _final(schedule, lane, weight, weight.sum(dtype=np.uint64))
    for _, r, held, received, cells in _walk(schedule, lane, state):
        cells.put(held + received if r.add else received)
    for rank, (begin, end, value) in enumerate(goal):
        if not (state[rank, begin:end] == value).all():
            for first in range(0, schedule.p, GROUP):
                _run_masks(schedule, lane, first)
            raise ScheduleError(f"{schedule}: lane {lane}: rank {rank} ends with a wrong sum")


def _run_alltoall(schedule: Schedule, lane: int) -> None:
    """Check that block d of rank r's input becomes block r of rank d's output, exactly once."""
    p = schedule.p
    came = np.eye(p, dtype=bool)
    for step_index, step in enumerate(schedule.steps(lane, np.arange(p))):
        for round_index, r in enumerate(step):
            place = _Place(schedule, lane, step_index, round_index)
            r = _check_messages(place, r.over(p))
            for rank in np.flatnonzero(r.receive_from != NOBODY):
                source, to = r.receive_from[rank], r.receive.start[rank]
                sent, length = r.send.start[source], r.receive.stop[rank] - to
                if (to, sent, length) != (source, rank, 1) or r.add or came[rank, to]:
                    raise place.fault(f"rank {rank} gets block {sent} of rank {source}'s input as its block {to}")
                came[rank, to] = True
    if not came.all():
        rank, block = np.argwhere(~came)[0]
        raise ScheduleError(f"{schedule}: lane {lane}: rank {rank} never gets its block {block}")


def _initial(schedule: Schedule, lane: int, weight: Masks) -> Masks:
    p, chunks = schedule.p, schedule.lanes[lane].chunks
    state = np.zeros((p, chunks), np.uint64)
    if schedule.kind == "broadcast":
        state[schedule.root] = weight[schedule.root]
    elif schedule.kind == "allgather":
        np.fill_diagonal(state, weight)
    else:
        state[:] = weight[:, None]
    return state


def _final(schedule: Schedule, lane: int, weight: Masks, total: np.uint64) -> list[tuple[int, int, Masks | np.uint64]]:
    """Return for each rank the chunks [begin, end) that it must have at the end, and the values that they must hold."""
    p, chunks, root = schedule.p, schedule.lanes[lane].chunks, schedule.root
    if schedule.kind == "allreduce":
        return [(0, chunks, total)] * p
    if schedule.kind == "broadcast":
        return [(0, chunks, weight[root])] * p
    if schedule.kind == "reduce":
        return [(0, chunks if rank == root else 0, total) for rank in range(p)]
    if schedule.kind == "allgather":
        return [(0, p, weight)] * p
    return [(rank, rank + 1, total) for rank in range(p)]


def _compare(schedule: Schedule, lane: int, state: Masks, goal: list, first: int) -> None:
    for rank, (begin, end, value) in enumerate(goal):
        wrong = state[rank, begin:end] ^ value
        if wrong.any():
            chunk = begin + int(np.flatnonzero(wrong)[0])
            last = _last_written(schedule, lane, rank, chunk)
            missing = _members(wrong[chunk - begin], first)
            raise ScheduleError(
                f"{schedule}: lane {lane}: rank {rank} ends without the contributions of ranks {missing} "
                f"in chunk {chunk}, last written in {last}"
            )


def _last_written(schedule: Schedule, lane: int, rank: int, chunk: int) -> str:
    last = "no step"
    for index, step in enumerate(schedule.steps(lane, rank)):
        for number, r in enumerate(step):
            if r.receive_from != NOBODY and r.receive.start <= chunk < r.receive.stop:
                last = f"step {index}, round {number}"
    return last


def _members(mask: np.uint64, first: int) -> list[int]:
    return [first + bit for bit in range(GROUP) if int(mask) >> bit & 1]


class _Cells:
    """A part of the state: for each of several ranks one interval of chunks. All intervals have the same length.

    Args:
        state: One row for each rank, one column for each chunk.
        rows: The ranks.
        start: The first chunk of each rank's interval.
        length: The number of chunks of each interval.
    """

    def __init__(self, state: Masks, rows: Array, start: Array, length: int):
        self.rows = rows
        self.start = start
        chunks = state.shape[1]
        # If all intervals begin at multiples of their length, numpy can index whole intervals, which is faster.
        if chunks % length == 0 and not (start % length).any():
            self.view: NDArray[Any] = state.reshape(-1, length)
            self.index: NDArray[Any] = rows * (chunks // length) + start // length
        else:
            self.view = state.reshape(-1)
            self.index = (rows * chunks + start)[:, None] + np.arange(length)

    def get(self) -> Masks:
        return self.view[self.index]

    def put(self, values: Masks) -> None:
        self.view[self.index] = values

    def first(self, wrong: NDArray[np.bool_]) -> tuple[int, int]:
        """Return the rank and the chunk of the first wrong cell."""
        row, column = np.argwhere(wrong)[0]
        return int(self.rows[row]), int(self.start[row] + column)


def _walk(schedule: Schedule, lane: int, state: Masks) -> Iterator[tuple[_Place, Round, Masks, Masks, _Cells]]:
    """Yield the messages of a lane in order. An item has all messages of one round that have the same length.

    An item is (place, round, values that the receivers hold, values that they receive, cells to put the result in).
    """
    p, chunks = state.shape
    for step_index, step in enumerate(schedule.steps(lane, np.arange(p))):
        rounds = [_check_messages(_Place(schedule, lane, step_index, i), r.over(p)) for i, r in enumerate(step)]
        _check_races(schedule, lane, step_index, rounds, chunks)
        moves = []
        # A step sends the values from before the step. So read all sent values now, before the caller writes any.
        for index, r in enumerate(rounds):
            place = _Place(schedule, lane, step_index, index)
            receivers = np.flatnonzero(r.receive_from != NOBODY)
            lengths = (r.receive.stop - r.receive.start)[receivers]
            for length in np.unique(lengths):
                rows = receivers[lengths == length]
                source = r.receive_from[rows]
                received = _Cells(state, source, r.send.start[source], int(length)).get()
                moves.append((place, r, received, _Cells(state, rows, r.receive.start[rows], int(length))))
        for place, r, received, cells in moves:
            yield place, r, cells.get(), received, cells


def _check_messages(place: _Place, r: Round) -> Round:
    """Check that sender and receiver of each message of a round agree about the message. Return the round."""
    _check_side(place, "sends", "to", r.send_to, r.send, r.receive_from)
    _check_side(place, "receives", "from", r.receive_from, r.receive, r.send_to)
    rank = np.flatnonzero(r.receive_from != NOBODY)
    source = r.receive_from[rank]
    sent, got = (r.send.start[source], r.send.stop[source]), (r.receive.start[rank], r.receive.stop[rank])
    differ = sent[1] - sent[0] != got[1] - got[0]
    if place.schedule.kind != "alltoall":
        differ |= sent[0] != got[0]
    for i in np.flatnonzero(differ):
        to, chunks = f"rank {source[i]} sends chunks [{sent[0][i]}, {sent[1][i]})", f"[{got[0][i]}, {got[1][i]})"
        raise place.fault(f"{to} to rank {rank[i]}, which receives {chunks}")
    return r


def _check_side(place: _Place, verb: str, word: str, partner: Array, part: ChunkInterval, back: Array) -> None:
    """Check one side of a round: partners exist and name each other, intervals lie in the lane and are not empty.

    Args:
        place: The round.
        verb: "sends" or "receives", for the error.
        word: "to" or "from", for the error.
        partner: The partner of each rank.
        part: The interval of each rank.
        back: The partner of each rank on the other side of the round. If `partner[r]` is s, `back[s]` must be r.
    """
    chunks = place.schedule.lanes[place.lane].chunks
    rank = np.flatnonzero(partner != NOBODY)
    other, start, stop = partner[rank], part.start[rank], part.stop[rank]
    foreign = (other < 0) | (other >= place.schedule.p) | (other == rank)
    alone = back[np.where(foreign, 0, other)] != rank
    outside = (start < 0) | (stop > chunks) | (start >= stop)
    for i in np.flatnonzero(foreign | alone | outside)[:1]:
        does = f"rank {rank[i]} {verb} chunks [{start[i]}, {stop[i]}) {word} rank {other[i]}"
        why = (
            "which is not another rank of the schedule"
            if foreign[i]
            else "which does not name it back in that round"
            if alone[i]
            else f"but the lane has chunks [0, {chunks})"
        )
        raise place.fault(f"{does}, {why}")


def _check_races(schedule: Schedule, lane: int, step: int, rounds: list[Round], chunks: int) -> None:
    """Check that no round of a step touches chunks that another round of the step overwrites.

    Each (rank, chunk) is a point on one line, so that the intervals of all ranks can be sorted together. An interval is
    overlapped by an overwrite if more overwrites begin before its end than end before its start.
    """
    line = np.arange(schedule.p) * (chunks + 1)

    def along(part: ChunkInterval, partner: Array) -> tuple[Array, Array]:
        active = partner != NOBODY
        return (line + part.start)[active], (line + part.stop)[active]

    received = [along(r.receive, r.receive_from) for r in rounds]
    copied = [ends for r, ends in zip(rounds, received) if not r.add]
    if not copied:
        return
    begins, ends = (np.sort(np.concatenate(column)) for column in zip(*copied))
    for index, r in enumerate(rounds):
        for verb, part, own in (("sends", along(r.send, r.send_to), 0), ("receives", received[index], not r.add)):
            over = np.searchsorted(begins, part[1], "left") - np.searchsorted(ends, part[0], "right")
            for i in np.flatnonzero(over > own)[:1]:
                rank, chunk = divmod(int(part[0][i]), chunks + 1)
                text = f"rank {rank} {verb} chunks from {chunk} on, which another round of the step copies over"
                raise _Place(schedule, lane, step, index).fault(text)

"""Schedules over messages: persistent MPI requests, the vector they work in, and two levels for nodes of several ranks.

**One level** (`MessagePlan`). Each lane runs through its steps on its own, so that several are in flight. Lanes of
unlike `turn` take the wire one after the other, and one adds what it got while the next is on the wire. In a step all
messages start together. What comes in to be added is received beside and added when all has come, in the order of the
ranks (`schedule.model`). A receive goes beside too where the same step sends from the same place.

One request carries `MESSAGE_BYTES` at most, which keeps counts far below 2^31, and below the sizes from which Open MPI
asks the receiver first: that makes a TCP connection half-duplex.

**Two levels** (`TwoLevelPlan`): the schedule of `collectives.schedule.hierarchical`, its two inner stages run on loads
and stores. A node's vectors are reduce-scattered in its shared memory. Each rank's slice is allreduced over messages
among the ranks with the same place in their nodes. An allgather in shared memory ends it. The vector passes in
segments, so that one is between the nodes while the next is summed inside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from mpips.collectives.arrays import Flat, Vector
from mpips.collectives.call import Call, scale
from mpips.collectives.fabric.requests import Tags, receives, release, sends
from mpips.collectives.kernels import sums
from mpips.collectives.kernels.sums import Step, perform
from mpips.collectives.schedule import catalog
from mpips.collectives.schedule.model import NOBODY, RankStep, Schedule, cut, extent, in_rank_order, overlap


class _Step(NamedTuple):
    requests: list[MPI.Prequest]
    landings: list[Step]
    """The use of messages that were received beside their places: they are added or copied there."""


class MessagePlan:
    """One call compiled to persistent requests, with a tag for each lane. Making it is local."""

    def __init__(self, comm: MPI.Comm, call: Call, schedule: Schedule, x: Flat, out: Flat, tags: Sequence[int]):
        self._call = call
        self._space = Workspace(call, comm.rank, x, out)
        self._comm, self._schedule = comm, schedule
        program = schedule.program(comm.rank)
        self._lanes = [[self._compile(lane, step, tags[lane]) for step in steps] for lane, steps in enumerate(program)]
        self._queue = self._in_turn(program) if len({lane.turn for lane in schedule.lanes}) > 1 else []

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        self._space.begin()
        yield from self._one_by_one() if self._queue else self._side_by_side()
        self._space.end()

    def _side_by_side(self) -> Iterator[None]:
        lanes = [self._run_lane(steps) for steps in self._lanes]
        while lanes:
            lanes = [lane for lane in lanes if next(lane, self) is not self]
            if lanes:
                yield

    def _one_by_one(self) -> Iterator[None]:
        """Run lanes in turn: a lane's step goes on the wire when the one before it has left. Meanwhile what that one
        has brought is added."""
        landings: list[Step] = []
        lane_before = -1
        for lane, step in self._queue:
            if lane == lane_before:  # it may need its own sums
                perform(landings)
                landings = []
            MPI.Prequest.Startall(step.requests)
            perform(landings)
            while not MPI.Request.Testall(step.requests):
                yield
            lane_before, landings = lane, step.landings
        perform(landings)

    def free(self) -> None:
        """Give the requests back to MPI."""
        for steps in self._lanes:
            for step in steps:
                release(step.requests)
        self._lanes, self._queue = [], []

    def _run_lane(self, steps: list[_Step]) -> Iterator[Any]:
        for requests, landings in steps:
            MPI.Prequest.Startall(requests)
            while not MPI.Request.Testall(requests):
                yield
            perform(landings)

    def _in_turn(self, program: tuple[tuple[RankStep, ...], ...]) -> list[tuple[int, _Step]]:
        """(lane, step) of all lanes: step by step, and within a step by turn."""
        order = [
            (step.number, self._schedule.lanes[lane].turn, lane, i)
            for lane, steps in enumerate(program)
            for i, step in enumerate(steps)
        ]
        return [(lane, self._lanes[lane][i]) for _, _, lane, i in sorted(order)]

    def _compile(self, lane: int, step: RankStep, tag: int) -> _Step:
        comm, offsets = self._comm, self._schedule.offsets(self._call.n, lane)
        sent = [extent(offsets, r.send) for r in step.rounds if r.send_to != NOBODY]
        requests: list[MPI.Prequest] = []
        landings: list[Step] = []
        added: dict[tuple[int, int], dict[int, Vector]] = {}
        for round_ in step.rounds:
            if round_.receive_from != NOBODY:
                came = extent(offsets, round_.receive)
                place = self._space.arriving(*came, (int(round_.receive.start), int(round_.receive.stop)))
                if round_.add:
                    terms = added.setdefault(came, {comm.rank: place})
                    place = terms[round_.receive_from] = np.empty_like(place)
                elif self._call.kind != "alltoall" and overlap(came, sent):
                    beside = np.empty_like(place)
                    landings.append((np.copyto, (place, beside)))
                    place = beside
                requests += receives(comm, place, round_.receive_from, tag)
        for round_ in step.rounds:
            if round_.send_to != NOBODY:
                start, stop = extent(offsets, round_.send)
                requests += sends(comm, self._space.source[start:stop], round_.send_to, tag)
        for terms in added.values():
            assert self._call.operation is not None
            for to, of in in_rank_order(comm.rank, terms):
                pair = terms[to], terms[of]
                landings += sums.steps(self._call.operation.into, pair, pair[0], nbytes=self._call.nbytes)
        return _Step(requests, landings)


class Workspace:
    """`vector` holds the whole vector: out where that is one, else memory from `allocate`, so that x stays as it is. In
    alltoall it is out, whose blocks arrive by `Call.arrival`, and `source` is what the blocks are sent from."""

    def __init__(
        self, call: Call, rank: int, x: Flat, out: Flat, allocate: Callable[[int, Any], Vector] = np.empty
    ) -> None:
        self._call, self._rank = call, rank
        self._x, self._out = x.vector(), out.vector()
        self._in_place = x == out
        whole = call.kind == "alltoall" or (self._out.size == call.n and (call.kind != "reduce" or rank == call.root))
        self.vector = self._out if self._in_place or whole else allocate(call.n, call.dtype)
        self.source = self.vector
        if call.kind == "alltoall":
            self.source = allocate(call.n, call.dtype) if self._in_place else self._x
        self._result = self.vector
        if call.kind == "reduce_scatter":
            self._result = self.vector[slice(*call.block(rank))]
        mean = call.operation is not None and call.operation.is_mean
        self._scale = scale(self._result, call.p) if mean else []

    def begin(self) -> None:
        """Bring in this rank's part."""
        call = self._call
        own = slice(*call.block(self._rank))
        if call.kind == "alltoall":
            if self.source is not self._x:
                np.copyto(self.source, self._x)
            to = self._out[slice(*call.arrival(self._rank, self._rank))]
            np.copyto(to, self.source[own])
        elif not self._in_place:
            np.copyto(self.vector[own] if call.kind == "allgather" else self.vector, self._x)

    def end(self) -> None:
        """Take out the result, when nobody else reads the vector any more."""
        call = self._call
        if call.kind == "reduce" and self._rank != call.root:
            return
        perform(self._scale)
        if call.kind == "reduce_scatter" and not self._in_place:
            np.copyto(self._out, self._result)

    def arriving(self, start: int, stop: int, chunks: tuple[int, int]) -> Vector:
        """Return where elements [start, stop) of the vector, which are `chunks`, come in."""
        if self._call.kind != "alltoall":
            return self.vector[start:stop]
        first, last = (self._call.arrival(self._rank, chunk) for chunk in (chunks[0], chunks[1] - 1))
        return self._out[first[0] : last[1]]


Steps: TypeAlias = "Callable[[], Iterator[None]]"
SEGMENT_BYTES = 1 << 20
MOST_SEGMENTS = 8


class TwoLevelPlan:
    """One allreduce compiled for this rank, the one at `place` of the `local` ranks of its node; all nodes hold equally
    many. `on_node` compiles a call between them, and gives back what makes its steps. `between` names the algorithm
    over messages. Making it is local."""

    def __init__(
        self,
        place: int,
        local: int,
        on_node: Callable[[Call, Flat, Flat], Steps],
        call: Call,
        x: Flat,
        out: Flat,
        tags: Tags,
        between: str = "ring",
    ):
        if call.kind != "allreduce":
            raise ValueError(f"hierarchical serves allreduce, not {call.kind}")
        across = tags.lanes.across
        assert across is not None
        schedule = catalog.build("allreduce", between, across.size)
        count = min(MOST_SEGMENTS, max(1, call.nbytes // SEGMENT_BYTES))
        self._segments = []
        lanes = len(schedule.lanes)
        taken = tags.take(count * lanes, call.text)
        for i in range(count):
            start, stop = int(cut(call.n, count, i)), int(cut(call.n, count, i + 1))
            inside = [
                Call(kind, stop - start, call.dtype, operation, 0, call.algorithm, local, call.label)
                for kind, operation in (("reduce_scatter", call.operation), ("allgather", None))
            ]
            x_part, out_part = _part(x, start, stop), _part(out, start, stop)
            mine = _part(out_part, *inside[0].block(place))
            slice_ = Call("allreduce", mine.n, call.dtype, call.operation, 0, between, across.size)
            self._segments.append(
                _Segment(
                    on_node(inside[0], x_part, mine),
                    MessagePlan(across, slice_, schedule, mine, mine, taken[i * lanes :]),
                    on_node(inside[1], mine, out_part),
                )
            )

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        crossing: deque[Iterator[None]] = deque()
        for segment in self._segments:
            yield from _beside(segment.scatter(), crossing)
            crossing.append(segment.across.run())
        for segment in self._segments:
            first = crossing.popleft()
            yield from _beside(first, crossing)
            yield from _beside(segment.gather(), crossing)

    def free(self) -> None:
        """Give the requests back to MPI."""
        for segment in self._segments:
            segment.across.free()


class _Segment(NamedTuple):
    scatter: Steps
    across: MessagePlan
    gather: Steps


def _part(flat: Flat, start: int, stop: int) -> Flat:
    return Flat(flat.address + start * flat.dtype.itemsize, stop - start, flat.dtype)


def _beside(steps: Iterator[None], crossing: Iterable[Iterator[None]]) -> Iterator[None]:
    """`steps`, moving what is under way between the nodes whenever there is something to wait for, and at the end."""
    for _ in steps:
        _move(crossing)
        yield
    _move(crossing)


def _move(crossing: Iterable[Iterator[None]]) -> None:
    for steps in crossing:
        next(steps, None)

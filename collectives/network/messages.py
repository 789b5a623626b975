"""Runs schedules over messages, with persistent MPI requests, in one level or, for nodes of several ranks, in two.

**One level** (`MessagePlan`). A schedule consists of lanes. Each lane handles a part of the vector and runs through its
steps independently, so that several steps are in flight. Lanes with different `turn` use the network one after another:
while the messages of a lane are in flight, the lane before it adds the values that it has received. All messages of a
step start together. Values that will be added are received in separate memory, and are added in the order of the ranks
when all of them have arrived (`schedule.model`). Values are also received in separate memory if the same step sends the
old values from the same place.

A request carries at most `MESSAGE_BYTES`. This keeps counts far below 2^31. It also stays below the size at which Open
MPI asks the receiver before it sends, which makes a TCP connection half-duplex.

**Two levels** (`TwoLevelPlan`). The schedule of `collectives.schedule.hierarchical`, with the two stages within a node
in shared memory. The ranks of a node first reduce-scatter their vectors in shared memory. Then each rank's slice is
allreduced over messages, between the ranks that have the same place in their nodes. Finally an allgather in shared
memory distributes the results. The vector passes through these stages in segments: while one segment travels between
the nodes, the next one is summed within the nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from mpips.collectives.arrays import Flat, Vector
from mpips.collectives.call import Call, scale
from mpips.collectives.fabric.requests import Tags, make_receives, make_sends, release
from mpips.collectives.kernels import sums
from mpips.collectives.kernels.sums import Step, perform
from mpips.collectives.schedule import catalog
from mpips.collectives.schedule.model import NOBODY, RankStep, Schedule, cut, extent, in_rank_order, overlap


class _MessageStep(NamedTuple):
    requests: list[MPI.Prequest]
    # the steps that add or copy the values that were received in separate memory to their places in the vector
    landings: list[Step]


class MessagePlan:
    """The body of a call over messages, compiled to persistent requests. The constructor is local: it sends nothing.

    Args:
        comm: The communicator that carries the messages.
        call: The call.
        schedule: The schedule of the call over the ranks of `comm`.
        x: The array to read.
        out: The array for the result. For an in-place call it equals `x`.
        tags: A tag for each lane of the schedule.
    """

    def __init__(self, comm: MPI.Comm, call: Call, schedule: Schedule, x: Flat, out: Flat, tags: Sequence[int]):
        self._call = call
        self._space = Workspace(call, comm.rank, x, out)
        self._comm = comm
        self._schedule = schedule
        program = schedule.program(comm.rank)
        # the steps of each lane
        self._lanes = [[self._compile(lane, step, tags[lane]) for step in steps] for lane, steps in enumerate(program)]
        # all (lane, step) in the order in which they use the network, if lanes take turns; otherwise an empty list
        self._queue = self._in_turn(program) if len({lane.turn for lane in schedule.lanes}) > 1 else []

    def run(self) -> Iterator[None]:
        """Run the call. Yields whenever it has to wait."""
        self._space.begin()
        yield from self._one_by_one() if self._queue else self._side_by_side()
        self._space.end()

    def _side_by_side(self) -> Iterator[None]:
        """Run all lanes at the same time."""
        lanes = [self._run_lane(steps) for steps in self._lanes]
        while lanes:
            lanes = [lane for lane in lanes if next(lane, self) is not self]
            if lanes:
                yield

    def _one_by_one(self) -> Iterator[None]:
        """Run lanes in turn.

        A step starts its messages when the messages of the step before it are complete. While its own messages are in
        flight, it adds the values that the step before it has received.
        """
        landings: list[Step] = []
        lane_before = -1
        for lane, step in self._queue:
            # A step may send the sums of the step before it in the same lane, so compute those sums first.
            if lane == lane_before:
                perform(landings)
                landings = []
            MPI.Prequest.Startall(step.requests)
            perform(landings)
            while not MPI.Request.Testall(step.requests):
                yield
            lane_before, landings = lane, step.landings
        perform(landings)

    def free(self) -> None:
        """Free the MPI requests of the plan."""
        for steps in self._lanes:
            for step in steps:
                release(step.requests)
        self._lanes = []
        self._queue = []

    def _run_lane(self, steps: list[_MessageStep]) -> Iterator[Any]:
        for requests, landings in steps:
            MPI.Prequest.Startall(requests)
            while not MPI.Request.Testall(requests):
                yield
            perform(landings)

    def _in_turn(self, program: tuple[tuple[RankStep, ...], ...]) -> list[tuple[int, _MessageStep]]:
        """Return (lane, step) of all lanes, ordered by the step's number and then by the lane's turn."""
        order = [
            (step.number, self._schedule.lanes[lane].turn, lane, i)
            for lane, steps in enumerate(program)
            for i, step in enumerate(steps)
        ]
        return [(lane, self._lanes[lane][i]) for _, _, lane, i in sorted(order)]

    def _compile(self, lane: int, step: RankStep, tag: int) -> _MessageStep:
        """Make the MPI requests of a step, and the additions and copies of the values that the step receives."""
        comm, offsets = self._comm, self._schedule.offsets(self._call.n, lane)
        sent = [extent(offsets, r.send) for r in step.rounds if r.send_to != NOBODY]
        requests: list[MPI.Prequest] = []
        landings: list[Step] = []
        # interval of the vector -> rank -> the values of that rank that are added there
        added: dict[tuple[int, int], dict[int, Vector]] = {}
        for round_ in step.rounds:
            if round_.receive_from != NOBODY:
                extent_received = extent(offsets, round_.receive)
                place = self._space.arriving(*extent_received, (int(round_.receive.start), int(round_.receive.stop)))
                if round_.add:
                    terms = added.setdefault(extent_received, {comm.rank: place})
                    place = terms[round_.receive_from] = np.empty_like(place)
                elif self._call.kind != "alltoall" and overlap(extent_received, sent):
                    landing_memory = np.empty_like(place)
                    landings.append((np.copyto, (place, landing_memory)))
                    place = landing_memory
                requests += make_receives(comm, place, round_.receive_from, tag)
        for round_ in step.rounds:
            if round_.send_to != NOBODY:
                start, stop = extent(offsets, round_.send)
                requests += make_sends(comm, self._space.source[start:stop], round_.send_to, tag)
        for terms in added.values():
            assert self._call.reduction is not None
            for to, of in in_rank_order(comm.rank, terms):
                pair = terms[to], terms[of]
                landings += sums.steps(self._call.reduction.combine, pair, pair[0], nbytes=self._call.nbytes)
        return _MessageStep(requests, landings)


class Workspace:
    """The memory in which one rank runs a call over messages.

    A schedule works on the whole vector of `call.n` elements. But out may be shorter, and x must stay unchanged unless
    the call is in place.

    Attributes:
        vector: The memory into which values are received and added. This is out if the call is in place, or if the
            whole vector is this rank's result. Otherwise it is memory from `allocate`.
        source: The memory from which messages are sent. This is `vector`, except in an alltoall, whose blocks arrive in
            out and are sent from x. If the alltoall is in place, arriving blocks overwrite x, so they are sent from a
            copy of x.
    """

    def __init__(
        self, call: Call, rank: int, x: Flat, out: Flat, allocate: Callable[[int, Any], Vector] = np.empty
    ) -> None:
        self._call = call
        self._rank = rank
        self._x = x.vector()
        self._out = out.vector()
        self._in_place = x == out
        whole = call.kind == "alltoall" or (self._out.size == call.n and (call.kind != "reduce" or rank == call.root))
        self.vector = self._out if self._in_place or whole else allocate(call.n, call.dtype)
        self.source = self.vector
        if call.kind == "alltoall":
            self.source = allocate(call.n, call.dtype) if self._in_place else self._x
        self._result = self.vector
        if call.kind == "reduce_scatter":
            self._result = self.vector[slice(*call.block(rank))]
        mean = call.reduction is not None and call.reduction.is_mean
        self._scale = scale(self._result, call.p) if mean else []

    def begin(self) -> None:
        """Copy this rank's input to its place in `vector`. In an alltoall also copy this rank's own block to out."""
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
        """Complete the result (a mean is divided now), and copy it to `out` unless it is already there."""
        call = self._call
        if call.kind == "reduce" and self._rank != call.root:
            return
        perform(self._scale)
        if call.kind == "reduce_scatter" and not self._in_place:
            np.copyto(self._out, self._result)

    def arriving(self, start: int, stop: int, chunks: tuple[int, int]) -> Vector:
        """Return the memory into which elements [start, stop) of the vector are received.

        `chunks` names the same elements as chunks [first, last) of the schedule. In an alltoall, each chunk has its own
        place in out (`Call.arrival`).
        """
        if self._call.kind != "alltoall":
            return self.vector[start:stop]
        first, last = (self._call.arrival(self._rank, chunk) for chunk in (chunks[0], chunks[1] - 1))
        return self._out[first[0] : last[1]]


# a function that starts a call on the node, and returns the steps of this call
Steps: TypeAlias = "Callable[[], Iterator[None]]"
SEGMENT_BYTES = 1 << 20
MOST_SEGMENTS = 8


class TwoLevelPlan:
    """The body of an allreduce over nodes that all have the same number of ranks.

    The constructor is local: it sends nothing.

    Args:
        place: This rank's number among the ranks of its node.
        local: The number of ranks on each node.
        on_node: Compiles a call between the ranks of the node.
        call: The call.
        x: The array to read.
        out: The array for the result. For an in-place call it equals `x`.
        tags: Gives the tags of the messages.
        between: The algorithm over messages, between the nodes.
    """

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
                for kind, operation in (("reduce_scatter", call.reduction), ("allgather", None))
            ]
            x_part, out_part = _part(x, start, stop), _part(out, start, stop)
            own_slice = _part(out_part, *inside[0].block(place))
            slice_call = Call("allreduce", own_slice.n, call.dtype, call.reduction, 0, between, across.size)
            self._segments.append(
                _SegmentStages(
                    on_node(inside[0], x_part, own_slice),
                    MessagePlan(across, slice_call, schedule, own_slice, own_slice, taken[i * lanes :]),
                    on_node(inside[1], own_slice, out_part),
                )
            )

    def run(self) -> Iterator[None]:
        """Run the call. Yields whenever it has to wait."""
        # allreduces between nodes that are in flight
        crossing: deque[Iterator[None]] = deque()
        for segment in self._segments:
            yield from _advance_during(segment.scatter(), crossing)
            crossing.append(segment.across.run())
        for segment in self._segments:
            first = crossing.popleft()
            yield from _advance_during(first, crossing)
            yield from _advance_during(segment.gather(), crossing)

    def free(self) -> None:
        """Free the MPI requests of the plan."""
        for segment in self._segments:
            segment.across.free()


class _SegmentStages(NamedTuple):
    """The three stages of a segment: within the node, between nodes, and within the node again."""

    scatter: Steps
    across: MessagePlan
    gather: Steps


def _part(flat: Flat, start: int, stop: int) -> Flat:
    return Flat(flat.address + start * flat.dtype.itemsize, stop - start, flat.dtype)


def _advance_during(steps: Iterator[None], crossing: Iterable[Iterator[None]]) -> Iterator[None]:
    """Run `steps`. Whenever they have to wait, and at the end, advance the allreduces between nodes (`crossing`)."""
    for _ in steps:
        _advance_all(crossing)
        yield
    _advance_all(crossing)


def _advance_all(crossing: Iterable[Iterator[None]]) -> None:
    for steps in crossing:
        next(steps, None)

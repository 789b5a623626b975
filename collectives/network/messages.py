"""A schedule over messages: MPI persistent requests, compiled once for a plan and its buffers.

Each lane runs through its steps on its own, so that several are in flight; lanes of unlike `turn` take the wire one
after the other, and one adds what it got while the next is on the wire. In a step all messages start together; what
comes in to be added is received beside and added when all has come, in the order of the ranks
(`schedule.in_rank_order`). A receive goes beside too where the same step sends from the same place.

One request carries `MESSAGE_BYTES` at most, which keeps counts far below 2^31, and below the sizes from which Open MPI
asks the receiver first: that makes a TCP connection half-duplex.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.arrays import Flat, Vector
from collectives.call import Call
from collectives.network.requests import receives, release, sends
from collectives.network.workspace import Workspace
from collectives.schedule.model import NOBODY, RankStep, Schedule, extent, in_rank_order, overlap


class _Landing(NamedTuple):
    """What to do with a message that was received beside its place, or beside another one to be added to that first."""

    place: Vector
    beside: Vector
    add: bool


class _Step(NamedTuple):
    requests: list[MPI.Prequest]
    landings: list[_Landing]


class MessagePlan:
    """One call compiled to persistent requests, with a tag for each lane. Making it is local."""

    def __init__(self, comm: MPI.Comm, call: Call, schedule: Schedule, x: Flat, out: Flat, tags: Sequence[int]):
        self._call = call
        self._space = Workspace(call, comm.rank, x, out)
        self._comm, self._schedule = comm, schedule
        program = schedule.program(comm.rank)
        self._lanes = [
            [self._compile(lane, step, tags[lane]) for step in steps] for lane, steps in enumerate(program)
        ]
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
        """Lanes in turn: a lane's step goes on the wire when the one before it has left it, and while it is there, what
        the one before has brought is added."""
        landings: list[_Landing] = []
        lane_before = -1
        for lane, step in self._queue:
            if lane == lane_before:  # it may need its own sums
                self._land(landings)
                landings = []
            MPI.Prequest.Startall(step.requests)
            self._land(landings)
            while not MPI.Request.Testall(step.requests):
                yield
            lane_before, landings = lane, step.landings
        self._land(landings)

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
            self._land(landings)

    def _land(self, landings: list[_Landing]) -> None:
        for place, beside, add in landings:
            if add:
                assert self._call.operation is not None
                self._call.operation.ufunc(place, beside, out=place)
            else:
                np.copyto(place, beside)

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
        landings: list[_Landing] = []
        sums: dict[tuple[int, int], dict[int, Vector]] = {}
        for round_ in step.rounds:
            if round_.receive_from != NOBODY:
                came = extent(offsets, round_.receive)
                place = self._space.arriving(*came, (int(round_.receive.start), int(round_.receive.stop)))
                if round_.add:
                    terms = sums.setdefault(came, {comm.rank: place})
                    place = terms[round_.receive_from] = np.empty_like(place)
                elif self._call.kind != "alltoall" and overlap(came, sent):
                    landings.append(_Landing(place, np.empty_like(place), False))
                    place = landings[-1].beside
                requests += receives(comm, place, round_.receive_from, tag)
        for round_ in step.rounds:
            if round_.send_to != NOBODY:
                start, stop = extent(offsets, round_.send)
                requests += sends(comm, self._space.source[start:stop], round_.send_to, tag)
        for terms in sums.values():
            landings += [_Landing(terms[to], terms[of], True) for to, of in in_rank_order(comm.rank, terms)]
        return _Step(requests, landings)

"""A schedule over messages: MPI persistent requests, compiled once for a plan and its buffers.

Each lane runs through its steps on its own, so that several are in flight. In a step all messages start together; what
comes in to be added is received beside and added when it has come, in the order of the rounds, so that a run can be
repeated bit by bit. A receive goes beside too where the same step sends from the same place.

One request carries `MESSAGE_BYTES` at most, which keeps counts far below 2^31.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.arrays import Flat, Vector
from collectives.call import Call
from collectives.operations import scale
from collectives.schedule import NOBODY, Interval, RankStep, Round, Schedule

MESSAGE_BYTES = 1 << 30
FIRST_TAG = 16
TAGS = 8000  # of each sort; MPI promises 32,767 at least


class _Landing(NamedTuple):
    """What to do with a message that was received beside its place."""

    place: Vector
    beside: Vector
    add: bool


class _Step(NamedTuple):
    requests: list[MPI.Prequest]
    landings: list[_Landing]


class MessagePlan:
    """One call compiled to persistent requests. Making it is local.

    `number`, the same on all ranks, keeps messages of plans apart that are in flight together. A one-shot call has 0:
    nothing of its sort is ever in flight beside it, and a `label` (by default the text of the call) is enough. Ranks
    whose calls differ then do not take each other's messages, and `collectives.watch` finds out why they wait.
    """

    def __init__(
        self, comm: MPI.Comm, call: Call, schedule: Schedule, x: Flat, out: Flat, number: int, label: str = ""
    ):
        self._call, self._rank = call, comm.rank
        self._x, self._out = x.vector(), out.vector()
        self._in_place = x == out
        self._work = self._working_vector()
        self._source = self._x.copy() if call.kind == "alltoall" and self._in_place else self._x
        self._comm, self._schedule = comm, schedule
        sort, index = (0, number * len(schedule.lanes)) if number else (1, zlib.crc32((label or call.text).encode()))
        first_tag = FIRST_TAG + sort * TAGS + index % TAGS
        self._lanes = [
            [self._compile(lane, step, first_tag + lane) for step in steps]
            for lane, steps in enumerate(schedule.program(comm.rank))
        ]

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        self._begin()
        lanes = [self._run_lane(steps) for steps in self._lanes]
        while lanes:
            lanes = [lane for lane in lanes if next(lane, self) is not self]
            if lanes:
                yield
        self._end()

    def free(self) -> None:
        """Give the requests back to MPI."""
        for steps in self._lanes:
            for step in steps:
                for request in step.requests:
                    request.Free()
        self._lanes = []

    def _run_lane(self, steps: list[_Step]) -> Iterator[Any]:
        for requests, landings in steps:
            MPI.Prequest.Startall(requests)
            while not MPI.Request.Testall(requests):
                yield
            for place, beside, add in landings:
                if add:
                    assert self._call.operation is not None
                    self._call.operation.ufunc(place, beside, out=place)
                else:
                    np.copyto(place, beside)

    def _working_vector(self) -> Vector:
        """A whole vector to work in: out where it is one, else memory of its own, so that x stays as it is."""
        call = self._call
        beside = call.kind == "reduce" and not (self._rank == call.root or self._in_place)
        if self._in_place or (self._out.size == call.n and not beside and call.kind != "alltoall"):
            return self._out
        return np.empty(call.n, call.dtype) if call.kind != "alltoall" else self._out

    def _begin(self) -> None:
        call = self._call
        own = slice(*call.block(self._rank))
        if call.kind == "alltoall":
            if self._source is not self._x:
                np.copyto(self._source, self._x)
            to = self._out[slice(*call.arrival(self._rank, self._rank))]
            np.copyto(to, self._source[own])
        elif not self._in_place:
            np.copyto(self._work[own] if call.kind == "allgather" else self._work, self._x)

    def _end(self) -> None:
        call = self._call
        if call.kind == "reduce" and self._rank != call.root:
            return
        result = self._work
        if call.kind == "reduce_scatter":
            result = self._work[slice(*call.block(self._rank))]
        if call.operation is not None and call.operation.is_mean:
            function, arguments = scale(result, call.p)
            function(*arguments)
        if call.kind == "reduce_scatter" and not self._in_place:
            np.copyto(self._out, result)

    def _compile(self, lane: int, step: RankStep, tag: int) -> _Step:
        comm, offsets = self._comm, self._schedule.offsets(self._call.n, lane)
        sent = [_extent(offsets, r.send) for r in step.rounds if r.send_to != NOBODY]
        requests: list[MPI.Prequest] = []
        landings: list[_Landing] = []
        for round_ in step.rounds:
            if round_.receive_from != NOBODY:
                place = self._arriving(round_, offsets)
                if round_.add or (self._call.kind != "alltoall" and _overlap(_extent(offsets, round_.receive), sent)):
                    landings.append(_Landing(place, np.empty_like(place), round_.add))
                    place = landings[-1].beside
                requests += [comm.Recv_init(piece, round_.receive_from, tag) for piece in pieces(place)]
        for round_ in step.rounds:
            if round_.send_to != NOBODY:
                source = self._source if self._call.kind == "alltoall" else self._work
                start, stop = _extent(offsets, round_.send)
                requests += [comm.Send_init(piece, round_.send_to, tag) for piece in pieces(source[start:stop])]
        return _Step(requests, landings)

    def _arriving(self, round_: Round, offsets: Any) -> Vector:
        if self._call.kind != "alltoall":
            start, stop = _extent(offsets, round_.receive)
            return self._work[start:stop]
        first, last = int(round_.receive.start), int(round_.receive.stop)
        return self._out[self._call.arrival(self._rank, first)[0] : self._call.arrival(self._rank, last - 1)[1]]


def _extent(offsets: Any, interval: Interval) -> tuple[int, int]:
    return int(offsets[interval.start]), int(offsets[interval.stop])


def _overlap(extent: tuple[int, int], others: list[tuple[int, int]]) -> bool:
    return any(max(extent[0], start) < min(extent[1], stop) for start, stop in others)


def pieces(vector: Vector) -> list[list[Any]]:
    """Buffers of MESSAGE_BYTES at most, as bytes, which every element type is."""
    raw = vector.view(np.uint8)
    return [[raw[at : at + MESSAGE_BYTES], MPI.BYTE] for at in range(0, raw.size, MESSAGE_BYTES)]

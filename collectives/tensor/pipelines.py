"""The ways of a tensor through host memory: fused with any schedule (the paper's multi_ring), or staged, part by part.

Fused   What comes in is added to all vectors of the worker in one pass, while other messages are on the wire.
        Source: MXNET-MPI paper, sections 6.3.1 and 6.3.2 and figure 9. The rings go through host memory only, as on
        the paper's nodes, where the network does not reach the GPUs. A chunk is reduced over the vectors when that is
        first needed: before it is first sent, or when the first message for it has come (message and vectors in one
        pass). A chunk that is complete is spread to the vectors while the lanes go on. Lanes (the rings of
        `multi_ring`) run beside each other: while one lane's vectors are being reduced, the messages of another are
        on the wire. Memory: one vector on the host, and what one step of each lane receives.
Staged  Reduce the worker's vectors into one host vector, run any plan between the workers there, spread. With a ring
        it is the paper's omp_ring-IBMGpu (section 7.3 c). The host vector is node-shared, so that ranks of one node
        copy nothing beside. Memory: one vector on the host, two where x and out differ in length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from collectives.arrays import Vector
from collectives.call import Call
from collectives.network.requests import receives, release, sends
from collectives.network.tags import Tags
from collectives.operations import scale
from collectives.schedule.model import NOBODY, Interval, RankStep, Schedule, extent
from collectives.tensor.vectors import NO_MEMORY, Ticket, Vectors, running, until


class Runner(Protocol):
    """What carries a call out."""

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""

    def free(self) -> None:
        """Give back what it holds."""


class _Landing(NamedTuple):
    """A message has come: `fresh` extents meet the vectors for the first time."""

    start: int
    beside: Vector
    extents: list[tuple[int, int, bool]]


class _Step(NamedTuple):
    fills: list[tuple[int, int]]
    """Extents to be reduced over the worker's vectors before this step may send them."""
    requests: list[MPI.Prequest]
    landings: list[_Landing]
    arrivals: list[tuple[int, int]]
    """Extents that are complete after this step."""


class Fused:
    """An allreduce of a tensor by a schedule."""

    def __init__(self, comm: MPI.Comm, call: Call, schedule: Schedule, vectors: Vectors, tags: Tags):
        self._call, self._vectors = call, vectors
        self._is_mean = call.operation is not None and call.operation.is_mean
        self._work = vectors.host(call.n)
        self._lanes: list[list[_Step]] = []
        self._rest: list[tuple[int, int]] = []
        """Extents that no message completes: spread at the end."""
        self._unfilled: list[tuple[int, int]] = []
        """Extents that no message needs, where there is one worker: reduced at the end."""
        taken = tags.take(len(schedule.lanes), call.text)
        for lane, steps in enumerate(schedule.program(comm.rank)):
            self._compile_lane(comm, schedule.offsets(call.n, lane), steps, taken[lane])

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        with running(self._vectors):
            spreads: list[Ticket] = []
            lanes = [self._run_lane(steps, spreads) for steps in self._lanes]
            while lanes:
                lanes = [lane for lane in lanes if next(lane, self) is not self]
                if lanes:
                    yield
            yield from until(*[self._gather(start, stop) for start, stop in self._unfilled])
            if self._is_mean:
                function, arguments = scale(self._work, self._call.p * self._vectors.count)
                function(*arguments)
                spreads.append(self._spread(0, self._call.n))
            else:
                spreads += [self._spread(start, stop) for start, stop in self._rest]
            yield from until(*spreads)

    def free(self) -> None:
        """Give the requests back to MPI, and the memory."""
        for steps in self._lanes:
            for step in steps:
                release(step.requests)
        self._lanes, self._work = [], NO_MEMORY
        self._vectors.free()

    def _run_lane(self, steps: list[_Step], spreads: list[Ticket]) -> Iterator[Any]:
        for step in steps:
            yield from until(*[self._gather(start, stop) for start, stop in step.fills])
            MPI.Prequest.Startall(step.requests)
            while not MPI.Request.Testall(step.requests):
                yield
            for landing in step.landings:
                yield from until(*self._add(landing))
            if not self._is_mean:  # what arrives may have to be sent on, and must not be divided before
                spreads += [self._spread(start, stop) for start, stop in step.arrivals]

    def _gather(self, start: int, stop: int) -> Ticket:
        return self._vectors.gather(start, stop, None, self._work[start:stop])

    def _spread(self, start: int, stop: int) -> Ticket:
        return self._vectors.spread(start, stop, self._work[start:stop])

    def _add(self, landing: _Landing) -> Iterator[Ticket]:
        assert self._call.operation is not None
        for start, stop, fresh in landing.extents:
            place = self._work[start:stop]
            beside = landing.beside[start - landing.start : stop - landing.start]
            if fresh:
                yield self._vectors.gather(start, stop, beside, place)
            else:
                self._call.operation.ufunc(place, beside, out=place)

    def _compile_lane(self, comm: MPI.Comm, offsets: Any, steps: tuple[RankStep, ...], tag: int) -> None:
        chunks = len(offsets) - 1
        filled, complete = np.zeros(chunks, bool), np.zeros(chunks, bool)
        self._lanes.append([self._compile(comm, offsets, step, tag, filled, complete) for step in steps])
        self._unfilled += _runs(offsets, Interval(0, chunks), ~filled)
        self._rest += _runs(offsets, Interval(0, chunks), ~complete)

    def _compile(
        self, comm: MPI.Comm, offsets: Any, step: RankStep, tag: int, filled: Vector, complete: Vector
    ) -> _Step:
        made = _Step([], [], [], [])
        sent = [r for r in step.rounds if r.send_to != NOBODY]
        received = [r for r in step.rounds if r.receive_from != NOBODY]
        for r in sent:
            made.fills.extend(_runs(offsets, r.send, ~filled))
            filled[r.send.start : r.send.stop] = True
        for r in received:
            start, stop = extent(offsets, r.receive)
            place = self._work[start:stop]
            if r.add:
                place = self._vectors.host(stop - start)
                fresh = [(*run, True) for run in _runs(offsets, r.receive, ~filled)]
                known = [(*run, False) for run in _runs(offsets, r.receive, filled)]
                made.landings.append(_Landing(start, place, sorted(fresh + known)))
            else:
                made.arrivals.append((start, stop))
                complete[r.receive.start : r.receive.stop] = True
            filled[r.receive.start : r.receive.stop] = True
            made.requests.extend(receives(comm, place, r.receive_from, tag))
        for r in sent:
            part = self._work[slice(*extent(offsets, r.send))]
            made.requests.extend(sends(comm, part, r.send_to, tag))
        return made


class Staged:
    """Any plan between the workers: `inner` works from `x` to `out`, the same in place."""

    def __init__(self, call: Call, vectors: Vectors, inner: Runner, x: Vector, out: Vector, gives: bool, takes: bool):
        """`gives` and `takes` say whether this rank's vectors go in, and whether they get the result."""
        self._call, self._vectors, self._inner = call, vectors, inner
        self._x, self._out, self._gives, self._takes = x, out, gives, takes

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for. The inner plan counts as called."""
        return self._steps(self._inner.run())

    def free(self) -> None:
        """Give back what the inner plan holds, and the memory."""
        self._inner.free()
        self._x = self._out = NO_MEMORY
        self._vectors.free()

    def _steps(self, inner: Iterator[None]) -> Iterator[None]:
        operation, vectors = self._call.operation, self._vectors
        with running(vectors):
            if self._gives:
                yield from until(vectors.gather(0, self._x.size, None, self._x))
            yield from inner
            if not self._takes:
                return
            if operation is not None and operation.is_mean:  # the inner plan has summed
                function, arguments = scale(self._out, self._call.p * vectors.count)
                function(*arguments)
            yield from until(vectors.spread(0, self._out.size, self._out))


def _runs(offsets: Any, interval: Interval, wanted: Vector) -> list[tuple[int, int]]:
    """The longest extents of elements inside the interval of chunks, all of whose chunks are wanted."""
    found: list[tuple[int, int]] = []
    for chunk in range(int(interval.start), int(interval.stop)):
        start, stop = int(offsets[chunk]), int(offsets[chunk + 1])
        if not wanted[chunk] or start == stop:
            continue
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found

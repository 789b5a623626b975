"""Compilation of a collective on a list of arrays: arguments checked, algorithm chosen, runner fused or staged.

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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from collectives.arrays import Flat, Vector
from collectives.call import REDUCING, ROOTED, Call, operation, scale, see_root
from collectives.fabric.requests import Tags, receives, release, sends
from collectives.schedule.model import NOBODY, Interval, RankStep, Schedule, extent
from collectives.tensor import kernels
from collectives.tensor.vectors import NO_MEMORY, HostVectors, Ticket, VectorPlace, Vectors, place, running, until

FUSED_BYTES = 64 << 10
"""Between nodes, `auto` runs multi_ring on tensors from this size on; below, one message a rank and step is cheaper."""
THROUGH_HOST = {"shared_memory": "shared_memory", "native": "native", "host_ring": "ring"}
"""Algorithms of an allreduce that go through one host vector, and what runs there."""


class Home(Protocol):
    """The ranks of a communicator, and the nodes that they are on."""

    comm: MPI.Intracomm
    rank: int
    size: int
    nodes: int


class FlatRunner(Protocol):
    """Compiles a call on one host vector a rank; its ranks see first that all are in the same call (`Call.text`)."""

    def __call__(self, call: Call, x: Flat, out: Flat, tags: Tags, /) -> Runner: ...


@dataclass(frozen=True)
class TensorCall(Call):
    """A call in which every rank brings `vectors` vectors."""

    vectors: int = 1

    def described(self) -> str:
        return f"{super().described()}, {self.vectors} vectors a rank"

    @property
    def staged(self) -> bool:
        """Whether a flat plan runs between host vectors. It sees that all ranks are in the call; else the caller does,
        before it runs the runner."""
        return self.kind != "allreduce" or self.algorithm in THROUGH_HOST

    def more_algorithms(self, nodes: int) -> list[str]:
        others = [name for name in super().more_algorithms(nodes) if name != "reproducible"]
        return [*others, *(["host_ring"] if self.kind == "allreduce" else [])]

    def between(self) -> TensorCall:
        """What runs between the host vectors of the ranks. They still compare the text of the whole call."""
        name = THROUGH_HOST.get(self.algorithm, self.algorithm)
        reduction = self.operation
        if reduction is not None and reduction.is_mean:  # divided once, by all vectors
            reduction = operation("sum", self.dtype)
        inner = replace(self, algorithm=name, operation=reduction)
        object.__setattr__(inner, "text", self.text)
        return inner


class Compiled(NamedTuple):
    """A checked call. `make(flat_runner, build_schedule, tags)` compiles its runner; local."""

    call: TensorCall
    make: Callable[[FlatRunner, Callable[[Call], Schedule], Tags], Runner]
    in_place: bool


def compile_tensor(
    home: Home, kind: str, x: Any, op: str, algorithm: str, out: Any, root: int, label: str = ""
) -> Compiled:
    """The call of `kind` on the vectors `x`, a list or one device array, into `out` (None: in place).

    The vectors of x and out have one dtype. Those of x have one size, those of out one size, and there are as many of
    each. They may lie on GPUs, on the host, or some here and some there. Local: nothing is sent. ValueError or
    TypeError with the reason where the arguments are bad. The arrays are held by address only: the caller keeps them
    alive while an operation runs.
    """
    in_place = out is None
    given, taken = _listed(x), _listed(x if in_place else out)
    if not given or len(given) != len(taken):
        raise ValueError(f"x has {len(given)} vectors and out {len(taken)}: give at least one, and as many of each")
    sources = [place(v, f"x[{i}]", written=in_place) for i, v in enumerate(given)]
    targets = sources if in_place else [place(v, f"out[{i}]", written=True) for i, v in enumerate(taken)]
    call = _call(home, kind, sources, targets, op, algorithm, in_place, root, label)
    _see_devices(call, sources, targets)
    return Compiled(call, partial(_make, home, call, sources, targets, in_place), in_place)


def _listed(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def _call(
    home: Home,
    kind: str,
    x: list[VectorPlace],
    out: list[VectorPlace],
    op: str,
    algorithm: str,
    in_place: bool,
    root: int,
    label: str,
) -> TensorCall:
    if kind == "alltoall":
        raise ValueError("alltoall of a list of vectors has no meaning: call it for each vector")
    types = {v.dtype for v in [*x, *out]}
    if len({v.n for v in x}) > 1 or len({v.n for v in out}) > 1 or len(types) > 1:
        raise ValueError(
            f"the vectors of a tensor must be of one size and type, but x has {sorted(v.n for v in x)} elements, "
            f"out {sorted(v.n for v in out)}, of {', '.join(sorted(t.name for t in types))}; for unlike "
            "arrays there is grouped_allreduce"
        )
    see_root(root, home.size)
    (dtype,) = types
    reduction = operation(op, dtype) if kind in REDUCING else None
    n = out[0].n if kind == "allgather" else x[0].n
    chosen = algorithm if algorithm != "auto" else _auto(home, kind, n * dtype.itemsize)
    root = root if kind in ROOTED else 0
    call = TensorCall(kind, n, dtype, reduction, root, chosen, home.size, label, vectors=len(x))
    if in_place and kind in ("reduce_scatter", "allgather"):
        raise ValueError(f"{kind} of a list of vectors needs out=")
    if not in_place and (x[0].n, out[0].n) != call.sizes(home.rank):
        raise ValueError(
            f"vectors of {x[0].n} elements into {out[0].n}: {kind} between {home.size} ranks needs "
            f"{call.sizes(home.rank)[0]} and {call.sizes(home.rank)[1]} on rank {home.rank}"
        )
    return call


def _auto(home: Home, kind: str, nbytes: int) -> str:
    """The algorithm that `auto` means; the same on all ranks."""
    if home.nodes == 1:
        return "shared_memory"
    return "multi_ring" if kind == "allreduce" and nbytes >= FUSED_BYTES else "host_ring"


def _see_devices(call: TensorCall, sources: list[VectorPlace], targets: list[VectorPlace]) -> None:
    """ValueError where a GPU is asked for what it cannot do."""
    on_gpu = {v.device is not None for v in [*sources, *targets]}
    if True not in on_gpu:
        return
    if call.operation is not None:
        kernels.see_serves(call.operation.ufunc.__name__, call.dtype.name)


def _make(
    home: Home,
    call: TensorCall,
    sources: list[VectorPlace],
    targets: list[VectorPlace],
    in_place: bool,
    flat_runner: FlatRunner,
    build_schedule: Callable[[Call], Schedule],
    tags: Tags,
) -> Runner:
    # where nothing is reduced, the first vector is what the worker gives
    vectors = _vectors(sources if call.operation is not None else sources[:1], targets, call)
    if call.staged:
        return _staged(home, call, vectors, in_place, flat_runner, tags)
    return Fused(tags.lanes.comm, call, build_schedule(call), vectors, tags)


def _vectors(sources: list[VectorPlace], targets: list[VectorPlace], call: TensorCall) -> Vectors:
    """The backend for where the vectors lie."""
    ufunc = np.add if call.operation is None else call.operation.ufunc
    if all(v.device is None for v in [*sources, *targets]):
        return HostVectors(sources, targets, ufunc)
    from collectives.tensor.cuda import CudaVectors  # needs CuPy

    return CudaVectors(sources, targets, ufunc.__name__)


def _staged(
    home: Home, call: TensorCall, vectors: Vectors, in_place: bool, flat_runner: FlatRunner, tags: Tags
) -> StagedTensor:
    x_size, out_size = (call.n, call.n) if in_place else call.sizes(home.rank)
    x = vectors.host(x_size)
    out = x if in_place or call.kind not in ("reduce_scatter", "allgather") else vectors.host(out_size)
    inner = flat_runner(call.between(), _flat(x), _flat(out), tags)
    at_root = home.rank == call.root
    gives, takes = call.kind != "broadcast" or at_root, call.kind != "reduce" or at_root
    return StagedTensor(call, vectors, inner, x, out, gives, takes)


def _flat(vector: Vector) -> Flat:
    return Flat(vector.ctypes.data, vector.size, vector.dtype)


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


class StagedTensor:
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

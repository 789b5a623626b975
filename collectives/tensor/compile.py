"""Compiles a collective on a list of arrays: checks arguments, chooses an algorithm, makes a fused or staged body.

Fused   A received chunk is added to all vectors of the worker in one pass, while other messages are on the wire.
        Source: MXNET-MPI paper, sections 6.3.1 and 6.3.2 and figure 9. The rings go through host memory only, as on
        the paper's nodes, where the network does not reach the GPUs. The vectors of the worker are reduced as late as
        possible, chunk by chunk: before the chunk is sent for the first time, or when the first message for the chunk
        arrives (message and vectors in one pass). A complete chunk is copied to the vectors while the lanes continue.
        Lanes (the rings of `multi_ring`) run at the same time: while the vectors of one lane are reduced, messages of
        another are on the wire. Memory: one vector on the host, and the chunks that one step of each lane receives.
Staged  The worker's vectors are reduced into one host vector, any plan runs between the host vectors of the workers,
        and its result is copied to the vectors. With a ring this is the paper's omp_ring-IBMGpu (section 7.3 c). The
        host vector is node-shared, so that ranks of one node need no further copies. Memory: one vector on the host, or
        two if x and out differ in length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.arrays import Array, Flat, Vector, type_name
from mpips.collectives.call import REDUCING, ROOTED, Body, Call, Runner, check_root, find_reduction, scale
from mpips.collectives.communicator import Communicator
from mpips.collectives.fabric.requests import Tags, make_receives, make_sends, release
from mpips.collectives.kernels import sums
from mpips.collectives.kernels.sums import perform
from mpips.collectives.schedule.model import NOBODY, ChunkInterval, RankStep, Schedule, extent
from mpips.collectives.tensor import cuda_kernels
from mpips.collectives.tensor.vectors import (
    NO_MEMORY,
    HostVectors,
    TensorVectors,
    Ticket,
    VectorPlace,
    running,
    vector_place,
    wait_for,
)

# Between nodes, `auto` runs multi_ring on tensors of this size or more. For smaller tensors, a single message for each
# rank and step is faster.
FUSED_BYTES = 64 << 10
# algorithms of an allreduce that go through one host vector -> the algorithm that runs between host vectors
THROUGH_HOST = {"shared_memory": "shared_memory", "native": "native", "host_ring": "ring"}


@dataclass(frozen=True)
class TensorCall(Call):
    """A call on tensors, in which every rank passes `vectors` vectors."""

    vectors: int = 1

    def describe(self) -> str:
        return f"{super().describe()}, {self.vectors} vectors a rank"

    @property
    def staged(self) -> bool:
        """True if a plan runs between host vectors.

        That plan checks that all ranks are in the same call. For a fused call, the caller must check this before a run.
        """
        return self.kind != "allreduce" or self.algorithm in THROUGH_HOST

    def more_algorithms(self, nodes: int) -> list[str]:
        others = [name for name in super().more_algorithms(nodes) if name != "reproducible"]
        return [*others, *(["host_ring"] if self.kind == "allreduce" else [])]

    def between(self) -> TensorCall:
        """Return the call that runs between the host vectors of the ranks."""
        name = THROUGH_HOST.get(self.algorithm, self.algorithm)
        reduction = self.reduction
        # The runner divides once, by the number of all vectors of all ranks.
        if reduction is not None and reduction.is_mean:
            reduction = find_reduction("sum", self.dtype)
        inner = replace(self, algorithm=name, reduction=reduction)
        # Ranks compare the texts of their calls, and should see the text of the whole call.
        object.__setattr__(inner, "text", self.text)
        return inner


def compile_tensor(
    home: Communicator,
    kind: str,
    x: Array,
    op: str,
    algorithm: str,
    out: Array,
    root: int,
    label: str,
    tags: Tags,
    make_runner: Callable[[Call, Flat, Flat, Tags], Runner],
    build_schedule: Callable[[Call], Schedule],
) -> tuple[TensorCall, Body]:
    """Return a collective on the vectors of `x`, as a call and the body that runs it. Local: nothing is sent.

    All vectors have the same dtype. All vectors of x have the same size, and so do all vectors of out. x and out have
    the same number of vectors. Each vector may be on a GPU or on the host. The caller must keep the arrays alive while
    an operation runs.

    Args:
        home: The communicator of the ranks.
        kind: The collective, such as "allreduce".
        x: A list of vectors, or one device array.
        op: The reduction, such as "sum". Ignored by kinds that do not reduce.
        algorithm: The name of the algorithm, or "auto".
        out: The vectors that get the result; None means in place.
        root: The root of a broadcast or reduce.
        label: The name of the call in logs and errors.
        tags: Gives the MPI tags of the messages.
        make_runner: Compiles a call on one host vector for each rank. Its runner checks that all ranks are in the same
            call.
        build_schedule: Builds the schedule of a call.

    Raises:
        TypeError: x or out has something that is not an array.
        ValueError: The arguments do not fit each other. The error says why.
    """
    in_place = out is None
    x_arrays, out_arrays = _as_list(x), _as_list(x if in_place else out)
    if not x_arrays or len(x_arrays) != len(out_arrays):
        counts = f"x has {len(x_arrays)} vectors and out {len(out_arrays)}"
        raise ValueError(f"{counts}: give at least one, and the same number of each")
    sources = [vector_place(v, f"x[{i}]", written=in_place) for i, v in enumerate(x_arrays)]
    targets = sources if in_place else [vector_place(v, f"out[{i}]", written=True) for i, v in enumerate(out_arrays)]
    call = _call(home, kind, sources, targets, op, algorithm, in_place, root, label)
    on_gpu = any(v.device is not None for v in [*sources, *targets])
    if on_gpu and call.reduction is not None:
        cuda_kernels.check_kernel(call.reduction.ufunc.__name__, call.dtype.name)
    # Without a reduction, the worker contributes its first vector.
    if call.reduction is None:
        sources = sources[:1]
    vectors: TensorVectors
    if on_gpu:
        # imported only here, because it needs CuPy
        from mpips.collectives.tensor.cuda import CudaVectors

        vectors = CudaVectors(sources, targets, "add" if call.reduction is None else call.reduction.ufunc.__name__)
    else:
        vectors = HostVectors(sources, targets, np.add if call.reduction is None else call.reduction.combine)
    if call.staged:
        return call, _staged(home, call, vectors, in_place, make_runner, tags)
    return call, FusedTensor(tags.lanes.comm, call, build_schedule(call), vectors, tags)


def _as_list(x: Array) -> list[Array]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def _call(
    home: Communicator,
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
    # The checks look only at shapes, types and options, which should be the same on all ranks, and send nothing. So if
    # these arguments are wrong, all ranks raise the same error, and no rank waits for one that has raised an error.
    types = {v.dtype for v in [*x, *out]}
    if len({v.n for v in x}) > 1 or len({v.n for v in out}) > 1 or len(types) > 1:
        raise ValueError(
            f"the vectors of a tensor must be of one size and type, but x has {sorted(v.n for v in x)} elements, "
            f"out {sorted(v.n for v in out)}, of {', '.join(sorted(map(type_name, types)))}; for unlike "
            "arrays there is grouped_allreduce"
        )
    check_root(root, home.size)
    (dtype,) = types
    reduction = find_reduction(op, dtype) if kind in REDUCING else None
    n = out[0].n if kind == "allgather" else x[0].n
    chosen = algorithm if algorithm != "auto" else _choose_algorithm(home, kind, n * dtype.itemsize)
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


def _choose_algorithm(home: Communicator, kind: str, nbytes: int) -> str:
    """Return the algorithm that `auto` stands for. The result is the same on all ranks."""
    if home.nodes == 1:
        return "shared_memory"
    return "multi_ring" if kind == "allreduce" and nbytes >= FUSED_BYTES else "host_ring"


def _staged(
    home: Communicator,
    call: TensorCall,
    vectors: TensorVectors,
    in_place: bool,
    make_runner: Callable[[Call, Flat, Flat, Tags], Runner],
    tags: Tags,
) -> StagedTensor:
    x_size, out_size = (call.n, call.n) if in_place else call.sizes(home.rank)
    x = vectors.host(x_size)
    out = x if in_place or call.kind not in ("reduce_scatter", "allgather") else vectors.host(out_size)
    inner = make_runner(call.between(), _flat(x), _flat(out), tags)
    at_root = home.rank == call.root
    gives, takes = call.kind != "broadcast" or at_root, call.kind != "reduce" or at_root
    return StagedTensor(call, vectors, inner, x, out, gives, takes)


def _flat(vector: Vector) -> Flat:
    return Flat(vector.ctypes.data, vector.size, vector.dtype)


class _Landing(NamedTuple):
    """The values of a received message, which must be added to the host vector."""

    # the element of the host vector at which the message begins
    start: int
    # the buffer into which the message is received, separate from the host vector
    beside: Vector
    # Parts (start, stop, fresh) of the message. `fresh`: the worker's vectors have not been reduced into this part of
    # the host vector yet, so they are added together with the message.
    extents: list[tuple[int, int, bool]]


class _FusedStep(NamedTuple):
    # parts (start, stop) of the host vector that are reduced from the worker's vectors before this step sends them
    fills: list[tuple[int, int]]
    requests: list[MPI.Prequest]
    landings: list[_Landing]
    # parts (start, stop) of the host vector that hold the result after this step
    arrivals: list[tuple[int, int]]


class FusedTensor:
    """An allreduce of a tensor by a schedule, fused with the reduction over the worker's vectors."""

    def __init__(self, comm: MPI.Comm, call: Call, schedule: Schedule, vectors: TensorVectors, tags: Tags):
        self._call = call
        self._vectors = vectors
        self._is_mean = call.reduction is not None and call.reduction.is_mean
        self._work = vectors.host(call.n)
        self._lanes: list[list[_FusedStep]] = []
        # Parts of the host vector that this rank completes by its own sums, and does not receive as complete values.
        # They are copied to the vectors at the end.
        self._rest: list[tuple[int, int]] = []
        # Parts of the host vector that no message contains, because there is only one worker. They are reduced at the
        # end.
        self._unfilled: list[tuple[int, int]] = []
        taken = tags.take(len(schedule.lanes), call.text)
        for lane, steps in enumerate(schedule.program(comm.rank)):
            self._compile_lane(comm, schedule.offsets(call.n, lane), steps, taken[lane])

    def run(self) -> Iterator[None]:
        """Run the operation. It yields whenever it would have to wait."""
        with running(self._vectors):
            spreads: list[Ticket] = []
            lanes = [self._run_lane(steps, spreads) for steps in self._lanes]
            while lanes:
                # next() returns `self` at the end of a lane, because lanes themselves never yield `self`.
                lanes = [lane for lane in lanes if next(lane, self) is not self]
                if lanes:
                    yield
            yield from wait_for(*[self._gather(start, stop) for start, stop in self._unfilled])
            if self._is_mean:
                perform(scale(self._work, self._call.p * self._vectors.count))
                spreads.append(self._spread(0, self._call.n))
            else:
                spreads += [self._spread(start, stop) for start, stop in self._rest]
            yield from wait_for(*spreads)

    def free(self) -> None:
        """Free the MPI requests and the memory."""
        for steps in self._lanes:
            for step in steps:
                release(step.requests)
        self._lanes = []
        self._work = NO_MEMORY
        self._vectors.free()

    def _run_lane(self, steps: list[_FusedStep], spreads: list[Ticket]) -> Iterator[Any]:
        for step in steps:
            yield from wait_for(*[self._gather(start, stop) for start, stop in step.fills])
            MPI.Prequest.Startall(step.requests)
            while not MPI.Request.Testall(step.requests):
                yield
            for landing in step.landings:
                yield from wait_for(*self._add(landing))
            # For a mean, all parts are divided and copied at the end. A part that has arrived now may have to be sent
            # on, and must not be divided before that.
            if not self._is_mean:
                spreads += [self._spread(start, stop) for start, stop in step.arrivals]

    def _gather(self, start: int, stop: int) -> Ticket:
        return self._vectors.gather(start, stop, None, self._work[start:stop])

    def _spread(self, start: int, stop: int) -> Ticket:
        return self._vectors.spread(start, stop, self._work[start:stop])

    def _add(self, landing: _Landing) -> Iterator[Ticket]:
        assert self._call.reduction is not None
        for start, stop, fresh in landing.extents:
            place = self._work[start:stop]
            beside = landing.beside[start - landing.start : stop - landing.start]
            if fresh:
                yield self._vectors.gather(start, stop, beside, place)
            else:
                pair = place, beside
                perform(sums.steps(self._call.reduction.combine, pair, place, nbytes=self._call.nbytes))

    def _compile_lane(self, comm: MPI.Comm, offsets: NDArray[np.int64], steps: tuple[RankStep, ...], tag: int) -> None:
        chunks = len(offsets) - 1
        filled, complete = np.zeros(chunks, bool), np.zeros(chunks, bool)
        self._lanes.append([self._compile(comm, offsets, step, tag, filled, complete) for step in steps])
        self._unfilled += _element_runs(offsets, ChunkInterval(0, chunks), ~filled)
        self._rest += _element_runs(offsets, ChunkInterval(0, chunks), ~complete)

    def _compile(
        self, comm: MPI.Comm, offsets: NDArray[np.int64], step: RankStep, tag: int, filled: Vector, complete: Vector
    ) -> _FusedStep:
        fused = _FusedStep([], [], [], [])
        sent = [r for r in step.rounds if r.send_to != NOBODY]
        received = [r for r in step.rounds if r.receive_from != NOBODY]
        for r in sent:
            fused.fills.extend(_element_runs(offsets, r.send, ~filled))
            filled[r.send.start : r.send.stop] = True
        for r in received:
            start, stop = extent(offsets, r.receive)
            place = self._work[start:stop]
            if r.add:
                place = self._vectors.host(stop - start)
                fresh = [(*run, True) for run in _element_runs(offsets, r.receive, ~filled)]
                known = [(*run, False) for run in _element_runs(offsets, r.receive, filled)]
                fused.landings.append(_Landing(start, place, sorted(fresh + known)))
            else:
                fused.arrivals.append((start, stop))
                complete[r.receive.start : r.receive.stop] = True
            filled[r.receive.start : r.receive.stop] = True
            fused.requests.extend(make_receives(comm, place, r.receive_from, tag))
        for r in sent:
            part = self._work[slice(*extent(offsets, r.send))]
            fused.requests.extend(make_sends(comm, part, r.send_to, tag))
        return fused


class StagedTensor:
    """A collective on a tensor that is carried out by a plan on one host vector of each worker (*staged*).

    Args:
        call: The call.
        vectors: The vectors of this worker.
        inner: Runs the plan between the ranks, from `x` to `out`.
        x: The host vector that the plan reads.
        out: The host vector that the plan writes; `x` if it works in place.
        gives: True if the vectors of this rank contribute.
        takes: True if the vectors of this rank get the result.
    """

    def __init__(
        self, call: Call, vectors: TensorVectors, inner: Runner, x: Vector, out: Vector, gives: bool, takes: bool
    ):
        self._call = call
        self._vectors = vectors
        self._inner = inner
        self._x = x
        self._out = out
        self._gives = gives
        self._takes = takes

    def run(self) -> Iterator[None]:
        """Run the operation. It yields whenever it would have to wait.

        `steps()` of the inner plan is called at once, and not when the first step runs, because a `TimedRunner` records
        this moment as the time of the call.
        """
        return self._steps(self._inner.steps())

    def free(self) -> None:
        """Free the inner plan and the memory of the host vectors."""
        self._inner.free()
        self._x = self._out = NO_MEMORY
        self._vectors.free()

    def _steps(self, inner: Iterator[None]) -> Iterator[None]:
        reduction, vectors = self._call.reduction, self._vectors
        with running(vectors):
            if self._gives:
                yield from wait_for(vectors.gather(0, self._x.size, None, self._x))
            yield from inner
            if not self._takes:
                return
            # The inner plan has only summed (see TensorCall.between).
            if reduction is not None and reduction.is_mean:
                perform(scale(self._out, self._call.p * vectors.count))
            yield from wait_for(vectors.spread(0, self._out.size, self._out))


def _element_runs(offsets: NDArray[np.int64], interval: ChunkInterval, wanted: Vector) -> list[tuple[int, int]]:
    """Return the element ranges (start, stop) of the wanted chunks in an interval. Adjacent chunks form one range."""
    runs: list[tuple[int, int]] = []
    for chunk in range(int(interval.start), int(interval.stop)):
        start, stop = int(offsets[chunk]), int(offsets[chunk + 1])
        if not wanted[chunk] or start == stop:
            continue
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return runs

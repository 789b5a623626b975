"""What a list of arrays means as a collective call: arguments checked, algorithm chosen, runner compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from collectives.arrays import Flat, Vector
from collectives.call import REDUCING, ROOTED, Call, see_root
from collectives.network.tags import Tags
from collectives.operations import operation
from collectives.schedule.model import Schedule
from collectives.tensor import kernels
from collectives.tensor.arguments import Place, place
from collectives.tensor.pipelines import Fused, Runner, Staged
from collectives.tensor.rivals import Reg, VectorRing
from collectives.tensor.vectors import HostVectors, Vectors

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
        return [*others, *(["host_ring", "reg", "vector_ring"] if self.kind == "allreduce" else [])]

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
    x: list[Place],
    out: list[Place],
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


def _see_devices(call: TensorCall, sources: list[Place], targets: list[Place]) -> None:
    """ValueError where a GPU is asked for what it cannot do."""
    on_gpu = {v.device is not None for v in [*sources, *targets]}
    if True not in on_gpu:
        return
    if call.operation is not None:
        kernels.see_serves(call.operation.ufunc.__name__, call.dtype.name)
    if call.algorithm == "vector_ring" and len(on_gpu) > 1:
        raise ValueError("vector_ring takes vectors on GPUs or on the host, not both: choose multi_ring or auto")


def _make(
    home: Home,
    call: TensorCall,
    sources: list[Place],
    targets: list[Place],
    in_place: bool,
    flat_runner: FlatRunner,
    build_schedule: Callable[[Call], Schedule],
    tags: Tags,
) -> Runner:
    # where nothing is reduced, the first vector is what the worker gives
    vectors = _vectors(sources if call.operation is not None else sources[:1], targets, call)
    if call.staged:
        return _staged(home, call, vectors, in_place, flat_runner, tags)
    if call.algorithm == "reg":
        return Reg(home.comm, call, vectors)
    if call.algorithm == "vector_ring":
        return VectorRing(tags.lanes.comm, call, vectors, tags)
    return Fused(tags.lanes.comm, call, build_schedule(call), vectors, tags)


def _vectors(sources: list[Place], targets: list[Place], call: TensorCall) -> Vectors:
    """The backend for where the vectors lie."""
    ufunc = np.add if call.operation is None else call.operation.ufunc
    if all(v.device is None for v in [*sources, *targets]):
        return HostVectors(sources, targets, ufunc)
    from collectives.tensor.cuda import CudaVectors  # needs CuPy

    return CudaVectors(sources, targets, ufunc.__name__)


def _staged(
    home: Home, call: TensorCall, vectors: Vectors, in_place: bool, flat_runner: FlatRunner, tags: Tags
) -> Staged:
    x_size, out_size = (call.n, call.n) if in_place else call.sizes(home.rank)
    x = vectors.host(x_size)
    out = x if in_place or call.kind not in ("reduce_scatter", "allgather") else vectors.host(out_size)
    inner = flat_runner(call.between(), _flat(x), _flat(out), tags)
    at_root = home.rank == call.root
    gives, takes = call.kind != "broadcast" or at_root, call.kind != "reduce" or at_root
    return Staged(call, vectors, inner, x, out, gives, takes)


def _flat(vector: Vector) -> Flat:
    return Flat(vector.ctypes.data, vector.size, vector.dtype)

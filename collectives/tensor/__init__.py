"""Collectives on tensors: a list of vectors, one for each GPU of the worker, treated as one object.

Source: MXNET-MPI paper, section 6. Algorithms of an allreduce, by name:
  auto          what is best here
  multi_ring    the paper's: rings between host buffers, reductions of one ring beside the messages of another
  NAME          any algorithm of `collectives.schedule.catalog`, likewise fused with the reduction over the vectors
  host_ring     reduce all into host memory, ring there, spread (the paper's omp_ring)
  reg           reduce, MPI_Allreduce, spread, pipelined (the paper's reg)
  vector_ring   a ring through every vector (Baidu's)
  shared_memory, native  a plan of that name between host vectors
Other kinds go through one host vector: the worker's vectors are reduced where the kind reduces; where it does not, the
first one is what the worker gives; all get the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import arrays
from collectives.call import REDUCING, ROOTED, Call, see_root
from collectives.network.tags import Tags
from collectives.operations import Operation, operation
from collectives.tensor.regular import RegularTensor
from collectives.tensor.scheduled import ScheduledTensor
from collectives.tensor.staged import StagedTensor
from collectives.tensor.vector_ring import VectorRing
from collectives.tensor.vectors import HostVectors, Vectors

if TYPE_CHECKING:
    from collectives.guard import Runner
    from collectives.plan import Plan
    from collectives.session import Session

FUSED_BYTES = 64 << 10
"""Between nodes, `auto` runs multi_ring on tensors from this size on; below, one message a rank and step is cheaper."""


@dataclass(frozen=True)
class TensorCall(Call):
    """A call in which every rank brings `vectors` vectors."""

    vectors: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "text", f"{self.text}, {self.vectors} vectors a rank")

    def more_algorithms(self, nodes: int) -> list[str]:
        others = [name for name in super().more_algorithms(nodes) if name != "reproducible"]
        return [*others, *(["host_ring", "reg", "vector_ring"] if self.kind == "allreduce" else [])]


def compile_plan(home: Session, kind: str, x: Any, op: str, algorithm: str, out: Any, root: int, tags: Tags) -> Plan:
    """A plan for the vectors `x` (or one device array), into `out` (None: in place). Local; ValueError or TypeError
    with the reason where the arguments are bad."""
    from collectives.plan import Plan

    sources = _listed(x)
    targets = sources if out is None else _listed(out)
    call = _call(home, kind, sources, targets, op, algorithm, out is None, root)
    vectors = _vectors(sources, targets, call.operation, out is None)
    return Plan(home, call, partial(_runner, home, call, vectors, out is None, tags), out is None)


def _runner(home: Session, call: TensorCall, vectors: Vectors, in_place: bool, tags: Tags) -> Runner:
    from collectives.guard import Guarded
    from collectives.plan import build_schedule

    if call.kind != "allreduce" or call.algorithm in ("shared_memory", "native", "host_ring"):
        return _staged(home, call, vectors, in_place, tags)
    if call.algorithm == "reg":
        inner: Runner = RegularTensor(home.comm, call, vectors)
    elif call.algorithm == "vector_ring":
        inner = VectorRing(home.comm, call, vectors, tags)
    else:
        inner = ScheduledTensor(home.comm, call, build_schedule(home, call), vectors, tags)
    return Guarded(home, call, inner)


def _listed(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def _call(
    home: Session, kind: str, x: list[Any], out: list[Any], op: str, algorithm: str, in_place: bool, root: int
) -> TensorCall:
    if not x or len(x) != len(out):
        raise ValueError(f"x has {len(x)} vectors and out {len(out)}: give at least one, and as many of each")
    if kind == "alltoall":
        raise ValueError("alltoall of a list of vectors has no meaning: call it for each vector")
    sizes, types = {v.size for v in x}, {np.dtype(v.dtype) for v in [*x, *out]}
    if len(sizes) > 1 or len({v.size for v in out}) > 1 or len(types) > 1:
        raise ValueError(
            f"the vectors of a tensor must be of one size and type, but x has {sorted(v.size for v in x)} elements, "
            f"out {sorted(v.size for v in out)}, of {', '.join(sorted(t.name for t in types))}"
        )
    see_root(root, home.size)
    (dtype,) = types
    reduction = operation(op, dtype) if kind in REDUCING else None
    n = out[0].size if kind == "allgather" else x[0].size
    root = root if kind in ROOTED else 0
    call = TensorCall(
        kind, n, dtype, reduction, root, _chosen(home, kind, n * dtype.itemsize, algorithm), home.size, len(x)
    )
    if in_place and kind in ("reduce_scatter", "allgather"):
        raise ValueError(f"{kind} of a list of vectors needs out=")
    if not in_place and (x[0].size, out[0].size) != call.sizes(home.rank):
        raise ValueError(
            f"vectors of {x[0].size} elements into {out[0].size}: {kind} between {home.size} ranks needs "
            f"{call.sizes(home.rank)[0]} and {call.sizes(home.rank)[1]} on rank {home.rank}"
        )
    return call


def _chosen(home: Session, kind: str, nbytes: int, algorithm: str) -> str:
    if algorithm != "auto":
        return algorithm
    if home.nodes == 1:
        return "shared_memory"
    return "multi_ring" if kind == "allreduce" and nbytes >= FUSED_BYTES else "host_ring"


def _vectors(x: list[Any], out: list[Any], reduction: Operation | None, in_place: bool) -> Vectors:
    """The backend of the arrays. Where nothing is reduced, the first vector is what the worker gives."""
    given = x if reduction is not None else x[:1]
    ufunc = np.add if reduction is None else reduction.ufunc
    if any(arrays.is_device(v) for v in [*x, *out]):
        from collectives.cuda import CudaVectors

        return CudaVectors(given, out, "add" if reduction is None else ufunc.__name__)
    sources, targets = [arrays.host(v) for v in given], [arrays.host(v, "out") for v in out]
    for number, source in enumerate(sources):
        arrays.flat(source, f"x[{number}]", False)
    for number, target in enumerate(targets):
        arrays.flat(target, f"x[{number}]" if in_place else f"out[{number}]", True)
    return HostVectors([v.reshape(-1) for v in sources], [v.reshape(-1) for v in targets], ufunc)


def _staged(home: Session, call: TensorCall, vectors: Vectors, in_place: bool, tags: Tags) -> StagedTensor:
    from collectives.plan import make_runner

    inner_name = {"host_ring": "ring"}.get(call.algorithm, call.algorithm)
    inner_call = TensorCall(
        call.kind, call.n, call.dtype, call.operation, call.root, inner_name, call.p, vectors=call.vectors
    )
    x_size, out_size = (call.n, call.n) if in_place else call.sizes(home.rank)
    host_x = vectors.host(x_size)
    separate = not in_place and call.kind in ("reduce_scatter", "allgather")
    host_out = vectors.host(out_size) if separate else host_x
    x_flat = arrays.flat(host_x, "x", True)
    runner = make_runner(home, inner_call, x_flat, arrays.flat(host_out, "out", True) if separate else x_flat, tags)
    at_root = home.rank == call.root
    gives, takes = call.kind != "broadcast" or at_root, call.kind != "reduce" or at_root
    return StagedTensor(call, vectors, runner, host_x, host_out, gives, takes)

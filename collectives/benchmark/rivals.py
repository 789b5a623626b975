"""The calls that plans are held against: the MPI's own collectives, and gloo's where PyTorch is installed."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}
GLOO_KINDS = ("allreduce", "broadcast")

Call = Callable[[], object]


def mpi_calls(
    kind: str, op: str, comm: MPI.Comm, source: NDArray[Any], out: NDArray[Any], blocks: list[int]
) -> list[Call]:
    """The blocking and the non-blocking call of the MPI for `kind`: from `source` to `out` (one array: in place).

    `blocks` are the elements of each rank's block (reduce_scatter, allgather, alltoall). An empty list where the MPI
    cannot reduce the dtype.
    """
    mpi_op = OPS[op]
    try:
        MPI.Datatype.fromcode(source.dtype.char)
    except ValueError:
        return []
    own, all_blocks = [source, source.size], (out, (blocks, None))
    calls: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
        "allreduce": (comm.Allreduce, comm.Iallreduce, (MPI.IN_PLACE, out, mpi_op)),
        "broadcast": (comm.Bcast, comm.Ibcast, (out, 0)),
        "reduce": (comm.Reduce, comm.Ireduce, (source, out if comm.rank == 0 else None, mpi_op, 0)),
        "reduce_scatter": (comm.Reduce_scatter, comm.Ireduce_scatter, (source, out, blocks, mpi_op)),
        "allgather": (comm.Allgatherv, comm.Iallgatherv, (own, all_blocks)),
    }
    if kind == "alltoall":
        mine = [blocks[comm.rank]] * comm.size
        arguments: tuple[Any, ...] = ((source, (blocks, None)), (out, (mine, None)))
        calls["alltoall"] = (comm.Alltoallv, comm.Ialltoallv, arguments)
    blocking, nonblocking, arguments = calls[kind]
    return [lambda: blocking(*arguments), lambda: nonblocking(*arguments).Wait()]


def why_no_gloo(kind: str, dtype: np.dtype[Any]) -> str | None:
    """The reason why gloo cannot take part, or None if it can."""
    if kind not in GLOO_KINDS:
        return f"gloo is compared on {' and '.join(GLOO_KINDS)} only"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed: pip install torch"
    if dtype.name not in ("float16", "float32", "float64", "int32", "int64"):
        return f"gloo is not compared on {dtype}"
    return None


def gloo_call(kind: str, op: str, comm: MPI.Comm, out: NDArray[Any]) -> Call:
    """PyTorch's collective over gloo on the memory of `out`, in place. Collective: the first call joins the ranks."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{_free_port(comm)}",
            rank=comm.rank,
            world_size=comm.size,
            timeout=timedelta(seconds=120),
        )
    tensor = torch.from_numpy(out)
    if kind == "broadcast":
        return lambda: dist.broadcast(tensor, 0)
    word = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    word["prod"] = dist.ReduceOp.PRODUCT
    return lambda: dist.all_reduce(tensor, word[op])


def _free_port(comm: MPI.Comm) -> int:
    """A loopback port that was free on rank 0 a moment ago, told to all."""
    port = np.zeros(1, np.int64)
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port[0] = probe.getsockname()[1]
    comm.Bcast(port, 0)
    return int(port[0])

"""Horovod's API for PyTorch: `import mpips.horovod.torch as hvd`, and the rest of the program stays unchanged.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

Ranks match operations by name, so they may begin operations in any order. A function of Horovod that is not supported
raises NotImplementedError when the program uses it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, NoReturn

if find_spec("torch") is None:
    raise ModuleNotFoundError("mpips.horovod.torch needs PyTorch: pip install 'mpips[torch]'", name="torch")

import torch
from mpi4py import MPI
from torch import Tensor

from mpips.collectives.errors import of_caller
from mpips.horovod.negotiation import HorovodInternalError, HorovodOp
from mpips.horovod.operations import (
    Compression,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from mpips.horovod.optimizer import DistributedOptimizer
from mpips.horovod.world import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
    world_comm,
)
from mpips.torch import state

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

Average, Sum, Adasum, Min, Max, Product = HorovodOp


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0) -> None:
    """Copy the root's values of a `state_dict`, or of parameters, to all ranks, in place. Collective, blocking.

    Raises:
        TypeError: A value is not a tensor.
        HorovodInternalError: Names, dtypes or shapes differ between ranks. All ranks raise it.
    """
    pairs = params.items() if isinstance(params, Mapping) else params
    named = [pair if isinstance(pair, tuple) else (None, pair) for pair in pairs]
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise of_caller(
                TypeError(
                    f"broadcast_parameters: {name!r} is of type {type(tensor).__name__}: send it by broadcast_object()"
                )
            )
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in named]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Replace the state of an optimizer on all ranks by the root's state. Collective, blocking.

    `model` is ignored. Raises ValueError for LBFGS, because its history differs from rank to rank.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise of_caller(
            ValueError("broadcast_optimizer_state: LBFGS keeps a history of this rank's own: choose another optimizer")
        )
    state.broadcast_optimizer_state(optimizer, root_rank, world_comm())


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on all ranks. The object is pickled for sending. Collective, blocking."""
    name = "broadcast_object" if name is None else name
    is_root = rank() == root_rank
    packed = torch.frombuffer(bytearray(pickle.dumps(obj) if is_root else b"\0"), dtype=torch.uint8)
    length = broadcast_(torch.tensor([packed.numel()]), root_rank, f"{name}.sz", process_set)
    packed = packed if is_root else torch.empty(int(length), dtype=torch.uint8)
    broadcast_(packed, root_rank, f"{name}.t", process_set)
    return obj if is_root else pickle.loads(packed.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return a list of all ranks' objects, by rank. The objects are pickled for sending. Collective, blocking."""
    packed = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    stream = io.BytesIO(allgather(packed, f"{name or 'allgather_object'}.t", process_set).numpy().tobytes())
    return [pickle.load(stream) for _ in range(process_set.size() or 0)]


# ---- features of this build, for programs that query them


def mpi_threads_supported() -> bool:
    """True if MPI was initialized with THREAD_MULTIPLE."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def _says(answer: bool) -> Callable[..., bool]:
    return lambda *args, **keywords: answer


mpi_enabled = mpi_built = _says(True)
gloo_enabled = gloo_built = nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _says(False)


# ---- unsupported names


class _Refused:
    """A placeholder for a name of Horovod's API that is not supported.

    Calling it, or reading an attribute of it, raises an error that names an alternative.
    """

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def __call__(self, *args: object, **keywords: object) -> NoReturn:
        raise of_caller(NotImplementedError(self._sentence))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise of_caller(NotImplementedError(self._sentence))


SyncBatchNorm = _Refused(
    "hvd.SyncBatchNorm is for GPUs, in Horovod too: use torch.nn.BatchNorm with larger batches, or torch.nn.GroupNorm"
)
elastic = _Refused(
    "hvd.elastic is not supported: use `mpips run --spares` with mpips.torch.DistributedOptimizer, "
    "which goes on after a death"
)
start_timeline = _Refused("hvd.start_timeline is not supported: use torch.profiler, or leave it out")
stop_timeline = _Refused("hvd.stop_timeline is not supported: use torch.profiler, or leave it out")

"""A fast allreduce of one tensor, in the caller's thread. It reuses a NumPy view and a plan from an earlier call.

`all_reduce` is for programs that make many small calls, such as inference with tensor parallelism.
`ProcessGroup.allreduce` also uses this fast path, for synchronous calls.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

import mpips.collectives as collectives
from mpips.collectives import arrays
from mpips.collectives.arrays import Vector
from mpips.torch.tensors import NAMES
from mpips.torch.works import communication

# name of a reduction -> the reduction of torch.distributed
REDUCTIONS = {name: reduction for reduction, name in NAMES.items()}


class TensorViews:
    """Caches NumPy views of tensors. A view is kept as long as its tensor exists and stays at the same address."""

    def __init__(self) -> None:
        # id of a tensor -> a reference to it, its address, its number of elements, its dtype, and its view, which does
        # not keep the memory alive
        self._views: dict[int, tuple[weakref.ref[Tensor], int, int, torch.dtype, Vector]] = {}

    def find(self, tensor: Tensor) -> Vector | None:
        """Return a 1-D view of a tensor, or None if the fast path does not support this tensor."""
        known = self._views.get(id(tensor))
        if known is not None:
            reference, address, count, dtype, view = known
            # The program may have given the tensor other memory, strides or elements. A new tensor may have the id of a
            # dead one.
            unmoved = tensor.data_ptr() == address and tensor.numel() == count and tensor.is_contiguous()
            if unmoved and tensor.dtype is dtype and reference() is tensor:
                return view
        return self._make(tensor)

    def _make(self, tensor: Tensor) -> Vector | None:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
        if not plain or tensor.layout is not torch.strided or not tensor.is_contiguous() or not tensor.numel():
            return None
        if not (tensor.is_floating_point() or tensor.dtype in (torch.int32, torch.int64)):
            return None
        if tensor.data_ptr() == 0:
            return None
        number = id(tensor)
        view = arrays.flat(arrays.host(tensor.detach().view(-1), "tensor"), "tensor", True).vector()
        reference = weakref.ref(tensor, lambda _: self._views.pop(number, None))
        self._views[number] = (reference, tensor.data_ptr(), tensor.numel(), tensor.dtype, view)
        return view


_views = TensorViews()


def reduce_at_once(tensor: Tensor, comm: MPI.Intracomm, op: str) -> bool:
    """Run an allreduce in the caller's thread, and return True. Blocking.

    If the fast path is not possible, do nothing and return False. This is the case if other operations are under way,
    if other threads make calls, or if the fast path does not support the tensor.
    """
    view = _views.find(tensor)
    if view is None or (op == "mean" and not tensor.is_floating_point()):
        return False
    return communication.run_at_once(collectives.allreduce, view, comm, op=op)


def all_reduce(tensor: Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce a tensor over all ranks of a group, in place. Collective, blocking.

    The result is that of `torch.distributed.all_reduce` with the backend "mpips", at a fraction of the latency. Under
    `torch.compile` the call becomes the operator `mpips::all_reduce`. It is not differentiable.

    Args:
        tensor: A tensor in host memory.
        op: "sum", "mean" (floats only), "min", "max" or "prod".
        group: A process group of the backend "mpips". None means all ranks.

    Returns:
        `tensor`.

    Raises:
        ValueError: `op` is not one of these names, or no process group has been initialized.
        MismatchError: The ranks make different calls. All ranks raise the same message.
        CollectiveError: A rank has died or was interrupted.

    >>> torch.distributed.init_process_group("mpips")
    >>> mpips.torch.all_reduce(torch.ones(4), "mean")
    tensor([1., 1., 1., 1.])
    >>> torch.distributed.destroy_process_group()
    """
    if op not in REDUCTIONS:
        raise ValueError(f"all_reduce: op is {op!r}: give {', '.join(REDUCTIONS)}")
    if torch.compiler.is_compiling():
        chosen: Any = dist.group.WORLD if group is None else group
        torch.ops.mpips.all_reduce(tensor, op, chosen.group_name)
        return tensor
    _reduce(tensor, op, group)
    return tensor


def _reduce(tensor: Tensor, op: str, group: dist.ProcessGroup | None) -> None:
    comm = _comm_of(dist.group.WORLD if group is None else group)
    if comm is None or not reduce_at_once(tensor, comm, op):
        dist.all_reduce(tensor, REDUCTIONS[op], group=group)


def _comm_of(group: Any) -> MPI.Intracomm | None:
    """Return the communicator of a group with the backend "mpips", or None for a group of another backend."""
    if group is None:
        raise ValueError('all_reduce: there is no process group yet: call dist.init_process_group("mpips") first')
    if not isinstance(group, dist.ProcessGroup):
        # GroupMember.NON_GROUP_MEMBER: this rank is not in the group, and dist.all_reduce warns about that.
        return None
    comm = getattr(group, "comm", None)
    if comm is None:
        comm = getattr(group._get_backend(torch.device("cpu")), "comm", None)
    return comm  # type: ignore[no-any-return]


@torch.library.custom_op("mpips::all_reduce", mutates_args=("tensor",))
def _operator(tensor: Tensor, op: str, group_name: str) -> None:
    _reduce(tensor, op, dist.distributed_c10d._resolve_process_group(group_name))


@_operator.register_fake
def _(tensor: Tensor, op: str, group_name: str) -> None:
    return None

"""Operations of Horovod's API: allreduce, allgather and so on, blocking, asynchronous and differentiable.

`_begin` starts every operation and returns a handle, and `synchronize` waits for the handle. The name of a call tells
its kind:

- With `_async` it returns a handle. Without `_async` it blocks.
- With a trailing underscore it works in place. Without the underscore it returns new tensors, and if it also blocks, it
  is differentiable.

All ranks of the process set (a group of ranks) must begin operations of the same names, in any order. An operation
without a `name` gets a number as its name, and then the order of operations of its kind matters. A bad argument raises
an error on this rank, and nothing is sent. If the arguments of the ranks do not fit together, the operation raises
`HorovodInternalError` on all ranks.

Gradients are defined as in Horovod: the gradient of an allreduce is the same allreduce of the gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from mpips.collectives.errors import of_caller
from mpips.horovod.negotiation import REDUCTIONS, HorovodOp, OperationHandle, OperationRequest
from mpips.horovod.world import ProcessSet, global_process_set, rank
from mpips.torch.tensors import check_on_host, reduction

Tensors = Sequence[Tensor]
T = TypeVar("T")
Step = Callable[[Tensors], Tensors]
Splits: TypeAlias = "Tensor | Sequence[int]"
WORLD = global_process_set


class TensorCompressor(Protocol):
    """Horovod's interface for compressing tensors. A program may define its own class."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and a context for `decompress`."""

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in its original form. `ctx` is the context that `compress` returned."""


class Compression:
    """Horovod's compressors: `none` sends tensors unchanged, and `fp16` sends floats as float16."""

    class none:
        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, None]:
            return tensor, None

        @staticmethod
        def decompress(tensor: Tensor, ctx: object) -> Tensor:
            return tensor

    class fp16:
        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
            return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

        @staticmethod
        def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
            return tensor.to(ctx)


def poll(handle: OperationHandle[Any]) -> bool:
    """True if an operation has ended. Local."""
    return handle.poll()


def synchronize(handle: OperationHandle[T]) -> T:
    """Wait for an operation and return its result. Blocking.

    Raises `HorovodInternalError` if the operation has failed. All ranks then raise it.
    """
    return handle.wait()


# ---- allreduce


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> OperationHandle[Tensor]:
    """Begin an allreduce into a new tensor.

    Args:
        tensor: A host tensor, of the same shape and dtype on all ranks.
        average: Deprecated argument of Horovod. Pass `op` instead.
        name: The name that ranks match operations by.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: The tensor is multiplied by this before the reduction.
        postscale_factor: The result is multiplied by this.
        process_set: The ranks that take part.

    Returns:
        A handle for `synchronize`.
    """
    return _reduce([_copy(tensor)], name, _op(op, average), prescale_factor, postscale_factor, process_set, _first)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> OperationHandle[Tensor]:
    """Begin an allreduce in place. The arguments are those of `allreduce_async`."""
    return _reduce([tensor], name, _op(op, average), prescale_factor, postscale_factor, process_set, _first)


def allreduce_(tensor: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """Reduce a tensor over all ranks, in place. Blocking. The arguments are those of `allreduce_async_`."""
    return synchronize(allreduce_async_(tensor, *args, **keywords))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[TensorCompressor] = Compression.none,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> Tensor:
    """Reduce a tensor over all ranks into a new, differentiable tensor. Blocking.

    The arguments are those of `allreduce_async`, and `compression`, a class that compresses the tensors to send.
    """
    factors = (prescale_factor, postscale_factor, process_set)
    (result,) = grouped_allreduce([tensor], average, name, compression, op, *factors)
    return result


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> OperationHandle[list[Tensor]]:
    """Begin one allreduce of several tensors, into new tensors. The arguments are those of `allreduce_async`."""
    copies = [_copy(tensor) for tensor in tensors]
    return _reduce(copies, name, _op(op, average), prescale_factor, postscale_factor, process_set, list)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> OperationHandle[list[Tensor]]:
    """Begin one allreduce of several tensors, in place. The arguments are those of `allreduce_async`."""
    return _reduce(list(tensors), name, _op(op, average), prescale_factor, postscale_factor, process_set, list)


def grouped_allreduce_(tensors: Tensors, *args: Any, **keywords: Any) -> list[Tensor]:
    """Reduce several tensors in place, as one operation. Blocking. Arguments as in `grouped_allreduce_async_`."""
    return synchronize(grouped_allreduce_async_(tensors, *args, **keywords))


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[TensorCompressor] = Compression.none,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> list[Tensor]:
    """Reduce several tensors into new, differentiable tensors, as one operation. Blocking.

    The arguments are those of `allreduce`.
    """
    arguments = _op(op, average), prescale_factor, postscale_factor, process_set
    packed, contexts = zip(*[compression.compress(tensor) for tensor in tensors])

    def reduce(given: Tensors, named: str | None = None) -> list[Tensor]:
        return synchronize(grouped_allreduce_async(given, None, named, *arguments))

    results = _Followed.apply(lambda given: reduce(given, name), reduce, *packed)
    return [compression.decompress(result, context) for result, context in zip(results, contexts)]


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: HorovodOp, process_set: ProcessSet = WORLD
) -> Callable[[], Tensor]:
    """Begin an allreduce of a sparse tensor. It is made by an allgather of all ranks' entries.

    Return a function that waits for the result and returns it. The result is not coalesced. `op` is Average or Sum.
    """
    if op not in (HorovodOp.Average, HorovodOp.Sum):
        raise of_caller(NotImplementedError(f"sparse_allreduce_async: op is {op!r}: choose Average or Sum"))
    at, values = tensor._indices().t().contiguous(), tensor._values()
    handle = grouped_allgather_async([at, values], f"{name}.sparse" if name is not None else None, process_set)

    def finish() -> Tensor:
        places, summed = synchronize(handle)
        summed = summed / process_set.size() if op == HorovodOp.Average else summed
        return torch.sparse_coo_tensor(places.t(), summed, tensor.size(), check_invariants=False)

    return finish


# ---- allgather, broadcast, alltoall, reducescatter


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = WORLD
) -> OperationHandle[Tensor]:
    """Begin to concatenate all ranks' tensors along the first dimension, whose length may differ between ranks."""
    return _begin("allgather", [_copy(tensor)], name, process_set, _first)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = WORLD) -> Tensor:
    """Concatenate all ranks' tensors along the first dimension, whose length may differ between ranks. Blocking.

    The result is differentiable.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = WORLD
) -> OperationHandle[list[Tensor]]:
    """Do `allgather_async` for several tensors, as one operation."""
    return _begin("allgather", [_copy(tensor) for tensor in tensors], name, process_set, list)


def grouped_allgather(tensors: Tensors, name: str | None = None, process_set: ProcessSet = WORLD) -> list[Tensor]:
    """Do `allgather` for several tensors, as one operation. The results are differentiable. Blocking."""
    rows = [tensor.shape[0] for tensor in tensors if tensor.dim()]

    def forward(given: Tensors) -> list[Tensor]:
        return synchronize(grouped_allgather_async(given, name, process_set))

    def backward(gradients: Tensors) -> list[Tensor]:
        means = synchronize(grouped_allreduce_async(gradients, None, None, HorovodOp.Average, process_set=process_set))
        lengths = synchronize(allgather_async(torch.tensor([rows]), None, process_set))
        starts = lengths[: process_set.rank()].sum(0).tolist()
        return [mean.narrow(0, start, length) for mean, start, length in zip(means, starts, rows)]

    return list(_Followed.apply(forward, backward, *tensors))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD
) -> OperationHandle[Tensor]:
    """Begin a broadcast of the root's tensor into a new tensor. `root_rank` is a rank of the world."""
    return broadcast_async_(_copy(tensor), root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD
) -> OperationHandle[Tensor]:
    """Begin a broadcast of the root's tensor, in place. `root_rank` is a rank of the world."""
    if root_rank not in process_set.ranks:
        raise of_caller(ValueError(f"broadcast {name!r}: root_rank is {root_rank}, which {process_set} lacks"))
    return _begin("broadcast", [tensor], name, process_set, _first, root=root_rank)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD) -> Tensor:
    """Broadcast the root's tensor, in place. Blocking."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD) -> Tensor:
    """Broadcast the root's tensor into a new, differentiable tensor. Blocking."""

    def forward(given: Tensors) -> list[Tensor]:
        return [synchronize(broadcast_async(given[0], root_rank, name, process_set))]

    def backward(gradients: Tensors) -> list[Tensor]:
        mean = synchronize(allreduce_async(gradients[0], None, None, HorovodOp.Average, process_set=process_set))
        return [mean if rank() == root_rank else mean * 0]

    return _Followed.apply(forward, backward, tensor)[0]


def alltoall_async(
    tensor: Tensor, splits: Splits | None = None, name: str | None = None, process_set: ProcessSet = WORLD
) -> OperationHandle[tuple[Tensor, Tensor]]:
    """Begin to send the first `splits[0]` rows of a tensor to rank 0, the next `splits[1]` rows to rank 1, and so on.

    Without `splits` every rank gets an equal share.

    Returns:
        A handle. Its result is a pair: the rows received, and the number of rows from each rank.
    """
    members, given = process_set.members(), splits
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % len(members.names):
            raise of_caller(
                ValueError(
                    f"alltoall {name!r}: {rows} rows do not split evenly over {len(members.names)} ranks: pass splits"
                )
            )
        splits = [rows // len(members.names)] * len(members.names)
    if isinstance(splits, Tensor):
        if splits.is_floating_point():
            raise of_caller(ValueError(f"alltoall {name!r}: splits is of {splits.dtype}: pass integers"))
        splits = splits.tolist()
    splits = [int(each) for each in splits]
    if len(splits) != len(members.names) or sum(splits) != rows or min(splits) < 0:
        raise of_caller(
            ValueError(f"alltoall {name!r}: splits is {splits}: give {len(members.names)} numbers whose sum is {rows}")
        )

    def deliver(results: list[Tensor]) -> tuple[Tensor, Tensor]:
        kind, device = (given.dtype, "cpu") if isinstance(given, Tensor) else (torch.int32, "cpu")
        return results[0], torch.tensor(handle.received, dtype=kind, device=device)

    handle = _begin("alltoall", [_copy(tensor)], name, process_set, deliver, splits=splits)
    return handle


def alltoall(
    tensor: Tensor, splits: Splits | None = None, name: str | None = None, process_set: ProcessSet = WORLD
) -> Tensor | tuple[Tensor, Tensor]:
    """Exchange rows as `alltoall_async` does. The result is differentiable. Blocking.

    Return the rows received. If `splits` is given, return a pair: the rows, and the number of rows from each rank.
    """
    received: list[Tensor] = []

    def forward(given: Tensors) -> list[Tensor]:
        rows, counts = synchronize(alltoall_async(given[0], splits, name, process_set))
        received.append(counts)
        return [rows]

    def backward(gradients: Tensors) -> list[Tensor]:
        return [synchronize(alltoall_async(gradients[0], received[0], None, process_set))[0]]

    (result,) = _Followed.apply(forward, backward, tensor)
    return result if splits is None else (result, received[0])


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: HorovodOp = HorovodOp.Average,
    process_set: ProcessSet = WORLD,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> OperationHandle[Tensor]:
    """Begin a reduction whose result is split by rows among the ranks.

    If the rows do not divide evenly, the first ranks get one row more. The arguments are those of `allreduce_async`.
    """
    copies = [_copy(tensor)]
    return _begin("reducescatter", copies, name, process_set, _first, _op(op, None), prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: HorovodOp = HorovodOp.Average,
    process_set: ProcessSet = WORLD,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> OperationHandle[list[Tensor]]:
    """Do `reducescatter_async` for several tensors, as one operation."""
    copies = [_copy(tensor) for tensor in tensors]
    return _begin("reducescatter", copies, name, process_set, list, _op(op, None), prescale_factor, postscale_factor)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[TensorCompressor] = Compression.none,
    op: HorovodOp = HorovodOp.Average,
    process_set: ProcessSet = WORLD,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over all ranks, and return this rank's part of the rows, which is differentiable. Blocking.

    If the rows do not divide evenly, the first ranks get one row more. The arguments are those of `allreduce`.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[TensorCompressor] = Compression.none,
    op: HorovodOp = HorovodOp.Average,
    process_set: ProcessSet = WORLD,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Do `reducescatter` for several tensors, as one operation. The results are differentiable. Blocking."""
    factors = (prescale_factor, postscale_factor)
    packed, contexts = zip(*[compression.compress(tensor) for tensor in tensors])

    def forward(given: Tensors) -> list[Tensor]:
        return synchronize(grouped_reducescatter_async(given, name, op, process_set, *factors))

    def backward(gradients: Tensors) -> list[Tensor]:
        scale = prescale_factor * postscale_factor * ((process_set.size() or 1) if op == HorovodOp.Sum else 1)
        return synchronize(grouped_allgather_async([scale * each for each in gradients], None, process_set))

    results = _Followed.apply(forward, backward, *packed)
    return [compression.decompress(result, context) for result, context in zip(results, contexts)]


def barrier(process_set: ProcessSet = WORLD) -> None:
    """Wait until all ranks of the process set have called `barrier`. Blocking."""
    synchronize(_begin("barrier", [], None, process_set, list))


def join(device: int = -1) -> int:
    """Tell the other ranks that this rank has no more batches. Return the rank that called `join` last.

    Blocks until all ranks have called `join`. Until then this rank contributes zeros to the other ranks' allreduces.
    `device` is ignored.
    """
    return synchronize(_begin("join", [], "join", WORLD, int))


# ---- inside


def _begin(
    kind: str,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    deliver: Callable[..., T],
    op: HorovodOp = HorovodOp.Average,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: Sequence[int] = (),
) -> OperationHandle[T]:
    members = process_set.members()
    check_on_host(tensors, f"{kind} {name!r}")
    for tensor in tensors:
        if not tensor.dim() and kind in ("allgather", "alltoall", "reducescatter"):
            raise of_caller(ValueError(f"{kind} {name!r}: the tensor has no dimension: pass tensor.reshape(1)"))
        if kind in ("allreduce", "reducescatter"):
            reduction(REDUCTIONS[op], tensor.dtype)
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    shapes = [list(tensor.shape) for tensor in tensors]
    request = OperationRequest(kind, name or "", dtypes, shapes, int(op), prescale, postscale, root, list(splits))
    return members.begin(OperationHandle(request, tensors, deliver, members.waiting))


def _reduce(
    tensors: Tensors,
    name: str | None,
    op: HorovodOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    deliver: Callable[..., T],
) -> OperationHandle[T]:
    return _begin("allreduce", tensors, name, process_set, deliver, op=op, prescale=prescale, postscale=postscale)


def _op(op: HorovodOp | None, average: bool | None) -> HorovodOp:
    """Return the reduction that `op` or the deprecated `average` selects.

    Raises an error if both are given, or if the reduction is unknown or not supported.
    """
    if average is not None:
        if op is not None:
            raise of_caller(ValueError("op and average are both given: pass op alone"))
        warnings.warn("average is Horovod's old name: pass op=hvd.Average or hvd.Sum", DeprecationWarning, stacklevel=4)
        return HorovodOp.Average if average else HorovodOp.Sum
    if op is HorovodOp.Adasum:
        raise of_caller(NotImplementedError("op=Adasum is not supported: choose op=hvd.Average, and tune the rate"))
    if op is not None and op not in REDUCTIONS:
        raise of_caller(ValueError(f"op is {op!r}: choose hvd.Average, Sum, Min, Max or Product"))
    return HorovodOp.Average if op is None else HorovodOp(op)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format) if tensor.layout is torch.strided else tensor


def _first(results: list[Tensor]) -> Tensor:
    return results[0]


class _Followed(torch.autograd.Function):
    """Runs one function on tensors in the forward pass, and another on their gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, forward: Step, backward: Step, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.backward_of = backward
        return tuple(forward(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.backward_of(list(gradients)))

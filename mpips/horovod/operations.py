"""Operations with Horovod's names: allreduce and its family, asynchronous ones, and those that autograd follows.

Each begins by `_begin`, which gives a handle; `synchronize` waits for it. Gradients are Horovod's: that of an allreduce
is the same allreduce of the gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from mpips.collectives.errors import of_caller
from mpips.horovod.negotiation import REDUCTIONS, Handle, Op, Request
from mpips.horovod.world import ProcessSet, global_process_set, rank
from mpips.torch.tensors import check_on_host, reduction

Tensors = Sequence[Tensor]
T = TypeVar("T")
Step = Callable[[Tensors], Tensors]
Splits: TypeAlias = "Tensor | Sequence[int]"
WORLD = global_process_set


class Compressor(Protocol):
    """Horovod's interface of what compresses a tensor; a program may bring its own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what travels, and what `decompress` needs to know."""

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return a tensor as it was."""


class Compression:
    """Compress what travels: `none` leaves tensors as they are, `fp16` sends float16."""

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


def poll(handle: Handle[Any]) -> bool:
    """Return whether an operation has ended."""
    return handle.poll()


def synchronize(handle: Handle[T]) -> T:
    """Wait for an operation; return its result. HorovodInternalError where it has failed, as it has on all ranks."""
    return handle.wait()


# ---- allreduce


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> Handle[Tensor]:
    """Begin an allreduce into a new tensor. `op` is Average unless given."""
    return _reduce([_copy(tensor)], name, _op(op, average), prescale_factor, postscale_factor, process_set, _first)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> Handle[Tensor]:
    """Begin an allreduce in place."""
    return _reduce([tensor], name, _op(op, average), prescale_factor, postscale_factor, process_set, _first)


def allreduce_(tensor: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """Make an allreduce in place. Blocking. Arguments are those of `allreduce_async_`."""
    return synchronize(allreduce_async_(tensor, *args, **keywords))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> Tensor:
    """Make an allreduce into a new tensor, through which gradients flow. Blocking."""
    factors = (prescale_factor, postscale_factor, process_set)
    (result,) = grouped_allreduce([tensor], average, name, compression, op, *factors)
    return result


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> Handle[list[Tensor]]:
    """Begin one allreduce of many tensors, into new ones."""
    copies = [_copy(tensor) for tensor in tensors]
    return _reduce(copies, name, _op(op, average), prescale_factor, postscale_factor, process_set, list)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> Handle[list[Tensor]]:
    """Begin one allreduce of many tensors, in place."""
    return _reduce(list(tensors), name, _op(op, average), prescale_factor, postscale_factor, process_set, list)


def grouped_allreduce_(tensors: Tensors, *args: Any, **keywords: Any) -> list[Tensor]:
    """Make one allreduce of many tensors in place. Blocking. Arguments are those of `grouped_allreduce_async_`."""
    return synchronize(grouped_allreduce_async_(tensors, *args, **keywords))


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = WORLD,
) -> list[Tensor]:
    """Make one allreduce of many tensors, through which gradients flow. Blocking."""
    arguments = _op(op, average), prescale_factor, postscale_factor, process_set
    packed, contexts = zip(*[compression.compress(tensor) for tensor in tensors])

    def reduce(given: Tensors, named: str | None = None) -> list[Tensor]:
        return synchronize(grouped_allreduce_async(given, None, named, *arguments))

    results = _Followed.apply(lambda given: reduce(given, name), reduce, *packed)
    return [compression.decompress(result, context) for result, context in zip(results, contexts)]


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: Op, process_set: ProcessSet = WORLD
) -> Callable[[], Tensor]:
    """Begin an allreduce of a sparse tensor, by allgathers; call what is returned for its result."""
    if op not in (Op.Average, Op.Sum):
        raise of_caller(NotImplementedError(f"sparse_allreduce_async: op is {op!r}: choose Average or Sum"))
    at, values = tensor._indices().t().contiguous(), tensor._values()
    handle = grouped_allgather_async([at, values], f"{name}.sparse" if name is not None else None, process_set)

    def finish() -> Tensor:
        places, summed = synchronize(handle)
        summed = summed / process_set.size() if op == Op.Average else summed
        return torch.sparse_coo_tensor(places.t(), summed, tensor.size(), check_invariants=False)

    return finish


# ---- allgather, broadcast, alltoall, reducescatter


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = WORLD) -> Handle[Tensor]:
    """Begin to join all ranks' tensors along their first dimension, of which each may have any length."""
    return _begin("allgather", [_copy(tensor)], name, process_set, _first)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = WORLD) -> Tensor:
    """Join all ranks' tensors along their first dimension; gradients flow through. Blocking."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = WORLD
) -> Handle[list[Tensor]]:
    """Begin to join all ranks' tensors, for each of many."""
    return _begin("allgather", [_copy(tensor) for tensor in tensors], name, process_set, list)


def grouped_allgather(tensors: Tensors, name: str | None = None, process_set: ProcessSet = WORLD) -> list[Tensor]:
    """Join all ranks' tensors, for each of many; gradients flow through. Blocking."""
    rows = [tensor.shape[0] for tensor in tensors if tensor.dim()]

    def forward(given: Tensors) -> list[Tensor]:
        return synchronize(grouped_allgather_async(given, name, process_set))

    def backward(gradients: Tensors) -> list[Tensor]:
        means = synchronize(grouped_allreduce_async(gradients, None, None, Op.Average, process_set=process_set))
        lengths = synchronize(allgather_async(torch.tensor([rows]), None, process_set))
        starts = lengths[: process_set.rank()].sum(0).tolist()
        return [mean.narrow(0, start, length) for mean, start, length in zip(means, starts, rows)]

    return list(_Followed.apply(forward, backward, *tensors))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD
) -> Handle[Tensor]:
    """Begin to give all ranks the root's tensor, as a new one."""
    return broadcast_async_(_copy(tensor), root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD
) -> Handle[Tensor]:
    """Begin to give all ranks the root's tensor, in place. `root_rank` is a rank of the world."""
    if root_rank not in process_set.ranks:
        raise of_caller(ValueError(f"broadcast {name!r}: root_rank is {root_rank}, which {process_set} lacks"))
    return _begin("broadcast", [tensor], name, process_set, _first, root=root_rank)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD) -> Tensor:
    """Give all ranks the root's tensor, in place. Blocking."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD) -> Tensor:
    """Give all ranks the root's tensor, as a new one through which gradients flow. Blocking."""

    def forward(given: Tensors) -> list[Tensor]:
        return [synchronize(broadcast_async(given[0], root_rank, name, process_set))]

    def backward(gradients: Tensors) -> list[Tensor]:
        mean = synchronize(allreduce_async(gradients[0], None, None, Op.Average, process_set=process_set))
        return [mean if rank() == root_rank else mean * 0]

    return _Followed.apply(forward, backward, tensor)[0]


def alltoall_async(
    tensor: Tensor, splits: Splits | None = None, name: str | None = None, process_set: ProcessSet = WORLD
) -> Handle[tuple[Tensor, Tensor]]:
    """Begin to send `splits[k]` rows to each rank k, in order; an even share where no splits are given.

    Its result is a pair: the rows that have come, and how many of each rank.
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
    """Exchange rows as `alltoall_async` does; gradients flow back. Without splits return the rows alone. Blocking."""
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
    op: Op = Op.Average,
    process_set: ProcessSet = WORLD,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """Begin a reduction of which each rank takes its rows; the first ranks have one more where they do not divide."""
    copies = [_copy(tensor)]
    return _begin("reducescatter", copies, name, process_set, _first, _op(op, None), prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Op = Op.Average,
    process_set: ProcessSet = WORLD,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Tensor]]:
    """Begin a reduction of many tensors, of each of which a rank takes its rows."""
    copies = [_copy(tensor) for tensor in tensors]
    return _begin("reducescatter", copies, name, process_set, list, _op(op, None), prescale_factor, postscale_factor)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.Average,
    process_set: ProcessSet = WORLD,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce, and take this rank's rows; gradients flow back. Blocking."""
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.Average,
    process_set: ProcessSet = WORLD,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce many tensors, and take this rank's rows of each; gradients flow back. Blocking."""
    factors = (prescale_factor, postscale_factor)
    packed, contexts = zip(*[compression.compress(tensor) for tensor in tensors])

    def forward(given: Tensors) -> list[Tensor]:
        return synchronize(grouped_reducescatter_async(given, name, op, process_set, *factors))

    def backward(gradients: Tensors) -> list[Tensor]:
        scale = prescale_factor * postscale_factor * ((process_set.size() or 1) if op == Op.Sum else 1)
        return synchronize(grouped_allgather_async([scale * each for each in gradients], None, process_set))

    results = _Followed.apply(forward, backward, *packed)
    return [compression.decompress(result, context) for result, context in zip(results, contexts)]


def barrier(process_set: ProcessSet = WORLD) -> None:
    """Wait until all ranks of the set are here."""
    synchronize(_begin("barrier", [], None, process_set, list))


def join(device: int = -1) -> int:
    """Tell the others that this rank has no more batches, and bring zeros to their allreduces until all have joined.

    Return the rank that joined last. Blocking.
    """
    return synchronize(_begin("join", [], "join", WORLD, int))


# ---- inside


def _begin(
    kind: str,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    deliver: Callable[..., T],
    op: Op = Op.Average,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: Sequence[int] = (),
) -> Handle[T]:
    members = process_set.members()
    check_on_host(tensors, f"{kind} {name!r}")
    for tensor in tensors:
        if not tensor.dim() and kind in ("allgather", "alltoall", "reducescatter"):
            raise of_caller(ValueError(f"{kind} {name!r}: the tensor has no dimension: pass tensor.reshape(1)"))
        if kind in ("allreduce", "reducescatter"):
            reduction(REDUCTIONS[op], tensor.dtype)
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    shapes = [list(tensor.shape) for tensor in tensors]
    request = Request(kind, name or "", dtypes, shapes, int(op), prescale, postscale, root, list(splits))
    return members.begin(Handle(request, tensors, deliver, members.waiting))


def _reduce(
    tensors: Tensors,
    name: str | None,
    op: Op,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    deliver: Callable[..., T],
) -> Handle[T]:
    return _begin("allreduce", tensors, name, process_set, deliver, op=op, prescale=prescale, postscale=postscale)


def _op(op: Op | None, average: bool | None) -> Op:
    """Return the reduction that is asked for. ValueError where it is asked for twice, or is none."""
    if average is not None:
        if op is not None:
            raise of_caller(ValueError("op and average are both given: pass op alone"))
        warnings.warn("average is Horovod's old name: pass op=hvd.Average or hvd.Sum", DeprecationWarning, stacklevel=4)
        return Op.Average if average else Op.Sum
    if op is Op.Adasum:
        raise of_caller(NotImplementedError("op=Adasum is not supported: choose op=hvd.Average, and tune the rate"))
    if op is not None and op not in REDUCTIONS:
        raise of_caller(ValueError(f"op is {op!r}: choose hvd.Average, Sum, Min, Max or Product"))
    return Op.Average if op is None else Op(op)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format) if tensor.layout is torch.strided else tensor


def _first(results: list[Tensor]) -> Tensor:
    return results[0]


class _Followed(torch.autograd.Function):
    """Calls an operation on tensors forwards, and another one on their gradients backwards."""

    @staticmethod
    def forward(ctx: Any, forward: Step, backward: Step, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.backward_of = backward
        return tuple(forward(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.backward_of(list(gradients)))

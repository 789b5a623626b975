"""Convert PyTorch's tensors to flat host arrays for `mpips.collectives` and back, and convert PyTorch's reductions."""

from __future__ import annotations

import functools
import inspect
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed import ReduceOp

from mpips.collectives.agreement import SAME_VALUES, difference
from mpips.collectives.errors import MismatchError

# GradScaler warns that it passes itself to `step` of our optimizers. Users can do nothing about that warning.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)

T = TypeVar("T")

# dtypes that `collectives` moves as bytes and cannot compute with
MOVED_AS_BYTES = (torch.bool, torch.complex64, torch.complex128)
# reduction of torch.distributed -> name of the reduction in `collectives`
NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}
# reduction of torch.distributed -> MPI's operation on bytes
BITWISE = {ReduceOp.BAND: MPI.BAND, ReduceOp.BOR: MPI.BOR, ReduceOp.BXOR: MPI.BXOR}
REALS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


# ---- errors


class ArgumentError(RuntimeError, ValueError, TypeError):
    """A call of the backend has bad arguments. Nothing was sent, and the group can still be used.

    PyTorch's own backends raise RuntimeError for most bad arguments, and ValueError or TypeError for some. Programs try
    a call and catch RuntimeError to find out whether a backend supports the call. So this error derives from all three.
    """

    of_caller = True


def as_backend_error(error: Exception) -> Exception:
    """Turn a TypeError or ValueError that mpi4py or `collectives` has raised into an ArgumentError.

    Other errors are returned unchanged.
    """
    if isinstance(error, RuntimeError) or not isinstance(error, (TypeError, ValueError)):
        return error
    return ArgumentError(str(error))


# ---- tensors


def check_on_host(tensors: Sequence[Tensor], what: str) -> None:
    """Raise ArgumentError if a tensor is sparse or not on the host."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ArgumentError(
                f"{what}: a tensor has layout {tensor.layout}: pass dense tensors, as tensor.to_dense()"
            )
        if tensor.device.type != "cpu":
            raise ArgumentError(f"{what}: a tensor is on {tensor.device}: pass CPU tensors, as tensor.cpu()")


def find_overflow(scaler: GradScaler, optimizer: Any) -> Tensor:
    """Unscale an optimizer's gradients, unless that was done already, and return the scaler's overflow flag.

    The flag is above 0 if a gradient of this rank is infinite or NaN. The caller may change the flag, because
    `GradScaler.update` reads it later.
    """
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    flags: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    # The scaler has no flag if this worker has no gradient.
    return flags.setdefault(torch.device("cpu"), torch.zeros(()))


def flatten(tensor: Tensor) -> Tensor:
    """Return the tensor's elements in order, 1-D and detached.

    The result shares the memory of a contiguous tensor. It is a copy of any other tensor.
    """
    return _as_line(tensor.contiguous())


def flatten_result(tensor: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Return a 1-D tensor for the result of an operation, and a function that copies the result back into `tensor`.

    If `tensor` is contiguous, the 1-D tensor shares its memory, and the function is None.
    """
    if tensor.is_contiguous():
        return _as_line(tensor), None
    result = flatten(tensor)

    def copy_back() -> None:
        tensor.detach().copy_(result.view(tensor.shape))

    return result, copy_back


def from_array(array: NDArray[Any]) -> Tensor:
    """Return a tensor that shares an array's memory. `torch.from_numpy` alone does not accept NumPy's bfloat16."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the memory of a contiguous host tensor as bytes, without a copy."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return _as_line(tensor).view(torch.uint8).numpy()


def _as_line(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as 1-D with stride 1.

    `Tensor.view` would keep the stride of a tensor with a single element, which may be any number.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def as_movable(tensor: Tensor) -> Tensor:
    """View a contiguous 1-D tensor in a dtype that `collectives` can move."""
    return tensor.view(torch.uint8) if tensor.dtype in MOVED_AS_BYTES else tensor


def as_numbers(tensor: Tensor) -> Tensor:
    """View a contiguous 1-D tensor as real numbers. A complex number becomes two real numbers."""
    return tensor.view(REALS[tensor.dtype]) if tensor.dtype in REALS else tensor


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output, including those inside of lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from find_tensors(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from find_tensors(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from find_tensors(getattr(value, field.name))


# ---- sparse tensors


def sparse_parameters(module: torch.nn.Module) -> set[Tensor]:
    """Return the parameters whose gradients are sparse: the weights of embeddings made with sparse=True."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {each.weight for each in module.modules() if isinstance(each, kinds) and each.sparse}


# How many numbers describe a sparse tensor: the numbers of its entries, of its sparse dimensions and of all dimensions,
# its dtype, and up to 64 sizes of dimensions.
WORDS = 68


def check_sparse(tensor: Tensor, op: Any) -> Reduction:
    """Return the reduction for a sparse all_reduce.

    Raises ArgumentError unless `op` is SUM or AVG and the tensor is on the host.
    """
    if tensor.device.type != "cpu":
        raise ArgumentError(f"all_reduce: a tensor is on {tensor.device}: pass CPU tensors, as tensor.cpu()")
    how = reduction(op, tensor.dtype)
    if how.name not in ("sum", "mean") or how.factor is not None:
        name = str(op.op if hasattr(op, "op") else op).rpartition(".")[2]
        raise ArgumentError(
            f"all_reduce: {name} of a sparse tensor of {tensor.dtype}: sparse tensors are added (SUM, "
            "AVG) only; pass dense tensors, as tensor.to_dense()"
        )
    return how


def describe_sparse(tensor: Tensor) -> Tensor:
    """Return a tensor of WORDS numbers that describes a coalesced sparse tensor to the other ranks."""
    kind = zlib.crc32(str(tensor.dtype).encode())
    numbers = [tensor.indices().shape[1], tensor.sparse_dim(), tensor.dim(), kind, *tensor.shape]
    return torch.tensor(numbers + [0] * (WORDS - len(numbers)))


def count_entries(every: Tensor) -> list[int]:
    """Return the number of entries on each rank, from the gathered descriptions.

    Raises MismatchError if the tensors differ in shape, dtype or number of sparse dimensions.
    """
    if (every[:, 1:] != every[0, 1:]).any():
        shapes = [[("the sparse tensor", _shape_of(words))] for words in every.tolist()]
        raise MismatchError(f"all_reduce: {difference(dict(enumerate(shapes)))}: {SAME_VALUES}")
    return [int(count) for count in every[:, 0]]


def _shape_of(words: Sequence[int]) -> str:
    dtypes = [str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)]
    dtype = next(each for each in dtypes if zlib.crc32(each.encode()) == words[3])
    shape = ", ".join(map(str, words[4 : 4 + words[2]]))
    return f"{dtype} of shape ({shape}) with {words[1]} sparse dimensions"


# ---- reductions


class Reduction(NamedTuple):
    """A reduction of torch.distributed, in terms of operations of `collectives` and MPI."""

    # the operation's name in `collectives`, or "" if `bitwise` is used
    name: str
    # an operation of MPI that is run on bytes
    bitwise: MPI.Op | None = None
    # Unless this is None, every rank first multiplies its tensor by it.
    factor: Any = None
    # True if the result, a sum of integers, is then divided by the number of ranks. The division rounds toward 0, as
    # in NCCL's AVG.
    divided: bool = False


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """Convert a reduction of torch.distributed, for tensors of a dtype. Raise ArgumentError if it is not supported."""
    kind = op.op if hasattr(op, "op") else op
    name = str(kind).rpartition(".")[2]
    if kind in BITWISE:
        if dtype.is_floating_point or dtype.is_complex:
            raise ArgumentError(f"{name} of {dtype}: bitwise reductions take integers and bool")
        return Reduction("", BITWISE[kind])
    if kind == ReduceOp.PREMUL_SUM:
        return Reduction("sum", factor=op.factor)
    if kind not in NAMES:
        raise ArgumentError(
            f"unknown reduction {op}: choose SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM"
        )
    if kind == ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        if dtype == torch.bool:
            raise ArgumentError(f"AVG of {dtype}: the mean is taken of numbers; use SUM, which is true where any is")
        return Reduction("sum", divided=True)
    if dtype.is_complex and kind not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ArgumentError(f"{name} of {dtype}: complex numbers are added only (SUM, AVG)")
    if dtype == torch.bool:
        return Reduction("", MPI.LOR if kind in (ReduceOp.SUM, ReduceOp.MAX) else MPI.LAND)
    return Reduction(NAMES[kind])


# ---- torch.compile


def uncompiled(*names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator that keeps `torch.compile` from tracing into the methods `names`, because they call MPI.

    Without `names` this applies to all methods whose names do not begin with two underscores.
    """

    def change(cls: type[T]) -> type[T]:
        for name, method in list(vars(cls).items()):
            if name in names or (not names and inspect.isfunction(method) and not name.startswith("__")):
                setattr(cls, name, _not_compiled(method))
        return cls

    return change


def _not_compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    disabled: list[Callable[..., Any]] = []

    # torch.compiler.disable imports the compiler, which takes seconds. So we call it only if the program compiles.
    @functools.wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        if not torch.compiler.is_compiling():
            return method(*args, **keywords)
        if not disabled:
            why = "it talks to other processes: compile without fullgraph=True"
            disabled.append(torch.compiler.disable(method, reason=why))
        return disabled[0](*args, **keywords)

    return call

"""PyTorch's tensors and reductions as those of `collectives`: contiguous, flat, on the host; and back again."""

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

from mpips.collectives.errors import MismatchError

warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)  # to `step`

T = TypeVar("T")

MOVED_AS_BYTES = (torch.bool, torch.complex64, torch.complex128)
"""Types that move, but are no numbers to `collectives`."""
NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}
BITWISE = {ReduceOp.BAND: MPI.BAND, ReduceOp.BOR: MPI.BOR, ReduceOp.BXOR: MPI.BXOR}
REALS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


# ---- errors


class ArgumentError(RuntimeError, ValueError, TypeError):
    """A call of the backend got arguments that do not fit; nothing was sent, and the group goes on.

    PyTorch's own backends raise RuntimeError for most of them, ValueError or TypeError for some, and programs ask by
    `except RuntimeError` what a backend can do. It is caught by each of the three.
    """

    of_caller = True


def as_backend_error(error: Exception) -> Exception:
    """The RuntimeError for an argument that was refused below the backend, as by mpi4py; other errors as they are."""
    if isinstance(error, RuntimeError) or not isinstance(error, (TypeError, ValueError)):
        return error
    return ArgumentError(str(error))


# ---- tensors


def check_on_host(tensors: Sequence[Tensor], what: str) -> None:
    """Raise ArgumentError where a tensor is sparse or not on the host."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ArgumentError(
                f"{what}: a tensor has layout {tensor.layout}: pass dense tensors, as tensor.to_dense()"
            )
        if tensor.device.type != "cpu":
            raise ArgumentError(f"{what}: a tensor is on {tensor.device}: pass CPU tensors, as tensor.cpu()")


def find_overflow(scaler: GradScaler, optimizer: Any) -> Tensor:
    """Unscale an optimizer's gradients, where that was not done; return what the scaler keeps of their overflow.

    It is above 0 where one was infinite or NaN here, and `GradScaler.update` reads what stands in it then.
    """
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    return found.setdefault(torch.device("cpu"), torch.zeros(()))  # this worker may have no gradient


def flatten(tensor: Tensor) -> Tensor:
    """Return the tensor's elements in order, 1-D, detached: its memory where it is contiguous, else a copy."""
    return _as_line(tensor.contiguous())


def flatten_result(tensor: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Return where to write the result of an operation, 1-D, and what then copies it back to the tensor. Nothing does
    where the tensor is contiguous."""
    if tensor.is_contiguous():
        return _as_line(tensor), None
    result = flatten(tensor)

    def copy_back() -> None:
        tensor.detach().copy_(result.view(tensor.shape))

    return result, copy_back


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the memory of a contiguous host tensor as bytes; empty for one without elements."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return _as_line(tensor).view(torch.uint8).numpy()


def _as_line(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as 1-D of stride 1: `view` keeps the stride of a single element, whatever it is."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def as_movable(tensor: Tensor) -> Tensor:
    """View a contiguous 1-D tensor as one of a type that `collectives` moves."""
    return tensor.view(torch.uint8) if tensor.dtype in MOVED_AS_BYTES else tensor


def as_numbers(tensor: Tensor) -> Tensor:
    """View a contiguous 1-D tensor as one of real numbers: of complex ones both parts."""
    return tensor.view(REALS[tensor.dtype]) if tensor.dtype in REALS else tensor


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Find the tensors in a module's output: in lists, tuples, dicts and dataclasses."""
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
    """Return the parameters whose gradients come as rows: weights of embeddings made with sparse=True."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {each.weight for each in module.modules() if isinstance(each, kinds) and each.sparse}


WORDS = 68
"""Numbers that describe a sparse tensor: entries, sparse and all dimensions, type, and a shape of 64 at most."""


def check_sparse(tensor: Tensor, op: Any) -> Reduction:
    """Return how sparse tensors are added: SUM or AVG. ArgumentError for other reductions, and off the host."""
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
    """Describe a coalesced sparse tensor by WORDS numbers, for the other ranks."""
    kind = zlib.crc32(str(tensor.dtype).encode())
    numbers = [tensor.indices().shape[1], tensor.sparse_dim(), tensor.dim(), kind, *tensor.shape]
    return torch.tensor(numbers + [0] * (WORDS - len(numbers)))


def count_entries(every: Tensor) -> list[int]:
    """Return each rank's entries, from all ranks' descriptions. MismatchError where the tensors do not fit together."""
    for rank, words in enumerate(every.tolist()):
        first = every[0].tolist()
        if words[1:] != first[1:]:
            raise MismatchError(
                f"all_reduce: sparse tensors differ: rank 0 has {_shape_of(first)} and rank {rank} {_shape_of(words)}: "
                "let all ranks pass one shape, one type and as many sparse dimensions"
            )
    return [int(count) for count in every[:, 0]]


def _shape_of(words: Sequence[int]) -> str:
    dtypes = [str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)]
    dtype = next(each for each in dtypes if zlib.crc32(each.encode()) == words[3])
    shape = ", ".join(map(str, words[4 : 4 + words[2]]))
    return f"shape ({shape}) of {dtype} with {words[1]} sparse dimensions"


# ---- reductions


class Reduction(NamedTuple):
    """A way to reduce tensors."""

    name: str
    """As `collectives` calls it; "" where it is bitwise."""
    bitwise: MPI.Op | None = None
    """MPI's operation on bytes."""
    factor: Any = None
    """Every rank's tensor is multiplied by it first, unless it is None."""
    divided: bool = False
    """True where a sum of integers is divided by the number of ranks, toward 0, as NCCL's AVG does."""


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """Return how c10d's `op` reduces tensors of a type. Raise ArgumentError where it cannot."""
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
    """Keep `torch.compile` from tracing into methods of a class, which call MPI: these, or all where none is named.

    The compiler is not imported for it, which would take seconds.
    """

    def change(cls: type[T]) -> type[T]:
        for name, method in list(vars(cls).items()):
            if name in names or (not names and inspect.isfunction(method) and not name.startswith("__")):
                setattr(cls, name, _not_compiled(method))
        return cls

    return change


def _not_compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        if not torch.compiler.is_compiling():
            return method(*args, **keywords)
        if not disabled:
            why = "it talks to other processes: compile without fullgraph=True"
            disabled.append(torch.compiler.disable(method, reason=why))
        return disabled[0](*args, **keywords)

    return call

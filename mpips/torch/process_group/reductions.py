"""c10d's reductions: what each is called in `collectives`, and those that only an MPI's own allreduce has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

NAMES = {
    ReduceOp.SUM: "sum", ReduceOp.AVG: "mean", ReduceOp.PRODUCT: "prod", ReduceOp.MIN: "min", ReduceOp.MAX: "max",
}  # fmt: skip
BITWISE = {ReduceOp.BAND: MPI.BAND, ReduceOp.BOR: MPI.BOR, ReduceOp.BXOR: MPI.BXOR}
REALS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Reduction(NamedTuple):
    """How a tensor is reduced."""

    name: str
    """As `collectives` calls it; "" where it is bitwise."""
    bitwise: Any
    """MPI's operation on bytes, or None."""
    factor: Any
    """What every rank's tensor is multiplied by first, or None."""
    divided: bool = False
    """Whether a sum of integers is divided by the number of ranks, toward 0, as NCCL's AVG does."""


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """How c10d's `op` reduces tensors of a type. TypeError or ValueError where it cannot."""
    kind = op.op if hasattr(op, "op") else op
    if kind in BITWISE:
        if dtype.is_floating_point or dtype.is_complex:
            raise TypeError(f"{name(kind)} of {dtype}: bitwise reductions take integers and bool")
        return Reduction("", BITWISE[kind], None)
    if kind == ReduceOp.PREMUL_SUM:
        return Reduction("sum", None, op.factor)
    if kind not in NAMES:
        raise ValueError(f"unknown reduction {op}: choose SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM")
    if kind == ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        if dtype == torch.bool:
            raise TypeError(f"AVG of {dtype}: the mean is taken of numbers; use SUM, which is true where any is")
        return Reduction("sum", None, None, True)
    if dtype.is_complex and kind not in (ReduceOp.SUM, ReduceOp.AVG):
        raise TypeError(f"{name(kind)} of {dtype}: complex numbers are added only (SUM, AVG)")
    if dtype == torch.bool:
        return Reduction("", MPI.LOR if kind in (ReduceOp.SUM, ReduceOp.MAX) else MPI.LAND, None)
    return Reduction(NAMES[kind], None, None)


def numbers(tensor: Tensor) -> Tensor:
    """A contiguous 1-D tensor as one of real numbers: of complex ones both parts."""
    return tensor.view(REALS[tensor.dtype]) if tensor.dtype in REALS else tensor


def name(kind: Any) -> str:
    """The reduction's name in c10d."""
    return str(kind).rpartition(".")[2]

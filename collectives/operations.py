"""The reductions: how NumPy and MPI spell each, and which element types each takes.

float16 sums round after every addition, as MPI's own do. bfloat16 is the NumPy element type of the ml_dtypes package;
MPI has no such type, so those sums are always taken here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Operation:
    """A reduction of two arrays into one, element by element; `mean` divides the sum by the number of ranks."""

    name: str
    ufunc: np.ufunc
    mpi: MPI.Op
    is_mean: bool = False

    @property
    def into(self) -> Callable[[Any, Any, Any], Any]:
        """The reduction as a call (first, second, result)."""
        return {"min": _minimum, "max": _maximum}.get(self.name, self.ufunc)


def _minimum(first: Any, second: Any, result: Any) -> Any:
    return np.minimum(first, second, out=result)  # NumPy 2.5 and later want it by name


def _maximum(first: Any, second: Any, result: Any) -> Any:
    return np.maximum(first, second, out=result)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("sum", np.add, MPI.SUM),
        Operation("min", np.minimum, MPI.MIN),
        Operation("max", np.maximum, MPI.MAX),
        Operation("prod", np.multiply, MPI.PROD),
        Operation("mean", np.add, MPI.SUM, is_mean=True),
    )
}


def operation(name: str, dtype: np.dtype[Any]) -> Operation:
    """The operation called `name` on elements of `dtype`; ValueError with the choices otherwise."""
    if not isinstance(name, str):
        raise TypeError(f"op {name!r} is of type {type(name).__name__}: pass one of {', '.join(OPERATIONS)}, as a word")
    found = OPERATIONS.get(name)
    if found is None:
        raise ValueError(f"unknown operation {name!r}: choose one of {', '.join(OPERATIONS)}")
    if not (dtype.kind in "iuf" and dtype.isnative) and dtype.name != "bfloat16":
        raise ValueError(
            f"cannot reduce elements of type {dtype.name}{'' if dtype.isnative else ' in the other byte order'}: "
            "use float16, bfloat16, float32, float64 or integers, as this machine has them"
        )
    if found.is_mean and dtype.kind in "iu":
        raise ValueError(f"the mean of {dtype.name} elements is no {dtype.name}: use op='sum' and divide, or floats")
    return found


def scale(array: NDArray[Any], ranks: int) -> tuple[Any, tuple[Any, ...]]:
    """The call that divides `array` by the number of ranks, in place."""
    return np.true_divide, (array, array.dtype.type(ranks), array)


def mpi_type(dtype: np.dtype[Any]) -> MPI.Datatype | None:
    """The MPI type that MPI can reduce, or None where it has none."""
    if dtype.kind not in "iuf" or dtype.itemsize not in (1, 2, 4, 8) or dtype.char == "e":
        return None
    return MPI.Datatype.fromcode(dtype.char)

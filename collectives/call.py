"""One collective call, as data that all ranks must agree on, and the reductions that it may name.

`Operation` says how NumPy and MPI spell a reduction, and which element types it takes. float16 sums round after every
addition, as MPI's own do. bfloat16 is the NumPy element type of the ml_dtypes package; MPI has no such type, so those
sums are always taken here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from mpi4py import MPI

from mpips.collectives.arrays import type_name
from mpips.collectives.errors import did_you_mean
from mpips.collectives.kernels.sums import Step, steps
from mpips.collectives.schedule.model import KINDS, cut

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Body(Protocol):
    """The part of a call that moves and adds, once it is clear that all ranks are in the same call."""

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""

    def free(self) -> None:
        """Give back what it holds of MPI."""


class Runner(Protocol):
    """Carry a call out. `fast` does it at once, or tells how far it came (`node.executor`)."""

    fast: Callable[[], int]
    holds: bool
    """Whether it has work vectors of its own."""

    def steps(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""

    def rest(self) -> Iterator[None]:
        """Go on from where all have met."""

    def free(self) -> None:
        """Give back what it holds of MPI."""


REDUCING = ("allreduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce")


@dataclass(frozen=True)
class Call:
    """`kind` over vectors of `n` elements between `p` ranks; `n` counts the whole vector, not a rank's block.

    Rank r's block is [cut(n, p, r), cut(n, p, r + 1)), in reduce_scatter, allgather and alltoall.
    """

    kind: str
    n: int
    dtype: np.dtype[Any]
    operation: Operation | None
    root: int
    algorithm: str
    p: int
    label: str = ""
    """What the caller calls it for; ranks compare that, too."""
    text: str = field(init=False)
    """What ranks compare: the same on all of them, or the call is refused on all of them."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            perhaps = did_you_mean(self.kind, KINDS)
            raise ValueError(f"unknown collective {self.kind!r}{perhaps}: choose one of {', '.join(KINDS)}")
        text = self.described()
        object.__setattr__(self, "text", f"{self.label} ({text})" if self.label else text)

    def described(self) -> str:
        """The call in words, without its label."""
        parts = [f"{self.kind} of {self.n} {type_name(self.dtype)}"]
        if self.operation is not None:
            parts.append(self.operation.name)
        if self.kind in ROOTED:
            parts.append(f"root {self.root}")
        return f"{', '.join(parts)}, algorithm {self.algorithm}"

    @property
    def nbytes(self) -> int:
        return self.n * self.dtype.itemsize

    def more_algorithms(self, nodes: int) -> list[str]:
        """Return what a plan of such a call takes as its algorithm beside those of `collectives.schedule.catalog`."""
        between = ["native"] if nodes > 1 else ["shared_memory", "native"]
        return ["auto", *(["reproducible"] if self.kind == "allreduce" else []), *between]

    def block(self, rank: int) -> tuple[int, int]:
        """Return where the rank's block begins and ends."""
        return int(cut(self.n, self.p, rank)), int(cut(self.n, self.p, rank + 1))

    def arrival(self, rank: int, source: int) -> tuple[int, int]:
        """In alltoall: where in the rank's out the block from `source` goes; blocks there are as long as its own."""
        start, stop = self.block(rank)
        return source * (stop - start), (source + 1) * (stop - start)

    def extent_of_x(self, rank: int, in_place: bool) -> tuple[int, int]:
        """Return which elements of the whole vector the argument `x` holds."""
        return self.block(rank) if self.kind == "allgather" and not in_place else (0, self.n)

    def extent_of_out(self, rank: int, in_place: bool) -> tuple[int, int]:
        """Return which elements of the whole vector `out` holds (`x` itself when in place)."""
        return self.block(rank) if self.kind == "reduce_scatter" and not in_place else (0, self.n)

    def sizes(self, rank: int) -> tuple[int, int]:
        """Elements of x and of out, when both are given."""
        start, stop = self.block(rank)
        own = stop - start
        x = own if self.kind == "allgather" else self.n
        return x, {"reduce_scatter": own, "alltoall": own * self.p}.get(self.kind, self.n)

    def sources(self, owner: int) -> list[int]:
        """Return whose x goes into the owner's piece of the result."""
        if self.kind in REDUCING:
            return list(range(self.p))
        return [self.root if self.kind == "broadcast" else owner]

    def readers(self, owner: int) -> list[int]:
        """Return whose out wants the owner's piece of the result."""
        if self.kind == "reduce_scatter":
            return [owner]
        return [self.root] if self.kind == "reduce" else list(range(self.p))


def see_root(root: object, ranks: int) -> None:
    """TypeError or ValueError where it is the number of none of so many ranks."""
    if not isinstance(root, (int, np.integer)):
        raise TypeError(f"root {root!r} is of type {type(root).__name__}: pass a rank's number")
    if not 0 <= root < ranks:
        raise ValueError(f"root {root} is no rank of {ranks}: choose one from 0 to {ranks - 1}")


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


def _minimum(first: NDArray[Any], second: NDArray[Any], result: NDArray[Any]) -> NDArray[Any]:
    return np.minimum(first, second, out=result)  # NumPy 2.5 and later want it by name


def _maximum(first: NDArray[Any], second: NDArray[Any], result: NDArray[Any]) -> NDArray[Any]:
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
        perhaps = did_you_mean(name, OPERATIONS)
        raise ValueError(f"unknown operation {name!r}{perhaps}: choose one of {', '.join(OPERATIONS)}")
    if not (dtype.isnative and (dtype.kind in "iuf" or dtype.name == "bfloat16")):
        raise ValueError(
            f"cannot reduce elements of type {dtype.name}{'' if dtype.isnative else ' in the other byte order'}: "
            "use float16, bfloat16, float32, float64 or integers, as this machine has them"
        )
    if found.is_mean and dtype.kind in "iu":
        raise ValueError(f"the mean of {dtype.name} elements is no {dtype.name}: use op='sum' and divide, or floats")
    return found


def scale(array: NDArray[Any], ranks: int) -> list[Step]:
    """Return the calls that divide `array` by the number of ranks, in place."""
    return steps(np.add, [array], array, divisor=ranks)


def mpi_type(dtype: np.dtype[Any]) -> MPI.Datatype | None:
    """The MPI type that MPI can reduce, or None where it has none."""
    if dtype.kind not in "iuf" or dtype.itemsize not in (1, 2, 4, 8) or dtype.char == "e":
        return None
    return MPI.Datatype.fromcode(dtype.char)

"""A collective call as data that ranks compare, and the reductions, such as "sum", that a call may use.

A `ReduceOp` combines two arrays element by element; it has a counterpart in NumPy and one in MPI. float16 sums round
after every addition, as MPI's own sums do. bfloat16 is the NumPy element type of the ml_dtypes package. MPI has no
bfloat16, so this package always computes bfloat16 sums itself.
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
    """The part of a call that moves and adds data. It runs as soon as all ranks are known to be in the same call."""

    def run(self) -> Iterator[None]:
        """Run the operation. Yields whenever it has to wait."""

    def free(self) -> None:
        """Free the MPI objects of the body."""


class Runner(Protocol):
    """Runs a compiled call: waits until all ranks have entered the call, and computes the result."""

    # Runs the call, if possible to its end. Returns DONE, or a code that says how far the call has come; see
    # `node.executor`.
    fast: Callable[[], int]
    # True if the runner has allocated memory for work vectors
    holds: bool

    def steps(self) -> Iterator[None]:
        """Run the call from its beginning. Yields whenever it has to wait."""

    def rest(self) -> Iterator[None]:
        """Run the rest of the call after `fast` has returned MET, which means that all ranks have entered the call."""

    def free(self) -> None:
        """Free the MPI objects of the runner."""


REDUCING = ("allreduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce")


@dataclass(frozen=True)
class Call:
    """A collective over vectors of `n` elements between `p` ranks.

    In reduce_scatter, allgather and alltoall, `n` is the size of the whole vector. The block of rank r in this vector
    is the elements [cut(n, p, r), cut(n, p, r + 1)); see `schedule.model.cut`.
    """

    # one of `schedule.model.KINDS`
    kind: str
    n: int
    dtype: np.dtype[Any]
    # the operation of the reduction; None if the kind of call does not reduce
    reduction: ReduceOp | None
    # the root; 0 if the kind of call has no root
    root: int
    # The name that the user gave. "auto" and "reproducible" are replaced by the algorithm that they stand for.
    algorithm: str
    # number of ranks
    p: int
    # the caller's name for this call, such as "layer 3"
    label: str = ""
    # The call in words, with its label. Ranks compare this text: if it differs, all ranks raise MismatchError.
    text: str = field(init=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            perhaps = did_you_mean(self.kind, KINDS)
            raise ValueError(f"unknown collective {self.kind!r}{perhaps}: choose one of {', '.join(KINDS)}")
        text = self.describe()
        object.__setattr__(self, "text", f"{self.label} ({text})" if self.label else text)

    def describe(self) -> str:
        """Return the call in words, without its label."""
        parts = [f"{self.kind} of {self.n} {type_name(self.dtype)}"]
        if self.reduction is not None:
            parts.append(self.reduction.name)
        if self.kind in ROOTED:
            parts.append(f"root {self.root}")
        return f"{', '.join(parts)}, algorithm {self.algorithm}"

    @property
    def nbytes(self) -> int:
        return self.n * self.dtype.itemsize

    def more_algorithms(self, nodes: int) -> list[str]:
        """Return the algorithm names that this call accepts in addition to those of `collectives.schedule.catalog`."""
        between = ["native"] if nodes > 1 else ["shared_memory", "native"]
        return ["auto", *(["reproducible"] if self.kind == "allreduce" else []), *between]

    def block(self, rank: int) -> tuple[int, int]:
        return int(cut(self.n, self.p, rank)), int(cut(self.n, self.p, rank + 1))

    def arrival(self, rank: int, source: int) -> tuple[int, int]:
        """Return the interval of `rank`'s `out` that receives the block from rank `source` in an alltoall.

        Every block that `rank` receives has the size of the block `self.block(rank)`.
        """
        start, stop = self.block(rank)
        return source * (stop - start), (source + 1) * (stop - start)

    def extent_of_x(self, rank: int, in_place: bool) -> tuple[int, int]:
        """Return which interval of the whole vector the argument `x` holds on this rank."""
        return self.block(rank) if self.kind == "allgather" and not in_place else (0, self.n)

    def extent_of_out(self, rank: int, in_place: bool) -> tuple[int, int]:
        """Return which interval of the whole vector `out` holds on this rank. In place, `out` is `x`."""
        return self.block(rank) if self.kind == "reduce_scatter" and not in_place else (0, self.n)

    def sizes(self, rank: int) -> tuple[int, int]:
        """Return the number of elements of x and of out, if the call is not in place."""
        start, stop = self.block(rank)
        own = stop - start
        x = own if self.kind == "allgather" else self.n
        return x, {"reduce_scatter": own, "alltoall": own * self.p}.get(self.kind, self.n)

    def sources(self, owner: int) -> list[int]:
        """Return the ranks whose `x` contributes to the piece of the result that rank `owner` computes."""
        if self.kind in REDUCING:
            return list(range(self.p))
        return [self.root if self.kind == "broadcast" else owner]

    def readers(self, owner: int) -> list[int]:
        """Return the ranks whose `out` receives the piece of the result that rank `owner` computes."""
        if self.kind == "reduce_scatter":
            return [owner]
        return [self.root] if self.kind == "reduce" else list(range(self.p))


def check_root(root: object, ranks: int) -> None:
    """Raise TypeError or ValueError unless `root` is an integer from 0 to `ranks` - 1."""
    if not isinstance(root, (int, np.integer)):
        raise TypeError(f"root {root!r} is of type {type(root).__name__}: pass a rank's number")
    if not 0 <= root < ranks:
        raise ValueError(f"root {root} is not one of the {ranks} ranks: choose one from 0 to {ranks - 1}")


@dataclass(frozen=True)
class ReduceOp:
    """An elementwise reduction of two arrays. "mean" is a sum that is divided by the number of ranks at the end."""

    name: str
    ufunc: np.ufunc
    mpi: MPI.Op
    is_mean: bool = False

    @property
    def combine(self) -> Callable[[Any, Any, Any], Any]:
        """The reduction as a function of (first, second, result)."""
        return {"min": _minimum, "max": _maximum}.get(self.name, self.ufunc)


def _minimum(first: NDArray[Any], second: NDArray[Any], result: NDArray[Any]) -> NDArray[Any]:
    # NumPy 2.5 and later take `out` of minimum and maximum by keyword only.
    return np.minimum(first, second, out=result)


def _maximum(first: NDArray[Any], second: NDArray[Any], result: NDArray[Any]) -> NDArray[Any]:
    return np.maximum(first, second, out=result)


REDUCTIONS = {
    reduction.name: reduction
    for reduction in (
        ReduceOp("sum", np.add, MPI.SUM),
        ReduceOp("min", np.minimum, MPI.MIN),
        ReduceOp("max", np.maximum, MPI.MAX),
        ReduceOp("prod", np.multiply, MPI.PROD),
        ReduceOp("mean", np.add, MPI.SUM, is_mean=True),
    )
}


def find_reduction(name: str, dtype: np.dtype[Any]) -> ReduceOp:
    """Return the reduction with this name. Raise ValueError or TypeError if it does not exist for this dtype."""
    if not isinstance(name, str):
        raise TypeError(f"op {name!r} is of type {type(name).__name__}: pass one of {', '.join(REDUCTIONS)}, as a word")
    reduction = REDUCTIONS.get(name)
    if reduction is None:
        perhaps = did_you_mean(name, REDUCTIONS)
        raise ValueError(f"unknown operation {name!r}{perhaps}: choose one of {', '.join(REDUCTIONS)}")
    if not (dtype.isnative and (dtype.kind in "iuf" or dtype.name == "bfloat16")):
        raise ValueError(
            f"cannot reduce elements of type {dtype.name}{'' if dtype.isnative else ' in the other byte order'}: "
            "use float16, bfloat16, float32, float64 or integers, as this machine has them"
        )
    if reduction.is_mean and dtype.kind in "iu":
        raise ValueError(
            f"the mean of {dtype.name} elements is not {dtype.name}: use op='sum' and divide, or pass floats"
        )
    return reduction


def scale(array: NDArray[Any], ranks: int) -> list[Step]:
    """Return the steps that divide `array` by the number of ranks, in place."""
    return steps(np.add, [array], array, divisor=ranks)


def mpi_type(dtype: np.dtype[Any]) -> MPI.Datatype | None:
    """Return the MPI datatype for this dtype, or None if MPI cannot reduce elements of this dtype."""
    # "e" is float16
    if dtype.kind not in "iuf" or dtype.itemsize not in (1, 2, 4, 8) or dtype.char == "e":
        return None
    return MPI.Datatype.fromcode(dtype.char)

"""One collective call, as data: what all ranks must agree on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collectives.operations import Operation
from collectives.schedule.model import KINDS, cut

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
            raise ValueError(f"unknown collective {self.kind!r}: choose one of {', '.join(KINDS)}")
        text = self.described()
        object.__setattr__(self, "text", f"{self.label} ({text})" if self.label else text)

    def described(self) -> str:
        """The call in words, without its label."""
        parts = [f"{self.kind} of {self.n} {self.dtype.name}"]
        if self.operation is not None:
            parts.append(self.operation.name)
        if self.kind in ROOTED:
            parts.append(f"root {self.root}")
        return f"{', '.join(parts)}, algorithm {self.algorithm}"

    @property
    def nbytes(self) -> int:
        return self.n * self.dtype.itemsize

    def more_algorithms(self, nodes: int) -> list[str]:
        """What a plan of such a call takes as its algorithm beside those of `collectives.schedule.catalog`."""
        between = ["native"] if nodes > 1 else ["shared_memory", "native"]
        return ["auto", *(["reproducible"] if self.kind == "allreduce" else []), *between]

    def block(self, rank: int) -> tuple[int, int]:
        """Where the rank's block begins and ends."""
        return int(cut(self.n, self.p, rank)), int(cut(self.n, self.p, rank + 1))

    def arrival(self, rank: int, source: int) -> tuple[int, int]:
        """In alltoall: where in the rank's out the block from `source` goes; blocks there are as long as its own."""
        start, stop = self.block(rank)
        return source * (stop - start), (source + 1) * (stop - start)

    def extent_of_x(self, rank: int, in_place: bool) -> tuple[int, int]:
        """Which elements of the whole vector the argument `x` holds."""
        return self.block(rank) if self.kind == "allgather" and not in_place else (0, self.n)

    def extent_of_out(self, rank: int, in_place: bool) -> tuple[int, int]:
        """Which elements of the whole vector `out` holds (`x` itself when in place)."""
        return self.block(rank) if self.kind == "reduce_scatter" and not in_place else (0, self.n)

    def sizes(self, rank: int) -> tuple[int, int]:
        """Elements of x and of out, when both are given."""
        start, stop = self.block(rank)
        own = stop - start
        x = own if self.kind == "allgather" else self.n
        return x, {"reduce_scatter": own, "alltoall": own * self.p}.get(self.kind, self.n)

    def sources(self, owner: int) -> list[int]:
        """Whose x goes into the owner's piece of the result."""
        if self.kind in REDUCING:
            return list(range(self.p))
        return [self.root if self.kind == "broadcast" else owner]

    def readers(self, owner: int) -> list[int]:
        """Whose out wants the owner's piece of the result."""
        if self.kind == "reduce_scatter":
            return [owner]
        return [self.root] if self.kind == "reduce" else list(range(self.p))


def see_root(root: Any, ranks: int) -> None:
    """TypeError or ValueError where it is the number of none of so many ranks."""
    if not isinstance(root, (int, np.integer)):
        raise TypeError(f"root {root!r} is of type {type(root).__name__}: pass a rank's number")
    if not 0 <= root < ranks:
        raise ValueError(f"root {root} is no rank of {ranks}: choose one from 0 to {ranks - 1}")

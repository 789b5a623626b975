"""One size of one collective: its arrays, the callables to time, and the check of what they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import api
from collectives.benchmark import data, rivals
from collectives.call import REDUCING
from collectives.fabric.arena import empty
from collectives.plan import plan as compiled
from collectives.schedule.model import cut

MPI_NAME = "MPI"

IN_PLACE = ("allreduce", "broadcast")

FLOOR_SHARE: dict[str, Callable[[int], float]] = {
    "allreduce": lambda p: 1.0,
    "reduce_scatter": lambda p: (1 + 1 / p) / 2,
    "allgather": lambda p: (1 + 1 / p) / 2,
    "alltoall": lambda p: 1.0,
    "broadcast": lambda p: 1 / 2,
    "reduce": lambda p: (1 + 1 / p) / 2,
}
"""(bytes that must be read + bytes that must be written) / (2 x bytes), a rank. To copy `bytes` bytes is to read and
to write as many. An allreduce in place reads the p vectors once and writes them once; a reduce_scatter writes one in
all, an allgather reads one, a broadcast in place reads one and writes p - 1."""


class Candidate(NamedTuple):
    """A way to do the collective: what to time, and the wrong elements it leaves (None: not checked)."""

    algorithm: str
    array: str
    run: Callable[[], object]
    check: Callable[[], int]
    close: Callable[[], object]
    predicted: float | None


@dataclass(frozen=True)
class Case:
    """A collective of `n` elements of `dtype` in its larger buffer, on every rank of `comm`."""

    kind: str
    op: str
    dtype: np.dtype[Any]
    n: int
    comm: MPI.Comm
    _arrays: dict[str, tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=dict)

    @property
    def bounds(self) -> list[int]:
        """Rank r's block is elements bounds[r] .. bounds[r+1]."""
        return [int(cut(self.n, self.comm.size, r)) for r in range(self.comm.size + 1)]

    def arrays(self, array: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """(source, result) of zeros, the same array where the collective works in place. All candidates get the same:
        which pages an array has, and how they share the caches, is luck that must meet all alike."""
        if array not in self._arrays:
            self._arrays[array] = self._make(array)
        return self._arrays[array]

    def _make(self, array: str) -> tuple[NDArray[Any], NDArray[Any]]:
        blocks = np.diff(self.bounds)
        own = int(blocks[self.comm.rank])
        sizes = {
            "reduce_scatter": (self.n, own),
            "allgather": (own, self.n),
            "alltoall": (self.n, own * self.comm.size),
        }
        into, out = sizes.get(self.kind, (self.n, self.n))
        source = self._zeros(into, array)
        return source, source if self.kind in IN_PLACE else self._zeros(out, array)

    def _zeros(self, n: int, array: str) -> NDArray[Any]:
        x = empty(n, self.dtype, self.comm) if array == "empty" else np.empty(n, self.dtype)
        x.fill(0)
        return x

    def plan(self, algorithm: str, array: str) -> Candidate:
        """Our own plan. Collective; ValueError where the algorithm does not serve this case."""
        source, result = self.arrays(array)
        out = None if self.kind in IN_PLACE else result
        plan = compiled(self.kind, source, self.comm, op=self.op, algorithm=algorithm, out=out)
        check = self._check(plan, source, result)
        return Candidate(algorithm, array, plan, check, plan.free, plan.predicted_seconds)

    def mpi(self) -> list[Candidate]:
        """The MPI's own blocking and non-blocking call, on ordinary arrays."""
        source, result = self.arrays("ordinary")
        blocks = [int(b) for b in np.diff(self.bounds)]
        calls = rivals.mpi_calls(self.kind, self.op, self.comm, source, result, blocks)
        return [Candidate(MPI_NAME, "ordinary", call, lambda: 0, lambda: None, None) for call in calls]

    def one_shot(self, array: str) -> Candidate:
        """`auto` through the one-shot call, which finds its plan anew each time."""
        source, result = self.arrays(array)
        keywords: dict[str, Any] = {} if self.kind in IN_PLACE else {"out": result}
        if self.kind in REDUCING:
            keywords["op"] = self.op
        call = partial(getattr(api, self.kind), source, self.comm, **keywords)
        return Candidate("one_shot", array, call, self._check(call, source, result), lambda: None, None)

    def copy(self) -> Callable[[], object]:
        """All ranks copy as many bytes from one ordinary array to another, and meet: what memory and cores allow.
        Without the meeting, ranks that share a core would each be timed while it is theirs alone."""
        comm, to, source = self.comm, self._zeros(self.n, "ordinary"), self._zeros(self.n, "ordinary")

        def copy() -> None:
            np.copyto(to, source)
            comm.Barrier()

        return copy

    def gloo(self) -> Candidate:
        """PyTorch's gloo on an ordinary array, in place."""
        source, result = self.arrays("ordinary")
        call = rivals.gloo_call(self.kind, self.op, self.comm, source)
        op = "sum" if self.op == "mean" else self.op  # gloo has no mean; dividing is not timed
        check = replace(self, op=op)._check(call, source, result)
        return Candidate("gloo", "ordinary", call, check, lambda: None, None)

    def _check(self, run: Callable[[], object], source: NDArray[Any], result: NDArray[Any]) -> Callable[[], int]:
        """Fills the source, runs, compares, and leaves zeros again."""
        comm, rank = self.comm, self.comm.rank

        def check() -> int:
            whole = data.contribution(self.op, rank, self.n, self.dtype, comm.size)
            own = slice(self.bounds[rank], self.bounds[rank + 1])
            result.fill(1)  # as another candidate may have left what is right
            source[...] = whole[own] if self.kind == "allgather" else whole
            run()
            relevant = self.kind != "reduce" or rank == 0
            wanted = data.expected(self.kind, self.op, rank, comm.size, self.n, self.dtype, self.bounds)
            faults = np.array([data.wrong(result, wanted) if relevant else 0], np.int64)
            comm.Allreduce(MPI.IN_PLACE, faults)
            comm.Barrier()
            source.fill(0)
            result.fill(0)
            comm.Barrier()
            return int(faults[0])

        return check

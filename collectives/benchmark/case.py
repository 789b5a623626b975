"""A benchmark case, that is, one size of one collective: its arrays, the calls to time, and the check of results.

Our calls are compared with MPI's own collectives, and with those of gloo if PyTorch is installed. For the check, ranks
contribute whole numbers that differ from position to position. The numbers are small, so that the results are exact
wherever possible.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, partial
from itertools import cycle
from typing import Any, NamedTuple, TypeAlias

import click
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.benchmark import GLOO_KINDS
from mpips.collectives.call import REDUCING
from mpips.collectives.fabric.arena import empty
from mpips.collectives.plan import plan as compiled
from mpips.collectives.schedule.model import cut

MPI_NAME = "MPI"

IN_PLACE = ("allreduce", "broadcast")

# kind -> number of ranks p -> the least memory traffic of the collective, as a share of the traffic of a copy in which
# each rank copies the whole vector (and so reads p vectors and writes p vectors in all). An allreduce in place reads
# the p vectors once and writes them once. A reduce_scatter writes only one vector in all, and an allgather reads only
# one. A broadcast in place reads one vector and writes p - 1.
FLOOR_SHARE: dict[str, Callable[[int], float]] = {
    "allreduce": lambda p: 1.0,
    "reduce_scatter": lambda p: (1 + 1 / p) / 2,
    "allgather": lambda p: (1 + 1 / p) / 2,
    "alltoall": lambda p: 1.0,
    "broadcast": lambda p: 1 / 2,
    "reduce": lambda p: (1 + 1 / p) / 2,
}


class Candidate(NamedTuple):
    """One way to run a collective.

    Attributes:
        algorithm: The algorithm's name.
        array: The kind of the arrays: "ordinary", or "empty" for arrays from `collectives.empty`.
        run: The call to time.
        check: Runs the call once with known values. Returns the number of wrong elements of all ranks.
        close: Frees the candidate's resources.
        predicted: The seconds that a call should take, or None.
    """

    algorithm: str
    array: str
    run: Callable[[], object]
    check: Callable[[], int]
    close: Callable[[], object]
    predicted: float | None


@dataclass(frozen=True)
class BenchmarkCase:
    """A collective over the ranks of `comm`, whose larger buffer has `n` elements of `dtype`."""

    kind: str
    op: str
    dtype: np.dtype[Any]
    n: int
    comm: MPI.Comm
    # kind of array -> (source, result); `arrays` adds the missing ones
    made: dict[str, tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=dict)
    # yields numbers for `renew`, the same on all ranks
    _turns: Iterator[int] = field(default_factory=lambda: cycle((1, 2)))

    @property
    def bounds(self) -> list[int]:
        """The bounds of the ranks' blocks: rank r has the elements bounds[r] <= i < bounds[r+1]."""
        return [int(cut(self.n, self.comm.size, r)) for r in range(self.comm.size + 1)]

    def arrays(self, array: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return (source, result), filled with zeros. Both are one array if the collective works in place.

        All candidates get the same arrays, because the speed of a call depends on which memory pages an array happens
        to get, and on how these pages map to the caches.
        """
        if array not in self.made:
            self.made[array] = self._make(array)
        return self.made[array]

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

    def renew(self) -> None:
        """Give all sources new values, so that no cache has them.

        The values of all ranks have the sum 0, so that a sum in place does not grow from call to call.
        """
        turn = next(self._turns)
        value = (turn if self.comm.rank else turn * (1 - self.comm.size)) if self.op in ("sum", "mean") else turn - 1
        for source, _ in self.made.values():
            source.fill(np.array(value).astype(self.dtype))

    def plan(self, algorithm: str, array: str) -> Candidate:
        """Return a plan of this package as a candidate. Collective.

        Raises:
            ValueError: The algorithm does not support this case.
        """
        source, result = self.arrays(array)
        out = None if self.kind in IN_PLACE else result
        plan = compiled(self.kind, source, self.comm, op=self.op, algorithm=algorithm, out=out)
        check = self.check(plan, source, result)
        return Candidate(algorithm, array, plan, check, plan.free, plan.predicted_seconds)

    def mpi(self) -> list[Candidate]:
        """Return MPI's own blocking and non-blocking call as candidates, on ordinary arrays."""
        source, result = self.arrays("ordinary")
        blocks = [int(b) for b in np.diff(self.bounds)]
        calls = mpi_calls(self.kind, self.op, self.comm, source, result, blocks)
        checks = [self.check(call, source, result) for call in calls]
        return [Candidate(MPI_NAME, "ordinary", *both, lambda: None, None) for both in zip(calls, checks)]

    def one_shot(self, function: Callable[..., Any], array: str) -> Candidate:
        """Return a one-shot call such as api.allreduce as a candidate. Each call looks up its plan."""
        source, result = self.arrays(array)
        keywords: dict[str, Any] = {} if self.kind in IN_PLACE else {"out": result}
        if self.kind in REDUCING:
            keywords["op"] = self.op
        call = partial(function, source, self.comm, **keywords)
        return Candidate("one_shot", array, call, self.check(call, source, result), lambda: None, None)

    def copy(self) -> Callable[[], object]:
        """Return a call in which every rank copies n elements from one ordinary array to another.

        The time of a collective is compared with the time of this copy (`FLOOR_SHARE`).
        """
        comm, to, source = self.comm, self._zeros(self.n, "ordinary"), self._zeros(self.n, "ordinary")

        def copy() -> None:
            np.copyto(to, source)
            # Without this barrier, ranks that share a core would each be timed while they have the core to themselves.
            comm.Barrier()

        return copy

    def gloo(self) -> Candidate:
        """Return PyTorch's gloo as a candidate, in place on an ordinary array."""
        source, result = self.arrays("ordinary")
        call = gloo_call(self.kind, self.op, self.comm, source)
        # gloo has no mean, so it only sums; the time of the division is left out.
        op = "sum" if self.op == "mean" else self.op
        check = replace(self, op=op).check(call, source, result)
        return Candidate("gloo", "ordinary", call, check, lambda: None, None)

    @cached_property
    def _known(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The values that this rank contributes in a check, and the result that it must get."""
        rank, p = self.comm.rank, self.comm.size
        whole = contribution(self.op, rank, self.n, self.dtype, p)
        own = slice(self.bounds[rank], self.bounds[rank + 1])
        wanted = expected(self.kind, self.op, rank, p, self.n, self.dtype, self.bounds)
        return whole[own] if self.kind == "allgather" else whole, wanted

    def check(self, run: Callable[[], object], source: NDArray[Any], result: NDArray[Any]) -> Callable[[], int]:
        """Return a function that fills the source, runs the call, counts wrong elements, and zeroes the arrays."""
        comm, rank = self.comm, self.comm.rank

        def check() -> int:
            own, wanted = self._known
            # Overwrite `result`: an earlier candidate may have left the right values in it.
            result.fill(1)
            source[...] = own
            run()
            relevant = self.kind != "reduce" or rank == 0
            faults = np.array([count_wrong(result, wanted) if relevant else 0], np.int64)
            comm.Allreduce(MPI.IN_PLACE, faults)
            comm.Barrier()
            source.fill(0)
            result.fill(0)
            comm.Barrier()
            return int(faults[0])

        return check


# Contributions repeat after this many elements. It is a prime number, so that a shifted result is noticed unless the
# shift is a multiple of 251.
PRIME = 251


def contribution(op: str, rank: int, n: int, dtype: np.dtype[Any], p: int) -> NDArray[Any]:
    """Return the n elements that a rank contributes: whole numbers, small enough for an exact result if possible."""
    span = 2 if op == "prod" else max(2, min(PRIME, _exact_limit(dtype) // max(1, p)))
    period = (((np.arange(PRIME) + 7 * rank) % PRIME) % span + (op == "prod")).astype(dtype)
    return np.resize(period, n)


def expected(kind: str, op: str, rank: int, p: int, n: int, dtype: np.dtype[Any], bounds: list[int]) -> NDArray[Any]:
    """Return the result that a rank must have after a collective.

    Args:
        kind: The collective.
        op: The reduction.
        rank: The rank.
        p: The number of ranks.
        n: The number of elements of the larger buffer.
        dtype: The type of the elements.
        bounds: The bounds of the ranks' blocks (`BenchmarkCase.bounds`).
    """
    own = slice(bounds[rank], bounds[rank + 1])
    if kind == "allgather":
        parts = [contribution(op, r, n, dtype, p)[bounds[r] : bounds[r + 1]] for r in range(p)]
        return np.concatenate(parts)
    if kind == "broadcast":
        return contribution(op, 0, n, dtype, p)
    if kind == "alltoall":
        return np.concatenate([contribution(op, r, n, dtype, p)[own] for r in range(p)])
    total = np.resize(_reduce(op, p, PRIME, dtype), n)
    return total[own] if kind == "reduce_scatter" else total


def _reduce(op: str, p: int, n: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    combine: Any = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}[op]
    wide = np.dtype(np.float64) if dtype.kind not in "iu" else dtype
    total = contribution(op, 0, n, dtype, p).astype(wide)
    for rank in range(1, p):
        combine(total, contribution(op, rank, n, dtype, p).astype(wide), out=total)
    if op == "mean":
        total = total / p
    return total.astype(dtype)


def count_wrong(result: NDArray[Any], wanted: NDArray[Any]) -> int:
    """Return the number of wrong elements. Integers must be equal, floats within two units in the last place."""
    if result.shape != wanted.shape:
        return max(result.size, wanted.size)
    if np.array_equal(result, wanted):
        return 0
    if result.dtype.kind in "iu":
        return int(np.count_nonzero(result != wanted))
    epsilon = 2.0 / _exact_limit(result.dtype)
    a, b = result.astype(np.float64), wanted.astype(np.float64)
    same = (a == b) | (np.abs(a - b) <= 2 * epsilon * np.abs(b))
    return int(result.size - np.count_nonzero(same))


def _exact_limit(dtype: np.dtype[Any]) -> int:
    """Return the largest n such that the dtype represents all whole numbers up to n exactly."""
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).max)
    return {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24}.get(dtype.name, 2**53)


OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}
GLOO_ATTEMPTS = 3
# the time limit of gloo, both for a collective and for rank 0's wait until the other ranks have joined
GLOO_SECONDS = 60.0

RivalCall = Callable[[], object]
# a blocking call of MPI, the non-blocking call for the same collective, and the arguments of both
MPICalls: TypeAlias = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]


def mpi_calls(
    kind: str, op: str, comm: MPI.Comm, source: NDArray[Any], out: NDArray[Any], blocks: list[int]
) -> list[RivalCall]:
    """Return MPI's blocking and non-blocking calls, or an empty list if MPI does not know the dtype.

    If all blocks have the same size, the list also has MPI's calls for equal blocks.

    Args:
        kind: The collective.
        op: The reduction.
        comm: The ranks.
        source: The array to read.
        out: The array to write. For a call in place it is `source`.
        blocks: The number of elements of each rank's block (for reduce_scatter, allgather and alltoall).
    """
    mpi_op = OPS[op]
    try:
        MPI.Datatype.fromcode(source.dtype.char)
    except ValueError:
        return []
    own, all_blocks = [source, source.size], (out, (blocks, None))
    calls: dict[str, MPICalls] = {
        "allreduce": (comm.Allreduce, comm.Iallreduce, (MPI.IN_PLACE, out, mpi_op)),
        "broadcast": (comm.Bcast, comm.Ibcast, (out, 0)),
        "reduce": (comm.Reduce, comm.Ireduce, (source, out if comm.rank == 0 else None, mpi_op, 0)),
        "reduce_scatter": (comm.Reduce_scatter, comm.Ireduce_scatter, (source, out, blocks, mpi_op)),
        "allgather": (comm.Allgatherv, comm.Iallgatherv, (own, all_blocks)),
    }
    if kind == "alltoall":
        own_counts = [blocks[comm.rank]] * comm.size
        arguments: tuple[Any, ...] = ((source, (blocks, None)), (out, (own_counts, None)))
        calls["alltoall"] = (comm.Alltoallv, comm.Ialltoallv, arguments)
    chosen = [calls[kind]]
    if len(set(blocks)) == 1:
        of_equal_blocks: dict[str, MPICalls] = {
            "reduce_scatter": (comm.Reduce_scatter_block, comm.Ireduce_scatter_block, (source, out, mpi_op)),
            "allgather": (comm.Allgather, comm.Iallgather, (source, out)),
            "alltoall": (comm.Alltoall, comm.Ialltoall, (source, out)),
        }
        chosen += [of_equal_blocks[kind]] if kind in of_equal_blocks else []
    found: list[RivalCall] = []
    for blocking, nonblocking, arguments in chosen:
        found.append(partial(blocking, *arguments))
        found.append(partial(_complete, nonblocking, arguments))
    return found


def _complete(nonblocking: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    nonblocking(*arguments).Wait()


def why_no_gloo(kind: str, dtype: np.dtype[Any]) -> str | None:
    """Return the reason why gloo cannot be compared in this case, or None if it can."""
    if kind not in GLOO_KINDS:
        return f"gloo is compared on {' and '.join(GLOO_KINDS)} only"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed: pip install torch"
    if dtype.name not in ("float16", "float32", "float64", "int32", "int64"):
        return f"gloo is not compared on {dtype}"
    return None


def gloo_call(kind: str, op: str, comm: MPI.Comm, out: NDArray[Any]) -> RivalCall:
    """Return a call of PyTorch's collective over gloo, on the memory of `out`.

    Collective: the first call makes the process group.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() and (refusal := join_gloo(comm)):
        raise click.ClickException(refusal)
    tensor = torch.from_numpy(out)
    if kind == "broadcast":
        return lambda: dist.broadcast(tensor, 0)
    word = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    word["prod"] = dist.ReduceOp.PRODUCT
    return lambda: dist.all_reduce(tensor, word[op])


def join_gloo(comm: MPI.Comm) -> str:
    """Make PyTorch's gloo process group from the ranks of `comm`, over the loopback interface. Collective.

    Tries several times, because another process may take the port before gloo binds it.

    Returns:
        "" on success, otherwise the reason for the failure. All ranks get the same text.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    refusal = ""
    for _ in range(GLOO_ATTEMPTS):
        refusal = next(filter(None, comm.allgather(_try_gloo(comm))), "")
        if not refusal:
            break
    return refusal


def _try_gloo(comm: MPI.Comm) -> str:
    """Try once to make the group. Return "" on success, otherwise the reason for the failure on this rank."""
    import torch.distributed as dist

    port = 0
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    address, limit = f"tcp://127.0.0.1:{comm.bcast(port)}", timedelta(seconds=GLOO_SECONDS)
    try:
        dist.init_process_group("gloo", address, limit, comm.size, comm.rank)
        dist.barrier()
    except RuntimeError as error:
        # This also catches DistNetworkError, which is a RuntimeError.
        if dist.is_initialized():
            dist.destroy_process_group()
        return f"gloo on rank {comm.rank}: {str(error).splitlines()[0]}"
    return ""


def leave_gloo(comm: MPI.Comm) -> None:
    """Destroy the process group that `join_gloo` has made. Collective. All operations on the group must have ended."""
    import torch.distributed as dist

    comm.Barrier()
    dist.destroy_process_group()
    comm.Barrier()

"""The MPI library's own collectives, with the same interface as all other bodies of calls.

A `NativePlan` uses MPI's non-blocking calls and polls them, because in a blocking call the ranks would wait for ever
for a rank that never makes the call. MPI works on the user's arrays. So once all ranks have entered a call, a rank on
which the call fails still completes it (`requests.NativeCollectives`). Vectors that are too long for the counts of MPI,
which are C ints, are cut into several calls. All kinds of calls are supported, but reductions only for element types
that MPI can reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpips.collectives.agreement import SAME_CALL
from mpips.collectives.arrays import Flat, Vector
from mpips.collectives.call import Call, mpi_type, scale
from mpips.collectives.errors import MismatchError
from mpips.collectives.fabric.layout import digest
from mpips.collectives.fabric.requests import NativeCall, NativeCollectives
from mpips.collectives.kernels.sums import Step, perform

MOST_ELEMENTS = 1 << 28
# The limit of a call that counts bytes instead of elements. MPI's counts are C ints.
MOST_BYTES = (1 << 31) - 1


def why_not(call: Call) -> str | None:
    """Return the reason why MPI cannot run the call, or None if it can."""
    if call.reduction is not None and mpi_type(call.dtype) is None:
        return f"MPI has no type that it can reduce for {call.dtype.name}: choose another algorithm, or auto"
    if call.kind in ("reduce_scatter", "allgather", "alltoall") and call.n > (most := _most(call)):
        return f"native {call.kind} takes at most {most} {call.dtype.name}: choose another algorithm, or auto"
    return None


def _most(call: Call) -> int:
    """Return the largest number of elements of a single MPI call."""
    return MOST_ELEMENTS if call.reduction is not None else min(MOST_ELEMENTS, MOST_BYTES // call.dtype.itemsize)


class NativePlan:
    """The body of a call by MPI's own collective.

    If `met` is True, the ranks compare their calls on the board of their node, and must call `enter` before that.
    Otherwise the plan itself first compares them, by an allreduce of a digest of each call.
    """

    def __init__(self, own: NativeCollectives, call: Call, x: Flat, out: Flat, met: bool):
        self._own = own
        self._comm = own.comm
        self._call = call
        self._x = x.vector()
        self._out = out.vector()
        self._in_place = x == out
        # For calls in place of these two kinds, MPI sends from a copy of x.
        self._copy = self._x.copy() if self._in_place and call.kind in ("alltoall", "reduce_scatter") else None
        # Ranks compare their calls by an allreduce of the maximum of (number, -number), where the number is a hash of
        # the call. The result is (number, -number) again only if all numbers are equal.
        number = digest(call.text.encode()) >> 1
        self._number_pair = (number, -number)
        self._extremes = np.zeros(2, np.int64)
        compare: list[NativeCall] = [(self._comm.Iallreduce, (MPI.IN_PLACE, self._extremes, MPI.MAX))]
        self._met = met
        alone = own.comm.size == 1
        self._row = [*([] if met or alone else compare), *self._calls()]
        self._compare_rows = None if met or alone else self._compare
        # the copies that must be made before MPI's collective begins
        self._before: list[Step] = []
        if self._copy is not None:
            self._before = [(np.copyto, (self._copy, self._x))]
        elif call.kind == "broadcast" and not self._in_place and self._comm.rank == call.root:
            self._before = [(np.copyto, (self._out, self._x))]
        mean = call.reduction is not None and call.reduction.is_mean
        self._after = scale(self._result(), call.p) if mean else []

    def enter(self, number: int = -1) -> None:
        """Enter the call. If the ranks compare calls on the board, `number` is the board's number for it."""
        perform(self._before)
        self._own.enter(self._row, self._compare_rows, number)

    def run(self) -> Iterator[None]:
        """Run the call. Yields whenever it has to wait. With `met`, the caller has already called `enter`."""
        if not self._met:
            self._extremes[:] = self._number_pair
            self.enter()
        while not self._own.step():
            yield
        perform(self._after)

    def _compare(self) -> None:
        """Raise MismatchError if the ranks' calls differ. MPI may crash if they do: Open MPI frees memory twice."""
        if self._extremes[0] != -self._extremes[1]:
            raise MismatchError(f"ranks make different calls: {SAME_CALL}")

    def free(self) -> None:
        """Do nothing: the plan owns no MPI objects."""

    def _result(self) -> Vector:
        """Return the memory of this rank's result, which a mean divides by the number of ranks."""
        if self._call.kind == "reduce" and self._comm.rank != self._call.root:
            return self._out[:0]
        if self._call.kind == "reduce_scatter" and self._in_place:
            return self._out[slice(*self._call.block(self._comm.rank))]
        return self._out

    def _calls(self) -> list[NativeCall]:
        most = _most(self._call)
        return [self._call_of(slice(at, at + most)) for at in range(0, max(1, self._call.n), most)]

    def _call_of(self, part: slice) -> NativeCall:
        """Return the MPI call for a part of the vector. Kinds with blocks are never cut into parts (see `why_not`)."""
        comm, call, in_place = self._comm, self._call, self._in_place
        op = call.reduction.mpi if call.reduction is not None else None
        datatype = mpi_type(call.dtype) if op is not None else MPI.BYTE
        size = 1 if op is not None else call.dtype.itemsize

        def buffer(vector: Vector) -> list[Any]:
            return [vector if op is not None else vector.view(np.uint8), datatype]

        rank = comm.rank
        blocks = [call.block(other) for other in range(call.p)]
        counts = [(stop - start) * size for start, stop in blocks]
        starts = [start * size for start, _ in blocks]
        x, out = self._x[part], self._out[part]
        if call.kind == "allreduce":
            return comm.Iallreduce, (MPI.IN_PLACE if in_place else buffer(x), buffer(out), op)
        if call.kind == "broadcast":
            return comm.Ibcast, (buffer(out), call.root)
        if call.kind == "reduce":
            source = MPI.IN_PLACE if in_place and rank == call.root else buffer(x)
            return comm.Ireduce, (source, buffer(out) if rank == call.root else None, op, call.root)
        if call.kind == "reduce_scatter":
            target = self._out[slice(*blocks[rank])] if in_place else self._out
            source = buffer(self._x if self._copy is None else self._copy)
            return comm.Ireduce_scatter, (source, buffer(target), counts, op)
        if call.kind == "allgather":
            whole = [self._out.view(np.uint8), counts, starts, MPI.BYTE]
            return comm.Iallgatherv, (MPI.IN_PLACE if in_place else buffer(self._x), whole)
        own = counts[rank]
        sent = self._x if self._copy is None else self._copy
        arrivals = [self._out.view(np.uint8), [own] * call.p, [own * other for other in range(call.p)], MPI.BYTE]
        return comm.Ialltoallv, ([sent.view(np.uint8), counts, starts, MPI.BYTE], arrivals)

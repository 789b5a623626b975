"""The MPI's own collectives, behind the same interface.

The non-blocking calls are used, which can be polled: a rank that never comes would hold the others in a blocking one
for ever. MPI works on the user's arrays, so a call that all have met for is carried through also by who gives it up
(`requests.Collectives`). Counts past 2^31 go in parts. Serves all kinds but only element types that MPI can reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpips.collectives.arrays import Flat, Vector
from mpips.collectives.call import Call, mpi_type, scale
from mpips.collectives.errors import MismatchError
from mpips.collectives.fabric.layout import DIFFERENT, digest
from mpips.collectives.fabric.requests import Begin, Collectives
from mpips.collectives.kernels.sums import Step, perform

MOST_ELEMENTS = 1 << 28
MOST_BYTES = (1 << 31) - 1  # where elements go as bytes: an int of C counts no further


def why_not(call: Call) -> str | None:
    """The reason why MPI cannot serve the call, or None."""
    if call.operation is not None and mpi_type(call.dtype) is None:
        return f"MPI has no type that it can reduce for {call.dtype.name}: choose another algorithm, or auto"
    if call.kind in ("reduce_scatter", "allgather", "alltoall") and call.n > (most := _most(call)):
        return f"native {call.kind} takes at most {most} {call.dtype.name}: choose another algorithm, or auto"
    return None


def _most(call: Call) -> int:
    """Return how many elements one call of MPI takes."""
    return MOST_ELEMENTS if call.operation is not None else min(MOST_ELEMENTS, MOST_BYTES // call.dtype.itemsize)


class NativePlan:
    """One call by MPI's own collective. `met`: ranks meet on a board, where they `enter` it, and have compared their
    calls when it runs."""

    def __init__(self, own: Collectives, call: Call, x: Flat, out: Flat, met: bool):
        self._own, self._comm, self._call = own, own.comm, call
        self._x, self._out, self._in_place = x.vector(), out.vector(), x == out
        self._copy = self._x.copy() if self._in_place and call.kind in ("alltoall", "reduce_scatter") else None
        number = digest(call.text.encode()) >> 1
        self._mine, self._words = (number, -number), np.zeros(2, np.int64)
        compare: list[Begin] = [(self._comm.Iallreduce, (MPI.IN_PLACE, self._words, MPI.MAX))]
        self._met, alone = met, own.comm.size == 1
        self._row = [*([] if met or alone else compare), *self._calls()]
        self._see = None if met or alone else self._compare
        self._before: list[Step] = []
        if self._copy is not None:
            self._before = [(np.copyto, (self._copy, self._x))]
        elif call.kind == "broadcast" and not self._in_place and self._comm.rank == call.root:
            self._before = [(np.copyto, (self._out, self._x))]
        mean = call.operation is not None and call.operation.is_mean
        self._after = scale(self._result(), call.p) if mean else []

    def enter(self, number: int = -1) -> None:
        """Be in the call, which is the operation of this number on the board where ranks meet there."""
        perform(self._before)
        self._own.enter(self._row, self._see, number)

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for. Ranks that have met have entered."""
        if not self._met:
            self._words[:] = self._mine
            self.enter()
        while not self._own.step():
            yield
        perform(self._after)

    def _compare(self) -> None:
        """MismatchError where ranks come with unlike calls, which MPI need not survive: Open MPI frees memory twice."""
        if self._words[0] != -self._words[1]:
            raise MismatchError(DIFFERENT)

    def free(self) -> None:
        """There is nothing to give back."""

    def _result(self) -> Vector:
        if self._call.kind == "reduce" and self._comm.rank != self._call.root:
            return self._out[:0]
        if self._call.kind == "reduce_scatter" and self._in_place:
            return self._out[slice(*self._call.block(self._comm.rank))]
        return self._out

    def _calls(self) -> list[Begin]:
        most = _most(self._call)
        return [self._call_of(slice(at, at + most)) for at in range(0, max(1, self._call.n), most)]

    def _call_of(self, part: slice) -> Begin:
        comm, call, in_place = self._comm, self._call, self._in_place
        op = call.operation.mpi if call.operation is not None else None
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

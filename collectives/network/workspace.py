"""The vector that a schedule works in, and the ways between it and the caller's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.arrays import Flat, Vector
from collectives.call import Call
from collectives.operations import scale


class Workspace:
    """`vector` holds the whole vector: out where that is one, else memory from `allocate`, so that x stays as it is. In
    alltoall it is out, whose blocks arrive by `Call.arrival`, and `source` is what the blocks are sent from."""

    def __init__(
        self, call: Call, rank: int, x: Flat, out: Flat, allocate: Callable[[int, Any], Vector] = np.empty
    ) -> None:
        self._call, self._rank = call, rank
        self._x, self._out = x.vector(), out.vector()
        self._in_place = x == out
        whole = call.kind == "alltoall" or (self._out.size == call.n and (call.kind != "reduce" or rank == call.root))
        self.vector = self._out if self._in_place or whole else allocate(call.n, call.dtype)
        self.source = self.vector
        if call.kind == "alltoall":
            self.source = allocate(call.n, call.dtype) if self._in_place else self._x

    def begin(self) -> None:
        """Bring in this rank's part."""
        call = self._call
        own = slice(*call.block(self._rank))
        if call.kind == "alltoall":
            if self.source is not self._x:
                np.copyto(self.source, self._x)
            to = self._out[slice(*call.arrival(self._rank, self._rank))]
            np.copyto(to, self.source[own])
        elif not self._in_place:
            np.copyto(self.vector[own] if call.kind == "allgather" else self.vector, self._x)

    def end(self) -> None:
        """Take out the result, when nobody else reads the vector any more."""
        call = self._call
        if call.kind == "reduce" and self._rank != call.root:
            return
        result = self.vector
        if call.kind == "reduce_scatter":
            result = self.vector[slice(*call.block(self._rank))]
        if call.operation is not None and call.operation.is_mean:
            function, arguments = scale(result, call.p)
            function(*arguments)
        if call.kind == "reduce_scatter" and not self._in_place:
            np.copyto(self._out, result)

    def arriving(self, start: int, stop: int, chunks: tuple[int, int]) -> Vector:
        """Where elements [start, stop) of the vector, which are `chunks`, come in."""
        if self._call.kind != "alltoall":
            return self.vector[start:stop]
        first, last = (self._call.arrival(self._rank, chunk) for chunk in (chunks[0], chunks[1] - 1))
        return self._out[first[0] : last[1]]

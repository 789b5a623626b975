"""A tensor through one vector on the host: reduce the worker's vectors, run any plan between workers, spread.

`host_ring` is the paper's omp_ring-IBMGpu (section 7.3 c): the whole buffer is reduced into host memory, the ring runs
there, and the result goes back. With ranks of one node the vector lies in node-shared memory, so that the plan between
them copies nothing beside (`auto`).

Memory: one vector on the host, two where x and out differ in length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from collectives.arrays import Vector
from collectives.call import Call
from collectives.operations import scale
from collectives.tensor.vectors import Vectors, until


class Inner(Protocol):
    """What runs between the workers, on host vectors."""

    def run(self) -> Iterator[None]: ...


class StagedTensor:
    """`inner` works from `x` to `out` (the same in place); `extent` is what of the whole vector the targets hold."""

    def __init__(self, call: Call, vectors: Vectors, inner: Inner, x: Vector, out: Vector, gives: bool, takes: bool):
        self._call, self._vectors, self._inner = call, vectors, inner
        self._x, self._out, self._gives, self._takes = x, out, gives, takes

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for. The inner plan counts as called."""
        return self._steps(self._inner.run())

    def _steps(self, inner: Iterator[None]) -> Iterator[None]:
        self._vectors.begin()
        if self._gives:
            yield from until(self._vectors.gather(0, self._x.size, None, self._x))
        yield from inner
        if not self._takes:
            return
        operation = self._call.operation
        if operation is not None and operation.is_mean:
            function, arguments = scale(self._out, self._vectors.count)  # the inner plan divided by the ranks
            function(*arguments)
        yield from until(self._vectors.spread(0, self._out.size, self._out))

    def free(self) -> None:
        """Give back what the inner plan holds."""
        release = getattr(self._inner, "free", None)
        if release is not None:
            release()

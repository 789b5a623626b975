"""The vectors of one worker's tensor, and what algorithms do with them.

A tensor is a group of vectors of one length and type, one for each GPU of the worker, that is reduced as a single
object (MXNET-MPI paper, section 6.1). Algorithms see it through `Vectors`; `HostVectors` is NumPy's side of it and
`collectives.cuda.CudaVectors` CuPy's. What may still be running when a method returns is told by a *ticket*: a function
that says, without blocking, whether it is done (GpuWait in figure 9 of the paper; the method itself is GpuStart).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from collectives.arrays import Vector
from collectives.node import arena

Ticket: TypeAlias = Callable[[], bool]


class Vectors(Protocol):
    """`count` source vectors of `n` elements, and the targets (the same ones when in place)."""

    n: int
    count: int
    dtype: np.dtype[Any]

    def host(self, n: int) -> Vector:
        """Node-shared host memory for n elements, fast to move to and from the vectors."""
        ...

    def begin(self) -> None:
        """Whatever the user has queued on the vectors comes before what follows."""
        ...

    def gather(self, start: int, stop: int, incoming: Vector | None, out: Vector) -> Ticket:
        """out = the reduction of `incoming` and elements [start, stop) of all sources; both on the host."""
        ...

    def spread(self, start: int, stop: int, source: Vector) -> Ticket:
        """Elements [start, stop) of all targets = `source`, on the host."""
        ...

    def adopt(self) -> Ticket:
        """Targets = sources, each its own."""
        ...

    def fetch(self, which: int, start: int, stop: int, out: Vector) -> Ticket:
        """out = elements of one target, to the host."""
        ...

    def store(self, which: int, start: int, stop: int, source: Vector, add: bool) -> Ticket:
        """Elements of one target = `source`, or their reduction with it."""
        ...

    def pass_on(self, which: int, start: int, stop: int, add: bool) -> Ticket:
        """Elements of target which + 1 = those of target `which`, or their reduction with them."""
        ...


def done() -> bool:
    """The ticket of what is finished when the method returns."""
    return True


def until(*tickets: Ticket) -> Iterator[None]:
    """Give way until all tickets are done."""
    for ticket in tickets:
        while not ticket():
            yield


class HostVectors:
    """Vectors in host memory. Every method is finished when it returns."""

    def __init__(self, sources: Sequence[Vector], targets: Sequence[Vector], reduce: np.ufunc):
        self._sources, self._targets, self._reduce = list(sources), list(targets), reduce
        self.n, self.count, self.dtype = sources[0].size, len(sources), sources[0].dtype

    def host(self, n: int) -> Vector:
        return arena.empty(n, self.dtype)

    def begin(self) -> None:
        pass

    def gather(self, start: int, stop: int, incoming: Vector | None, out: Vector) -> Ticket:
        parts = [source[start:stop] for source in self._sources]
        if incoming is not None:
            parts.insert(0, incoming)
        if len(parts) == 1:
            np.copyto(out, parts[0])
        else:
            self._reduce(parts[0], parts[1], out=out)
        for part in parts[2:]:
            self._reduce(out, part, out=out)
        return done

    def spread(self, start: int, stop: int, source: Vector) -> Ticket:
        for target in self._targets:
            np.copyto(target[start:stop], source)
        return done

    def adopt(self) -> Ticket:
        for target, source in zip(self._targets, self._sources):
            np.copyto(target, source)
        return done

    def fetch(self, which: int, start: int, stop: int, out: Vector) -> Ticket:
        np.copyto(out, self._targets[which][start:stop])
        return done

    def store(self, which: int, start: int, stop: int, source: Vector, add: bool) -> Ticket:
        target = self._targets[which][start:stop]
        if add:
            self._reduce(target, source, out=target)
        else:
            np.copyto(target, source)
        return done

    def pass_on(self, which: int, start: int, stop: int, add: bool) -> Ticket:
        return self.store(which + 1, start, stop, self._targets[which][start:stop], add)

"""What an algorithm may do with the vectors of one worker, and how NumPy does it; `cuda` does it on GPUs.

A tensor is a group of vectors of one length and type, one for each GPU of the worker, that is reduced as a single
object (MXNET-MPI paper, section 6.1). A method may return before its work is done. What is still running is told by a
*ticket*: a function that says, without blocking, whether it is done. The method is GpuStart in figure 9 of the paper,
the ticket GpuWait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import numpy as np

from collectives.arrays import Vector
from collectives.fabric import arena
from collectives.tensor.arguments import Place
from collectives.tensor.kernels import combine

Ticket: TypeAlias = Callable[[], bool]
NO_MEMORY: Vector = np.empty(0)
"""In place of host memory that was given back."""


class Vectors(Protocol):
    """`count` source vectors of `n` elements of `dtype`, and the targets (the same ones when in place)."""

    n: int
    count: int
    dtype: np.dtype[Any]

    def host(self, n: int) -> Vector:
        """Node-shared host memory for n elements, fast to move to and from the vectors. It lives as long as views."""
        ...

    def begin(self) -> None:
        """What the user has queued on the vectors comes before what follows."""
        ...

    def finish(self) -> None:
        """Wait until nothing runs on the vectors any more. Where something never ends, its host memory stays taken."""
        ...

    def free(self) -> None:
        """Forget the vectors, and give back the memory made for them."""
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


@contextmanager
def running(vectors: Vectors) -> Iterator[None]:
    """An operation on the vectors. However it ends, nothing of it runs on memory that serves another one afterwards."""
    vectors.begin()
    try:
        yield
    finally:
        vectors.finish()


class HostVectors:
    """Vectors in host memory. Every method is finished when it returns. Arrays are held by address only."""

    def __init__(self, sources: Sequence[Place], targets: Sequence[Place], ufunc: np.ufunc):
        self._sources, self._targets = [s.vector() for s in sources], [t.vector() for t in targets]
        self._ufunc = ufunc
        self.n, self.count, self.dtype = sources[0].n, len(sources), sources[0].dtype

    def host(self, n: int) -> Vector:
        return arena.empty(n, self.dtype)

    def begin(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def free(self) -> None:
        self._sources, self._targets = [], []

    def gather(self, start: int, stop: int, incoming: Vector | None, out: Vector) -> Ticket:
        parts = [source[start:stop] for source in self._sources]
        combine(self._ufunc, parts if incoming is None else [incoming, *parts], out)
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
        combine(self._ufunc, [target, source] if add else [source], target)
        return done

    def pass_on(self, which: int, start: int, stop: int, add: bool) -> Ticket:
        return self.store(which + 1, start, stop, self._targets[which][start:stop], add)

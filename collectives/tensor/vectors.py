"""Vectors of one worker: where they lie, what an algorithm may do with them, and how NumPy does it (GPUs: `cuda`).

A tensor is a group of vectors of one length and type, one for each GPU of the worker, that is reduced as a single
object (MXNET-MPI paper, section 6.1). A method may return before its work is done. What is still running is told by a
*ticket*: a function that says, without blocking, whether it is done. The method is GpuStart in figure 9 of the paper,
the ticket GpuWait.

`place` tells where an array of the user's lies: on the host or on a GPU, of what type, writable or not. Places are
addresses. They keep no array alive: whoever calls a collective does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from mpips.collectives import arrays
from mpips.collectives.arrays import Array, Flat, Vector
from mpips.collectives.fabric import arena
from mpips.collectives.kernels import sums

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
        """Order what the user has queued on the vectors before what follows."""
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

    def __init__(self, sources: Sequence[VectorPlace], targets: Sequence[VectorPlace], combine: Callable[..., Any]):
        self._sources, self._targets = [s.vector() for s in sources], [t.vector() for t in targets]
        self._combine = combine
        self.n, self.count, self.dtype = sources[0].n, len(sources), sources[0].dtype
        for incoming in (0, 1):
            sums.prepare(combine, self.dtype, incoming + self.count, self.n * self.dtype.itemsize)

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
        if incoming is not None:
            parts.insert(0, incoming)
        sums.perform(sums.steps(self._combine, parts, out, nbytes=self.n * self.dtype.itemsize))
        return done

    def spread(self, start: int, stop: int, source: Vector) -> Ticket:
        for target in self._targets:
            np.copyto(target[start:stop], source)
        return done


_ORDINALS = {"cupy": "id", "torch": "index"}
"""Where an array of the library says which GPU it is on: array.device.id, tensor.device.index."""
_READ_ONLY = ("jax", "jaxlib")
"""Libraries whose arrays must not be written, though their interface does not say so."""


class VectorPlace(NamedTuple):
    """The beginning of a vector of n elements, and its GPU; `device` None is host memory."""

    address: int
    n: int
    dtype: np.dtype[Any]
    device: int | None

    def at(self, element: int) -> int:
        """The address of an element."""
        return self.address + element * self.dtype.itemsize

    def moved(self, address: int) -> VectorPlace:
        """Return the elements as they stand elsewhere."""
        return self._replace(address=address)

    def vector(self) -> Vector:
        """A NumPy view of a place on the host."""
        return Flat(self.address, self.n, self.dtype).vector()


def place(x: Array, name: str, written: bool) -> VectorPlace:
    """Return where a C-contiguous array of any shape lies; it must be writable if it is `written`.

    Takes NumPy's arrays, what has `__array_interface__` or DLPack on the host (torch), and what has
    `__cuda_array_interface__` (CuPy, torch, Numba). Local. TypeError or ValueError with what to do instead.
    """
    if not arrays.is_device(x):
        return VectorPlace(*arrays.flat(arrays.host(x, name), name, written), None)
    interface = arrays.device_interface(x)
    shape, (address, read_only) = tuple(interface["shape"]), interface["data"]
    dtype, n = _dtype(x, interface["typestr"]), math.prod(shape)
    if not _contiguous(shape, interface.get("strides"), dtype.itemsize):
        raise ValueError(f"{name} of shape {shape} is not C-contiguous: pass a contiguous copy")
    if written and (read_only or _library(x) in _READ_ONLY):
        raise ValueError(f"{name} is read-only, and the result goes there: pass a writable array or out=")
    if n == 0:
        return VectorPlace(0, 0, dtype, None)  # has no memory on any device
    return VectorPlace(int(address), n, dtype, _device(x, int(address)))


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> bool:
    """Return whether elements lie as C puts them. No strides say so; that of an axis of one place says nothing."""
    if strides is None or 0 in shape:
        return True
    wanted = (itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return all(stride == want for stride, want, places in zip(strides, wanted, shape) if places > 1)


def _library(x: Array) -> str:
    return type(x).__module__.split(".")[0]


def _dtype(x: Array, typestr: str) -> np.dtype[Any]:
    """bfloat16 has no letter in the interface, so its name is asked for."""
    if not str(getattr(x, "dtype", "")).endswith("bfloat16"):
        return np.dtype(typestr)
    try:
        import ml_dtypes
    except ImportError:
        raise ValueError("bfloat16 needs the element type of ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


def _device(x: Array, address: int) -> int:
    """The GPU that holds the array: as its library says, else CUDA, whose answer may open a context on another GPU."""
    if ordinal := _ORDINALS.get(_library(x)):
        return int(getattr(x.device, ordinal))
    import cupy

    return int(cupy.cuda.runtime.pointerGetAttributes(address).device)

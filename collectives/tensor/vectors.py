"""Reduces the vectors of one worker to one vector in host memory, and copies a result back to them, by NumPy.

A worker may have several GPUs with a vector on each. These vectors have one length and type, and are reduced as a
single object, a *tensor* (MXNET-MPI paper, section 6.1). A collective on tensors works on them through `TensorVectors`:

    gather    reduces an interval of all vectors of the worker into host memory, from where other workers get it
    spread    copies an interval of the result from host memory to all vectors of the worker

`HostVectors` does this with NumPy for vectors in host memory. The module `cuda` does it for vectors on GPUs. Both
methods may return before their work is done. They return a *ticket*: a function that never blocks, and returns True
once the work is done. In figure 9 of the paper these methods are GpuStart, and the ticket is GpuWait.

`vector_place` finds out where a user's array lies, and returns this as a `VectorPlace`: the address, the number of
elements, their type, and the GPU. A `VectorPlace` does not keep the array alive, so the caller of a collective must.
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
# the vector that replaces a plan's host vectors once their memory is freed
NO_MEMORY: Vector = np.empty(0)


class TensorVectors(Protocol):
    """The `count` source vectors of a worker, with `n` elements of `dtype` each, and its target vectors.

    For an in-place operation, the targets are the sources.
    """

    n: int
    count: int
    dtype: np.dtype[Any]

    def host(self, n: int) -> Vector:
        """Return node-shared host memory for n elements, from which copies to the vectors are fast.

        The memory lives as long as any view of it.
        """
        ...

    def begin(self) -> None:
        """Begin an operation. It runs after all work that the user has queued on the vectors."""
        ...

    def finish(self) -> None:
        """Wait until no work runs on the vectors. If the wait takes too long, the memory in use is never reused."""
        ...

    def free(self) -> None:
        """Release the vectors, and the host memory made for them."""
        ...

    def gather(self, start: int, stop: int, incoming: Vector | None, out: Vector) -> Ticket:
        """Begin to reduce `incoming` (if given) and elements [start, stop) of all source vectors into `out`.

        `incoming` and `out` are vectors of stop - start elements in host memory.
        """
        ...

    def spread(self, start: int, stop: int, source: Vector) -> Ticket:
        """Begin to copy `source`, which is in host memory, to elements [start, stop) of all target vectors."""
        ...


def done() -> bool:
    """The ticket of a method whose work was done before the method returned. Always returns True."""
    return True


def wait_for(*tickets: Ticket) -> Iterator[None]:
    """Yield until all tickets are done."""
    for ticket in tickets:
        while not ticket():
            yield


@contextmanager
def running(vectors: TensorVectors) -> Iterator[None]:
    """A context in which an operation on the vectors runs: calls begin() before and finish() after the block.

    However the block ends, its work does not touch memory that another operation gets afterwards.
    """
    vectors.begin()
    try:
        yield
    finally:
        vectors.finish()


class HostVectors:
    """Vectors in host memory. Every method has done its work when it returns. The user's arrays are not kept alive."""

    def __init__(self, sources: Sequence[VectorPlace], targets: Sequence[VectorPlace], combine: Callable[..., Any]):
        self._sources = [s.vector() for s in sources]
        self._targets = [t.vector() for t in targets]
        self._combine = combine
        self.n = sources[0].n
        self.count = len(sources)
        self.dtype = sources[0].dtype
        # gather() reduces the sources, either alone or together with an incoming vector.
        for incoming in (0, 1):
            sums.prepare(combine, self.dtype, incoming + self.count, self.n * self.dtype.itemsize)

    def host(self, n: int) -> Vector:
        return arena.empty(n, self.dtype)

    def begin(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def free(self) -> None:
        self._sources = []
        self._targets = []

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


# library -> the attribute of an array's `device` that is the number of the GPU (array.device.id, tensor.device.index)
_ORDINALS = {"cupy": "id", "torch": "index"}
# libraries whose arrays must not be written, although their interface does not say so
_READ_ONLY = ("jax", "jaxlib")


class VectorPlace(NamedTuple):
    """Where a vector of n elements lies: its address, and the number of its GPU. `device` is None in host memory."""

    address: int
    n: int
    dtype: np.dtype[Any]
    device: int | None

    def at(self, element: int) -> int:
        """Return the address of an element."""
        return self.address + element * self.dtype.itemsize

    def moved(self, address: int) -> VectorPlace:
        """Return the `VectorPlace` of a vector with the same length, type and GPU at another address."""
        return self._replace(address=address)

    def vector(self) -> Vector:
        """Return the vector as a NumPy array, without a copy. The vector must lie in host memory."""
        return Flat(self.address, self.n, self.dtype).vector()


def vector_place(x: Array, name: str, written: bool) -> VectorPlace:
    """Find out where a C-contiguous array of any shape lies. Local.

    Args:
        x: An array of NumPy, an array on the host with `__array_interface__` or DLPack (torch), or an array with
            `__cuda_array_interface__` (CuPy, torch, Numba).
        name: The name of the array in errors.
        written: True if the array will be written.

    Raises:
        TypeError: x is not such an array.
        ValueError: x is not contiguous, or is read-only and `written`. The error says what to do instead.
    """
    if not arrays.is_device(x):
        return VectorPlace(*arrays.flat(arrays.host(x, name), name, written), None)
    interface = arrays.device_interface(x)
    shape, (address, read_only) = tuple(interface["shape"]), interface["data"]
    dtype, n = _dtype(x, interface["typestr"]), math.prod(shape)
    if not _contiguous(shape, interface.get("strides"), dtype.itemsize):
        raise ValueError(f"{name} of shape {shape} is not C-contiguous: pass a contiguous copy")
    if written and (read_only or _library(x) in _READ_ONLY):
        raise ValueError(f"{name} is read-only, and the result is written to it: pass a writable array or out=")
    # An empty array has no memory on any device.
    if n == 0:
        return VectorPlace(0, 0, dtype, None)
    return VectorPlace(int(address), n, dtype, _device(x, int(address)))


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> bool:
    """True if an array with these strides (in bytes) is C-contiguous.

    In the array interface, strides of None mean C-contiguous. The stride of an axis of length 1 does not matter.
    """
    if strides is None or 0 in shape:
        return True
    wanted = (itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return all(stride == want for stride, want, places in zip(strides, wanted, shape) if places > 1)


def _library(x: Array) -> str:
    return type(x).__module__.split(".")[0]


def _dtype(x: Array, typestr: str) -> np.dtype[Any]:
    # The array interface has no letter for bfloat16, so the type is recognized by the name of the dtype.
    if not str(getattr(x, "dtype", "")).endswith("bfloat16"):
        return np.dtype(typestr)
    try:
        import ml_dtypes
    except ImportError:
        raise ValueError("bfloat16 needs the element type of ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


def _device(x: Array, address: int) -> int:
    # Ask the array first, if its library is known. A query to CUDA may open a context on another GPU.
    if ordinal := _ORDINALS.get(_library(x)):
        return int(getattr(x.device, ordinal))
    import cupy

    return int(cupy.cuda.runtime.pointerGetAttributes(address).device)

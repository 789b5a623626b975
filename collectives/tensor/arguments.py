"""The arrays that a user passes, as places in memory: on the host or on a GPU, of what type, writable or not.

Places are addresses. They keep no array alive: whoever calls a collective does.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from collectives import arrays
from collectives.arrays import Flat, Vector

_ORDINALS = {"cupy": "id", "torch": "index"}
"""Where an array of the library says which GPU it is on: array.device.id, tensor.device.index."""
_READ_ONLY = ("jax", "jaxlib")
"""Libraries whose arrays must not be written, though their interface does not say so."""


class Place(NamedTuple):
    """Where the n elements of a vector begin, and on which GPU; `device` None is host memory."""

    address: int
    n: int
    dtype: np.dtype[Any]
    device: int | None

    def at(self, element: int) -> int:
        """The address of an element."""
        return self.address + element * self.dtype.itemsize

    def moved(self, address: int) -> Place:
        """The same elements elsewhere."""
        return self._replace(address=address)

    def vector(self) -> Vector:
        """A NumPy view of a place on the host."""
        return Flat(self.address, self.n, self.dtype).vector()


def place(x: Any, name: str, written: bool) -> Place:
    """Where a C-contiguous array of any shape lies; it must be writable if it is `written`.

    Takes NumPy's arrays, what has `__array_interface__` or DLPack on the host (torch), and what has
    `__cuda_array_interface__` (CuPy, torch, Numba). Local. TypeError or ValueError with what to do instead.
    """
    if not arrays.is_device(x):
        return Place(*arrays.flat(arrays.host(x, name), name, written), None)
    interface = x.__cuda_array_interface__
    shape, (address, read_only) = tuple(interface["shape"]), interface["data"]
    dtype, n = _dtype(x, interface["typestr"]), math.prod(shape)
    if not _contiguous(shape, interface.get("strides"), dtype.itemsize):
        raise ValueError(f"{name} of shape {shape} is not C-contiguous: pass a contiguous copy")
    if written and (read_only or _library(x) in _READ_ONLY):
        raise ValueError(f"{name} is read-only, and the result goes there: pass a writable array or out=")
    if n == 0:
        return Place(0, 0, dtype, None)  # has no memory on any device
    return Place(int(address), n, dtype, _device(x, int(address)))


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> bool:
    """Whether elements lie as C puts them. No strides say so; where an axis has one place, its stride says nothing."""
    if strides is None or 0 in shape:
        return True
    wanted = (itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return all(stride == want for stride, want, places in zip(strides, wanted, shape) if places > 1)


def _library(x: Any) -> str:
    return type(x).__module__.split(".")[0]


def _dtype(x: Any, typestr: str) -> np.dtype[Any]:
    """bfloat16 has no letter in the interface, so its name is asked for."""
    if not str(getattr(x, "dtype", "")).endswith("bfloat16"):
        return np.dtype(typestr)
    try:
        import ml_dtypes
    except ImportError:
        raise ValueError("bfloat16 needs the element type of ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


def _device(x: Any, address: int) -> int:
    """The GPU that holds the array: as its library says, else CUDA, whose answer may open a context on another GPU."""
    if ordinal := _ORDINALS.get(_library(x)):
        return int(getattr(x.device, ordinal))
    import cupy

    return int(cupy.cuda.runtime.pointerGetAttributes(address).device)

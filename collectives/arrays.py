"""Converts any kind of array that a user passes to a flat vector over the same memory.

Host arrays with ``__array_interface__`` or DLPack, and CPU tensors of PyTorch, become NumPy views of the same memory.
Arrays with ``__cuda_array_interface__`` are in the memory of a GPU; `collectives.tensor` handles them.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[Any]
# An array of any library, a list of such arrays, or None. The attributes of an array show its library.
Array: TypeAlias = Any


# True if this NumPy's DLPack distinguishes read-only arrays from writable ones. Older versions of NumPy import every
# array as read-only. They use an old protocol that cannot mark memory as read-only. Libraries therefore refuse to
# export read-only memory by this protocol, so every array that they export may be written.
DLPACK_TELLS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


class _Writable:
    """Exports the memory of a read-only NumPy array as writable. See DLPACK_TELLS."""

    def __init__(self, array: Vector):
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


class Flat(NamedTuple):
    """The address, number of elements and type of a C-contiguous array."""

    address: int
    n: int
    dtype: np.dtype[Any]

    def vector(self) -> Vector:
        """Return a view of the memory. The view does not keep the array alive: the caller of the collective must."""
        nbytes = self.n * self.dtype.itemsize
        memory = memoryview((ctypes.c_char * nbytes).from_address(self.address))
        return np.ndarray((self.n,), self.dtype, buffer=memory)


def type_name(dtype: np.dtype[Any]) -> str:
    """Return a name for an element type. Two types have the same name only if the same bytes mean the same value.

    `dtype.name` is not enough: it leaves out the byte order and the fields of structured types.
    """
    if dtype.fields is None:
        return dtype.name if dtype.isnative else repr(dtype.str)
    fields = []
    for name in dtype.names or ():
        base, shape = dtype.fields[name][0], dtype.fields[name][0].shape
        base, many = base.base, f"{shape}" if shape else ""
        fields.append(f"{name}: {type_name(base)}{many} at {dtype.fields[name][1]}")
    return f"records of {dtype.itemsize} bytes ({', '.join(fields)})"


def same_address(a: Vector, b: Vector) -> bool:
    """True if two arrays begin at the same address."""
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


def is_device(x: Array) -> bool:
    """True if an array is in the memory of a GPU."""
    if is_torch(x):
        return x.is_cuda and hasattr(x.detach(), "__cuda_array_interface__")
    return not isinstance(x, np.ndarray) and hasattr(x, "__cuda_array_interface__")


def device_interface(x: Array) -> dict[str, Any]:
    """Return the `__cuda_array_interface__` of an array on a GPU, also of a PyTorch tensor that requires gradients."""
    # PyTorch refuses the interface on tensors that require gradients. detach() returns a tensor without gradients over
    # the same memory.
    return (x.detach() if is_torch(x) else x).__cuda_array_interface__


def is_torch(x: Array) -> bool:
    """True if x is a PyTorch tensor. Does not import PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def host(x: Array, name: str = "x") -> Vector:
    """Return `x` as a NumPy array over the same memory. Raise TypeError if `x` is not an array in host memory."""
    if isinstance(x, np.ndarray):
        check_unmasked(x, name)
        return x
    if isinstance(x, np.generic):
        raise TypeError(f"{name} is a NumPy scalar, which has no memory of its own: pass an array, numpy.array(...)")
    if is_torch(x) and not is_device(x):
        return _host_torch(x, name)
    if hasattr(x, "__array_interface__"):
        return np.asarray(x)
    if hasattr(x, "__dlpack__") and not is_device(x):
        array = np.from_dlpack(x)
        return array if DLPACK_TELLS else np.asarray(_Writable(array))
    called = name.rpartition(": ")[2].partition("[")[0]
    raise TypeError(
        f"{name} is of type {type(x).__name__}, which is not an array in memory: pass "
        f"numpy.asarray({called}), a PyTorch tensor, or an object with __array_interface__ or DLPack"
    )


def check_unmasked(x: Array, name: str) -> None:
    """Raise TypeError for a masked array, because the values of its masked elements are arbitrary."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, whose mask would be lost: pass its filled(value), with a "
            "value for the masked elements"
        )


def _host_torch(x: Array, name: str) -> Vector:
    """Return the memory of a CPU tensor as a NumPy array. A bfloat16 tensor gets the dtype of the ml_dtypes package."""
    torch = sys.modules["torch"]
    if x.device.type != "cpu":
        raise TypeError(f"{name} is a tensor on {x.device}: pass a CPU tensor, as tensor.cpu()")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} is a tensor of layout {x.layout}: pass a dense one, as tensor.to_dense()")
    values = x.detach()
    if values.dtype != torch.bfloat16:
        return values.numpy()
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(f"{name} holds bfloat16, which needs the package ml_dtypes: pip install ml_dtypes") from None
    return values.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def flat(array: Vector, name: str, written: bool) -> Flat:
    """Return a C-contiguous array of a numeric type as a flat vector.

    Raise ValueError, with advice, for any other array. `written` is True if the call writes to the array. A read-only
    array is then refused.
    """
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} of shape {array.shape} is not C-contiguous: pass a contiguous copy of it")
    if written and not array.flags.writeable:
        raise ValueError(f"{name} is read-only, and the result is written to it: pass a writable array or out=")
    if array.dtype.hasobject:
        raise ValueError(f"{name} holds Python objects: use a numeric type")
    if array.dtype.kind in "SUMm":
        raise ValueError(f"{name} has elements of dtype {array.dtype}: use a numeric type, or a view of it as integers")
    return Flat(array.__array_interface__["data"][0], array.size, array.dtype)

"""Turn a kernel's text into machine code with Numba, and keep that in a folder. Imported where Numba is there only.

Numba has its own cache beside a module's file; a kernel's text has no file, so `_Folder` says where it is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import llvmlite.binding
import llvmlite.ir
import numpy as np
from numba import njit, types
from numba.core import caching
from numba.extending import intrinsic

LOG = logging.getLogger("mpips.kernels")
_HALF, _FLOAT = llvmlite.ir.HalfType(), llvmlite.ir.FloatType()
_INT16, _INT32 = llvmlite.ir.IntType(16), llvmlite.ir.IntType(32)


class Source(NamedTuple):
    """A kernel to compile: the text of a function `kernel`, the types of its arguments, what names it in a folder."""

    name: str
    text: str
    types: tuple[str, ...]
    stamp: str


def compiled(kernel: Source, folder: Path | None) -> Callable[..., Any]:
    """Return the kernel's function, from `folder` where it is kept there; else compile it, and try to keep it.

    Blocking, about half a second where it is not kept. Raises what Numba raises for a text that it cannot compile.
    """
    if folder is not None:
        try:
            return _function(kernel, folder)
        except (OSError, EOFError, ValueError, KeyError, AttributeError, ImportError, TypeError) as error:
            LOG.info("kernel %s cannot be kept in %s: %s", kernel.name, folder, error)
    return _function(kernel, None)


def _function(kernel: Source, folder: Path | None) -> Callable[..., Any]:
    if "float16(" in kernel.text.replace("bfloat16(", "") and not _converts_float16():
        raise RuntimeError("this processor does not convert float16")  # LLVM would call a function that is not there
    space: dict[str, Any] = {"__name__": __name__, "np": np, **CONVERSIONS}
    exec(compile(kernel.text, f"<{kernel.name}>", "exec"), space)
    function: FunctionType = space["kernel"]
    dispatcher: Any = njit(error_model="numpy", nogil=True, fastmath=False, boundscheck=False)(function)
    if folder is not None:
        dispatcher._cache = _cache(function, kernel, folder)
    dispatcher.compile(tuple(map(_type, kernel.types)))
    dispatcher.disable_compile()
    return dispatcher


def _converts_float16() -> bool:
    if llvmlite.binding.get_process_triple().startswith(("x86_64", "i686")):
        return llvmlite.binding.get_host_cpu_features().get("f16c", False)
    return True


def _type(text: str) -> Any:
    """Return Numba's type of an argument."""
    element = getattr(types, text.removeprefix("const ").removesuffix("[]"))
    return types.Array(element, 1, "C", readonly=text.startswith("const ")) if text.endswith("[]") else element


def _cache(function: FunctionType, kernel: Source, folder: Path) -> caching.FunctionCache:
    class Implementation(caching.CompileResultCacheImpl):
        _locator_classes: ClassVar[list[Any]] = [_Folder]

    class Cache(caching.FunctionCache):
        _impl_class = Implementation

    function.__dict__["kept_in"] = (folder, kernel.stamp)
    return Cache(function)


class _Folder(caching._CacheLocator):
    """The place of one kernel in a folder, which may be read-only."""

    def __init__(self, function: FunctionType) -> None:
        self._folder, self._stamp = function.__dict__["kept_in"]

    @classmethod
    def from_function(cls, py_func: FunctionType, py_file: str) -> _Folder:
        return cls(py_func)

    def ensure_cache_path(self) -> None:
        """Do nothing: the folder is there."""

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._stamp

    def get_disambiguator(self) -> str:
        return self._stamp


@intrinsic
def widen_float16(typingctx: Any, bits: Any) -> Any:
    """Return the float32 of a float16's bits."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = builder.bitcast(args[0], _HALF)
        return builder.fpext(half, _FLOAT)

    return types.float32(types.uint16), code


@intrinsic
def narrow_float16(typingctx: Any, x: Any) -> Any:
    """Return the bits of the float16 that is nearest to a float32, ties to even."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], _HALF), _INT16)

    return types.uint16(types.float32), code


@intrinsic
def float_of(typingctx: Any, bits: Any) -> Any:
    """Return the float32 of these 32 bits."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.uint32), code


@intrinsic
def bits_of(typingctx: Any, x: Any) -> Any:
    """Return the 32 bits of a float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _INT32)

    return types.uint32(types.float32), code


@njit(inline="always")
def widen_bfloat16(bits: Any) -> Any:
    """Return the float32 of a bfloat16's bits."""
    return float_of(np.uint32(np.uint32(bits) << np.uint32(16)))


@njit(inline="always")
def narrow_bfloat16(x: Any) -> Any:
    """Return the bits of the bfloat16 that is nearest to a float32, ties to even; a NaN stays one."""
    bits = bits_of(x)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.uint16(nan if x != x else rounded)


CONVERSIONS: dict[str, Any] = {
    "widen_float16": widen_float16, "narrow_float16": narrow_float16, "widen_bfloat16": widen_bfloat16,
    "narrow_bfloat16": narrow_bfloat16, "float_of": float_of, "bits_of": bits_of,
}  # fmt: skip
"""Functions that a kernel's text may call."""

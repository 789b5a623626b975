"""Turn a kernel's text into machine code with Numba, and keep that in a folder. Imported where Numba is there only.

Numba keeps code beside a module's file, and takes what lies there for sound; a kernel has a file of its own (`_File`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import llvmlite.binding
import llvmlite.ir
import numba
import numpy as np
from llvmlite.ir import IRBuilder, Value
from numba import njit, types
from numba.core import caching, errors
from numba.core.base import BaseContext
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.core.typing import Context, Signature
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from mpips.collectives import log

LOG = log.get("mpips.kernels")
_HALF, _FLOAT = llvmlite.ir.HalfType(), llvmlite.ir.FloatType()
_DIGEST = hashlib.sha256().digest_size
_OWN = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
"""Names the conversions, which kernels take in."""
_INT16, _INT32 = llvmlite.ir.IntType(16), llvmlite.ir.IntType(32)
Typed: TypeAlias = "tuple[Signature, Callable[..., Value]]"
"""Of an intrinsic: the types of its result and arguments, and what writes its code."""


# To colour a message Numba would put other streams in the place of sys.stdout and sys.stderr meanwhile, and write to
# standard output when the process ends.
setattr(errors, "ColorShell", contextlib.nullcontext)  # noqa: B010


class Source(NamedTuple):
    """A kernel to compile: the text of a function `kernel`, and the types of its arguments."""

    name: str
    text: str
    types: tuple[str, ...]


def place(kernel: Source, folder: Path) -> Path:
    """Return the file of a kernel: for this text, processor, Python and Numba."""
    machine = cpu_target.target_context.codegen().magic_tuple()
    here = (kernel.text, kernel.types, machine, sys.version_info[:2], numba.__version__, llvmlite.__version__, _OWN)
    return folder / f"{hashlib.sha256(repr(here).encode()).hexdigest()[:24]}.kernel"


def compiled(kernel: Source, path: Path | None) -> Callable[..., Any]:
    """Return the kernel's function, from a file where it is kept there; else compile it, and try to keep it.

    Blocking, about half a second where it is not kept. Raises what Numba raises for a text that it cannot compile.
    """
    if "float16(" in kernel.text.replace("bfloat16(", "") and not _converts_float16():
        raise RuntimeError("this processor does not convert float16")  # LLVM would call a function that is not there
    space: dict[str, Any] = {"__name__": __name__, "np": np, **CONVERSIONS}
    exec(compile(kernel.text, f"<{kernel.name}>", "exec"), space)
    dispatcher = njit(error_model="numpy", nogil=True, fastmath=False, boundscheck=False)(space["kernel"])
    if path is not None:
        dispatcher._cache = _File(kernel.name, path)
    dispatcher.compile(tuple(map(_type, kernel.types)))
    dispatcher.disable_compile()
    return dispatcher


class _File(caching.NullCache):
    """A dispatcher's cache: one kernel's machine code, with a checksum, as changed code may do anything."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path

    def load_overload(self, sig: Signature, target_context: BaseContext) -> CompileResult | None:
        try:
            found = self._path.stat()
            if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ValueError("others can write to it")
            kept = self._path.read_bytes()
            if hashlib.sha256(kept[_DIGEST:]).digest() != kept[:_DIGEST]:
                raise ValueError("its checksum does not fit")
            target_context.refresh()
            return CompileResult._rebuild(target_context, *pickle.loads(kept[_DIGEST:]))
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever pickle and LLVM say of another version's file
            LOG.info("kernel %s is compiled anew: %s: %s", self._name, self._path, error)
            return None

    def save_overload(self, sig: Signature, data: CompileResult) -> None:
        part = self._path.with_suffix(".part")
        try:
            payload = dumps(data._reduce())
            part.touch(mode=0o600)
            part.write_bytes(hashlib.sha256(payload).digest() + payload)
            part.replace(self._path)
            LOG.info("kernel %s is kept in %s", self._name, self._path)
        except Exception as error:  # a full disk, a read-only folder, what cannot be pickled
            LOG.info("kernel %s is not kept: %s: %s", self._name, type(error).__name__, error)
            with contextlib.suppress(OSError):
                part.unlink()


def _converts_float16() -> bool:
    if llvmlite.binding.get_process_triple().startswith(("x86_64", "i686")):
        return llvmlite.binding.get_host_cpu_features().get("f16c", False)
    return True


def _type(text: str) -> types.Type:
    """Return Numba's type of an argument."""
    element = getattr(types, text.removeprefix("const ").removesuffix("[]"))
    return types.Array(element, 1, "C", readonly=text.startswith("const ")) if text.endswith("[]") else element


@intrinsic
def widen_float16(typingctx: Context, bits: types.Type) -> Typed:
    """Return the float32 of a float16's bits."""

    def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
        half = builder.bitcast(args[0], _HALF)
        return builder.fpext(half, _FLOAT)

    return types.float32(types.uint16), code


@intrinsic
def narrow_float16(typingctx: Context, x: types.Type) -> Typed:
    """Return the bits of the float16 that is nearest to a float32, ties to even."""

    def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
        return builder.bitcast(builder.fptrunc(args[0], _HALF), _INT16)

    return types.uint16(types.float32), code


@intrinsic
def float_of(typingctx: Context, bits: types.Type) -> Typed:
    """Return the float32 of these 32 bits."""

    def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.uint32), code


@intrinsic
def bits_of(typingctx: Context, x: types.Type) -> Typed:
    """Return the 32 bits of a float32."""

    def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
        return builder.bitcast(args[0], _INT32)

    return types.uint32(types.float32), code


@njit(inline="always")
def widen_bfloat16(bits: np.uint16) -> np.float32:
    """Return the float32 of a bfloat16's bits."""
    return float_of(np.uint32(np.uint32(bits) << np.uint32(16)))


@njit(inline="always")
def narrow_bfloat16(x: np.float32) -> np.uint16:
    """Return the bits of the bfloat16 that is nearest to a float32, ties to even; a NaN stays one."""
    bits = bits_of(x)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.uint16(nan if x != x else rounded)


@intrinsic
def sum_of_128(typingctx: Context, array: types.Type, start: types.Type) -> Typed:
    """Return the sum of 128 elements from `start` on in NumPy's order: of eight columns, then of neighbours."""

    def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
        columns = llvmlite.ir.VectorType(context.get_value_type(array.dtype), 8)
        data = make_array(array)(context, builder, args[0]).data
        rows = builder.bitcast(builder.gep(data, [args[1]]), columns.as_pointer())
        total = None
        for i in range(16):
            row = builder.load(builder.gep(rows, [_INT32(i)]), align=array.dtype.bitwidth // 8)
            total = row if total is None else builder.fadd(total, row)
        sums = [builder.extract_element(total, _INT32(i)) for i in range(8)]
        while len(sums) > 1:
            sums = [builder.fadd(left, right) for left, right in zip(sums[::2], sums[1::2])]
        return sums[0]

    return array.dtype(array, types.intp), code


@njit(inline="always")
def mixed64(word: np.uint64) -> np.uint64:
    """Return a hash of a uint64, one to one (SplitMix64's finalizer)."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@intrinsic
def prefetch(typingctx: Context, array: types.Type, index: types.Type) -> Typed:
    """Let the processor fetch the cache line of an element, which may lie anywhere."""

    def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
        data = make_array(array)(context, builder, args[0]).data
        pointer = builder.gep(data, [args[1]])
        function = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [pointer.type],
            llvmlite.ir.FunctionType(llvmlite.ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32]),
        )
        builder.call(function, [pointer, _INT32(0), _INT32(3), _INT32(1)])
        return context.get_dummy_value()

    return types.none(array, types.intp), code


CONVERSIONS: dict[str, Any] = {
    "widen_float16": widen_float16,
    "narrow_float16": narrow_float16,
    "widen_bfloat16": widen_bfloat16,
    "narrow_bfloat16": narrow_bfloat16,
    "float_of": float_of,
    "bits_of": bits_of,
    "sum_of_128": sum_of_128,
    "mixed64": mixed64,
    "prefetch": prefetch,
}
"""Functions that a kernel's text may call."""

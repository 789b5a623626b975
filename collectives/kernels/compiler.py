"""Compiles a kernel with Numba, and keeps its machine code in a folder. Imported only if Numba is installed.

Numba's own cache keeps code beside a module's file and trusts every file that it finds there. So kernels have files of
their own, which are checked before use (`_File`).
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
from numba import carray, njit, types
from numba.core import caching, errors
from numba.core.base import BaseContext
from numba.core.cgutils import raw_memmove
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.core.typing import Context, Signature
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from mpips.collectives import log

LOG = log.get("mpips.kernels")
# the constant of SplitMix64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF, _FLOAT = llvmlite.ir.HalfType(), llvmlite.ir.FloatType()
_DIGEST = hashlib.sha256().digest_size
# Identifies this version of the functions below, whose code is part of kernels. Part of the name of a kernel's file.
_OWN = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
_INT8, _INT16, _INT32, _INT64 = (llvmlite.ir.IntType(bits) for bits in (8, 16, 32, 64))
# An intrinsic: the types of its result and arguments, and the function that writes its code.
Typed: TypeAlias = "tuple[Signature, Callable[..., Value]]"


# Switch off Numba's coloured messages. For each message Numba would replace sys.stdout and sys.stderr for a moment. Its
# library for colours would also write to standard output when the process ends.
setattr(errors, "ColorShell", contextlib.nullcontext)  # noqa: B010


class Source(NamedTuple):
    """A kernel to compile: the source of a function named `kernel`, and the types of its arguments."""

    name: str
    text: str
    types: tuple[str, ...]


def kernel_path(kernel: Source, folder: Path) -> Path:
    """Return the path of a kernel's file. The name is a hash of source, processor, and versions of Python and Numba."""
    machine = cpu_target.target_context.codegen().magic_tuple()
    parts = (kernel.text, kernel.types, machine, sys.version_info[:2], numba.__version__, llvmlite.__version__, _OWN)
    return folder / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.kernel"


def load_or_compile(kernel: Source, path: Path | None) -> Callable[..., Any]:
    """Return the function of a kernel: load it from its file, or compile it and try to save it there.

    Blocking: compiling takes about half a second. Raises Numba's errors if the source cannot be compiled.
    """
    # On such a processor, LLVM would call a library function that does not exist.
    if "float16(" in kernel.text.replace("bfloat16(", "") and not _converts_float16():
        raise RuntimeError("this processor does not convert float16")
    space: dict[str, Any] = {"__name__": __name__, "np": np, **CONVERSIONS}
    exec(compile(kernel.text, f"<{kernel.name}>", "exec"), space)
    # Most kernels release the GIL (Python's lock on its interpreter) while they run. Kernels that read words of other
    # processes keep it, because they are short, and would have to wait until they get the GIL back.
    nogil = "load_word(" not in kernel.text
    dispatcher = njit(error_model="numpy", nogil=nogil, fastmath=False, boundscheck=False)(space["kernel"])
    if path is not None:
        dispatcher._cache = _File(kernel.name, path)
    dispatcher.compile(tuple(map(_type, kernel.types)))
    dispatcher.disable_compile()
    return dispatcher


class _File(caching.NullCache):
    """The cache of a dispatcher: a file with the machine code of one kernel.

    The file has a checksum, because damaged code could do anything. A file to which another user can write is not used.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._path = path

    def load_overload(self, sig: Signature, target_context: BaseContext) -> CompileResult | None:
        try:
            status = self._path.stat()
            if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ValueError("others can write to it")
            stored = self._path.read_bytes()
            if hashlib.sha256(stored[_DIGEST:]).digest() != stored[:_DIGEST]:
                raise ValueError("its checksum does not fit")
            target_context.refresh()
            return CompileResult._rebuild(target_context, *pickle.loads(stored[_DIGEST:]))
        except FileNotFoundError:
            return None
        except Exception as error:
            # pickle and LLVM may raise any exception for a file that is damaged or from another version
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
        except Exception as error:
            # for example a full disk, a read-only folder, or code that cannot be pickled
            LOG.info("kernel %s is not kept: %s: %s", self._name, type(error).__name__, error)
            with contextlib.suppress(OSError):
                part.unlink()


def _converts_float16() -> bool:
    if llvmlite.binding.get_process_triple().startswith(("x86_64", "i686")):
        return llvmlite.binding.get_host_cpu_features().get("f16c", False)
    return True


def _type(text: str) -> types.Type:
    """Return Numba's type for the type of an argument, such as "const float32[]"."""
    element = getattr(types, text.removeprefix("const ").removesuffix("[]"))
    return types.Array(element, 1, "C", readonly=text.startswith("const ")) if text.endswith("[]") else element


@intrinsic
def widen_float16(typingctx: Context, bits: types.Type) -> Typed:
    """Convert the bits of a float16 to a float32."""

    def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
        half = builder.bitcast(args[0], _HALF)
        return builder.fpext(half, _FLOAT)

    return types.float32(types.uint16), code


@intrinsic
def narrow_float16(typingctx: Context, x: types.Type) -> Typed:
    """Convert a float32 to the bits of the nearest float16, ties to even."""

    def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
        return builder.bitcast(builder.fptrunc(args[0], _HALF), _INT16)

    return types.uint16(types.float32), code


@intrinsic
def float_of(typingctx: Context, bits: types.Type) -> Typed:
    """Return the float32 that has these 32 bits."""

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
    """Convert the bits of a bfloat16 to a float32."""
    return float_of(np.uint32(np.uint32(bits) << np.uint32(16)))


@njit(inline="always")
def narrow_bfloat16(x: np.float32) -> np.uint16:
    """Convert a float32 to the bits of the nearest bfloat16, ties to even. A NaN stays a NaN."""
    bits = bits_of(x)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.uint16(nan if x != x else rounded)


@njit(inline="always")
def narrow_at_random_bfloat16(x: np.float32, word: np.uint64) -> np.uint16:
    """Convert a float32 to the bits of one of the two nearest bfloat16.

    The higher absolute value has the probability of the distance to the lower one. With u = (word >> 11) / 2^53 it is
    chosen if (distance to the lower one) / (distance between both) + u >= 1.
    """
    bits = bits_of(x)
    if bits & np.uint32(0x7FFFFFFF) >= np.uint32(0x7F800000):
        return narrow_bfloat16(x)
    return np.uint16(np.uint32(bits + np.uint32(word >> np.uint64(48))) >> np.uint32(16))


@njit(inline="always")
def narrow_at_random_float16(x: np.float32, word: np.uint64) -> np.uint16:
    """Convert a float32 to the bits of one of the two nearest float16, as `narrow_at_random_bfloat16` does."""
    bits = bits_of(x)
    size, sign = bits & np.uint32(0x7FFFFFFF), np.uint16((bits >> np.uint32(16)) & np.uint32(0x8000))
    if size >= np.uint32(0x7F800000):
        return narrow_float16(x)
    if size >= np.uint32(0x38800000):
        # Adding 13 random bits carries into the bits that are kept. 112 is the difference of the exponents' biases.
        half = np.uint32(np.uint32(size + np.uint32(word >> np.uint64(51))) >> np.uint32(13)) - np.uint32(112 << 10)
        return sign | np.uint16(min(half, np.uint32(0x7C00)))
    # Numbers below 2^-14 are multiples of 2^-24 in float16.
    steps = np.float64(float_of(size)) * 16777216.0
    below = np.floor(steps)
    up = steps - below >= np.float64(np.int64((1 << 53) - np.int64(word >> np.uint64(11)))) * (1.0 / (1 << 53))
    return sign | np.uint16(np.int64(below) + np.int64(up))


@intrinsic
def sum_of_128(typingctx: Context, array: types.Type, start: types.Type) -> Typed:
    """Return the sum of the 128 elements from `start` on, added in NumPy's order.

    NumPy takes them as 16 rows of 8, sums each column, and then adds neighbouring sums.
    """

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
def sum_of_row(values: Any) -> Any:
    """Return the sum of 1 to 128 values, added in NumPy's order. Overwrites the first eight values.

    First eight running sums go over the values, then these sums are added in pairs, then the remaining values are added
    one by one.
    """
    whole, total = values.size // 8 * 8, values[0]
    if whole:
        for start in range(8, whole, 8):
            for k in range(8):
                values[k] += values[start + k]
        left, right = (
            (values[0] + values[1]) + (values[2] + values[3]),
            (values[4] + values[5]) + (values[6] + values[7]),
        )
        total = left + right
    for k in range(max(whole, 1), values.size):
        total += values[k]
    return total


@njit(inline="always")
def mixed64(word: np.uint64) -> np.uint64:
    """Return a hash of a uint64, different for every value (the finalizer of SplitMix64)."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@intrinsic
def prefetch(typingctx: Context, array: types.Type, index: types.Type) -> Typed:
    """Tell the processor to fetch the cache line of an element. The index may be out of bounds."""

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


@intrinsic
def load_word(typingctx: Context, address: types.Type) -> Typed:
    """Read the word at an address. Later reads see all that its writer wrote before it."""

    def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
        return builder.load_atomic(builder.inttoptr(args[0], _INT64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), code


@intrinsic
def store_word(typingctx: Context, address: types.Type, word: types.Type) -> Typed:
    """Write the word at an address, after all that was written before."""

    def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
        builder.store_atomic(args[1], builder.inttoptr(args[0], _INT64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), code


@intrinsic
def move_bytes(typingctx: Context, to: types.Type, source: types.Type, count: types.Type) -> Typed:
    """Copy bytes between addresses."""

    def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
        target, origin = (builder.inttoptr(address, _INT8.as_pointer()) for address in args[:2])
        raw_memmove(builder, target, origin, args[2], 1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), code


@intrinsic
def pause(typingctx: Context) -> Typed:
    """Tell the processor that this thread waits, so that the other thread of its core runs faster."""

    def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
        if llvmlite.binding.get_process_triple().startswith(("x86_64", "i686")):
            function = llvmlite.ir.FunctionType(llvmlite.ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", [], function), [])
        return context.get_dummy_value()

    return types.none(), code


def _pointer_to(element: types.Type) -> Callable[..., Any]:
    """Return a function that turns an address into a pointer to elements of this type."""

    @intrinsic
    def pointer(typingctx: Context, address: types.Type) -> Typed:
        def code(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Value]) -> Value:
            return builder.inttoptr(args[0], context.get_value_type(types.CPointer(element)))

        return types.CPointer(element)(types.int64), code

    return pointer  # type: ignore[no-any-return]


def _array_at(element: types.Type) -> Callable[..., Any]:
    """Return a function that views the memory at an address as an array of elements of this type."""
    pointer = _pointer_to(element)

    @njit(inline="always")
    def array_at(address: int, count: int = 1) -> Any:
        return carray(pointer(address), count)

    return array_at  # type: ignore[no-any-return]


@njit(inline="always")
def _same_row(row: Any, scratch: Any) -> Any:
    return row


@njit(inline="always")
def _row_is_stored(row: Any, wide: Any, streams: Any, i: int) -> None:
    pass


def _widened_row(widen: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that converts a row of 16 bits to float32."""

    @njit(inline="always")
    def widened_row(row: Any, scratch: Any) -> Any:
        for k in range(row.size):
            scratch[k] = widen(row[k])
        return scratch

    return widened_row  # type: ignore[no-any-return]


def _store_row(narrow: Callable[..., Any], narrow_at_random: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that rounds a float32 row to 16 bits (see `mpips.tables.halves`)."""

    @njit(inline="always")
    def store_row(row: Any, wide: Any, streams: Any, i: int) -> None:
        if streams.size:
            stream = streams[i]
            for k in range(row.size):
                row[k] = narrow_at_random(wide[k], mixed64(stream + np.uint64(k + 1) * _GOLDEN))
        else:
            for k in range(row.size):
                row[k] = narrow(wide[k])

    return store_row  # type: ignore[no-any-return]


# the functions that the source of a kernel may call
CONVERSIONS: dict[str, Any] = {
    "widen_float16": widen_float16,
    "narrow_float16": narrow_float16,
    "widen_bfloat16": widen_bfloat16,
    "narrow_bfloat16": narrow_bfloat16,
    "widened_row_float": _same_row,
    "widened_row_float16": _widened_row(widen_float16),
    "widened_row_bfloat16": _widened_row(widen_bfloat16),
    "store_row_float": _row_is_stored,
    "store_row_float16": _store_row(narrow_float16, narrow_at_random_float16),
    "store_row_bfloat16": _store_row(narrow_bfloat16, narrow_at_random_bfloat16),
    "float_of": float_of,
    "bits_of": bits_of,
    "sum_of_128": sum_of_128,
    "sum_of_row": sum_of_row,
    "mixed64": mixed64,
    "prefetch": prefetch,
    "load_word": load_word,
    "store_word": store_word,
    "move_bytes": move_bytes,
    "pause": pause,
    "yield_core": types.ExternalFunction("sched_yield", types.int32()),
    "words_at": _array_at(types.int64),
    "uint16_at": _array_at(types.uint16),
    "float32_at": _array_at(types.float32),
    "float64_at": _array_at(types.float64),
}

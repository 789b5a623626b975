"""Reduce several vectors to one, element by element, in one pass over memory: compiled where that pays, else by NumPy.

Vectors combine from the first to the last, and every partial result rounds to their dtype, as NumPy's calls one after
another do, so the bits are the same. NaN payloads are open.

NumPy adds float16 and bfloat16 one element at a time: 60 and 7 times slower than compiled code. Two vectors of float32
or float64 it adds as fast, of more it makes a pass for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.kernels import engine

MOST_PARTS = 8
"""Vectors that one kernel reads; more are reduced in steps."""
TILE = 1024
"""Elements that are reduced before they are written, so that the result may lie where one of the vectors does."""
SIGNS: dict[Any, str] = {np.add: "+", np.multiply: "*"}
"""Of compiled reductions. Which zero is the minimum of 0 and -0 is a matter of NumPy's version: that stays NumPy's."""


class Limit(NamedTuple):
    """The number of vectors, and the bytes of one, from which on a kernel is asked for."""

    parts: int
    nbytes: int


_16_BIT = Limit(2, 32 << 10)
_WIDER = Limit(3, 1 << 20)
LIMITS = {"float16": _16_BIT, "bfloat16": _16_BIT, "float32": _WIDER, "float64": _WIDER}
"""A kernel that is there wins from 64 elements on. But a process that asks for the first loads Numba: 0.5 s, 70 MiB."""


def add_parts(parts: Sequence[NDArray[Any]], out: NDArray[Any], nbytes: int | None = None) -> None:
    """Set `out` to the sum of one or more 1-D arrays of its size and dtype, from first to last.

    `out` may be one of them, but not overlap one otherwise. `nbytes`: of the whole vectors, where these are blocks.
    """
    for function, arguments in steps(np.add, parts, out, nbytes=nbytes):
        function(*arguments)


def pays(combine: Callable[..., Any], dtype: np.dtype[Any], parts: int, nbytes: int) -> bool:
    """Return whether a kernel is worth asking for, to reduce `parts` vectors of so many bytes."""
    limit = LIMITS.get(dtype.name)
    return combine in SIGNS and limit is not None and dtype.isnative and parts >= limit.parts and nbytes >= limit.nbytes


def prepare(combine: Callable[..., Any], dtype: np.dtype[Any], parts: int, nbytes: int) -> None:
    """Ask for the kernels of such a reduction where they pay, so that they are there in time. Not blocking."""
    if pays(combine, dtype, parts, nbytes):
        _kernel(combine, dtype.name, min(parts, MOST_PARTS))
        if parts > MOST_PARTS and (rest := (parts - 1) % (MOST_PARTS - 1)):
            _kernel(combine, dtype.name, rest + 1)


def steps(
    combine: Callable[..., Any],
    parts: Sequence[NDArray[Any]],
    out: NDArray[Any],
    scratch: NDArray[Any] | None = None,
    divisor: int = 1,
    nbytes: int | None = None,
) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return calls, bound to these arrays, that set `out` to the reduction of `parts`, divided by `divisor`.

    Args:
        combine: what NumPy's (first, second, result) does, such as np.add.
        parts: one or more 1-D arrays of the size and dtype of `out`, which may be one of them.
        scratch: an array at least as long, used where `out` may not be written early; None: made where needed.
        nbytes: of the whole vectors, where these are blocks of them.
    """
    whole = out.nbytes if nbytes is None else nbytes
    if not pays(combine, out.dtype, len(parts), whole) or not all(_alike(part, out) for part in parts):
        return _pairs(combine, parts, out, scratch, divisor)
    made = []
    first, others = parts[0], parts[1:]
    while others:
        group, others = [first, *others[: MOST_PARTS - 1]], others[MOST_PARTS - 1 :]
        last = divisor if not others else 1
        if any(_same(later, out) for later in others):
            scratch = np.empty_like(out) if scratch is None else scratch
            first = scratch[: out.size]
        else:
            first = out
        kernel = _kernel(combine, out.dtype.name, len(group))
        made.append((_one_pass(kernel, group, first, last, _pairs(combine, group, first, scratch, last)), ()))
    return made


def _pairs(
    combine: Callable[..., Any],
    parts: Sequence[NDArray[Any]],
    out: NDArray[Any],
    scratch: NDArray[Any] | None,
    divisor: int,
) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return NumPy's calls, one for each vector after the first."""
    made: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    first = parts[0]
    for index, part in enumerate(parts[1:], 2):
        to = out
        if any(_same(later, out) for later in parts[index:]):
            scratch = np.empty_like(out) if scratch is None else scratch
            to = scratch[: out.size]
        made.append((combine, (first, part, to)))
        first = to
    if len(parts) == 1 and not _same(first, out):
        made.append((np.copyto, (out, first)))
    if divisor != 1:
        made.append((np.true_divide, (out, out.dtype.type(divisor), out)))
    return made


def _one_pass(
    kernel: engine.Kernel,
    parts: Sequence[NDArray[Any]],
    out: NDArray[Any],
    divisor: int,
    by_numpy: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
) -> Callable[[], None]:
    """Return what runs the kernel, or NumPy's calls until it is there."""
    arrays, wide = [out, *parts], np.float64 if out.itemsize == 8 else np.float32
    if out.itemsize == 2:
        arrays = [array.view(np.uint16) for array in arrays]
    arguments = (*arrays, wide(out.dtype.type(divisor)))

    def run() -> None:
        if kernel.call is not None:
            kernel.call(*arguments)
            return
        for function, bound in by_numpy:
            function(*bound)

    return run


def _alike(part: NDArray[Any], out: NDArray[Any]) -> bool:
    """Return whether a kernel can read `part` and write `out`, neither of which it looks at again."""
    flags = part.flags
    return (
        part.ndim == 1 and part.shape == out.shape and part.dtype == out.dtype and flags.aligned
        and flags.c_contiguous and out.flags.carray
    )  # fmt: skip


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


@functools.cache
def _kernel(combine: Callable[..., Any], dtype: str, parts: int) -> engine.Kernel:
    stored, wide = ("uint16", "float32") if "16" in dtype else (dtype, dtype)
    types = [f"{stored}[]", *[f"const {stored}[]"] * parts, wide]
    return engine.kernel(f"{SIGNS[combine]} of {parts} {dtype}", text(SIGNS[combine], dtype, parts), types)


def text(sign: str, dtype: str, parts: int) -> str:
    """Return the text of the kernel `(out, parts..., divisor)`."""
    widen, narrow = (f"widen_{dtype}", f"narrow_{dtype}") if "16" in dtype else ("", "")
    names = [f"p{i}" for i in range(parts)]
    total = "p0[i]"
    for name in names[1:]:
        total = f"{narrow}({widen}({total}) {sign} {widen}({name}[i]))"
    return "\n".join([
        f"def kernel(out_all, {', '.join(f'{name}_all' for name in names)}, divisor):",
        f"    total = np.empty({TILE}, np.{'uint16' if '16' in dtype else dtype})",
        f"    for start in range(0, out_all.size, {TILE}):",
        f"        stop = min(start + {TILE}, out_all.size)",
        *[f"        {name} = {name}_all[start:stop]" for name in ("out", *names)],
        "        for i in range(out.size):",
        f"            total[i] = {total}",
        "        if divisor == 1:",
        "            for i in range(out.size):",
        "                out[i] = total[i]",
        "        else:",
        "            for i in range(out.size):",
        f"                out[i] = {narrow}({widen}(total[i]) / divisor)",
        "",
    ])  # fmt: skip

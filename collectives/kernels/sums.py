"""Reduces several vectors to one, element by element: by a compiled kernel where it is faster, otherwise by NumPy.

Vectors are combined from the first to the last, and every partial result is rounded to their dtype, as in a sequence of
NumPy calls. So kernels and NumPy give the same bits, except that NaN payloads may differ.

NumPy adds float16 and bfloat16 one element at a time, which is 60 and 7 times slower than compiled code. It adds two
vectors of float32 or float64 as fast as a kernel, but it needs another pass over memory for each further vector, and
one for the division of a mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpips.collectives.arrays import Vector, same_address
from mpips.collectives.kernels import engine
from mpips.collectives.kernels.quiet import quietly

# a function and its arguments
Step: TypeAlias = "tuple[Callable[..., Any], tuple[Any, ...]]"
# The largest number of vectors that one kernel reads. More vectors are reduced in several steps.
MOST_PARTS = 8
# A kernel reduces this many elements before it writes them, so that the result may overwrite one of the vectors.
TILE = 1024
# NumPy sums long vectors in pieces of this size. The running sum, which it reads again for every vector, then stays in
# a core's own cache together with a piece of one vector.
PIECE_BYTES = 384 << 10
# The reductions that are compiled. minimum and maximum are not: whether 0 or -0 is smaller depends on NumPy's version.
SIGNS: dict[Any, str] = {np.add: "+", np.multiply: "*"}


class KernelThreshold(NamedTuple):
    """The smallest reductions for which a kernel is used instead of NumPy.

    `passes` is the number of times that NumPy would pass over the vectors, and `nbytes` the size of one vector.
    """

    passes: int
    nbytes: int


# the size of the smallest vectors that add_parts() sums by a kernel, for 16-bit and for wider elements
LEAST_BYTES = 4 << 10
LEAST_WIDER_BYTES = 512 << 10
_16_BIT = KernelThreshold(1, LEAST_BYTES)
_WIDER = KernelThreshold(2, 64 << 10)
# The smallest reductions that are worth a kernel. (A compiled kernel alone is faster than NumPy from 64 elements on.)
# It saves 60 us to 1 ms in each call with float16 vectors of 64 KiB. With float32 vectors it saves a tenth to a third
# of the time of a call between 64 KiB and 4 MiB, and nothing above 4 MiB. That is too little to load Numba for it (see
# `pays`).
THRESHOLDS = {"float16": _16_BIT, "bfloat16": _16_BIT, "float32": _WIDER, "float64": _WIDER}


def perform(steps: Sequence[Step]) -> None:
    """Run steps, one after the other."""
    for function, arguments in steps:
        function(*arguments)


def add_parts(parts: Sequence[Vector], out: Vector) -> None:
    """Set `out` to the sum of one or more 1-D arrays of its size and dtype, added from first to last.

    `out` may be the first part, but must not overlap any other part.
    """
    # NumPy adds short arrays, and two arrays of any length, as fast as a kernel does.
    if out.itemsize > 2 and (len(parts) == 2 or out.nbytes < LEAST_WIDER_BYTES):
        quietly(_add_by_numpy, parts, out)
        return
    group, others = parts[:MOST_PARTS], parts[MOST_PARTS:]
    _add_group(group, out)
    while others:
        group, others = [out, *others[: MOST_PARTS - 1]], others[MOST_PARTS - 1 :]
        _add_group(group, out)


def _add_group(parts: Sequence[Vector], out: Vector) -> None:
    """Sum up to `MOST_PARTS` vectors by a kernel where it is faster, and otherwise by NumPy."""
    # The limit is higher than in THRESHOLDS, because here the arguments of the kernel are checked in every call.
    least = LEAST_BYTES if out.itemsize == 2 else LEAST_WIDER_BYTES
    if out.nbytes >= least and pays(np.add, out.dtype, len(parts), out.nbytes) and isinstance(out, np.ndarray):
        call = _call(_kernel(np.add, out.dtype.name, len(parts)), out)
        if call is not None and all(_kernel_can_take(part, out) for part in parts):
            call(*_arguments(parts, out, 1))
            return
    quietly(_add_by_numpy, parts, out)


def _add_by_numpy(parts: Sequence[Vector], out: Vector) -> None:
    if len(parts) > 2 and out.nbytes > PIECE_BYTES:
        step = PIECE_BYTES // out.itemsize
        for start in range(0, out.size, step):
            piece = slice(start, start + step)
            _add_by_numpy([part[piece] for part in parts], out[piece])
        return
    if len(parts) == 1:
        np.copyto(out, parts[0])
    first = parts[0]
    for other in parts[1:]:
        np.add(first, other, out)
        first = out


def pays(combine: Callable[..., Any], dtype: np.dtype[Any], parts: int, nbytes: int, mean: bool = False) -> bool:
    """True if a kernel should be used for a reduction of `parts` vectors of `nbytes` bytes each, because it is faster.

    For elements wider than 16 bits a kernel saves too little time to import Numba for it. So for these the result is
    False unless this process has imported Numba for something else.
    """
    limit = _threshold(dtype)
    if limit is None or combine not in SIGNS or not (dtype.itemsize == 2 or engine.in_use()):
        return False
    return parts - 1 + mean >= limit.passes and nbytes >= limit.nbytes


def _call(kernel: engine.Kernel, out: Vector) -> Callable[..., Any] | None:
    """Return the function of a kernel, or None until it is loaded. Only 16-bit elements count towards loading."""
    return kernel.call_for(out.size) if out.itemsize == 2 else kernel.call


# cached, because dtype.name takes 2 us each time
@functools.cache
def _threshold(dtype: np.dtype[Any]) -> KernelThreshold | None:
    return THRESHOLDS.get(dtype.name) if dtype.isnative else None


def prepare(combine: Callable[..., Any], dtype: np.dtype[Any], parts: int, nbytes: int, mean: bool = False) -> None:
    """Load the compiled kernels of a reduction, if they are expected to save more time than loading takes.

    Call this while a program sets up, because loading may block for a second or two. Until the kernels are loaded,
    NumPy does the reduction (`engine`).

    Args:
        parts: The number of vectors that are reduced to one.
        nbytes: The size of each vector.
        mean: True if the result is then divided.
    """
    if pays(combine, dtype, parts, nbytes, mean):
        groups = {min(parts, MOST_PARTS)}
        if parts > MOST_PARTS and (rest := (parts - 1) % (MOST_PARTS - 1)):
            groups.add(rest + 1)
        for count in groups:
            _kernel(combine, dtype.name, count).prepare(nbytes // dtype.itemsize)


def steps(
    combine: Callable[..., Any],
    parts: Sequence[Vector],
    out: Vector,
    scratch: Vector | None = None,
    divisor: int = 1,
    nbytes: int | None = None,
) -> list[Step]:
    """Return calls, bound to these arrays, that set `out` to the reduction of `parts`, divided by `divisor`.

    Args:
        combine: The reduction, called as combine(first, second, result), such as np.add.
        parts: One or more 1-D arrays of the size and dtype of `out`.
        out: The array for the result. It may be one of `parts`.
        scratch: An array at least as long as `out`, for partial results that must not overwrite a part. If it is None,
            it is allocated when needed.
        divisor: The number of vectors for a mean, otherwise 1.
        nbytes: The size of a whole vector in bytes, if the arrays are blocks of vectors.
    """
    whole = out.nbytes if nbytes is None else nbytes
    known = pays(combine, out.dtype, len(parts), whole, divisor != 1)
    if not known or not all(_kernel_can_take(part, out) for part in parts):
        return _pairs(combine, parts, out, scratch, divisor)
    group, others = list(parts[:MOST_PARTS]), list(parts[MOST_PARTS:])
    result: list[Step] = []
    while others:
        to, scratch = _partial_target(out, others, scratch)
        result.append(_one_pass(combine, group, to, scratch, 1))
        group, others = [to, *others[: MOST_PARTS - 1]], others[MOST_PARTS - 1 :]
    return [*result, _one_pass(combine, group, out, scratch, divisor)]


def _partial_target(out: Vector, unread: Sequence[Vector], scratch: Vector | None) -> tuple[Vector, Vector | None]:
    """Return the array for a partial result, and the scratch array (or None).

    A partial result goes to `out`, unless that is one of the vectors that have not been read yet.
    """
    if not any(same_address(later, out) for later in unread):
        return out, scratch
    scratch = np.empty_like(out) if scratch is None else scratch
    return scratch[: out.size], scratch


def _pairs(
    combine: Callable[..., Any], parts: Sequence[Vector], out: Vector, scratch: Vector | None, divisor: int
) -> list[Step]:
    """Return a reduction as NumPy calls, one for each vector after the first."""
    result: list[Step] = []
    first = parts[0]
    for index, part in enumerate(parts[1:], 2):
        to, scratch = _partial_target(out, parts[index:], scratch)
        result.append((quietly, (combine, first, part, to)))
        first = to
    if len(parts) == 1 and not same_address(first, out):
        result.append((np.copyto, (out, first)))
    if divisor != 1:
        result.append((quietly, (np.true_divide, out, out.dtype.type(divisor), out)))
    return result


def _one_pass(
    combine: Callable[..., Any], parts: Sequence[Vector], out: Vector, scratch: Vector | None, divisor: int
) -> Step:
    """Return a step that runs a kernel, or NumPy calls as long as the kernel is not loaded."""
    kernel, by_numpy = _kernel(combine, out.dtype.name, len(parts)), _pairs(combine, parts, out, scratch, divisor)
    arguments = _arguments(parts, out, divisor)

    def run() -> None:
        if (call := _call(kernel, out)) is None:
            perform(by_numpy)
        else:
            call(*arguments)

    return run, ()


def _arguments(parts: Sequence[Vector], out: Vector, divisor: int) -> tuple[Any, ...]:
    arrays, wide = [out, *parts], np.float64 if out.itemsize == 8 else np.float32
    if out.itemsize == 2:
        arrays = [array.view(np.uint16) for array in arrays]
    return (*arrays, wide(out.dtype.type(divisor)))


def _kernel_can_take(part: Vector, out: Vector) -> bool:
    """True if a kernel can read `part` and write `out`. The kernel itself does not check them."""
    flags = part.flags
    return (
        part.ndim == 1
        and part.shape == out.shape
        and part.dtype == out.dtype
        and flags.aligned
        and flags.c_contiguous
        and out.flags.carray
    )


@functools.cache
def _kernel(combine: Callable[..., Any], dtype: str, parts: int) -> engine.Kernel:
    stored, wide = ("uint16", "float32") if "16" in dtype else (dtype, dtype)
    types = [f"{stored}[]", *[f"const {stored}[]"] * parts, wide]
    return engine.kernel(f"{SIGNS[combine]} of {parts} {dtype}", kernel_source(SIGNS[combine], dtype, parts), types)


def kernel_source(sign: str, dtype: str, parts: int) -> str:
    """Return the source of kernel(out, p0, p1, ..., divisor), which combines `parts` arrays by the operator `sign`."""
    widen, narrow = (f"widen_{dtype}", f"narrow_{dtype}") if "16" in dtype else ("", "")
    names = [f"p{i}" for i in range(parts)]
    total = "p0[i]"
    for name in names[1:]:
        total = f"{narrow}({widen}({total}) {sign} {widen}({name}[i]))"
    return "\n".join(
        [
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
        ]
    )

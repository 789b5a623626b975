"""The kernels that add GPU vectors, in CUDA.

`source` writes a kernel for an operation, an element type and a number of vectors. It needs no CUDA header. It computes
what `collectives.kernels.sums` does on the host, so a list of vectors gives one result wherever it lies:

- Vectors combine from the first to the last, and every partial result rounds to the element type. A sum of float16 or
  bfloat16 vectors therefore rounds after every addition, as sums on the host do.
- minimum and maximum keep a NaN of either side, as NumPy's do. Which zero wins, +0 or -0, is open, as in NumPy.
- Sums and products of integers wrap, as NumPy's do: they are taken unsigned, where C++ defines overflow.

NaN payloads are not specified.
"""

from __future__ import annotations

from typing import NamedTuple

THREADS = 256
MOST_BLOCKS = 2048  # beyond them a thread takes several elements

OPERATIONS = ("add", "multiply", "minimum", "maximum")
"""The reductions, by the names of NumPy's ufuncs."""


class Element(NamedTuple):
    """An element type in C++: `stored` in vectors, and the type in which sums and products are taken."""

    stored: str
    computed: str
    widen: str = ""
    """Functions widen(stored) -> float and narrow(float) -> stored, for types without arithmetic of their own."""


FLOAT16 = """
static __device__ float widen(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
static __device__ unsigned short narrow(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
"""
BFLOAT16 = """
static __device__ float widen(unsigned short bits) {
    return __uint_as_float((unsigned int)bits << 16);
}
static __device__ unsigned short narrow(float x) {
    const unsigned int bits = __float_as_uint(x);
    if (x != x) return (unsigned short)(bits >> 16 | 0x40);
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
"""

ELEMENTS = {
    "float16": Element("unsigned short", "float", FLOAT16),
    "bfloat16": Element("unsigned short", "float", BFLOAT16),
    "float32": Element("float", "float"),
    "float64": Element("double", "double"),
    "int8": Element("signed char", "unsigned int"),
    "int16": Element("short", "unsigned int"),
    "int32": Element("int", "unsigned int"),
    "int64": Element("long long", "unsigned long long"),
    "uint8": Element("unsigned char", "unsigned int"),
    "uint16": Element("unsigned short", "unsigned int"),
    "uint32": Element("unsigned int", "unsigned int"),
    "uint64": Element("unsigned long long", "unsigned long long"),
}
"""The element types that kernels reduce, by NumPy's names."""

KERNEL = """
static __device__ {stored} combine({stored} a, {stored} b) {{
    {combine}
}}
extern "C" __global__ void {name}({inputs}, {stored}* out, long long n) {{
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {{
        {stored} total = v0[i];
        {rest}
        out[i] = total;
    }}
}}
"""


def name(operation: str, dtype: str, count: int) -> str:
    """The kernel's name, as the source spells it."""
    return f"collectives_{operation}_{dtype}_{count}"


def source(operation: str, dtype: str, count: int) -> str:
    """CUDA C++ of `name(...)(v0, ..., out, n)`: out = the reduction of `count` vectors of n elements, in one pass.

    `out` may be one of the vectors. Pure. ValueError where no kernel serves the operation or the element type.
    """
    see_serves(operation, dtype)
    element = ELEMENTS[dtype]
    return element.widen + KERNEL.format(
        stored=element.stored,
        combine=_combine(operation, element),
        name=name(operation, dtype, count),
        inputs=", ".join(f"const {element.stored}* v{i}" for i in range(count)),
        rest="\n        ".join(f"total = combine(total, v{i}[i]);" for i in range(1, count)),
    )


def see_serves(operation: str, dtype: str) -> None:
    """ValueError with the choices where no kernel serves the operation or the element type."""
    if operation not in OPERATIONS:
        raise ValueError(f"no kernel computes {operation!r}: choose one of {', '.join(OPERATIONS)}")
    if dtype not in ELEMENTS:
        raise ValueError(f"no kernel reduces elements of type {dtype}: choose one of {', '.join(ELEMENTS)}")


def grid(n: int) -> tuple[int, int]:
    """Blocks, and threads of each, for n elements."""
    return max(1, min(MOST_BLOCKS, -(-n // THREADS))), THREADS


def _combine(operation: str, element: Element) -> str:
    """The body of combine(a, b)."""
    computed, stored = element.computed, element.stored
    if operation in ("minimum", "maximum"):
        sign = "<" if operation == "minimum" else ">"
        x, y = ("widen(a)", "widen(b)") if element.widen else ("a", "b")
        return f"return {x} {sign} {y} || {x} != {x} ? a : b;"  # a NaN differs from itself
    sign = "+" if operation == "add" else "*"
    if element.widen:
        return f"return narrow(widen(a) {sign} widen(b));"
    return f"return ({stored})(({computed})a {sign} ({computed})b);"

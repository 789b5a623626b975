"""The text of the CUDA kernels that reduce several GPU vectors to one; `cuda` launches them and waits for streams.

`source` writes a kernel for an operation, an element type and a number of vectors. The kernel needs no CUDA header. Its
result has the same bits as that of `collectives.kernels.sums` on the host, so a result does not depend on where the
vectors are:

- Vectors are combined from the first to the last, and every partial result is rounded to the element type. So a sum of
  float16 or bfloat16 vectors is rounded after every addition, as on the host.
- minimum and maximum return NaN if either side is NaN, as NumPy does. Of +0 and -0 either may win, as in NumPy.
- Sums and products of integers wrap, as NumPy's do. They are computed in unsigned types, because C++ defines overflow
  only for those.

The payload bits of NaNs are not specified.
"""

from __future__ import annotations

from typing import NamedTuple

THREADS = 256
# A kernel is started with at most this many blocks. If a vector has more elements than these blocks have threads, each
# thread computes several elements.
MOST_BLOCKS = 2048

# the operations, by the names of NumPy's ufuncs
OPERATIONS = ("add", "multiply", "minimum", "maximum")


class Element(NamedTuple):
    """An element type in C++.

    Attributes:
        stored: The type of elements in vectors.
        computed: The type in which sums and products are computed.
        widen: For types that C++ cannot add, the source code of widen(stored) -> float and narrow(float) -> stored.
    """

    stored: str
    computed: str
    widen: str = ""


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

# NumPy's name of an element type -> the type in C++
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
    """Return the name of a kernel in its source."""
    return f"collectives_{operation}_{dtype}_{count}"


def source(operation: str, dtype: str, count: int) -> str:
    """Return the CUDA C++ source of a kernel (v0, ..., out, n).

    The kernel reduces `count` vectors of n elements to `out` in one pass. `out` may be one of the vectors.

    Raises:
        ValueError: There is no kernel for the operation or the element type.
    """
    check_kernel(operation, dtype)
    element = ELEMENTS[dtype]
    return element.widen + KERNEL.format(
        stored=element.stored,
        combine=_combine(operation, element),
        name=name(operation, dtype, count),
        inputs=", ".join(f"const {element.stored}* v{i}" for i in range(count)),
        rest="\n        ".join(f"total = combine(total, v{i}[i]);" for i in range(1, count)),
    )


def check_kernel(operation: str, dtype: str) -> None:
    """Raise ValueError, with the choices, if there is no kernel for the operation or the element type."""
    if operation not in OPERATIONS:
        raise ValueError(f"no kernel computes {operation!r}: choose one of {', '.join(OPERATIONS)}")
    if dtype not in ELEMENTS:
        raise ValueError(f"no kernel reduces elements of type {dtype}: choose one of {', '.join(ELEMENTS)}")


def grid(n: int) -> tuple[int, int]:
    """Return the number of blocks, and of threads in a block, for n elements."""
    return max(1, min(MOST_BLOCKS, -(-n // THREADS))), THREADS


def _combine(operation: str, element: Element) -> str:
    """Return the C++ body of combine(a, b)."""
    computed, stored = element.computed, element.stored
    if operation in ("minimum", "maximum"):
        sign = "<" if operation == "minimum" else ">"
        x, y = ("widen(a)", "widen(b)") if element.widen else ("a", "b")
        # x != x is true only for a NaN
        return f"return {x} {sign} {y} || {x} != {x} ? a : b;"
    sign = "+" if operation == "add" else "*"
    if element.widen:
        return f"return narrow(widen(a) {sign} widen(b));"
    return f"return ({stored})(({computed})a {sign} ({computed})b);"

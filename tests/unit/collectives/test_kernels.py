"""Every CUDA kernel compiles for a GPU; compiled for the host, each one computes NumPy's bits."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.tensor import cuda_kernels as kernels
from collectives.tensor.vectors import running, vector_place
from tests.choice import once
from tests.gpu.arrays import on_gpu
from tests.unit.collectives import nvrtc

Vector = np.ndarray[Any, Any]
COUNTS = (2, 3, 4, 5, 9)
"""What is reduced at once: 1 to 4 or 8 vectors of a worker, and what comes in."""
DTYPES = {name: np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name) for name in kernels.ELEMENTS}
COMPILER = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "c++", "clang++"))), None)
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC")
"""-ffp-contract=off: a product and a sum in one instruction would round once where NumPy rounds twice. -O1: more takes
longer to compile, and changes speed alone."""
needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason=f"needs {nvrtc.PACKAGE}")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++, c++ or clang++")

CUDA = """
#define __global__
#define __device__
struct index { unsigned int x; };
static index blockIdx, blockDim, gridDim, threadIdx;
static float __uint_as_float(unsigned int bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
static unsigned int __float_as_uint(float x) { unsigned int bits; __builtin_memcpy(&bits, &x, 4); return bits; }

template <class... Arguments>
static void on_every_thread(void (*kernel)(Arguments...), unsigned int blocks, unsigned int threads, Arguments... given)
{
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kernel(given...);
}
"""
"""What CUDA gives a kernel, for the host: threads of a grid run one after another."""
FLOAT16 = """
static float widen(unsigned short bits) {
    const unsigned int sign = (bits & 0x8000u) << 16, size = bits & 0x7fffu;
    if (size >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (size & 0x3ffu) << 13);  // infinity, NaN
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(size << 13) * 0x1p112f));  // exact
}
static unsigned short narrow(float x) {
    const unsigned int bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return sign | 0x7e00u;   // NaN
    if (size >= 0x477ff000u) return sign | 0x7c00u;  // rounds to more than the largest: infinity
    if (size < 0x38800000u)  // subnormal: a sum with 0.5 rounds to units of 2^-24
        return sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u);
    return sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
}
"""
"""What the two PTX instructions of `kernels.FLOAT16` do."""
CONVERSIONS = """
extern "C" void widen_all(const unsigned short* from, float* to, long long n) {
    for (long long i = 0; i < n; i++) to[i] = widen(from[i]);
}
extern "C" void narrow_all(const float* from, unsigned short* to, long long n) {
    for (long long i = 0; i < n; i++) to[i] = narrow(from[i]);
}
"""


@pytest.mark.slow
@needs_nvrtc
@once(dtype=kernels.ELEMENTS, operation=kernels.OPERATIONS)
def test_every_kernel_compiles(operation: str, dtype: str) -> None:
    for count in COUNTS:
        ptx = nvrtc.compile_source(kernels.source(operation, dtype, count))
        assert f".visible .entry {kernels.name(operation, dtype, count)}(" in ptx


@needs_nvrtc
@pytest.mark.parametrize(
    "good, bad, word",
    [
        ("out[i] = total;", "out[i] = totl;", "totl"),
        ("long long n)", "long long m)", '"n"'),
        ("return", "retrun", "retrun"),
    ],
)
def test_a_broken_kernel_is_refused(good: str, bad: str, word: str) -> None:
    source = kernels.source("add", "float32", 2)
    assert good in source
    with pytest.raises(nvrtc.Refused, match=word):
        nvrtc.compile_source(source.replace(good, bad))


@needs_nvrtc
def test_float16_rounds_after_every_addition() -> None:
    ptx = nvrtc.compile_source(kernels.source("add", "float16", 4))
    assert ptx.count("add.f32") % 3 == 0
    assert ptx.count("cvt.rn.f16.f32") == ptx.count("add.f32")


@pytest.mark.parametrize("operation, dtype", [("subtract", "float32"), ("add", "complex64"), ("add", "bool")])
def test_what_no_kernel_serves_is_refused(operation: str, dtype: str) -> None:
    with pytest.raises(ValueError, match="choose one of"):
        kernels.source(operation, dtype, 2)


# ---- the kernels' arithmetic, on the host


def for_host(operation: str, dtype: str, count: int) -> str:
    """The kernel's source in a namespace of its own, and a function that runs it on every thread of a grid."""
    name, stored = kernels.name(operation, dtype, count), kernels.ELEMENTS[dtype].stored
    source = kernels.source(operation, dtype, count).replace(kernels.FLOAT16, FLOAT16)
    given = ", ".join(f"(const {stored}*)vectors[{number}]" for number in range(count))
    return f"""
namespace of_{name} {{
{source}
extern "C" void run_{name}(unsigned int blocks, unsigned int threads, const void** vectors, void* out, long long n) {{
    on_every_thread({name}, blocks, threads, {given}, ({stored}*)out, n);
}}
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every kernel, compiled for the host at once."""
    folder = tmp_path_factory.mktemp("kernels")
    cases = [(operation, dtype, count) for operation in kernels.OPERATIONS for dtype in DTYPES for count in COUNTS]
    conversions = f"namespace conversions {{ {FLOAT16} {CONVERSIONS} }}"
    (folder / "kernels.cpp").write_text(CUDA + conversions + "".join(for_host(*case) for case in cases))
    command = [str(COMPILER), *FLAGS, str(folder / "kernels.cpp"), "-o", str(folder / "kernels.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "kernels.so"))


def run(library: ctypes.CDLL, operation: str, vectors: list[Vector], out: Vector) -> None:
    """Run the kernel on the grid that `collectives.tensor.cuda` asks for."""
    function = getattr(library, "run_" + kernels.name(operation, out.dtype.name, len(vectors)))
    addresses = (ctypes.c_void_p * len(vectors))(*(vector.ctypes.data for vector in vectors))
    function(*kernels.grid(out.size), addresses, ctypes.c_void_p(out.ctypes.data), ctypes.c_longlong(out.size))


def reduced(operation: str, vectors: list[Vector]) -> Vector:
    """What NumPy makes of the vectors."""
    out = np.empty_like(vectors[0])
    with np.errstate(all="ignore"):
        out[:] = functools.reduce(getattr(np, operation), vectors)
    return out


def different(operation: str, got: Vector, want: Vector) -> list[int]:
    """Where bits differ. Any NaN is a NaN; of minimum and maximum, any zero is a zero."""
    bits = f"u{want.dtype.itemsize}"
    with np.errstate(invalid="ignore"):
        alike = got == want if operation in ("minimum", "maximum") else got.view(bits) == want.view(bits)
        return np.flatnonzero(~(alike | ((got != got) & (want != want)))).tolist()


def values(dtype: np.dtype[Any], which: int) -> Vector:
    """Elements of every kind, others for each `which`: all bits of 1 and 2 bytes, else random bits; small numbers; and
    often those at the borders of the type, of which any two meet: NaN, infinities, subnormals, zeros of both signs."""
    rng = np.random.default_rng(which)
    if dtype.itemsize <= 2:
        bits = rng.permutation(np.arange(1 << 16).astype(np.uint16)).astype(f"u{dtype.itemsize}").view(dtype)
    else:
        bits = rng.integers(0, 256, (20_000, dtype.itemsize), np.uint8).reshape(-1).view(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        borders = np.array([info.min, info.min + 1, 0, 1, 2, info.max - 1, info.max], dtype)
    else:
        about = ml_dtypes.finfo(dtype)
        sizes = [0, about.smallest_subnormal, about.tiny, about.eps, 1, 1.5, about.max, np.inf, np.nan]
        borders = np.array([float(sign * float(size)) for size in sizes for sign in (1, -1)]).astype(dtype)
    return np.concatenate([bits, rng.integers(0, 100, 1000).astype(dtype), rng.choice(borders, 4000)])


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("operation", kernels.OPERATIONS)
@pytest.mark.parametrize("dtype", kernels.ELEMENTS)
def test_kernels_compute_the_bits_of_numpy(library: ctypes.CDLL, dtype: str, operation: str) -> None:
    for count in COUNTS:
        vectors = [values(DTYPES[dtype], which) for which in range(count)]
        want = reduced(operation, vectors)
        run(library, operation, vectors, out := np.empty_like(want))
        assert different(operation, out, want) == []
        run(library, operation, vectors, vectors[0])
        assert different(operation, vectors[0], want) == []


LENGTHS = (*range(18), 31, 32, 33, 255, 256, 257, 1000)


@needs_compiler
@pytest.mark.parametrize("dtype", kernels.ELEMENTS)
def test_any_length_from_any_element_on_is_computed_and_no_more_written(library: ctypes.CDLL, dtype: str) -> None:
    filled = np.full(max(LENGTHS) + 8, 77).astype(DTYPES[dtype])
    whole = [values(DTYPES[dtype], which) for which in range(max(COUNTS))]
    for turn, (operation, count, n) in enumerate(
        (operation, count, n) for operation in kernels.OPERATIONS for count in COUNTS for n in LENGTHS
    ):
        starts = [(turn + number) % 5 for number in range(count + 1)]
        vectors = [vector[start : start + n] for vector, start in zip(whole, starts[:-1])]
        memory, place = filled.copy(), slice(starts[-1], starts[-1] + n)
        run(library, operation, vectors, memory[place])
        assert different(operation, memory[place], reduced(operation, vectors)) == []
        assert (np.delete(memory, place) == 77).all()


@needs_compiler
def test_more_elements_than_threads(library: ctypes.CDLL) -> None:
    n = kernels.MOST_BLOCKS * kernels.THREADS + 1001
    vectors = [np.arange(n).astype(np.int32) * which for which in (1, 7)]
    run(library, "add", vectors, out := np.empty_like(vectors[0]))
    assert np.array_equal(out, reduced("add", vectors))


@needs_compiler
def test_the_conversions_of_float16_are_numpys(library: ctypes.CDLL) -> None:
    every = np.arange(1 << 16).astype(np.uint16)
    library.widen_all(every.ctypes, (wide := np.empty(every.size, np.float32)).ctypes, ctypes.c_longlong(every.size))
    assert different("add", wide, every.view(np.float16).astype(np.float32)) == []
    with np.errstate(all="ignore"):
        middle = wide + (np.nextafter(every.view(np.float16), np.float16(np.inf)).astype(np.float32) - wide) / 2
        numbers = [wide, values(np.dtype(np.float32), 0)]
        numbers += [np.nextafter(middle, np.float32(end)) for end in (-np.inf, 0, np.inf)] + [middle]
        given = np.concatenate(numbers)
        want = given.astype(np.float16)
    library.narrow_all(given.ctypes, (got := np.empty(given.size, np.float16)).ctypes, ctypes.c_longlong(given.size))
    assert different("add", got, want) == []


# ---- the kernels as they are launched: on a card, and on the stand-in, which computes by NumPy


@pytest.mark.parametrize("incoming", [False, True])
@once(dtype=kernels.ELEMENTS, operation=kernels.OPERATIONS)
def test_gpus_compute_the_bits_of_numpy(gpu_xp: Any, operation: str, dtype: str, incoming: bool) -> None:
    from collectives.tensor.cuda import CudaVectors

    for count, start in ((1, 0), (2, 1), (3, 3)):
        vectors = [values(DTYPES[dtype], which) for which in range(count)]
        arrays = [on_gpu(gpu_xp, vector) for vector in vectors]
        places = [vector_place(array, "x", written=False) for array in arrays]
        cuda = CudaVectors(places, places, operation)
        n = cuda.n - start
        came, out = cuda.host(n), cuda.host(n)
        came[...] = values(DTYPES[dtype], count)[start:]
        parts = [came] * incoming + [vector[start:] for vector in vectors]
        with running(cuda):
            ticket = cuda.gather(start, cuda.n, came if incoming else None, out)
            while not ticket():
                pass
        assert different(operation, out, reduced(operation, parts)) == []

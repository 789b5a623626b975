"""Every CUDA kernel compiles for a GPU, and computes what NumPy does, as a C compiler for the host shows."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.tensor import kernels
from tests.choice import once
from tests.unit.collectives import nvrtc

COUNTS = (2, 3, 4)
"""What is reduced at once: 1 to 3 vectors of a worker, and what comes in."""
DTYPES = {name: np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name) for name in kernels.ELEMENTS}
needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason=f"needs {nvrtc.PACKAGE}")
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

HOST = """
#define __global__
#define __device__
static struct { unsigned int x; } blockIdx = {0}, blockDim = {1}, gridDim = {1}, threadIdx = {0};
union word { unsigned int bits; float x; };
static float __uint_as_float(unsigned int bits) { union word w; w.bits = bits; return w.x; }
static unsigned int __float_as_uint(float x) { union word w; w.x = x; return w.bits; }
"""
HALF = """
union half { unsigned short bits; _Float16 x; };
static float widen(unsigned short bits) { union half h; h.bits = bits; return (float)h.x; }
static unsigned short narrow(float x) { union half h; h.x = (_Float16)x; return h.bits; }
"""
"""What the two PTX instructions of `kernels.FLOAT16` do, as C spells it."""


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


def built(folder: Path, text: str) -> ctypes.CDLL:
    source, library = folder / "kernels.c", folder / "kernels.so"
    source.write_text(text)
    command = ["cc", "-O2", "-w", "-shared", "-fPIC", "-ffp-contract=off", str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(library))


def on_host(operation: str, dtype: str, count: int) -> str:
    """The kernel as C, its helpers under names of their own."""
    mark = f"{operation}_{dtype}_{count}"
    text = kernels.source(operation, dtype, count).replace(kernels.FLOAT16, HALF).replace('extern "C"', "")
    for helper in ("combine(", "widen(", "narrow(", "union half"):
        word, bracket = helper.rstrip("("), helper[-1] if helper[-1] == "(" else ""
        text = text.replace(helper, f"{word}_{mark}{bracket}")
    return text


def values(dtype: np.dtype[Any], which: int) -> np.ndarray[Any, Any]:
    """Elements of every kind: all bits of 1 and 2 bytes, else random bits and small numbers, NaN and inf among them."""
    rng = np.random.default_rng(which)
    if dtype.itemsize <= 2:
        return rng.permutation(np.arange(1 << 16).astype(np.uint16)).astype(f"u{dtype.itemsize}").view(dtype)
    bits = rng.integers(0, 256, (20_000, dtype.itemsize), np.uint8).reshape(-1).view(dtype)
    small = rng.integers(0, 100, 1000).astype(dtype)
    special = [0, 1] if dtype.kind in "iu" else [np.nan, np.inf, -np.inf, 0.0, 1.5]
    return np.concatenate([bits, small, rng.choice(np.array(special, dtype), 2000)])


@needs_cc
@pytest.mark.parametrize("dtype", kernels.ELEMENTS)
def test_kernels_compute_what_numpy_does(dtype: str, tmp_path: Path) -> None:
    cases = [(operation, count) for operation in kernels.OPERATIONS for count in COUNTS]
    try:
        library = built(tmp_path, HOST + "".join(on_host(operation, dtype, count) for operation, count in cases))
    except subprocess.CalledProcessError:
        if dtype == "float16":
            pytest.skip("needs a C compiler that knows _Float16")
        raise
    for operation, count in cases:
        vectors = [values(DTYPES[dtype], which) for which in range(count)]
        got, want = np.empty_like(vectors[0]), np.empty_like(vectors[0])
        function = getattr(library, kernels.name(operation, dtype, count))
        function(*(ctypes.c_void_p(v.ctypes.data) for v in (*vectors, got)), ctypes.c_longlong(got.size))
        with np.errstate(all="ignore"):
            kernels.combine(getattr(np, operation), vectors, want)
            same = (got == want) | ((got != got) & (want != want))
        assert same.all(), (operation, count, np.flatnonzero(~same)[:5])

"""The reduction of several vectors gives the same bits by NumPy's calls and by a compiled kernel."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.kernels import engine, sums

DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float16", "bfloat16", "float32", "float64")}
SPECIAL = [0.0, -0.0, 1.0, 1e-45, -1e-40, 6e-8, -6e-8, 65504.0, -65504.0, 65519.0, 3e38, -3e38, np.inf, -np.inf, np.nan]
COUNTS = (2, 3, 8, 9, 17)
Vector = np.ndarray[Any, Any]
numba = pytest.mark.skipif(engine.status().engine != "numba", reason=engine.status().reason)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """All kernels are there before any test."""
    if not engine.in_use():  # by tests before, in the same process
        assert not sums.pays(np.add, np.dtype(np.float32), 8, 1 << 30), "float32 alone loads no Numba"
    sums.prepare(np.add, DTYPES["float16"], 2, 1 << 30)
    engine.load_all()
    for dtype in DTYPES.values():
        for sign in sums.SIGNS:
            for count in COUNTS:
                sums.prepare(sign, dtype, count, 1 << 30)
    engine.load_all()


def bits(array: Vector) -> Vector:
    """The bits of an array, in which all NaN are alike."""
    return np.where(np.isnan(array.astype(np.float64)), 1, array.view(f"u{array.itemsize}"))


def by_numpy(combine: Any, parts: list[Vector], divisor: int) -> Vector:
    """The reduction as NumPy does it."""
    total = functools.reduce(combine, parts)
    return total if divisor == 1 else np.true_divide(total, total.dtype.type(divisor))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    st.sampled_from(list(sums.SIGNS)),
    st.sampled_from((1, *COUNTS)),
    st.sampled_from((0, 1, 7, 1023, 1025, 5000)),
    st.sampled_from((1, 3)),
    st.integers(-1, 16),
    st.integers(0, 999),
)
def test_bits_are_those_of_numpy(dtype, combine, count, n, divisor, place, seed):
    rng, element = np.random.default_rng(seed), DTYPES[dtype]
    with np.errstate(all="ignore"):
        parts = [rng.normal(size=n).astype(element) for _ in range(count)]
        for part in parts:
            chosen = rng.choice(n, min(n, 60), replace=False)
            part[chosen] = rng.choice(SPECIAL, chosen.size).astype(element)
        wanted = by_numpy(combine, parts, divisor)
        out = np.empty_like(parts[0]) if place < 0 else parts[place % count]
        sums.perform(sums.steps(combine, parts, out, None, divisor, 1 << 30))
    np.testing.assert_array_equal(bits(out), bits(wanted))


@numba
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_sums_large_vectors(dtype):
    for count in (3, 8):
        kernel = sums._kernel(np.add, dtype, count)
        assert kernel.call is not None, kernel.failure
        parts, out = [np.ones(100, DTYPES[dtype])] * count, np.zeros(100, DTYPES[dtype])
        ((run, nothing),) = sums.steps(np.add, parts, out, nbytes=1 << 30)
        assert nothing == ()
        run()
        assert (out == count).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", (1, *COUNTS))
@pytest.mark.parametrize("n", [0, 5, 2500, 200_000])
def test_parts_are_added_at_once_as_numpy_adds_them(n, count, dtype):
    rng = np.random.default_rng(n)
    parts = [rng.normal(size=n).astype(DTYPES[dtype]) for _ in range(count)]
    wanted, out = by_numpy(np.add, parts, 1), np.empty(n, DTYPES[dtype])
    sums.add_parts(parts, out)
    np.testing.assert_array_equal(bits(out), bits(wanted))
    sums.add_parts(parts, parts[0])
    np.testing.assert_array_equal(bits(parts[0]), bits(wanted))


def test_odd_arrays_go_to_numpy():
    memory = np.zeros(2 * 3001 + 1, np.uint8)
    unaligned = memory[1:].view(np.float16)
    every_other = np.ones(6002, np.float16)[::2]
    swapped = np.ones(3001, ">f2")
    for array in (unaligned, every_other, swapped):
        array[:] = 1
        out = np.zeros(3001, np.float16)
        sums.add_parts([array, array, np.ones(3001, np.float16)], out)
        assert (out == 3).all()
        sums.add_parts([np.ones(3001, np.float16)] * 2, array)
        assert (array == 2).all()


@numba
def test_kernels_are_asked_for_where_they_pay():
    assert not sums.pays(np.add, np.dtype(np.float16), 2, 1024)
    assert not sums.pays(np.add, np.dtype(np.float32), 2, 1 << 30)
    assert sums.pays(np.add, np.dtype(np.float32), 2, 1 << 30, mean=True)
    assert not sums.pays(np.add, np.dtype(np.int32), 4, 1 << 30)
    assert sums.pays(np.add, np.dtype(np.float16), 2, 1 << 20)
    assert sums.pays(np.add, np.dtype(np.float32), 3, 16 << 20)

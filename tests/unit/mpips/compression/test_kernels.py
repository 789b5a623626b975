"""Compiled kernels pack and unpack to the bits of NumPy's passes, and leave everything alone where they cannot."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.errors import CollectiveError
from collectives.kernels import engine
from mpips import compression
from mpips.compression import BLOCK, OneBit, TopK, TwoBit
from mpips.compression.compressors import unfit

pytest.importorskip("numba")
if engine.status().engine != "numba":
    pytest.skip(engine.status().reason, allow_module_level=True)

COMPRESSORS = [
    TwoBit(),
    TwoBit(0.1),
    TwoBit(1e-46),
    OneBit(),
    compression.Half(),
    TopK(),
    TopK(0.3),
    TopK(1e-9),
    TopK(1),
]
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "float64", "float16", "bfloat16")}
SIZES = st.one_of(
    st.integers(0, 300),
    st.sampled_from([0, 1, 7, 8, 9, 1023, 1024, 1025, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 37, 150001]),
)
SPECIAL = [0.0, -0.0, 0.5, -0.5, 1e-45, -1e-40, 6e-8, 65504.0, -65504.0, 65520.0, 1e5, 3e38, -3e38, 1e-20]
VALUES = {
    "normal": lambda rng, n: rng.normal(size=n),
    "few": lambda rng, n: rng.integers(-3, 4, n) / 4,
    "sparse": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 0.02),
    "wide": lambda rng, n: rng.normal(size=n) * 10.0 ** rng.integers(-38, 38, n),
    "special": lambda rng, n: rng.choice(SPECIAL, n),
    "negative": lambda rng, n: -rng.random(n),
    "columns": lambda rng, n: rng.normal(size=n) * np.where(np.arange(n) % 64 == 5, 100, 0.01),
}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """All kernels are there before any test."""
    for compressor in COMPRESSORS:
        for dtype in DTYPES.values():
            compressor.prepare(dtype)
    engine.load_all()


def bits(array):
    return array.view(f"u{array.itemsize}")


def draw(values, n, dtype, seed):
    with np.errstate(over="ignore"):
        gradient = VALUES[values](np.random.default_rng(seed), n).astype(dtype)
    gradient[~np.isfinite(gradient)] = 0.75
    return gradient


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@settings(max_examples=25, deadline=None)
@given(n=SIZES, values=st.sampled_from(list(VALUES)), seed=st.integers(0, 999), other=st.sampled_from(list(DTYPES)))
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_both_engines_give_the_same_bits(compressor, dtype, n, values, seed, other):
    out = draw(values, n, DTYPES[other], seed + 7)
    residuals = [compressor.init(np.zeros(n, DTYPES[dtype])) for _ in range(2)]
    for step in range(3):
        gradient = draw(values, n, DTYPES[dtype], seed + step)
        with engine.numpy_only():
            if unfit(gradient, residuals[1]) >= 0:
                assert compressor.encode_by_kernels(gradient, residuals[0]) is None
                np.testing.assert_array_equal(bits(residuals[0]), bits(residuals[1]))
                break
            payload = compressor.encode(gradient, residuals[1])
        np.testing.assert_array_equal(compressor.encode(gradient, residuals[0]), payload)
        np.testing.assert_array_equal(bits(residuals[0]), bits(residuals[1]))
        for add in (True, False):
            both = [out.copy(), out.copy()]
            compressor.decode(payload, both[0], add)
            with engine.numpy_only():
                compressor.decode(payload, both[1], add)
            np.testing.assert_array_equal(bits(both[0]), bits(both[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_kernels_serve(compressor, dtype):
    served = (compressor, dtype) != (compression.Half(), "float64")  # NumPy rounds float64 to float16 at once
    n = 3 * BLOCK + 5
    gradient = np.random.default_rng(3).normal(size=n).astype(DTYPES[dtype])
    residual = compressor.init(gradient)
    assert (compressor.encode_by_kernels(gradient, residual) is not None) == served


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 5, 1024, BLOCK, 2 * BLOCK + 8])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_what_is_not_finite_is_refused_and_nothing_changes(compressor, at, bad):
    residuals = compression.Residuals(compressor, rank=3)
    gradient = np.random.default_rng(1).normal(size=2 * BLOCK + 9).astype(np.float32)
    residuals.payload("w", gradient)
    before = residuals.get("w").copy()
    gradient[[at, -1]] = bad
    with pytest.raises(CollectiveError, match=rf"element {at + 10} of what rank 3 pushes of key 'k' is {bad:g}, and"):
        residuals.payload("w", gradient, "k", 10)
    np.testing.assert_array_equal(bits(residuals.get("w")), bits(before))


def test_a_float64_beyond_float32_is_refused():
    residuals = compression.Residuals(TwoBit())
    with pytest.raises(CollectiveError, match="element 2 of"):
        residuals.payload("w", np.array([1, 2, -1e39]))
    np.testing.assert_array_equal(residuals.get("w"), 0)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_arrays_that_no_kernel_takes_are_numpys(compressor):
    n = 100
    gradient = np.random.default_rng(1).normal(size=2 * n).astype(np.float32)[::2]
    payloads = [compressor.encode(one, np.zeros(n, np.float32)) for one in (gradient, gradient.copy())]
    np.testing.assert_array_equal(payloads[0], payloads[1])
    odd = np.empty(payloads[0].size + 1, np.uint8)[1:]
    odd[...] = payloads[0]
    outs = np.ones((2, 2 * n), np.float32)
    compressor.decode(odd, outs[0, ::2])
    compressor.decode(payloads[0], outs[1, :n])
    np.testing.assert_array_equal(outs[0, ::2], outs[1, :n])
    np.testing.assert_array_equal(outs[0, 1::2], 1)
    outs.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        compressor.decode(payloads[0], outs[0, :n])


@pytest.mark.parametrize("places", [[0, 0], [3, 1], [1, 4], [1, 2**32 - 1]])
@pytest.mark.parametrize("add", [True, False])
def test_topk_payloads_of_others_are_read_as_numpy_does(places, add):
    payload = np.concatenate([np.array(places, np.uint32).view(np.uint8), np.array([2, 3], np.float32).view(np.uint8)])
    outs = np.ones((2, 4), np.float32)
    said = []
    for out, numpy_only in zip(outs, (False, True)):
        try:
            if numpy_only:
                with engine.numpy_only():
                    TopK(0.5).decode(payload, out, add)
            else:
                TopK(0.5).decode(payload, out, add)
        except ValueError as error:
            said.append(str(error))
    assert len(said) in (0, 2)
    assert said[:1] == said[1:]
    np.testing.assert_array_equal(outs[0], outs[1])


def test_a_class_derived_from_a_compressor_has_its_own_way():
    class Nothing(TwoBit):
        def fill(self, residual, payload):
            payload[...] = 0

        def read(self, payload, out, add):
            out[...] = 7

    gradient = np.ones(9, np.float32)
    residual, out = np.zeros(9, np.float32), np.zeros(9, np.float32)
    Nothing().decode(Nothing().encode(gradient, residual), out)
    np.testing.assert_array_equal(residual, 1)
    np.testing.assert_array_equal(out, 7)

"""Compressors: what arrives plus what stays behind is what was given, and payloads have the promised sizes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips import compression

OPTIONS = [
    {"type": "2bit", "threshold": 0.5},
    {"type": "2bit", "threshold": 2},
    {"type": "1bit"},
    {"type": "fp16"},
    {"type": "int", "bits": 8},
    {"type": "int", "bits": 4},
    {"type": "topk", "ratio": 0.05},
    {"type": "topk", "ratio": 1},
]


def send(compressor, gradient, residual, dtype=None):
    out = np.full(gradient.size, np.nan, dtype or gradient.dtype)
    compressor.decode(compressor.encode(gradient, residual), out, add=False)
    return out


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=30)
@given(
    n=st.one_of(st.integers(0, 70), st.sampled_from([compression.BLOCK, compression.BLOCK * 2 + 13])),
    sends=st.integers(1, 5),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_sent_plus_residual_is_the_sum_of_gradients(options, n, sends, dtype, seed):
    compressor = compression.create(options)
    rng = np.random.default_rng(seed)
    gradients = [rng.normal(size=n).astype(dtype) for _ in range(sends)]
    residual = compressor.init(np.zeros(n, dtype))
    arrived = np.zeros(n, np.float64)
    for gradient in gradients:
        before = gradient.copy()
        compressor.decode(compressor.encode(gradient, residual), arrived)
        np.testing.assert_array_equal(gradient, before)
    total = np.sum([g.astype(np.float64) for g in gradients], axis=0)
    np.testing.assert_allclose(arrived + residual, total, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@given(n=st.integers(0, 3000))
def test_a_payload_has_the_promised_size(options, n):
    compressor = compression.create(options)
    gradient = np.ones(n, np.float32)
    payload = compressor.encode(gradient, compressor.init(gradient))
    assert payload.dtype == np.uint8
    assert payload.shape == (compressor.max_bytes(n),)


@pytest.mark.parametrize(
    "name, factor", [("2bit", 16), ("1bit", 32), ("fp16", 2), ("int", 4 / (1 + 4 / 256)), ("topk", 50)]
)
def test_how_much_smaller_than_float32(name, factor):
    n = 1 << 20
    assert 4 * n / compression.create({"type": name}).max_bytes(n) == pytest.approx(factor, rel=1e-3)


def test_2bit_sends_thresholds_and_keeps_the_rest():
    compressor = compression.create({"type": "2bit", "threshold": 0.5})
    residual = np.zeros(6)
    gradient = np.array([0.0, 0.5, -0.5, 0.3, -0.3, 2.0])
    np.testing.assert_array_equal(send(compressor, gradient, residual), [0, 0.5, -0.5, 0, 0, 0.5])
    np.testing.assert_allclose(residual, [0, 0, 0, 0.3, -0.3, 1.5])
    # The residual crosses the threshold with the second push, and zeros go on sending what is left.
    np.testing.assert_array_equal(send(compressor, gradient, residual), [0, 0.5, -0.5, 0.5, -0.5, 0.5])
    for left in (0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0):
        np.testing.assert_array_equal(send(compressor, np.zeros(6), residual), [0, 0, 0, 0, 0, left])


def test_2bit_of_zeros_is_zeros():
    compressor = compression.create({"type": "2bit"})
    residual = np.zeros(100, np.float32)
    np.testing.assert_array_equal(send(compressor, np.zeros(100, np.float32), residual), 0)
    np.testing.assert_array_equal(residual, 0)


def test_1bit_sends_the_mean_of_each_sign():
    compressor = compression.create({"type": "1bit"})
    residual = np.zeros(4)
    np.testing.assert_array_equal(send(compressor, np.array([1.0, 3.0, -1.0, -2.0]), residual), [2, 2, -1.5, -1.5])
    np.testing.assert_array_equal(residual, [-1, 1, 0.5, -0.5])


@pytest.mark.parametrize("bits, most", [(8, 127), (4, 7)])
def test_integers_are_the_nearest_of_a_scale(bits, most):
    compressor = compression.create({"type": "int", "bits": bits})
    codes = np.array([most, -most, 0, 1, -1, 3, -2], np.float32)
    gradient = np.concatenate([codes * 0.5, np.zeros(256 - codes.size), codes * 4]).astype(np.float32)
    residual = np.zeros(gradient.size, np.float32)
    np.testing.assert_array_equal(send(compressor, gradient, residual), gradient)
    assert not residual.any()
    gradient[1:7] += [0.2, 0.2, 0.2, 0.2, -0.2, -0.3]
    sent = send(compressor, gradient, residual)
    np.testing.assert_array_equal(sent[1:7], [-most / 2, 0, 0.5, -0.5, 1.5, -1.5])
    np.testing.assert_allclose(residual[1:7], [0.2, 0.2, 0.2, 0.2, -0.2, 0.2], atol=1e-5)


def test_fp16_does_not_overflow():
    compressor = compression.create({"type": "fp16"})
    residual = np.zeros(2, np.float32)
    assert np.all(send(compressor, np.array([1e5, -1e5], np.float32), residual) == [65504, -65504])
    np.testing.assert_array_equal(residual, [1e5 - 65504, 65504 - 1e5])


@given(n=st.integers(1, 500), ratio=st.floats(0.001, 1), seed=st.integers(0, 1000))
def test_topk_sends_the_largest(n, ratio, seed):
    compressor = compression.create({"type": "topk", "ratio": ratio})
    gradient = np.random.default_rng(seed).permutation(np.arange(1, n + 1)).astype(np.float32)
    sent = send(compressor, gradient, np.zeros(n, np.float32))
    k = np.count_nonzero(sent)
    assert k == max(1, int(np.ceil(ratio * n)))
    np.testing.assert_array_equal(np.sort(sent[sent != 0]), np.arange(n - k + 1, n + 1))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decode_adds_or_writes(options):
    compressor = compression.create(options)
    gradient = np.linspace(-3, 3, 50, dtype=np.float32)
    payload = compressor.encode(gradient, np.zeros(50, np.float32))
    written, added = np.full(50, 7, np.float32), np.full(50, 7, np.float32)
    compressor.decode(payload, written, add=False)
    compressor.decode(payload, added)
    np.testing.assert_allclose(added, written + 7, rtol=1e-6)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"type": "3bit"}, ValueError, ["3bit", "2bit", "topk"]),
        ({}, ValueError, ["no key 'type'", "2bit"]),
        ({"typ": "2bit"}, ValueError, ["no key 'type', only 'typ'", '{"type": "2bit"', "1bit"]),
        ({"type": "2bit", "limit": 1}, TypeError, ["limit", "threshold"]),
        ({"type": "1bit", "threshold": 1}, TypeError, ["threshold", "none"]),
        ({"type": "2bit", "threshold": 0}, ValueError, ["threshold", "0"]),
        ({"type": "2bit", "threshold": float("nan")}, ValueError, ["threshold", "nan"]),
        ({"type": "2bit", "threshold": "big"}, ValueError, ["2bit", "threshold", "number", "big"]),
        ({"type": "2bit", "threshold": None}, ValueError, ["2bit", "threshold", "None"]),
        ({"type": "int", "bits": 5}, ValueError, ["int", "8 or 4", "5"]),
        ({"type": "topk", "ratio": 1.5}, ValueError, ["ratio", "1.5"]),
        ("2bit", TypeError, ["'2bit'", '{"type": "2bit"']),
        (None, TypeError, ["None", '{"type": "2bit"']),
    ],
)
def test_wrong_options_are_named(options, error, words):
    with pytest.raises(error) as caught:
        compression.create(options)
    assert all(word in str(caught.value) for word in words)


def test_a_payload_of_another_size_is_refused():
    compressor = compression.create({"type": "2bit"})
    out = np.ones(100, np.float32)
    with pytest.raises(ValueError, match="26 bytes for 100 elements"):
        compressor.decode(np.zeros(25, np.uint8), out)
    with pytest.raises(ValueError, match="alike"):
        compressor.encode(np.zeros(3), np.zeros(4))


def test_a_topk_payload_cannot_write_outside():
    compressor = compression.create({"type": "topk", "ratio": 0.5})
    payload = np.full(compressor.max_bytes(4), 255, np.uint8)
    with pytest.raises(ValueError, match="of 4"):
        compressor.decode(payload, np.zeros(4))


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(("n", "ratio"), [(1, 1), (7, 0.5), (10, 1), (1001, 0.1), (70_001, 0.01)])
def test_of_equal_elements_the_first_are_sent(name, n, ratio):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    gradient = np.random.default_rng(n).integers(-3, 4, n).astype(dtype)
    compressor = compression.TopK(ratio)
    residual = compressor.init(gradient)
    sent = np.zeros(n, dtype)
    compressor.decode(compressor.encode(gradient, residual), sent)
    first = np.argsort(-np.abs(gradient.astype(np.float64)), kind="stable")[: compressor.count(n)]
    expected = np.zeros(n, dtype)
    expected[first] = gradient[first]
    np.testing.assert_array_equal(sent, expected)
    np.testing.assert_array_equal(residual, (gradient - expected).astype(residual.dtype))

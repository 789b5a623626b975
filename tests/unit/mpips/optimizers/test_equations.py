"""Optimizers against their textbook equations, in any pieces, in every float dtype."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips import optimizers
from mpips.optimizers import SGD, AdaGrad, Adam, AdamW, Add, Elastic1, Elastic2, RMSProp
from mpips.optimizers.equation import BLOCK_BYTES

ALL = [
    SGD(learning_rate=0.1),
    SGD(learning_rate=0.1, momentum=0.9, weight_decay=0.01, rescale=0.25),
    SGD(learning_rate=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    AdaGrad(learning_rate=0.1, weight_decay=0.01, rescale=0.5),
    RMSProp(learning_rate=0.1, decay=0.9, rescale=2.0),
    Adam(learning_rate=0.1, beta1=0.8, beta2=0.9, weight_decay=0.01, rescale=0.5),
    AdamW(learning_rate=0.1, weight_decay=0.1, rescale=0.5),
    Elastic1(alpha=0.3, rescale=0.5),
    Elastic2(alpha=0.3),
    Add(rescale=2.0),
]


def textbook(opt, w, gradients):
    """The update rules as written in the papers, whole arrays, float64."""
    velocity = np.zeros_like(w)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        g = getattr(opt, "rescale", 1.0) * g
        if isinstance(opt, (Elastic1, Elastic2)):
            w = w - opt.alpha * (w - g)
            continue
        if isinstance(opt, Add):
            w = w + g
            continue
        if isinstance(opt, AdamW):
            w = w - opt.learning_rate * opt.weight_decay * w
        else:
            g = g + opt.weight_decay * w
        if isinstance(opt, SGD):
            velocity = opt.momentum * velocity + g
            w = w - opt.learning_rate * (g + opt.momentum * velocity if opt.nesterov else velocity)
        elif isinstance(opt, AdaGrad):
            v = v + g**2
            w = w - opt.learning_rate * g / (np.sqrt(v) + opt.epsilon)
        elif isinstance(opt, RMSProp):
            v = opt.decay * v + (1 - opt.decay) * g**2
            w = w - opt.learning_rate * g / (np.sqrt(v) + opt.epsilon)
        else:
            m = opt.beta1 * m + (1 - opt.beta1) * g
            v = opt.beta2 * v + (1 - opt.beta2) * g**2
            m_hat, v_hat = m / (1 - opt.beta1**t), v / (1 - opt.beta2**t)
            w = w - opt.learning_rate * m_hat / (np.sqrt(v_hat) + opt.epsilon)
    return w


def run(opt, w, gradients, cuts=()):
    w = w.copy()
    state = opt.init(w)
    edges = [0, *cuts, w.size]
    for step, g in enumerate(gradients, start=1):
        for a, b in itertools.pairwise(edges):
            opt.update(w[a:b], g[a:b], tuple(s[a:b] for s in state), step)
    return w, state


def draw(n, steps, dtype, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=n).astype(dtype), [rng.normal(size=n).astype(dtype) for _ in range(steps)]


@pytest.mark.parametrize("opt", ALL, ids=repr)
@settings(max_examples=25)
@given(n=st.integers(0, 300), steps=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_float64_follows_the_equation(opt, n, steps, seed):
    w, gradients = draw(n, steps, np.float64, seed)
    got, _ = run(opt, w, gradients)
    np.testing.assert_allclose(got, textbook(opt, w, gradients), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("opt", ALL, ids=repr)
@settings(max_examples=10)
@given(data=st.data(), extra=st.integers(1, 5000), dtype=st.sampled_from(["float16", "float32", "float64"]))
def test_any_pieces_give_the_same_bits_as_the_whole(opt, data, extra, dtype):
    n = BLOCK_BYTES // 8 + extra
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    w, gradients = draw(n, 2, dtype, seed=extra)
    whole, whole_state = run(opt, w, gradients)
    pieces, pieces_state = run(opt, w, gradients, cuts)
    np.testing.assert_array_equal(whole, pieces)
    for a, b in zip(whole_state, pieces_state):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("opt", ALL, ids=repr)
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("float16", 1e-2)])
def test_narrow_floats_stay_near_the_equation(opt, dtype, tolerance):
    w, gradients = draw(1000, 4, dtype, seed=3)
    got, _ = run(opt, w, gradients)
    assert got.dtype == dtype
    expected = textbook(opt, w.astype(np.float64), [g.astype(np.float64) for g in gradients])
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_float16_is_rounded_once():
    # 2048 + 1 is lost in float16, but 2048 + 3 * 1 is not when the sum is taken in float32.
    w = np.full(4, 2048, np.float16)
    Add(rescale=3.0).update(w, np.ones(4, np.float16), (), 1)
    np.testing.assert_array_equal(w, np.float16(2052))
    assert all(s.dtype == np.float32 for s in Adam().init(w))


@pytest.mark.parametrize("opt", ALL, ids=repr)
def test_the_gradient_is_only_read(opt):
    w, (g,) = draw(100, 1, np.float32, seed=1)
    g.flags.writeable = False
    before = g.copy()
    opt.update(w, g, opt.init(w), 1)
    np.testing.assert_array_equal(g, before)


@pytest.mark.parametrize("opt", ALL, ids=repr)
def test_an_optimizer_travels_as_data(opt):
    assert optimizers.decode(optimizers.encode(opt)) == opt
    assert optimizers.create(opt) is opt


def test_create_by_name_in_any_case():
    assert optimizers.create("SGD", learning_rate=0.5) == SGD(learning_rate=0.5)
    assert optimizers.create("adamw") == AdamW()
    assert set(optimizers.OPTIMIZERS) >= {"sgd", "adagrad", "rmsprop", "adam", "adamw", "elastic1", "elastic2", "add"}


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: optimizers.create("sdg"), ValueError, ["sdg", "adam"]),
        (lambda: optimizers.create(None), ValueError, ["None", "adam"]),
        (lambda: optimizers.create("sgd", lr=0.1), TypeError, ["lr", "learning_rate"]),
        (lambda: optimizers.create(SGD(), learning_rate=0.1), TypeError, ["learning_rate"]),
        (lambda: SGD(learning_rate=float("nan")), ValueError, ["SGD", "learning_rate", "nan"]),
        (lambda: SGD(learning_rate="fast"), ValueError, ["learning_rate", "fast"]),
        (lambda: SGD(learning_rate=-1), ValueError, ["learning_rate", "-1"]),
        (lambda: SGD(momentum=1.0), ValueError, ["momentum", "1.0"]),
        (lambda: SGD(nesterov=True), ValueError, ["nesterov", "momentum"]),
        (lambda: Adam(beta2=1.5), ValueError, ["beta2", "1.5"]),
        (lambda: Elastic1(alpha=0), ValueError, ["alpha", "0"]),
        (lambda: SGD().init(np.zeros(3, np.int32)), TypeError, ["int32"]),
        (lambda: optimizers.decode(b"\x80"), ValueError, ["name"]),
    ],
)
def test_a_wrong_option_is_named(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "gradient, state, step",
    [
        (np.zeros(4, np.float32), None, 1),
        (np.zeros(3, np.float64), None, 1),
        (np.zeros(6, np.float32)[::2], None, 1),
        (np.zeros(3, np.float32), (), 1),
        (np.zeros(3, np.float32), None, 0),
    ],
)
def test_arrays_that_do_not_fit_change_nothing(gradient, state, step):
    w = np.ones(3, np.float32)
    opt = SGD(momentum=0.5)
    with pytest.raises(ValueError):
        opt.update(w, gradient, opt.init(w) if state is None else state, step)
    np.testing.assert_array_equal(w, 1)


def test_an_updater_keeps_states_and_steps_of_a_models_arrays():
    rng = np.random.default_rng(0)
    parameters = [rng.normal(size=(3, 4)), rng.normal(size=5)]
    expected = [p.copy() for p in parameters]
    gradients = [[rng.normal(size=p.shape) for p in parameters] for _ in range(3)]
    updater = optimizers.Updater(Adam(learning_rate=0.1), parameters)
    for step in gradients:
        updater.update(step)
    for number, start in enumerate(expected):
        flat = textbook(Adam(learning_rate=0.1), start.reshape(-1), [step[number].reshape(-1) for step in gradients])
        np.testing.assert_allclose(parameters[number].reshape(-1), flat)
    with pytest.raises(ValueError, match="1 gradients for 2 arrays"):
        updater.update(gradients[0][:1])
    with pytest.raises(ValueError, match="contiguous"):
        optimizers.Updater(Adam(), [np.zeros((4, 4))[:, 1]])


@pytest.mark.parametrize("opt", ALL, ids=repr)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_update_makes_no_temporaries_of_full_size(opt, dtype):
    w, g = np.zeros(3_000_000, dtype), np.ones(3_000_000, dtype)
    state = opt.init(w)
    opt.update(w[:2], g[:2], [array[:2] for array in state], 1)
    tracemalloc.start()
    opt.update(w, g, state, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * BLOCK_BYTES < w.nbytes

"""A network: gradients, losses, memory and another array module; and the order of minibatches."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.mlp import MLP
from mpips.mlp.data.loading import epoch_order
from mpips.mlp.network import splits
from mpips.optimizers import SGD, Adam, AdamW, RMSProp

from .device import module


def problem(loss, samples, inputs, outputs, seed=3):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples, inputs))
    y = rng.integers(0, outputs, samples) if loss == "softmax" else rng.standard_normal((samples, outputs))
    return x, y


def test_the_serial_network_needs_no_mpi():
    code = (
        "import sys, numpy as np; from mpips.mlp import MLP; "
        "MLP([3, 4, 2]).loss_and_gradients(np.ones((5, 3), 'f4'), np.ones((5, 2), 'f4')); "
        "print([name for name in sys.modules if name.startswith('mpi4py')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    samples=st.integers(1, 5),
    loss=st.sampled_from(["l2", "softmax"]),
    activation=st.sampled_from(["relu", "tanh"]),
)
@settings(max_examples=40, deadline=None)
def test_gradients_agree_with_finite_differences(sizes, samples, loss, activation):
    mlp = MLP(sizes, activation, loss, "float64", seed=5)
    mlp.flat_parameters += 0.05 * np.random.default_rng(7).standard_normal(mlp.flat_parameters.size)
    x, y = problem(loss, samples, sizes[0], sizes[-1])
    mlp.loss_and_gradients(x, y)
    gradient = mlp.flat_gradients.copy()
    step = 1e-6
    for index in range(mlp.flat_parameters.size):
        value = mlp.flat_parameters[index]
        mlp.flat_parameters[index] = value + step
        above = mlp.loss_and_gradients(x, y)
        mlp.flat_parameters[index] = value - step
        below = mlp.loss_and_gradients(x, y)
        mlp.flat_parameters[index] = value
        assert gradient[index] == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-6)


def test_gradient_descent_learns_a_separable_problem():
    x = np.random.default_rng(1).standard_normal((200, 2)).astype("float32")
    y = (x[:, 0] > x[:, 1]).astype(int)
    mlp = MLP([2, 16, 2], loss="softmax", seed=1)
    first = mlp.loss_and_gradients(x, y)
    for _ in range(100):
        mlp.loss_and_gradients(x, y)
        mlp.flat_parameters -= 0.5 * mlp.flat_gradients
    assert mlp.loss_and_gradients(x, y) < 0.3 * first
    assert mlp.accuracy(x, y) > 0.95


def test_parameters_and_gradients_are_views_of_one_contiguous_array_each():
    mlp = MLP([3, 4, 2], loss="l2")
    assert mlp.names == ["layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias"]
    assert [p.shape for p in mlp.parameters] == [(4, 3), (4,), (2, 4), (2,)]
    assert [g.shape for g in mlp.gradients] == [p.shape for p in mlp.parameters]
    before = list(mlp.parameters)
    x, y = problem("l2", 5, 3, 2)
    mlp.loss_and_gradients(x.astype("float32"), y.astype("float32"))
    assert all(a is b for a, b in zip(before, mlp.parameters))
    np.testing.assert_array_equal(mlp.flat_gradients, np.concatenate([g.ravel() for g in mlp.gradients]))
    np.testing.assert_array_equal(mlp.flat_parameters, np.concatenate([p.ravel() for p in mlp.parameters]))


def test_prediction_does_not_depend_on_how_many_samples_come_at_once():
    mlp = MLP([3, 7, 2], "tanh", dtype="float64")
    x, _ = problem("l2", 2500, 3, 2)
    whole = mlp.predict(x)
    assert whole.shape == (2500, 2)
    np.testing.assert_allclose(whole[:3], mlp.predict(x[:3]), rtol=1e-12)
    np.testing.assert_allclose(whole[-1:], mlp.predict(x[-1:]), rtol=1e-12)


def test_gradients_can_live_in_memory_of_the_caller():
    memory = np.empty(10_000)
    used = 0

    def empty(count, dtype):
        nonlocal used
        used += count
        return memory[used - count : used]

    mlp = MLP([3, 4, 2], dtype="float64", empty=empty)
    assert np.shares_memory(mlp.flat_gradients, memory)
    assert mlp.flat_gradients.size == mlp.flat_parameters.size == 26


def test_same_seed_same_weights_other_seed_other_weights():
    a, b, c = (MLP([5, 9, 3], seed=seed).flat_parameters for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


X, STEP = np.zeros((6, 2), "float32"), MLP.loss_and_gradients


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: MLP([4]), "at least two"),
        (lambda: MLP([4, 0, 2]), "at least 1"),
        (lambda: MLP([4, 2], "swish"), "relu"),
        (lambda: MLP([4, 2], loss="hinge"), "softmax"),
        (lambda: MLP([4, 2], dtype="int32"), "float32"),
        (lambda: splits([2, 3, 1], 2, 0, "rows"), "pairs, columns"),
        (lambda: STEP(MLP([2, 2]), X[:0], X[:0]), "at least one sample"),
        (lambda: STEP(MLP([2, 3]), X, np.zeros(6, int)), r"y is \(6,\): loss='l2' takes targets \(samples, 3\); loss="),
        (lambda: STEP(MLP([2, 3]), X, X), r"y is \(6, 2\): loss='l2' takes targets \(samples, 3\)"),
        (
            lambda: STEP(MLP([2, 3], loss="softmax"), X, np.zeros((6, 3), int)),
            r"y is \(6, 3\) of int64: loss='softmax' takes the classes of the samples",
        ),
        (
            lambda: STEP(MLP([2, 3], loss="softmax"), X, X[:, 0]),
            r"of float32: loss='softmax' takes .* as whole numbers \(samples,\)",
        ),
    ],
)
def test_wrong_arguments_are_named_with_what_is_possible(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_one_output_takes_its_targets_with_or_without_a_column():
    x, y = np.ones((4, 2), "float32"), np.arange(4, dtype="float32")
    model = MLP([2, 1])
    assert model.loss_and_gradients(x, y) == model.loss_and_gradients(x, y[:, None])


# ---- on another array module; a real GPU is not tested


@pytest.mark.parametrize("loss", ["l2", "softmax"])
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.5, weight_decay=0.01), Adam(), AdamW(), RMSProp(rescale=0.5)])
def test_a_network_on_a_device_takes_the_same_steps(loss, optimizer):
    x, y = problem(loss, 20, 5, 3)
    weights = []
    for xp in (np, module):
        mlp = MLP([5, 7, 3], "tanh", loss, "float64", seed=2, xp=xp)
        state = optimizer.init(mlp.flat_parameters)
        losses = []
        for step in range(1, 4):
            losses.append(mlp.loss_and_gradients(*((x, y) if xp is np else (module.asarray(x), module.asarray(y)))))
            optimizer.update(mlp.flat_parameters, mlp.flat_gradients, state, step)
        weights.append((mlp.flat_parameters if xp is np else mlp.flat_parameters.get(), losses))
    np.testing.assert_array_equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


def test_predictions_and_accuracy_on_a_device():
    x, y = problem("softmax", 30, 4, 3)
    here = MLP([4, 6, 3], loss="softmax", dtype="float64", seed=2)
    there = MLP([4, 6, 3], loss="softmax", dtype="float64", seed=2, xp=module)
    on_device = module.asarray(x)
    np.testing.assert_array_equal(here.predict(x), there.predict(on_device).get())
    assert here.accuracy(x, y) == there.accuracy(on_device, module.asarray(y))


# ---- minibatches


def test_every_epoch_visits_every_minibatch_in_another_order():
    first, second = epoch_order(20, 0, 1), epoch_order(20, 1, 1)
    assert sorted(first) == sorted(second) == list(range(20))
    assert list(first) != list(second)
    np.testing.assert_array_equal(first, epoch_order(20, 0, 1))

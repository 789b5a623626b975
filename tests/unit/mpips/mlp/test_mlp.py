"""The serial network: gradients, losses, memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.mlp import MLP


def problem(loss, samples, inputs, outputs, seed=3):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples, inputs))
    y = rng.integers(0, outputs, samples) if loss == "softmax" else rng.standard_normal((samples, outputs))
    return x, y


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


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"sizes": [4]}, "at least two"),
        ({"sizes": [4, 0, 2]}, "at least 1"),
        ({"sizes": [4, 2], "activation": "swish"}, "relu"),
        ({"sizes": [4, 2], "loss": "hinge"}, "softmax"),
        ({"sizes": [4, 2], "dtype": "int32"}, "float32"),
    ],
)
def test_wrong_arguments_name_the_argument_and_the_choices(arguments, words):
    with pytest.raises(ValueError, match=words):
        MLP(**arguments)


def test_a_step_without_samples_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        MLP([2, 2]).loss_and_gradients(np.empty((0, 2), "float32"), np.empty((0, 2), "float32"))


@pytest.mark.parametrize(
    "loss, targets, words",
    [
        ("l2", np.zeros(6, int), r"y is \(6,\): loss='l2' takes targets \(samples, 3\); loss='softmax' takes"),
        ("l2", np.zeros((6, 2), "float32"), r"y is \(6, 2\): loss='l2' takes targets \(samples, 3\)"),
        ("softmax", np.zeros((6, 3), int), r"y is \(6, 3\) of int64: loss='softmax' takes the classes of the samples"),
        ("softmax", np.zeros(6, "float32"), r"of float32: loss='softmax' takes .* as whole numbers \(samples,\)"),
    ],
)
def test_targets_of_another_loss_are_told_which_one_takes_them(loss, targets, words):
    model = MLP([2, 3], loss=loss)
    with pytest.raises(ValueError, match=words):
        model.loss_and_gradients(np.zeros((6, 2), "float32"), targets)


def test_one_output_takes_its_targets_with_or_without_a_column():
    x, y = np.ones((4, 2), "float32"), np.arange(4, dtype="float32")
    model = MLP([2, 1])
    assert model.loss_and_gradients(x, y) == model.loss_and_gradients(x, y[:, None])

"""The parts of a Trainer that need no other rank."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips import optimizers
from mpips.mlp import MLP
from mpips.trainer import Elastic, averaged, fitting, shares, trainable


def workers(number):
    return [SimpleNamespace(rank=rank, num_workers=number) for rank in range(number)]


@given(number=st.integers(1, 7), batch=st.integers(1, 9), spare=st.integers(0, 40), epoch=st.integers(1, 9))
def test_workers_share_each_mini_batch_of_the_serial_run(number, batch, spare, epoch):
    samples = number * batch + spare
    serial = list(shares(samples, number * batch, epoch, 0, workers(1)[0]))
    split = [list(shares(samples, batch, epoch, 0, worker)) for worker in workers(number)]
    assert all(len(part) == len(serial) for part in split)
    for step, rows in enumerate(serial):
        np.testing.assert_array_equal(np.concatenate([part[step] for part in split]), rows)
    together = np.concatenate(serial)
    assert len(set(together.tolist())) == len(together) == samples - samples % (number * batch)


def test_epochs_and_seeds_give_other_orders():
    one = workers(1)[0]
    orders = [next(shares(50, 50, epoch, seed, one)).tolist() for epoch in (1, 2) for seed in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_a_mini_batch_larger_than_the_data_is_an_error():
    with pytest.raises(ValueError, match="batch_size=16 on 2 workers needs 32 samples a step, but there are 31"):
        next(shares(31, 16, 1, 0, workers(2)[0]))


def test_gradients_are_averaged_over_the_workers_in_a_sum():
    assert averaged(optimizers.SGD(0.1, rescale=0.5), 4) == optimizers.SGD(0.1, rescale=0.125)


@pytest.mark.parametrize("options", [{"interval": 0}, {"alpha": 0.0}, {"alpha": float("nan")}])
def test_elastic_options_are_checked(options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        Elastic(**options)


W = np.zeros((2, 3))


@pytest.mark.parametrize(
    "model, words",
    [
        (object(), "object has no parameters, gradients, loss_and_gradients"),
        (SimpleNamespace(parameters=[W], gradients=[], loss_and_gradients=print), "1 parameters, but 0 gradients"),
        (SimpleNamespace(parameters=[W], gradients=[W.T], loss_and_gradients=print), r"gradients\[0\] float64\(3, 2\)"),
    ],
)
def test_what_a_model_lacks_is_said(model, words):
    with pytest.raises((TypeError, ValueError), match=words):
        trainable(model)


X, Y = np.zeros((9, 4)), np.zeros(9)


class Scored:
    """A model that can be tested."""

    def accuracy(self, x, y):
        return 0.0


@pytest.mark.parametrize(
    "given_, words",
    [
        ({"y": Y[:7]}, "x and y: 9 inputs, but 7 targets"),
        ({"test": (X, Y[1:])}, "test: 9 inputs, but 8 targets"),
        ({"y": 9}, "x and y: give two arrays.*not int"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"epochs": -1}, "epochs=-1"),
    ],
)
def test_what_cannot_be_fitted_is_said(given_, words):
    with pytest.raises((TypeError, ValueError), match=words):
        fitting(**{"model": Scored(), "x": X, "y": Y, "batch_size": 3, "epochs": 1, "seed": 0, "test": None, **given_})


@pytest.mark.parametrize("x, y", [(X[:, :3], Y), (X, Y[:5]), (X[0], Y)])
def test_a_network_says_what_it_takes(x, y):
    with pytest.raises(ValueError, match=r"this network takes x \(samples, 4\)"):
        MLP((4, 1), dtype="float64").loss_and_gradients(x, y)

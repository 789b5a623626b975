"""The network that the examples write out, and the batches that they take."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import task


class Kv:
    def __init__(self, rank=0, num_workers=1):
        self.rank, self.num_workers = rank, num_workers

    def barrier(self):
        pass


def loss(network, x, y):
    network.forward(x)
    network.backward(y)
    return network.loss


def test_gradients_are_the_slopes_of_the_loss():
    rng = np.random.default_rng(0)
    network = task.Network(5, 7, 3, "float64", seed=1)
    x, y = rng.normal(size=(11, 5)), rng.integers(0, 3, 11)
    loss(network, x, y)
    gradients = [gradient.copy() for gradient in network.gradients]
    for parameter, gradient in zip(network.parameters, gradients):
        for place in np.ndindex(parameter.shape):
            kept = parameter[place]
            parameter[place] = kept + 1e-6
            above = loss(network, x, y)
            parameter[place] = kept - 1e-6
            below = loss(network, x, y)
            parameter[place] = kept
            assert gradient[place] == pytest.approx((above - below) / 2e-6, abs=1e-8)


def test_gradients_of_workers_have_the_mean_of_the_whole_batch():
    rng = np.random.default_rng(0)
    network = task.Network(5, 7, 3, "float64", seed=1)
    x, y = rng.normal(size=(12, 5)), rng.integers(0, 3, 12)
    loss(network, x, y)
    whole = [gradient.copy() for gradient in network.gradients]
    parts = [np.zeros_like(gradient) for gradient in whole]
    for start in range(0, 12, 4):
        loss(network, x[start : start + 4], y[start : start + 4])
        for part, gradient in zip(parts, network.gradients):
            part += gradient / 3
    for part, gradient in zip(parts, whole):
        np.testing.assert_allclose(part, gradient)


@pytest.fixture
def tasks():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    options = task.Settings(batch_size=100, hidden=2)
    return [task.Task("x", Kv(rank, 3), options) for rank in range(3)]


def test_batches_of_workers_are_equally_many_and_share_no_image(tasks):
    for each in tasks:
        each.x = np.arange(len(each.x))
    batches = [[rows.tolist() for rows, _ in each.batches(1)] for each in tasks]
    assert [len(each) for each in batches] == [4, 4, 4]
    assert len(set(np.ravel(batches).tolist())) == 1200
    assert [rows.tolist() for rows, _ in tasks[0].batches(1)] == batches[0]
    assert [rows.tolist() for rows, _ in tasks[0].batches(2)] != batches[0]


def test_batches_that_are_too_large_are_a_sentence():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    with pytest.raises(ValueError, match="--batch-size 1000 of 2 workers is more than 1437 images"):
        next(task.Task("x", Kv(0, 2), task.Settings(batch_size=1000, hidden=2)).batches(1))


def test_seconds_are_of_training_alone(monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    job = task.Task("x", Kv(), task.Settings(epochs=3, hidden=2, batch_size=256))
    clock = [0.0]
    monkeypatch.setattr(task.time, "perf_counter", lambda: clock[0])

    def evaluated(x, y):
        clock[0] += 100
        return 0.5

    job.model.accuracy = evaluated
    for epoch in job.epochs():
        for x, y in job.batches(epoch):
            job.model.forward(x)
            job.model.backward(y)
        clock[0] += 2
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines()] == ["2.00", "4.00", "6.00"]

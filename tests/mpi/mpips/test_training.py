"""Elastic averaging on digits, by a Trainer, step by step."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpips.mlp import MLP
from mpips.optimizers import SGD, Updater
from mpips.training import Elastic, Trainer
from mpips.training.batches import shares
from tests.mpi.mpips.support import run

if importlib.util.find_spec("sklearn") is None:
    pytest.skip("the digits come with scikit-learn", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import task

WORLD = MPI.COMM_WORLD
STEPS = 25
MOMENTUM = SGD(0.1, momentum=0.9)


class Alone:
    """Who a serial program is among workers."""

    rank, num_workers = 0, 1


def network():
    return MLP((64, 32, 10), loss="softmax", dtype="float64", seed=1)


def curve(step, data, batch_size, kv):
    """Local losses of the first steps."""
    x, y = data[:2]
    batches = (rows for epoch in itertools.count(1) for rows in shares(len(x), batch_size, epoch, 0, kv))
    return np.array([step(x[rows], y[rows]) for rows in itertools.islice(batches, STEPS)])


def mean_over_workers(losses, workers):
    """The mean curve of all workers, on every rank; servers give none."""
    total = np.empty(STEPS)
    WORLD.Allreduce(np.zeros(STEPS) if losses is None else losses, total)
    return total / workers


@pytest.mark.mpi(min_size=2)
def test_elastic_averaging_follows_equations_2_and_3():
    """One client: parameters and centre after a few intervals are those of the paper's equations, step by step."""
    workers, batch, interval, alpha, data = WORLD.size - 1, 12, 4, 0.3, task.digits("float64")

    def work(kv):
        model = network()
        trainer = Trainer(model, kv, MOMENTUM, elastic=Elastic(alpha=alpha, interval=interval))
        losses = curve(trainer.step, data, batch, kv)
        centers = [np.empty_like(parameter) for parameter in model.parameters]
        kv.pull(model.names, centers)
        return losses, centers

    result = run("mpi_async", work, servers=1, clients=1)
    losses = mean_over_workers(result and result[0], workers)

    model = network()
    updater, count = Updater(MOMENTUM, model.parameters), iter(range(STEPS))
    centers = [parameter.copy() for parameter in model.parameters]

    def step(x, y):
        loss = model.loss_and_gradients(x, y)
        if next(count) % interval == 0:
            for w, c in zip(model.parameters, centers):
                c += alpha * (w - c)
                w -= alpha * (w - c)
        updater.update(model.gradients)
        return loss

    np.testing.assert_allclose(losses, curve(step, data, batch * workers, Alone), rtol=0, atol=1e-9)

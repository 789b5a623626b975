"""Every way to train on digits: synchronous modes give the serial loss curve, all of them learn."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpips
from mpips.mlp import MLP
from mpips.optimizers import SGD, Updater
from mpips.training import Elastic, Trainer
from mpips.training.batches import shares
from tests.choice import once
from tests.mpi.mpips.support import need, run
from tests.mpi.sizes import either_mpi, only_on

if importlib.util.find_spec("sklearn") is None:
    pytest.skip("the digits come with scikit-learn", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import task

WORLD = MPI.COMM_WORLD
STEPS = 25
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
OPTIMIZERS = [SGD(0.1, momentum=0.9), mpips.optimizers.Adam(0.005)]
SYNCHRONOUS = [
    ("dist_sync", {"servers": 1}),
    ("dist_sync", {"servers": 2}),
    ("mpi_sync", {"servers": 1, "clients": 2}),
    ("mpi_sync", {"servers": 2, "clients": 2, "masters": "all"}),
    ("mpi_sync", {"servers": 1, "clients": 1}),
    ("mpi_sync", {"servers": 0}),
    ("dist_sync", {"servers": 0}),
]


class Alone:
    """Who a serial program is among workers."""

    rank, num_workers = 0, 1


def network(dtype):
    return MLP((64, 32, 10), loss="softmax", dtype=dtype, seed=1)


def curve(step, data, batch_size, kv):
    """Local losses of the first steps."""
    x, y = data[:2]
    batches = (rows for epoch in itertools.count(1) for rows in shares(len(x), batch_size, epoch, 0, kv))
    return np.array([step(x[rows], y[rows]) for rows in itertools.islice(batches, STEPS)])


def serial_curve(data, dtype, optimizer, mini_batch):
    """The losses of a program that knows nothing of stores."""
    model = network(dtype)
    updater = Updater(optimizer, model.parameters)

    def step(x, y):
        loss = model.loss_and_gradients(x, y)
        updater.update(model.gradients)
        return loss

    return curve(step, data, mini_batch, Alone)


def mean_over_workers(losses, workers):
    """The mean curve of all workers, on every rank; servers give none."""
    total = np.empty(STEPS)
    WORLD.Allreduce(np.zeros(STEPS) if losses is None else losses, total)
    return total / workers


@either_mpi
@only_on(1, 3, 4, 5)
@once(optimizer=OPTIMIZERS, dtype=["float64", "float32"], **{"kind, options": SYNCHRONOUS})
def test_synchronous_modes_give_the_serial_loss_curve(kind, options, dtype, optimizer):
    workers, batch, data = need(**options), 12, task.digits(dtype)

    def work(kv):
        trainer = Trainer(network(dtype), kv, optimizer)
        return curve(trainer.step, data, batch, kv)

    losses = mean_over_workers(run(kind, work, **options), workers)
    expected = serial_curve(data, dtype, optimizer, batch * workers)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=TOLERANCE[dtype])


@either_mpi
@pytest.mark.parametrize("kind, options", SYNCHRONOUS[:4], ids=str)
def test_gradients_that_come_back_and_are_applied_by_workers_give_it_too(kind, options):
    """Figure 6 of the paper: without an optimizer in the store."""
    workers, batch, data = need(**options), 12, task.digits("float64")
    sgd = OPTIMIZERS[0]

    def work(kv):
        model = network("float64")
        kv.init(model.names, model.parameters)
        updater = Updater(SGD(sgd.learning_rate, momentum=sgd.momentum, rescale=1 / kv.num_workers), model.parameters)

        def step(x, y):
            loss = model.loss_and_gradients(x, y)
            kv.push(model.names, model.gradients)
            kv.pull(model.names, model.gradients)
            updater.update(model.gradients)
            return loss

        return curve(step, data, batch, kv)

    losses = mean_over_workers(run(kind, work, **options), workers)
    expected = serial_curve(data, "float64", sgd, batch * workers)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-9)


@pytest.mark.mpi(min_size=2)
def test_elastic_averaging_follows_equations_2_and_3():
    """One client: parameters and centre after a few intervals are those of the paper's equations, step by step."""
    workers, batch, interval, alpha, data = WORLD.size - 1, 12, 4, 0.3, task.digits("float64")

    def work(kv):
        model = network("float64")
        trainer = Trainer(model, kv, OPTIMIZERS[0], elastic=Elastic(alpha=alpha, interval=interval))
        losses = curve(trainer.step, data, batch, kv)
        centers = [np.empty_like(parameter) for parameter in model.parameters]
        kv.pull(model.names, centers)
        return losses, centers

    result = run("mpi_async", work, servers=1, clients=1)
    losses = mean_over_workers(result and result[0], workers)

    model = network("float64")
    updater, count = Updater(OPTIMIZERS[0], model.parameters), iter(range(STEPS))
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

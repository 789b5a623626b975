"""One epoch: a pass over the minibatches, a test, and what it tells of losses and times."""

from __future__ import annotations

from math import isfinite
from time import perf_counter
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpips.mlp.agreement import agree
from mpips.mlp.clock import PHASES
from mpips.mlp.data.minibatches import order
from mpips.mlp.data.part import Data
from mpips.mlp.mesh import Mesh
from mpips.mlp.worker import Worker

_EVALUATE_SAMPLES = 1000


class Epoch(NamedTuple):
    """One epoch (from 1). Losses are means over samples; `test_loss` is None without test rows, `test_accuracy`
    with "l2".

    `phases` are seconds of this epoch by phase, the mean over ranks; `under_way` those with messages under way, waited
    for or not.
    """

    epoch: int
    train_loss: float
    test_loss: float | None
    test_accuracy: float | None
    seconds: float
    phases: dict[str, float]
    under_way: float


def run_epoch(worker: Worker, data: Data, epoch: int) -> Epoch:
    """Epoch number `epoch`, from 0. Collective over the mesh; TrainingError on every rank if the loss is not finite."""
    start, before = perf_counter(), _clocked(worker)
    with np.errstate(all="ignore"):  # the sentence tells what NumPy would warn of, once
        loss = _pass(worker, data, epoch)
        overflow = f"the loss of epoch {epoch + 1} is {loss}: lower the learning rate"
        agree(worker.mesh.comm, None if isfinite(loss) else overflow)
        test_loss, accuracy = _test(worker, data)
    *spent, under_way = _mean(_clocked(worker) - before, worker.mesh)
    phases = dict(zip(PHASES, spent))
    return Epoch(epoch + 1, loss, test_loss, accuracy, perf_counter() - start, phases, under_way)


def _pass(worker: Worker, data: Data, epoch: int) -> float:
    """Mean training loss of one pass over the minibatches, each loss taken before its update."""
    bounds, samples = data.deal.bounds, data.deal.samples
    total = 0.0
    for index in order(len(samples), epoch, data.seed):
        start = perf_counter()
        part = slice(bounds[index], bounds[index + 1])
        x, y = data.x[part], data.y[part]
        worker.clock.add("data", start)
        total += worker.step(x, y, int(samples[index]))
    sums = np.array([total])
    worker.mesh.batch_comm.Allreduce(MPI.IN_PLACE, sums)
    return float(sums[0]) / data.train_rows


def _test(worker: Worker, data: Data) -> tuple[float | None, float | None]:
    if not data.test_rows:
        return None, None
    loss, right = worker.evaluate(data.test_x, data.test_y, _EVALUATE_SAMPLES)
    return loss / data.test_rows, right / data.test_rows if data.classes else None


def _clocked(worker: Worker) -> np.ndarray:
    """Seconds of each phase so far, and with messages under way."""
    return np.array([*(worker.clock.seconds[phase] for phase in PHASES), worker.clock.under_way])


def _mean(seconds: np.ndarray, mesh: Mesh) -> list[float]:
    """The mean over the ranks."""
    mesh.comm.Allreduce(MPI.IN_PLACE, seconds)
    means: list[float] = (seconds / mesh.comm.size).tolist()
    return means

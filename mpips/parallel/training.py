"""The training loop over epochs and minibatches, the same for every grid."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from time import perf_counter
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpips.optimizers import SGD, Optimizer

from .agreement import agree
from .clock import PHASES
from .data import Data
from .grid import Grid
from .hybrid import Hybrid
from .minibatches import order
from .mlp import MLP
from .served import Servers

_EVALUATE_SAMPLES = 1000


class Epoch(NamedTuple):
    """One epoch (from 1). Losses are means over samples; `test_loss` is None without test rows, `test_accuracy`
    with "l2".

    `phases` are seconds of this epoch by phase, the mean over ranks.
    """

    epoch: int
    train_loss: float
    test_loss: float | None
    test_accuracy: float | None
    seconds: float
    phases: dict[str, float]


class Trained(NamedTuple):
    """The history, and this rank's slice of the trained network with its optimizer."""

    epochs: list[Epoch]
    hybrid: Hybrid


def train(
    model: MLP,
    data: Data,
    grid: Grid,
    epochs: int = 10,
    optimizer: Optimizer | None = None,
    mode: str = "pairs",
    on_epoch: Callable[[Epoch], None] | None = None,
    hybrid: Hybrid | None = None,
    overlap: bool | None = None,
    half: bool | None = None,
    servers: Servers | None = None,
) -> Trained:
    """Train `model` on the rows that `data` gave this rank. Collective over the grid; every rank returns the same
    history.

    Algorithm 1 of the paper on a grid of nb x 1, Algorithm 2 on 1 x nm, Algorithm 3 on any other; no step gathers
    anything at rank 0. The minibatches and so, up to rounding, the losses do not depend on the grid. `mode` is how
    model ranks cut the layers (see `splits`). `on_epoch` is called on every rank after each epoch. `hybrid`
    continues with the slice of an earlier run or of a checkpoint. `overlap`, `half`, `servers`: see `Hybrid`; with
    elastic averaging losses are means over the clients, each with its own weights on its own rows. TrainingError on
    every rank if network and data do not fit, or when a loss is no longer finite.
    """
    problem = _misfit(model, data)
    if problem and servers is not None:
        servers.give_up(problem)
    agree(grid.comm, problem)
    hybrid = hybrid or Hybrid(model, grid, optimizer or SGD(learning_rate=0.01), mode, overlap, half, servers)
    data = data.on(hybrid.network.xp)
    steps = len(data.deal.samples)
    done = hybrid.updates // steps
    history = []
    for epoch in range(done, done + epochs):
        start, phases = perf_counter(), dict(hybrid.clock.seconds)
        loss = _epoch(hybrid, data, epoch)
        overflow = f"the loss of epoch {epoch + 1} is {loss}: lower the learning rate"
        agree(grid.comm, None if isfinite(loss) else overflow)
        test_loss, accuracy = _test(hybrid, data)
        spent = _mean_phases(hybrid, phases, grid)
        record = Epoch(epoch + 1, loss, test_loss, accuracy, perf_counter() - start, spent)
        history.append(record)
        if on_epoch:
            on_epoch(record)
    return Trained(history, hybrid)


def _misfit(model: MLP, data: Data) -> str | None:
    sizes, loss = model.specification.sizes, model.specification.loss
    features = data.x.shape[1]
    if (sizes[0], sizes[-1]) != (features, data.outputs):
        return (
            f"a network of {sizes[0]} inputs and {sizes[-1]} outputs cannot learn {features} features -> {data.outputs}"
        )
    if (loss == "softmax") != data.classes:
        return f"loss {loss!r} does not fit the targets, which are {'class numbers' if data.classes else 'numbers'}"
    return None


def _epoch(hybrid: Hybrid, data: Data, epoch: int) -> float:
    """Mean training loss of one pass over the minibatches, each loss taken before its update."""
    bounds, samples = data.deal.bounds, data.deal.samples
    total = 0.0
    for index in order(len(samples), epoch, data.seed):
        start = perf_counter()
        part = slice(bounds[index], bounds[index + 1])
        x, y = data.x[part], data.y[part]
        hybrid.clock.add("data", start)
        total += hybrid.step(x, y, int(samples[index]))
    sums = np.array([total])
    hybrid.grid.batch_comm.Allreduce(MPI.IN_PLACE, sums)
    return float(sums[0]) / data.train_rows


def _test(hybrid: Hybrid, data: Data) -> tuple[float | None, float | None]:
    if not data.test_rows:
        return None, None
    loss, right = hybrid.evaluate(data.test_x, data.test_y, _EVALUATE_SAMPLES)
    return loss / data.test_rows, right / data.test_rows if data.classes else None


def _mean_phases(hybrid: Hybrid, before: dict[str, float], grid: Grid) -> dict[str, float]:
    spent = np.array([hybrid.clock.seconds[phase] - before[phase] for phase in PHASES])
    grid.comm.Allreduce(MPI.IN_PLACE, spent)
    return dict(zip(PHASES, (spent / grid.comm.size).tolist()))

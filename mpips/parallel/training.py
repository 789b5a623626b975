"""The training loop over epochs and minibatches, the same for every grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpips.optimizers import SGD, Optimizer

from .agreement import TrainingError, agree, alike, counted
from .arguments import check_weights, of_data, of_network, of_optimizer, of_past
from .clock import PHASES
from .data import Data, load
from .grid import Grid, parse
from .hybrid import Hybrid
from .minibatches import order
from .mlp import MLP
from .predict import choose_grid
from .served import Servers
from .sources import Source
from .specification import Specification

_EVALUATE_SAMPLES = 1000
_LOADING = ("batch", "seed", "test_share", "way", "link")


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


class Trained(NamedTuple):
    """The history, and this rank's slice of the trained network with its optimizer."""

    epochs: list[Epoch]
    hybrid: Hybrid


def train(
    model: MLP,
    data: Data | Callable[[], Source],
    grid: Grid | str = "auto",
    epochs: int = 10,
    optimizer: Optimizer | None = None,
    mode: str = "pairs",
    on_epoch: Callable[[Epoch], None] | None = None,
    hybrid: Hybrid | None = None,
    overlap: bool | None = None,
    half: bool | None = None,
    servers: Servers | None = None,
    **loading: Any,
) -> Trained:
    """Train `model` on the rows that `data` gave this rank. Collective over the grid; every rank returns the same
    history.

    Algorithm 1 of the paper on a grid of nb x 1, Algorithm 2 on 1 x nm, Algorithm 3 on any other; no step gathers
    anything at rank 0. The minibatches and so, up to rounding, the losses do not depend on the grid. `mode` is how
    model ranks cut the layers (see `splits`). `on_epoch` is called on every rank after each epoch. `hybrid`
    continues with the slice of an earlier run or of a checkpoint. `overlap`, `half`, `servers`: see `Hybrid`; with
    elastic averaging losses are means over the clients, each with its own weights on its own rows.

    In place of loaded data, `data` may be the function that opens them, with `batch` and other arguments of `load`:
    then `grid` may be "auto", the one with the shortest predicted step (`choose_grid`), or a text like "2x2", of all
    ranks of the job. TrainingError on every rank if the ranks give different arguments, if grid, network and data do
    not fit, or when a loss is no longer finite.
    """
    optimizer = optimizer or SGD(learning_rate=0.01)
    arguments = {
        **of_network(model.specification), "array module": model.xp.__name__, "the grid": grid, "epochs": epochs,
        **of_optimizer(optimizer), "mode": mode, "overlap": overlap, "half": half,
        **(of_data(data) if isinstance(data, Data) else {"data": "a function that opens them", **loading}),
        **of_past(hybrid), **(servers.arguments() if servers is not None else {"servers": "not given"}),
    }  # fmt: skip
    with _told_to(servers, grid):
        comm = MPI.COMM_WORLD if isinstance(grid, str) else grid.comm
        alike(comm, "train", arguments, _wrong_loading(data, grid, loading))
        if hybrid is None:
            check_weights(model, comm)
        grid, data = _load(model, data, grid, optimizer, mode, hybrid, loading)
    hybrid = hybrid or Hybrid(model, grid, optimizer, mode, overlap, half, servers)
    data = data.on(hybrid.network.xp)
    done = hybrid.updates // len(data.deal.samples)
    history = []
    for epoch in range(done, done + epochs):
        history.append(_epoch(hybrid, data, epoch))
        if on_epoch:
            on_epoch(history[-1])
    return Trained(history, hybrid)


@contextmanager
def _told_to(servers: Servers | None, grid: Grid | str) -> Iterator[None]:
    """Servers end, with the sentence, where the training cannot begin."""
    try:
        if servers is not None and isinstance(grid, str):
            raise TrainingError(f"with servers, give train the Grid that their join returned, not {grid!r}")
        yield
    except TrainingError as error:
        if servers is not None:
            servers.give_up(str(error))
        raise


def _wrong_loading(data: Data | Callable[[], Source], grid: Grid | str, loading: dict[str, Any]) -> str | None:
    """Why the data cannot be loaded so; None where they can, or already are."""
    if isinstance(data, Data):
        if not loading and not isinstance(grid, str):
            return None
        return (
            f"these rows were loaded for a grid {data.grid}: give train that Grid, not {grid!r}, nor how to load; "
            f"or give it the function that opens the data, with grid='auto' and batch=..."
        )
    if unknown := [name for name in loading if name not in _LOADING] or ("batch" not in loading and ["no batch"]):
        return f"train with data to open takes batch=..., and may take {_LOADING}; here is {unknown[0]}"
    return None


def _load(
    model: MLP, data: Data | Callable[[], Source], grid: Grid | str, optimizer: Optimizer, mode: str,
    hybrid: Hybrid | None, loading: dict[str, Any],
) -> tuple[Grid, Data]:  # fmt: skip
    """The grid, chosen if it is to be, and this rank's rows, loaded if they are to be; TrainingError on every rank
    where they do not fit."""
    if isinstance(grid, str):
        grid = choose_grid(model, loading["batch"], optimizer, mode) if grid == "auto" else Grid(*parse(grid))
    if not isinstance(data, Data):
        data = load(data, grid, dtype=model.specification.dtype, **loading)
    check_fit(model.specification, data, grid, hybrid)
    return grid, data


def check_fit(specification: Specification, data: Data, grid: Grid, hybrid: Hybrid | None = None) -> None:
    """TrainingError on every rank unless this network can be trained on these rows on this grid, going on from
    `hybrid` where it is given. Collective over the grid."""
    agree(grid.comm, _misfit(specification, data, grid) or _mixture(hybrid, data))


def _misfit(specification: Specification, data: Data, grid: Grid) -> str | None:
    if str(grid) != data.grid:
        return f"the data were loaded for a grid {data.grid}, not for {grid}: load them for the grid that trains"
    sizes, loss = specification.sizes, specification.loss
    features = data.x.shape[1]
    if (sizes[0], sizes[-1]) != (features, data.outputs):
        return (
            f"a network of {counted(sizes[0], 'input')} and {counted(sizes[-1], 'output')} cannot learn "
            f"{counted(features, 'feature')} -> {data.outputs}"
        )
    if (loss == "softmax") != data.classes:
        targets, fitting = ("class numbers", "softmax") if data.classes else ("numbers", "l2")
        return f"loss {loss!r} does not fit the targets, which are {targets}: make the MLP with loss={fitting!r}"
    return None


def _mixture(hybrid: Hybrid | None, data: Data) -> str | None:
    """Why rows that were for testing would be trained on, or the other way round; None where they would not."""
    before = None if hybrid is None else hybrid.rule
    if before is None or before[:2] == data.rule[:2]:
        return None
    return (
        f"the rows were dealt by seed {data.seed} and test share {data.test_share}, but those of the checkpoint by "
        f"seed {before.seed} and test share {before.test_share}: rows for training and rows for testing would mix; "
        f"load the data with the checkpoint's"
    )


def _epoch(hybrid: Hybrid, data: Data, epoch: int) -> Epoch:
    """One pass over the minibatches and the test rows; TrainingError on every rank if the loss is not finite."""
    start, before = perf_counter(), _clocked(hybrid)
    with np.errstate(all="ignore"):  # the sentence tells what NumPy would warn of, once
        loss = _pass(hybrid, data, epoch)
        overflow = f"the loss of epoch {epoch + 1} is {loss}: lower the learning rate"
        agree(hybrid.grid.comm, None if isfinite(loss) else overflow)
        test_loss, accuracy = _test(hybrid, data)
    *spent, under_way = _mean(_clocked(hybrid) - before, hybrid.grid)
    phases = dict(zip(PHASES, spent))
    return Epoch(epoch + 1, loss, test_loss, accuracy, perf_counter() - start, phases, under_way)


def _pass(hybrid: Hybrid, data: Data, epoch: int) -> float:
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


def _clocked(hybrid: Hybrid) -> np.ndarray:
    """Seconds of each phase so far, and with messages under way."""
    return np.array([*(hybrid.clock.seconds[phase] for phase in PHASES), hybrid.clock.under_way])


def _mean(seconds: np.ndarray, grid: Grid) -> list[float]:
    """The mean over the ranks."""
    grid.comm.Allreduce(MPI.IN_PLACE, seconds)
    means: list[float] = (seconds / grid.comm.size).tolist()
    return means

"""The time of a step on every grid, from the paper's communication formulas, and the grid they recommend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpips.optimizers import Optimizer

from .grid import Grid, factorings
from .measure import Link, allreduce_seconds, measure
from .network import Network, Specification
from .slices import interval
from .splits import kinds

_TIMED_SECONDS = 0.2
_FEWEST_STEPS, _MOST_STEPS = 3, 20


class Message(NamedTuple):
    """One collective between the ranks of a model: "gather" or "sum", of so many bytes (the whole array)."""

    kind: str
    size: float


class Prediction(NamedTuple):
    """Seconds of one step on a grid: computation, gradient sums over batch ranks, exchanges between model ranks."""

    batch: int
    model: int
    compute: float
    reduction: float
    exchange: float
    batch_link: Link
    model_link: Link

    @property
    def seconds(self) -> float:
        return self.compute + self.reduction + self.exchange


def gather_seconds(ranks: int, size: float, link: Link) -> float:
    """An allgather of `size` bytes in all: ``alpha ceil(log2 P) + beta (P - 1) / P size`` (a third of section 6's
    sum)."""
    return link.alpha * math.ceil(math.log2(ranks)) + link.beta * (ranks - 1) / ranks * size


def messages(sizes: Sequence[int], model: int, samples: float, itemsize: int, mode: str = "pairs") -> list[Message]:
    """What the ranks of one model exchange in a step of `samples` samples.

    Cut by columns, a layer gathers its outputs and sums the gradient of its inputs, three terms a layer as in the
    paper's section 6, except that the first layer's inputs need no gradient. A pair of columns and rows needs two
    sums in all.
    """
    result = []
    chosen = kinds(sizes, model, mode)
    for layer, kind in enumerate(chosen):
        if kind == "columns":
            if layer + 1 == len(chosen) or chosen[layer + 1] != "rows":
                result.append(Message("gather", samples * sizes[layer + 1] * itemsize))
            if layer:
                result.append(Message("sum", samples * sizes[layer] * itemsize))
        elif kind == "rows":
            result.append(Message("sum", samples * sizes[layer + 1] * itemsize))
    return result


def exchange_seconds(moved: Sequence[Message], model: int, link: Link) -> float:
    """The time of these messages between `model` ranks, one after the other."""
    cost = {"gather": gather_seconds, "sum": allreduce_seconds}
    return sum(cost[message.kind](model, message.size, link) for message in moved)


def parameter_bytes(sizes: Sequence[int], model: int, itemsize: int, mode: str = "pairs") -> int:
    """Bytes of the parameters of the rank that holds the most (slice 0)."""
    total = 0
    for layer, kind in enumerate(kinds(sizes, model, mode)):
        rows, columns = sizes[layer + 1], sizes[layer]
        rows = interval(rows, model, 0)[1] if kind == "columns" else rows
        columns = interval(columns, model, 0)[1] if kind == "rows" else columns
        total += rows * columns + rows
    return total * itemsize


def compute_seconds(
    specification: Specification, model: int, samples: int, whole: int, optimizer: Optimizer, mode: str = "pairs"
) -> float:
    """Measured: a step of slice 0 of `model` on `samples` samples of a minibatch of `whole`, update included, alone.

    Median of at least three steps after one; local, nothing is sent.
    """
    network = Network(specification, Mute(model), mode, np.zeros)
    weights = network.flat_parameters.copy()  # updated in place of the network's, which so stays sane
    state = optimizer.init(weights)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((samples, specification.sizes[0])).astype(specification.dtype)
    y = np.zeros((samples, specification.sizes[-1]), specification.dtype)
    labels = y[:, 0].astype(np.int64) if specification.loss == "softmax" else y
    times: list[float] = []
    while len(times) < 1 + _FEWEST_STEPS or (len(times) < _MOST_STEPS and sum(times) < _TIMED_SECONDS):
        start = perf_counter()
        network.step(x, labels, whole)
        optimizer.update(weights, network.flat_gradients, state, len(times) + 1)
        times.append(perf_counter() - start)
    return float(np.median(times[1:]))


class Mute:
    """Slice 0 of a model whose other ranks do not exist: collectives take no time, and leave what is there."""

    def __init__(self, parts: int) -> None:
        self.parts, self.part = parts, 0

    def gather(self, full: np.ndarray) -> None:
        pass

    def sum(self, array: np.ndarray) -> None:
        pass

    def start_sum(self, array: np.ndarray) -> Mute:
        return self

    def wait(self) -> None:
        pass


def predict(
    specification: Specification, batch: int, grid: Grid, optimizer: Optimizer, mode: str = "pairs"
) -> Prediction:
    """The time of a step of `batch` samples on this grid, with alpha, beta and compute measured on it. Collective."""
    sizes, itemsize = specification.sizes, np.dtype(specification.dtype).itemsize
    samples = interval(batch, grid.batch, 0)[1]
    moved = messages(sizes, grid.model, samples, itemsize, mode)
    parameters = parameter_bytes(sizes, grid.model, itemsize, mode)
    batch_link = measure(grid.batch_comm, parameters)
    model_link = measure(grid.model_comm, int(np.mean([message.size for message in moved])) if moved else 0)
    grid.comm.Barrier()
    local = compute_seconds(specification, grid.model, samples, batch, optimizer, mode)
    numbers = np.array([local, *batch_link, *model_link])
    grid.comm.Allreduce(MPI.IN_PLACE, numbers, MPI.MAX)
    batch_link, model_link = Link(*numbers[1:3].tolist()), Link(*numbers[3:5].tolist())
    reduction = allreduce_seconds(grid.batch, parameters, batch_link)
    exchange = exchange_seconds(moved, grid.model, model_link)
    return Prediction(grid.batch, grid.model, float(numbers[0]), reduction, exchange, batch_link, model_link)


def predict_all(
    specification: Specification, batch: int, comm: MPI.Comm, optimizer: Optimizer, mode: str = "pairs"
) -> list[Prediction]:
    """Predictions for every grid of the ranks of `comm`, the fastest first; the same on every rank. Collective."""
    result = []
    for nb, nm in factorings(comm.size):
        grid = Grid(nb, nm, comm)
        result.append(predict(specification, batch, grid, optimizer, mode))
        grid.free()
    return sorted(result, key=lambda prediction: prediction.seconds)

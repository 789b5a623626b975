"""The predicted time of a step on every mesh, by the paper's formulas, and the mesh that they recommend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpips.optimizers import SGD, Optimizer

from mpips.mlp.agreement import alike, of_network, of_optimizer
from mpips.mlp.data_parallel import buckets
from mpips.mlp.intervals import interval
from mpips.mlp.mesh import Mesh, Spans, factorings, spans_nodes
from mpips.mlp.network.mlp import MLP
from mpips.mlp.network.specification import Specification, working_dtype
from mpips.mlp.network.splits import kinds
from mpips.mlp.prediction.links import Link, allreduce_seconds, gather_seconds, measure_allreduce
from mpips.mlp.prediction.timeline import Costs, Event, replay, trace


class Message(NamedTuple):
    """One collective between the ranks of a model: "gather" or "sum", of so many bytes (the whole array)."""

    kind: str
    size: float


class Prediction(NamedTuple):
    """Seconds of one step on a mesh: computation, gradient sums over batch ranks, exchanges between model ranks, and
    what of the latter two is hidden behind computation."""

    batch: int
    model: int
    compute: float
    reduction: float
    exchange: float
    hidden: float
    batch_link: Link
    model_link: Link

    @property
    def seconds(self) -> float:
        return self.compute + self.reduction + self.exchange - self.hidden


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
    return sum(largest_slice(sizes, model, mode)) * itemsize


def largest_slice(sizes: Sequence[int], model: int, mode: str = "pairs") -> list[int]:
    """Parameters of each layer on the rank that holds the most (slice 0)."""
    elements = []
    for layer, kind in enumerate(kinds(sizes, model, mode)):
        rows, columns = sizes[layer + 1], sizes[layer]
        rows = interval(rows, model, 0)[1] if kind == "columns" else rows
        columns = interval(columns, model, 0)[1] if kind == "rows" else columns
        elements.append(rows * columns + rows)
    return elements


def compute_seconds(
    specification: Specification, model: int, samples: int, whole: int, optimizer: Optimizer, mode: str = "pairs"
) -> float:
    """Measured: a step of slice 0 of `model` on `samples` samples of a minibatch of `whole`, update included, alone."""
    return sum(event.compute for event in trace(specification, model, samples, whole, optimizer, mode))


def predict(
    specification: Specification, batch: int, mesh: Mesh, optimizer: Optimizer, mode: str = "pairs"
) -> Prediction:
    """The time of a step of `batch` samples on this mesh, with alpha, beta and compute measured on it. Collective."""
    sizes, samples = specification.sizes, interval(batch, mesh.batch, 0)[1]
    spans = spans_nodes(mesh)
    narrow = [specification.dtype == "mixed" and each for each in spans]
    batch_size, model_size = (2 if half else working_dtype(specification.dtype).itemsize for half in narrow)
    moved = messages(sizes, mesh.model, samples, model_size, mode)
    cut = buckets(largest_slice(sizes, mesh.model, mode), batch_size)
    bucket_bytes = [(bucket.stop - bucket.start) * batch_size for bucket in cut]
    batch_link = measure_allreduce(mesh.batch_comm, max(bucket_bytes), narrow[0])
    model_link = measure_allreduce(
        mesh.model_comm, int(np.mean([message.size for message in moved])) if moved else 0, narrow[1]
    )
    mesh.comm.Barrier()
    traced = trace(specification, mesh.model, samples, batch, optimizer, mode, cut, any(spans))
    compute, *links = _greatest(mesh.comm, [sum(event.compute for event in traced), *batch_link, *model_link])
    batch_link, model_link = Link(*links[:2]), Link(*links[2:])
    events = _mean(mesh.comm, traced, compute)
    reductions = [allreduce_seconds(mesh.batch, size, batch_link) for size in bucket_bytes]
    costs = Costs(mesh.model, model_link, model_size, reductions, cut)
    reduction, exchange = sum(reductions), exchange_seconds(moved, mesh.model, model_link)
    hidden = replay(events, costs, Spans(False, False)) - replay(events, costs, spans)
    return Prediction(mesh.batch, mesh.model, compute, reduction, exchange, hidden, batch_link, model_link)


def _greatest(comm: MPI.Comm, numbers: list[float]) -> list[float]:
    """Each number's greatest value over the ranks."""
    both = np.array(numbers)
    comm.Allreduce(MPI.IN_PLACE, both, MPI.MAX)
    return both.tolist()


def _mean(comm: MPI.Comm, events: list[Event], whole: float) -> list[Event]:
    """The mean of all ranks' events, stretched so that their computation takes `whole` seconds."""
    seconds = np.array([event.compute for event in events])
    comm.Allreduce(MPI.IN_PLACE, seconds)
    seconds *= whole / max(seconds.sum(), 1e-12)
    return [event._replace(compute=each) for event, each in zip(events, seconds.tolist())]


def predict_all(
    specification: Specification, batch: int, comm: MPI.Comm, optimizer: Optimizer, mode: str = "pairs"
) -> list[Prediction]:
    """Predictions for every mesh of the ranks of `comm`, the fastest first; the same on every rank. Collective."""
    result = []
    for nb, nm in factorings(comm.size):
        mesh = Mesh(nb, nm, comm)
        result.append(predict(specification, batch, mesh, optimizer, mode))
        mesh.free()
    return sorted(result, key=lambda prediction: prediction.seconds)


def choose_mesh(
    model: MLP, batch: int, optimizer: Optimizer | None = None, mode: str = "pairs", comm: MPI.Comm | None = None
) -> Mesh:
    """The mesh of all ranks of `comm` (None: COMM_WORLD) with the shortest predicted step on minibatches of `batch`
    samples. Collective; what `mpips train --grid auto` does."""
    comm = MPI.COMM_WORLD if comm is None else comm
    optimizer = optimizer or SGD(learning_rate=0.01)
    problem = None if model.xp is np else "predictions are for NumPy: give a Mesh(batch=..., model=...)"
    arguments = {**of_network(model.specification), "batch": batch, **of_optimizer(optimizer), "mode": mode}
    alike(comm, "choose_mesh", arguments, problem)
    best = predict_all(model.specification, batch, comm, optimizer, mode)[0]
    return Mesh(best.batch, best.model, comm)

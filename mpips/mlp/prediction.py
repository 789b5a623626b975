"""Predict the time of a training step on every mesh, by the paper's formulas, and choose the fastest mesh.

1. Two sums of different sizes are timed on each communicator of the mesh. They give the cost of its messages: alpha
   seconds for each message, and beta seconds for each byte.
2. Every rank runs steps of slice 0 alone, with collectives that do nothing. This gives the computation between one
   message and the next, as a list of `StepEvent`.
3. `step_seconds` puts the messages between these events, with the times that the formulas give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

import mpips.collectives as collectives
from mpips.collectives.benchmark.harness import measure_costs
from mpips.collectives.simulator.cost import FREE, LinkCost
from mpips.mlp.clock import PhaseClock
from mpips.mlp.mesh import Mesh, Spans, alike, arguments_of, factorings, spans_nodes
from mpips.mlp.network import Network, Specification, interval, kinds, largest_slice, working_dtype
from mpips.mlp.parallel import RepeatedCollective, buckets
from mpips.mlp.perceptron import MLP
from mpips.optimizers import SGD, Optimizer

# Sums of two sizes are timed on a communicator, because two points determine the line alpha + beta * bytes. The smaller
# sum has _SMALL bytes. The larger sum has the size that the training step sends. As this size may be tiny, the larger
# sum has _LARGE bytes at least, so that the two sums differ clearly.
_SMALL, _LARGE = 64, 1024
# steps are timed for this many seconds
_TIMED_SECONDS = 0.2
# fewest and most steps that are timed, however long they take
_FEWEST_STEPS, _MOST_STEPS = 3, 20


class MeshPrediction(NamedTuple):
    """The predicted time of one step on a mesh, in seconds.

    Attributes:
        batch: Batch ranks of the mesh.
        model: Model ranks of the mesh.
        compute: Seconds of computation.
        reduction: Seconds of the gradient sums between batch ranks.
        exchange: Seconds of the exchanges between model ranks.
        hidden: Seconds of `reduction` and `exchange` that pass during computation.
        batch_link: The measured cost of messages (alpha and beta) between batch ranks.
        model_link: The measured cost of messages (alpha and beta) between model ranks.
    """

    batch: int
    model: int
    compute: float
    reduction: float
    exchange: float
    hidden: float
    batch_link: LinkCost
    model_link: LinkCost

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.reduction + self.exchange - self.hidden


def choose_mesh(
    model: MLP, batch: int, optimizer: Optimizer | None = None, mode: str = "pairs", comm: MPI.Comm | None = None
) -> Mesh:
    """Return the mesh of all ranks of `comm` that has the shortest predicted step, as `mpips train --grid auto` does.

    Collective. It times messages and steps, so it takes a moment. Predictions are for NumPy networks.

    Args:
        batch: Samples of a whole minibatch.
        optimizer: Default: SGD(learning_rate=0.01).
        mode: How model ranks cut the layers: "pairs" or "columns".
        comm: Default: COMM_WORLD.

    Raises:
        TrainingError: On every rank, if the ranks give different arguments or the network is not NumPy's.

    >>> mesh = mpips.mlp.choose_mesh(mpips.mlp.MLP([4, 16, 1]), batch=40)
    >>> mesh.batch * mesh.model == MPI.COMM_WORLD.size
    True
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    optimizer = optimizer or SGD(learning_rate=0.01)
    problem = None if model.xp is np else "predictions are for NumPy: give a Mesh(batch=..., model=...)"
    arguments = {**arguments_of(model.specification, optimizer, mode), "batch": batch}
    alike(comm, "choose_mesh", arguments, problem)
    best = predict_all(model.specification, batch, comm, optimizer, mode)[0]
    return Mesh(best.batch, best.model, comm)


def predict_all(
    specification: Specification, batch: int, comm: MPI.Comm, optimizer: Optimizer, mode: str = "pairs"
) -> list[MeshPrediction]:
    """Predict the time of a step on every mesh of the ranks of `comm`. Collective; it times messages and steps.

    Args:
        specification: The network, such as `MLP.specification`.
        batch: Samples of a whole minibatch.
        comm: The ranks of the meshes.
        optimizer: The optimizer of the step.
        mode: How model ranks cut the layers: "pairs" or "columns".

    Returns:
        The predictions, the fastest mesh first. They are equal on every rank.

    >>> model = mpips.mlp.MLP([4, 16, 1])
    >>> best = mpips.mlp.predict_all(model.specification, 40, MPI.COMM_WORLD, mpips.optimizers.SGD())[0]
    >>> best.seconds > 0
    True
    """
    result = []
    for shape in factorings(comm.size):
        mesh = Mesh(*shape, comm)
        result.append(predict(specification, batch, mesh, optimizer, mode))
        mesh.free()
    return sorted(result, key=lambda prediction: prediction.seconds)


def predict(
    specification: Specification, batch: int, mesh: Mesh, optimizer: Optimizer, mode: str = "pairs"
) -> MeshPrediction:
    """Measure this mesh, and predict a step on it with minibatches of `batch` samples. Collective."""
    sizes, samples, comm = specification.sizes, interval(batch, mesh.batch, 0)[1], mesh.comm
    spans = spans_nodes(mesh)
    narrow = [specification.dtype == "mixed" and each for each in spans]
    batch_size, model_size = (2 if half else working_dtype(specification.dtype).itemsize for half in narrow)
    moved = messages(sizes, mesh.model, samples, model_size, mode)
    cut = buckets(largest_slice(sizes, mesh.model, mode), batch_size)
    bucket_bytes = [(stop - start) * batch_size for _, start, stop in cut]
    batch_link = measure_allreduce(mesh.batch_comm, max(bucket_bytes), narrow[0])
    model_link = measure_allreduce(mesh.model_comm, int(np.mean([n for _, n in moved])) if moved else 0, narrow[1])
    comm.Barrier()
    traced = time_events(specification, mesh.model, samples, batch, optimizer, mode, cut, any(spans))
    greatest = np.array([sum(event.compute for event in traced), *batch_link, *model_link])
    comm.Allreduce(MPI.IN_PLACE, greatest, MPI.MAX)
    compute, *links = greatest.tolist()
    batch_link, model_link = LinkCost(*links[:2]), LinkCost(*links[2:])
    # The time of each event is its mean over the ranks, scaled so that all events add up to `compute`, which is the
    # time of the slowest rank.
    seconds = np.array([event.compute for event in traced])
    comm.Allreduce(MPI.IN_PLACE, seconds)
    seconds *= compute / max(seconds.sum(), 1e-12)
    events = [event._replace(compute=each) for event, each in zip(traced, seconds.tolist())]
    reductions = {layer: allreduce_seconds(mesh.batch, n, batch_link) for (layer, _, _), n in zip(cut, bucket_bytes)}
    exchange = exchange_seconds(moved, mesh.model, model_link)
    whole, overlapped = (
        step_seconds(events, mesh.model, model_link, model_size, reductions, each)
        for each in (Spans(False, False), spans)
    )
    return MeshPrediction(
        mesh.batch, mesh.model, compute, sum(reductions.values()), exchange, whole - overlapped, batch_link, model_link
    )


# ---- messages, and their time by the paper's formulas


def messages(
    sizes: Sequence[int], model: int, samples: float, itemsize: int, mode: str = "pairs"
) -> list[tuple[str, float]]:
    """Return the collectives between the ranks of one model in a step: ("gather" or "sum", bytes of the whole array).

    A layer cut by columns gathers its outputs and sums the gradient of its inputs. A sum costs as much as two gathers,
    so a layer has the three terms of the paper's section 6, except that the first layer's inputs need no gradient. A
    pair of layers cut by columns and rows needs two sums in all.
    """
    result = []
    chosen = kinds(sizes, model, mode)
    for layer, kind in enumerate(chosen):
        if kind == "columns":
            if layer + 1 == len(chosen) or chosen[layer + 1] != "rows":
                result.append(("gather", samples * sizes[layer + 1] * itemsize))
            if layer:
                result.append(("sum", samples * sizes[layer] * itemsize))
        elif kind == "rows":
            result.append(("sum", samples * sizes[layer + 1] * itemsize))
    return result


def exchange_seconds(moved: Sequence[tuple[str, float]], model: int, link: LinkCost) -> float:
    """Return the seconds that collectives take between `model` ranks, one after another.

    `moved` lists the collectives as `messages` returns them.
    """
    cost = {"gather": gather_seconds, "sum": allreduce_seconds}
    return sum(cost[kind](model, size, link) for kind, size in moved)


def allreduce_seconds(ranks: int, size: float, link: LinkCost) -> float:
    """Return the seconds of an allreduce of `size` bytes: ``2 (alpha ceil(log2 P) + beta (P - 1) / P size)``.

    This is the summand of the paper's section 5. The paper prints P / (P - 1), which we take for a misprint. Its
    source, Gholami et al., has (P - 1) / P. With P = 1 a sum costs nothing, and only (P - 1) / P is then 0.
    """
    return 2 * gather_seconds(ranks, size, link)


def gather_seconds(ranks: int, size: float, link: LinkCost) -> float:
    """Return the seconds of an allgather of `size` bytes in all: ``alpha ceil(log2 P) + beta (P - 1) / P size``.

    This is one of the three terms of a layer in the paper's section 6.
    """
    return link.alpha * math.ceil(math.log2(ranks)) + link.beta * (ranks - 1) / ranks * size


def measure_allreduce(comm: MPI.Comm, size: int, half: bool = False) -> LinkCost:
    """Measure alpha and beta of `allreduce_seconds` by timing a short and a long sum between the ranks. Collective.

    The short sum has 64 bytes, and the long sum has `size` bytes, but at least 1,024. The time of a sum is the time of
    its slowest rank, as the median over several sums. With `half`, the arrays are float32 and travel as float16, and
    `size` counts the bytes that travel. With one rank, alpha and beta are 0.
    """
    if comm.size == 1:
        return FREE
    sums = {}
    for nbytes in (_SMALL, max(size, _LARGE)):
        array = collectives.empty(nbytes // (2 if half else 4), np.float32, comm)
        array[...] = 0
        sums[nbytes] = RepeatedCollective("allreduce", array, comm, PhaseClock(), "backward", half)
    alpha, beta = measure_costs(comm, {nbytes: each.run for nbytes, each in sums.items()})
    for each in sums.values():
        each.free()
    return LinkCost(alpha / (2 * math.ceil(math.log2(comm.size))), beta / (2 * (comm.size - 1) / comm.size))


# ---- a step as a list of events


class StepEvent(NamedTuple):
    """A moment of a training step at which messages matter. It follows `compute` seconds of computation.

    The *model ranks* hold different slices of one network and exchange values of its neurons. The *batch ranks* hold
    the same slice, train on different samples, and sum their gradients. They sum these gradients in *buckets* of
    several layers. The backward pass goes from the last layer to the first, so the lowest layer of a bucket is the one
    that completes the bucket.

    These are the kinds of events, with the meaning of `number`:

    - gather, sum: the model ranks exchange `number` elements in the forward pass, and wait for them
    - start: the model ranks begin to sum `number` elements in the backward pass
    - wait: the computation needs the result of the sum that the last `start` has begun
    - gradient: the gradients of layer `number` are complete
    - reduced: the optimizer needs the gradients of one bucket, summed over the batch ranks. `number` is the bucket's
      lowest layer
    - end: the step is done
    """

    kind: str
    number: int
    # seconds of computation since the event before
    compute: float


class EventRecorder:
    """A `ModelExchange` and `StepProgress` for slice 0 without other ranks. It exchanges nothing and records events."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.part = 0
        self.begin()

    def begin(self) -> None:
        """Start recording a step."""
        self.events: list[StepEvent] = []
        self._last = perf_counter()

    def note(self, kind: str, number: int = 0) -> None:
        """Record an event, and the seconds since the event before."""
        now = perf_counter()
        self.events.append(StepEvent(kind, number, now - self._last))
        self._last = perf_counter()

    def gather(self, full: np.ndarray) -> None:
        self.note("gather", full.size)

    def sum(self, array: np.ndarray) -> None:
        self.note("sum", array.size)

    def start_sum(self, array: np.ndarray) -> None:
        self.note("start", array.size)

    def wait(self) -> None:
        self.note("wait")

    def gradient(self, layer: int) -> None:
        self.note("gradient", layer)

    def poll(self) -> None:
        """Do nothing, because no message is in flight."""


def time_events(
    specification: Specification,
    model: int,
    samples: int,
    whole: int,
    optimizer: Optimizer,
    mode: str = "pairs",
    cut: Sequence[tuple[int, int, int]] = (),
    beside: bool = False,
) -> list[StepEvent]:
    """Time steps of slice 0, and return the events of a step. Local: nothing is sent.

    Times are medians over at least three steps, after one step that warms up. They are scaled so that they add up to
    the median step.

    Args:
        model: Number of slices of the network.
        samples: Samples of this rank in a minibatch.
        whole: Samples of the whole minibatch.
        cut: The buckets of layers by which gradients are summed and weights are updated, as `buckets` returns them. If
            it is empty, all weights are one bucket.
        beside: Compute the backward pass in blocks and record gradients, as if messages were sent during this pass.
    """
    mute = EventRecorder(model)
    network = Network(specification, mute, mode, np.zeros)
    # The optimizer updates a copy. These updates do not train anything, and could make the network's weights infinite.
    weights = network.flat_parameters.copy()
    state = optimizer.init(weights)
    rng = np.random.default_rng(0)
    dtype = working_dtype(specification.dtype)
    x = rng.standard_normal((samples, specification.sizes[0])).astype(dtype)
    y = np.zeros((samples, specification.sizes[-1]), dtype)
    labels = y[:, 0].astype(np.int64) if specification.loss == "softmax" else y
    steps: list[list[StepEvent]] = []
    spent = 0.0
    while len(steps) < 1 + _FEWEST_STEPS or (len(steps) < _MOST_STEPS and spent < _TIMED_SECONDS):
        mute.begin()
        network.step(x, labels, whole, progress=mute if beside else None)
        for layer, start, stop in cut or [(0, 0, weights.size)]:
            mute.note("reduced", layer)
            part = slice(start, stop)
            optimizer.update(
                weights[part], network.flat_gradients[part], tuple(each[part] for each in state), len(steps) + 1
            )
        mute.note("end")
        steps.append(mute.events)
        spent += sum(event.compute for event in mute.events)
    times = np.array([[event.compute for event in events] for events in steps[1:]])
    middle = np.median(times, axis=0)
    # If ranks share cores, different events are interrupted in each step, and the medians of the events leave out the
    # interruptions. So the medians are scaled to the median step, which includes them.
    middle *= np.median(times.sum(axis=1)) / max(middle.sum(), 1e-12)
    return [event._replace(compute=seconds) for event, seconds in zip(steps[0], middle.tolist())]


def step_seconds(
    events: Sequence[StepEvent], model: int, link: LinkCost, itemsize: int, reductions: dict[int, float], spans: Spans
) -> float:
    """Return the seconds of a step if messages are sent at its events.

    Messages that travel during computation share one link, first come, first served. For other messages the computation
    waits.

    Args:
        events: The computation, as `time_events` returns it.
        model: Number of model ranks.
        link: Alpha and beta between model ranks.
        itemsize: Bytes of an element that model ranks send.
        reductions: Lowest layer of a bucket -> seconds that the batch ranks need to sum the bucket's gradients.
        spans: The communicators whose messages travel during computation.
    """
    # now: the time that the computation has reached; free: the time at which the link becomes free; needed: the time at
    # which the sum that was begun last is complete
    now = free = needed = 0.0
    arrivals: dict[int, float] = {}
    for kind, number, compute in events:
        now += compute
        size = number * itemsize
        if kind == "gather":
            now += gather_seconds(model, size, link)
        elif kind == "sum" or (kind == "start" and not spans.model):
            now += allreduce_seconds(model, size, link)
        elif kind == "start":
            needed = free = max(free, now) + allreduce_seconds(model, size, link)
        elif kind == "wait":
            now = max(now, needed)
        elif kind == "gradient" and spans.batch and number in reductions:
            arrivals[number] = free = max(free, now) + reductions[number]
        elif kind == "reduced":
            now = max(now, arrivals[number]) if spans.batch else now + reductions[number]
    return now

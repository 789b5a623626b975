"""The predicted time of a step on every mesh, by the paper's formulas, and the mesh that they recommend.

Alpha and beta of a communicator, from timed collectives, and what collectives then cost by the paper's formulas.

The events of a step with the computation before each, measured, and how long it takes with messages between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

import collectives
from mpips.mlp.mesh import Mesh, Spans, alike, factorings, of_network, of_optimizer, spans_nodes
from mpips.mlp.network.layers import Specification, interval, kinds, working_dtype
from mpips.mlp.network.mlp import MLP
from mpips.mlp.network.slice import Network
from mpips.mlp.parallel import Bucket, Sum, buckets
from mpips.optimizers import SGD, Optimizer


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


_SMALL = 64  # bytes
_SCATTERED_BYTES = 256 << 10  # a rank's part of the scatter that is timed


class Link(NamedTuple):
    """Latency in seconds a message and inverse bandwidth in seconds a byte."""

    alpha: float
    beta: float


def allreduce_seconds(ranks: int, size: float, link: Link) -> float:
    """An allreduce of `size` bytes: ``2 (alpha ceil(log2 P) + beta (P - 1) / P size)``.

    The summand of the paper's section 5, whose printed P / (P - 1) we take for a slip: its source, Gholami et al.,
    and the limit P = 1 both want (P - 1) / P.
    """
    return 2 * (link.alpha * math.ceil(math.log2(ranks)) + link.beta * (ranks - 1) / ranks * size)


def gather_seconds(ranks: int, size: float, link: Link) -> float:
    """An allgather of `size` bytes in all: ``alpha ceil(log2 P) + beta (P - 1) / P size`` (a third of section 6's
    sum)."""
    return link.alpha * math.ceil(math.log2(ranks)) + link.beta * (ranks - 1) / ranks * size


def scatter_seconds(batch: int, model: int, data: float, alpha: float, beta: float) -> float:
    """One scatter to all ranks, `data` bytes a batch part: ``alpha + nb nm data beta`` (section 7, method one)."""
    return alpha + batch * model * data * beta


def broadcast_seconds(batch: int, model: int, data: float, alpha: float, beta: float) -> float:
    """A scatter to one rank a part, then broadcasts: ``2 alpha + max(nb, nm) data beta`` (section 7, method two)."""
    return 2 * alpha + max(batch, model) * data * beta


def way_seconds(batch: int, model: int, data: float, link: Link) -> dict[str, float]:
    """The cost of both ways of sending, by the paper's rule, the cheaper of two equal ones first."""
    return {
        "scatter": scatter_seconds(batch, model, data, *link),
        "broadcast": broadcast_seconds(batch, model, data, *link),
    }


def measure_allreduce(comm: MPI.Comm, size: int, half: bool = False, repeats: int = 7) -> Link:
    """The link for which `allreduce_seconds` gives the measured times of a tiny and of a `size`-byte sum. Collective.

    With `half`, of a sum of float32 that travels as `size` bytes of float16. Median of `repeats`, of the slowest
    rank. One rank has nothing to measure: alpha and beta are 0.
    """
    if comm.size == 1:
        return Link(0.0, 0.0)
    elements = (max(nbytes, _SMALL) // (2 if half else 4) for nbytes in (_SMALL, size))
    tiny, large = (_sum_seconds(comm, count, half, repeats) for count in elements)
    alpha = tiny / (2 * math.ceil(math.log2(comm.size)))
    beta = max(large - tiny, 0.0) / (2 * (comm.size - 1) / comm.size * max(size, _SMALL))
    return Link(alpha, beta)


def measure_scatter(comm: MPI.Comm, repeats: int = 5) -> Link:
    """The link for which `scatter_seconds` gives the measured times of a tiny and of a large scatter. Collective.

    Median of `repeats`, of the slowest rank. One rank has nothing to measure: alpha and beta are 0.
    """
    if comm.size == 1:
        return Link(0.0, 0.0)
    tiny, large = (_scatter_seconds(comm, nbytes, repeats) for nbytes in (8, _SCATTERED_BYTES))
    return Link(tiny, max(large - tiny, 0.0) / (comm.size * _SCATTERED_BYTES))


def _sum_seconds(comm: MPI.Comm, elements: int, half: bool, repeats: int) -> float:
    array = collectives.empty(elements, np.float32, comm)
    array[...] = 0
    running = Sum(array, comm, half)
    seconds = _median(comm, running.run, repeats)
    running.free()
    return seconds


def _scatter_seconds(comm: MPI.Comm, nbytes: int, repeats: int) -> float:
    mine = np.zeros(nbytes // 8)
    everything = np.zeros(comm.size * mine.size) if comm.rank == 0 else None
    return _median(comm, lambda: comm.Scatter(everything, mine, root=0), repeats)


def _median(comm: MPI.Comm, run: Callable[[], object], repeats: int) -> float:
    """The median of `repeats` calls after one, each taken at the slowest rank."""
    times = np.empty(repeats)
    for index in range(-1, repeats):
        comm.Barrier()
        start = perf_counter()
        run()
        if index >= 0:
            times[index] = perf_counter() - start
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return float(np.median(times))


_TIMED_SECONDS = 0.2
_FEWEST_STEPS, _MOST_STEPS = 3, 20


class Event(NamedTuple):
    """What a step does after `compute` seconds of computation.

    gather, sum   exchange `number` elements of a forward array between the ranks of a model
    start, wait   begin to sum `number` elements of a backward array; need the sum
    gradient      layer `number`'s gradients are there
    reduced       need bucket `number`'s sum over the batch ranks
    end           the step is done
    """

    kind: str
    number: int
    compute: float


class Costs(NamedTuple):
    """What messages cost: between `model` ranks over `link` elements of `itemsize` bytes; seconds a bucket's sum."""

    model: int
    link: Link
    itemsize: int
    reductions: Sequence[float]
    buckets: Sequence[Bucket]


class Mute:
    """Slice 0 of a model whose other ranks do not exist: collectives take no time, leave what is there, are noted."""

    def __init__(self, parts: int) -> None:
        self.parts, self.part = parts, 0
        self.events: list[Event] = []
        self._last = 0.0

    def begin(self) -> None:
        """Note a step from here on."""
        self.events = []
        self._last = perf_counter()

    def note(self, kind: str, number: int = 0) -> None:
        now = perf_counter()
        self.events.append(Event(kind, number, now - self._last))
        self._last = perf_counter()

    def gather(self, full: np.ndarray) -> None:
        self.note("gather", full.size)

    def sum(self, array: np.ndarray) -> None:
        self.note("sum", array.size)

    def start_sum(self, array: np.ndarray) -> Mute:
        self.note("start", array.size)
        return self

    def wait(self) -> None:
        self.note("wait")

    def gradient(self, layer: int) -> None:
        self.note("gradient", layer)

    def poll(self) -> None:
        """Nothing is on its way."""


def trace(
    specification: Specification, model: int, samples: int, whole: int, optimizer: Optimizer, mode: str = "pairs",
    cut: Sequence[Bucket] = (), beside: bool = False,
) -> list[Event]:  # fmt: skip
    """The events of a step of slice 0 of `model` on `samples` samples of a minibatch of `whole`, updated by `cut`;
    `beside` messages, as between nodes, it computes in blocks and tells of gradients.

    Medians of at least three steps after one, which add up to the median step; local, nothing is sent.
    """
    mute = Mute(model)
    network = Network(specification, mute, mode, np.zeros)
    if beside:
        network.progress = mute
    weights = network.flat_parameters.copy()  # updated in place of the network's, which so stays sane
    state = optimizer.init(weights)
    rng = np.random.default_rng(0)
    dtype = working_dtype(specification.dtype)
    x = rng.standard_normal((samples, specification.sizes[0])).astype(dtype)
    y = np.zeros((samples, specification.sizes[-1]), dtype)
    labels = y[:, 0].astype(np.int64) if specification.loss == "softmax" else y
    steps: list[list[Event]] = []
    spent = 0.0
    while len(steps) < 1 + _FEWEST_STEPS or (len(steps) < _MOST_STEPS and spent < _TIMED_SECONDS):
        mute.begin()
        network.step(x, labels, whole)
        for number, bucket in enumerate(cut or [Bucket(0, 0, weights.size)]):
            mute.note("reduced", number)
            part = slice(bucket.start, bucket.stop)
            pieces = tuple(array[part] for array in state)
            optimizer.update(weights[part], network.flat_gradients[part], pieces, len(steps) + 1)
        mute.note("end")
        steps.append(mute.events)
        spent += sum(event.compute for event in mute.events)
    times = np.array([[event.compute for event in events] for events in steps[1:]])
    middle = np.median(times, axis=0)
    middle *= np.median(times.sum(axis=1)) / max(middle.sum(), 1e-12)  # where ranks share cores, they are interrupted
    return [event._replace(compute=seconds) for event, seconds in zip(steps[0], middle.tolist())]


def replay(events: Sequence[Event], costs: Costs, spans: Spans) -> float:
    """Seconds of a step with these messages. What travels beside computation shares one link, first come, first
    served; what does not is waited for."""
    bucket_of = {bucket.layer: number for number, bucket in enumerate(costs.buckets)}
    now = free = needed = 0.0
    there: dict[int, float] = {}
    for kind, number, compute in events:
        now += compute
        size = number * costs.itemsize
        if kind == "gather":
            now += gather_seconds(costs.model, size, costs.link)
        elif kind == "sum" or (kind == "start" and not spans.model):
            now += allreduce_seconds(costs.model, size, costs.link)
        elif kind == "start":
            needed = free = max(free, now) + allreduce_seconds(costs.model, size, costs.link)
        elif kind == "wait":
            now = max(now, needed)
        elif kind == "gradient" and spans.batch and number in bucket_of:
            there[bucket_of[number]] = free = max(free, now) + costs.reductions[bucket_of[number]]
        elif kind == "reduced":
            now = max(now, there[number]) if spans.batch else now + costs.reductions[number]
    return now

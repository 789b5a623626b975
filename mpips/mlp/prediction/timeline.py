"""The events of a step with the computation before each, measured, and how long it takes with messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpips.optimizers import Optimizer

from mpips.mlp.data_parallel import Bucket
from mpips.mlp.mesh import Spans
from mpips.mlp.network.network import Network
from mpips.mlp.network.specification import Specification, working_dtype
from mpips.mlp.prediction.links import Link, allreduce_seconds, gather_seconds

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

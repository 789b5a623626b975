"""One step of training: compute, accumulate, and an exchange that blocks (`Blocking`); what every kind of exchange is.

An exchange is put together of two parts: `Blocking` makes the gradients of a step, and an `Update` (`gradients.py`,
`elastic.py`) makes the next parameters of them. `mpips.overlap` has one of its own, beside the compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

import collectives
from mpips.optimizers.base import Optimizer
from mpips.training.batches import Source
from mpips.training.clipping import Accumulated, weigh
from mpips.training.model import Model, samples_of


class Exchange(Protocol):
    """One way to train: a batch's compute and its communication."""

    def step(self, x: Any, y: Any) -> float:
        """Forward, backward, exchange, update; the loss of this worker's batch."""
        ...

    def finish(self) -> None:
        """Wait until the parameters are those that the last step made."""
        ...

    def report(self) -> Any:
        """What the last steps were on this worker, a `mpips.overlap.report.Report`. Local."""
        ...


class Clocks(Protocol):
    """Who is told how long the steps took."""

    def exchanged(self, begin: float, computed: float, ended: float) -> None:
        """A step by time.perf_counter(): when it began, when the gradients were there, and when it was over."""
        ...

    def report(self, name: str) -> Any:
        """What the last steps were."""
        ...


class Update(Protocol):
    """How gradients, each the mean over a worker's samples, become the next parameters. Blocking."""

    name: str
    """What a checkpoint calls it, and a report."""
    keys: list[str]
    """Of the parameters in the store, each pushed once an exchange."""

    @property
    def group(self) -> Any:
        """The communicator of the workers whose gradients make one update."""
        ...

    def exchange(self) -> None:
        """The model's gradients go out, and its parameters are the next ones. All workers of `group` call it."""
        ...

    def change(self, numbers: Mapping[str, Any]) -> None:
        """Other numbers for the optimizer, such as `learning_rate`; its state stays. All workers of the store call."""
        ...

    def share(self) -> None:
        """The parameters become those that all workers have in common, where there are such. All workers call."""
        ...

    @property
    def numbers(self) -> Optimizer:
        """The optimizer with the numbers of now, wherever it is."""
        ...

    # ---- for checkpoints, and after deaths: what the store does not hold

    @property
    def optimizer(self) -> Optimizer | None:
        """That of every worker, with the numbers of now; None where the store has it."""
        ...

    def owners(self) -> list[int]:
        """The workers that keep such arrays, one of each group of equal ones; empty where the store holds all."""
        ...

    def arrays(self) -> dict[str, np.ndarray]:
        """This worker's, by name; live or copies."""
        ...

    def restore(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        """Take them back, and the parameters, after `kv.load` or a death; `rescale` is that of the workers that are
        here. `optimizer`: the numbers of then; None: as they are. All workers call."""
        ...


@dataclass(frozen=True)
class Job:
    """The parts of a Trainer, for those who fit, evaluate and save."""

    model: Any
    kv: Any
    exchange: Exchange
    blocking: Blocking | None
    """The exchange, where it is one that blocks."""
    metrics: Mapping[str, Callable[[Any, Any], Any]]


class Joined(NamedTuple):
    """What workers with unlike batches had for a step."""

    batches: bool
    """Whether anybody had a batch; where not, the epoch is over."""
    samples: bool
    """Whether anybody had a sample; where not, nothing was exchanged."""
    everybody: bool
    """Whether no worker was out of batches."""


class Blocking:
    """An exchange that ends before its step does: of `accumulate` batches, by an `Update`."""

    def __init__(self, model: Model, update: Update, accumulate: int, clocks: Clocks) -> None:
        self.model, self.update, self.accumulate, self._clocks = model, update, accumulate, clocks
        self._sum = Accumulated(model.gradients)
        self._begin, self._added = 0.0, 0

    def step(self, x: Any, y: Any) -> float:
        """Forward and backward, and with every `accumulate`-th batch exchange and update; the batch's loss."""
        loss = self.add(x, y)
        if self.full:
            self.flush()
        return loss

    @property
    def full(self) -> bool:
        """Whether so many batches wait as are exchanged at once."""
        return self._added >= self.accumulate

    @property
    def waiting(self) -> int:
        """Batches that wait for the next exchange."""
        return self._added

    def add(self, x: Any, y: Any) -> float:
        """Forward and backward of a batch, which waits for the next exchange; its loss. Local."""
        if not self._added:
            self._begin = time.perf_counter()
        loss = _number(self.model.loss_and_gradients(x, y))
        self._added += 1
        if self.accumulate > 1:
            self._sum.add(samples_of(x, y))
        return loss

    def add_empty(self) -> None:
        """A batch without a sample, which no model is asked about: it has no weight in the next exchange. Local."""
        self._added += 1

    def flush(self) -> bool:
        """Exchange what waits, whose mean is over all its samples; whether there was anything. Blocking."""
        if not self._added:
            return False
        self._sum.mean()
        self._exchange()
        return True

    def join(self, samples: int) -> Joined:
        """`flush` where workers may have unlike numbers of samples, or none: the mean is over the samples of all.

        `samples`: of this worker's batches that wait. Blocking; all workers of the update's group call it, and sum two
        numbers before the exchange.
        """
        if not self._added:
            self._begin = time.perf_counter()
        group = self.update.group
        total = np.array([samples, self._added > 0], np.float64)
        if group.Get_size() > 1:
            collectives.allreduce(total, group, label="fit: samples of a step")
        joined = Joined(bool(total[1]), bool(total[0]), total[1] == group.Get_size())
        if joined.samples:
            self._sum.mean()
            weigh(self.model.gradients, samples * group.Get_size() / float(total[0]))
            self._exchange()
        self._added = 0
        return joined

    def forget(self) -> None:
        """Drop what waits for the next exchange."""
        self._sum.forget()
        self._added = 0

    def finish(self) -> None:
        """Nothing is under way."""

    def report(self) -> Any:
        """What the last steps were on this worker. Local."""
        return self._clocks.report(self.update.name)

    def _exchange(self) -> None:
        computed = time.perf_counter()
        self.update.exchange()
        self._clocks.exchanged(self._begin, computed, time.perf_counter())
        self._added = 0


def see_joined(job: Job, source: Source) -> None:
    """ValueError where workers may not have unlike numbers of batches."""
    if not source.joined:
        return
    if job.blocking is None:
        raise ValueError("fit: overlap= sends gradients while others are computed, before a step's samples are "
                         "counted: give arrays x and y with batch_size, or leave overlap out")
    staleness = job.kv.layout.options.staleness
    if job.kv.layout.asynchronous and staleness >= 0:
        raise ValueError(f"fit: with staleness={staleness} workers wait for one that is out of batches: give arrays x "
                         "and y with batch_size, or a store without staleness")


def update_optimizer(job: Job, numbers: dict[str, Any]) -> None:
    """Change numbers of the optimizer. Collective; ValueError or TypeError on all workers."""
    if job.blocking is None:
        raise ValueError("update_optimizer: a Trainer with overlap= sets its optimizer in the first step: give a "
                         "schedule, as learning_rate=mpips.optimizers.Cosine(0.1, 1000), or use kv.update_optimizer")
    if "rescale" in numbers:
        raise ValueError("update_optimizer: rescale is the Trainer's, which divides it by the workers of a sum")
    job.exchange.finish()
    job.blocking.update.change(numbers)


def _number(loss: Any) -> float:
    """The loss of a batch; TypeError where the model has returned something else."""
    try:
        return float(loss)
    except (TypeError, ValueError):
        what = f"an array {loss.shape}" if hasattr(loss, "shape") else repr(loss)
        raise TypeError(f"the model's loss_and_gradients returned {what}: return the mean loss, a number") from None

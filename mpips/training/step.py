"""One step of training (`Blocking`): compute and accumulate gradients, and exchange them.

A step has two parts. `Blocking` computes the gradients, and an `Update` (in `updates`) turns the gradients into the
next parameters. With `overlap=` the Trainer uses the exchange of `mpips.overlap` instead, which runs while gradients
are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import mpips.collectives as collectives
from mpips.collectives.kernels.quiet import quiet
from mpips.overlap.exchange import Overlapped, OverlapReport, Recorder
from mpips.training.batches import Source
from mpips.training.model import Model, Samples, samples_of
from mpips.training.updates import Arrays, Update, weigh

if TYPE_CHECKING:
    from mpips.store.api import KVStore


@dataclass(frozen=True)
class TrainerParts:
    """The parts of a Trainer that the modules for fitting, evaluating and saving use."""

    model: Any
    kv: KVStore
    exchange: Blocking | Overlapped
    # equal to `exchange` if that is a Blocking; None with `overlap=`
    blocking: Blocking | None
    metrics: Mapping[str, Callable[[Any, Any], Any]]


class StepTotals(NamedTuple):
    """The batches and samples of all workers in a step, when workers may have different numbers of batches."""

    # True if any worker had a batch; otherwise the epoch is over
    batches: bool
    # True if any worker had a sample; otherwise nothing was exchanged
    samples: bool
    # True if every worker had a batch
    everybody: bool


class Blocking:
    """Computes gradients and exchanges them. An exchange sends the gradients of `accumulate` batches by an `Update`.

    The class is called Blocking because each step waits until its exchange has ended.
    """

    def __init__(self, model: Model, update: Update, accumulate: int) -> None:
        self.model = model
        self.update = update
        self.accumulate = accumulate
        self._recorder = Recorder()
        self._sum = Accumulated(model.gradients)
        # time.perf_counter() when the first batch of the next exchange began
        self._begin = 0.0
        # number of batches that wait for the next exchange
        self._added = 0

    def step(self, x: Samples, y: Samples) -> float:
        """Compute a batch and return its loss. Every `accumulate`-th call also exchanges gradients."""
        loss = self.add(x, y)
        if self.full:
            self.flush()
        return loss

    @property
    def full(self) -> bool:
        """True if enough batches wait for an exchange."""
        return self._added >= self.accumulate

    @property
    def waiting(self) -> int:
        """The number of batches that wait for the next exchange."""
        return self._added

    def add(self, x: Samples, y: Samples) -> float:
        """Compute the loss and gradients of a batch. They wait for the next exchange. Return the loss. Local."""
        if not self._added:
            self._begin = time.perf_counter()
        loss = _number(self.model.loss_and_gradients(x, y))
        self._added += 1
        if self.accumulate > 1:
            self._sum.add(samples_of(x, y))
        return loss

    def add_empty(self) -> None:
        """Count a batch without samples. It has no weight in the exchange, and the model is not called. Local."""
        self._added += 1

    def flush(self) -> bool:
        """Exchange the mean gradient over all samples of the waiting batches. Return False if none waits. Blocking."""
        if not self._added:
            return False
        self._sum.mean()
        self._exchange()
        return True

    def flush_uneven(self, samples: int) -> StepTotals:
        """Exchange the mean gradient over the samples of all workers. A worker may have any number of samples, or none.

        Blocking. All workers of the update's group must call it. They sum two numbers before the exchange.

        Args:
            samples: The number of samples in this worker's waiting batches.
        """
        if not self._added:
            self._begin = time.perf_counter()
        group = self.update.group
        total = np.array([samples, self._added > 0], np.float64)
        if group.Get_size() > 1:
            collectives.allreduce(total, group, label="fit: samples of a step")
        totals = StepTotals(bool(total[1]), bool(total[0]), total[1] == group.Get_size())
        if totals.samples:
            self._sum.mean()
            weigh(self.model.gradients, samples * group.Get_size() / float(total[0]))
            self._exchange()
        self._added = 0
        return totals

    def forget(self) -> None:
        """Discard the batches that wait for the next exchange."""
        self._sum.forget()
        self._added = 0

    def finish(self) -> None:
        """Do nothing, because no exchange is in flight between two steps."""

    def report(self) -> OverlapReport:
        """Return the times of the last steps on this worker. Local."""
        return self._recorder.report(self.update.name, ((1, len(self.model.parameters)),), (), 0, None)

    def _exchange(self) -> None:
        computed = time.perf_counter()
        self.update.exchange()
        self._recorder.blocking(len(self.model.parameters), self._begin, computed, time.perf_counter())
        self._added = 0


def check_uneven_batches(parts: TrainerParts, source: Source) -> None:
    """Raise ValueError if workers may have different numbers of batches and this Trainer does not allow that."""
    if not source.uneven:
        return
    if parts.blocking is None:
        raise ValueError(
            "fit: overlap= sends gradients while others are computed, before a step's samples are "
            "counted: give arrays x and y with batch_size, or leave overlap out"
        )
    if parts.blocking.update.apart and not parts.kv.layout.asynchronous:
        raise ValueError(
            f"fit: with local= a store of kind {parts.kv.type} waits for a worker that is out of batches: "
            "give arrays x and y with batch_size, or take dist_async"
        )


def update_optimizer(parts: TrainerParts, numbers: dict[str, Any]) -> None:
    """Change hyperparameters of the optimizer. Collective.

    All workers raise ValueError or TypeError if a hyperparameter is invalid.
    """
    if parts.blocking is None:
        raise ValueError(
            "update_optimizer: a Trainer with overlap= sets its optimizer in the first step: give a "
            "schedule, as learning_rate=mpips.optimizers.Cosine(0.1, 1000), or use kv.update_optimizer"
        )
    if "rescale" in numbers:
        raise ValueError("update_optimizer: rescale is the Trainer's, which divides it by the workers of a sum")
    parts.exchange.finish()
    parts.blocking.update.change(numbers)


def _number(loss: Any) -> float:
    """Return the loss of a batch as a float. Raises TypeError if the model has not returned a number."""
    try:
        return float(loss)
    except (TypeError, ValueError):
        what = f"an array {loss.shape}" if hasattr(loss, "shape") else repr(loss)
        raise TypeError(f"the model's loss_and_gradients returned {what}: return the mean loss, a number") from None


class Accumulated:
    """Averages the gradients of several batches over all samples.

    It keeps a running sum, in which each batch's mean gradient is multiplied by the number of samples. 16-bit floats
    are added in float32. From the first `add` on, it takes memory for one copy of the gradients.
    """

    def __init__(self, gradients: Arrays) -> None:
        self._gradients = gradients
        self._sums: list[np.ndarray] | None = None
        self._samples = 0

    @quiet
    def add(self, samples: int) -> None:
        """Add the model's current gradients, which are the mean over `samples` samples. 0 samples do not count."""
        if not samples:
            return
        if self._sums is None:
            self._sums = [np.zeros(one.shape, np.result_type(one.dtype, np.float32)) for one in self._gradients]
        for total, gradient in zip(self._sums, self._gradients):
            total += np.multiply(gradient, samples, dtype=total.dtype)
        self._samples += samples

    @quiet
    def mean(self) -> None:
        """Overwrite the model's gradients with the mean over all added samples, and begin a new sum."""
        if self._sums is None or not self._samples:
            return
        for total, gradient in zip(self._sums, self._gradients):
            np.divide(total, self._samples, out=gradient, casting="same_kind")
        self.forget()

    def forget(self) -> None:
        """Discard the sum, and begin a new one."""
        for total in self._sums or ():
            total[...] = 0
        self._samples = 0

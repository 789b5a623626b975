"""Call functions between steps and epochs: `Checkpoint`, `EarlyStop`, `LearningRate`, `Progress`; keep the history."""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from mpips.training import checkpoint
from mpips.training.batches import Source
from mpips.training.checkpoint import Epoch, Position
from mpips.training.evaluation import LOSS, names_of
from mpips.training.step import Job, update_optimizer

if TYPE_CHECKING:
    from mpips.store.api import KVStore

QUIET_SECONDS = 3.0
"""Seconds in which `Progress` says nothing within an epoch."""


class Fitting:
    """A fit under way, as callbacks see it."""

    rank: int
    """This worker's; rank 0 prints and writes."""
    epochs: int
    """The number of epochs in all."""
    steps: int | None
    """Exchanges of an epoch; None where batches come from an iterable."""
    joined: bool
    """True where workers may take unlike numbers of steps, as each has batches of its own."""
    asynchronous: bool
    """True where workers wait for nobody."""
    measures: tuple[str, ...]
    """Names of the `value`s of an `Epoch`: "loss", and "test_loss" and others where there are test data."""

    def __init__(
        self,
        job: Job,
        position: Position,
        source: Source,
        test: Source | None,
        epochs: int,
        callbacks: Sequence[Callback],
    ) -> None:
        self.epochs, self.joined, self.asynchronous = epochs, source.joined, job.kv.layout.asynchronous
        tested = (LOSS, *names_of(job, test)) if test is not None else ()
        self.measures = (LOSS, *(f"test_{name}" for name in tested))
        self.callbacks = sorted(callbacks, key=lambda callback: callback.last)
        self.alone = False
        """True where the other workers are elsewhere: then nothing is sent."""
        self.position, self._job, self._source = position, job, source
        self.count_workers()

    def count_workers(self) -> None:
        """Set the numbers that depend on how many workers there are."""
        kv, source, blocking = self._job.kv, self._source, self._job.blocking
        per_epoch, accumulate = source.steps(kv.num_workers), 1 if blocking is None else blocking.accumulate
        self.rank, self.steps = kv.rank, None if per_epoch is None else -(-per_epoch // accumulate)
        self.position.order = order_of(self._job, source, kv.num_workers)

    def restore(self) -> None:
        """Give callbacks what they kept at this position."""
        for name, callback in named(self.callbacks).items():
            if name in self.position.callbacks:
                callback.restore(self.position.callbacks[name])

    @property
    def epoch(self) -> int:
        """Return the epoch that is under way, from 1."""
        return self.position.epoch

    @property
    def step(self) -> int:
        """Return the number of exchanges since the training began."""
        return self.position.step

    @property
    def loss(self) -> float:
        """Return the mean loss of this worker's batches in this epoch so far."""
        return self.position.loss

    @property
    def last_loss(self) -> float:
        """Return the loss of this worker's last batch."""
        return self.position.last_loss

    @property
    def history(self) -> Sequence[Epoch]:
        """Return all epochs that have ended."""
        return tuple(self.position.history)

    def mean(self, value: float) -> float:
        """Return the mean over the workers, equal on all, of those that bring no NaN. Collective, blocking."""
        if self.alone:
            return value
        told = self._job.kv.worker.agree("fit: a mean", data=struct.pack("<d", value))
        found = [each for data in told for each in struct.unpack("<d", data) if not math.isnan(each)]
        return sum(found) / len(found) if found else math.nan

    def save(self, path: str | os.PathLike[str], keep: int | None = None) -> None:
        """Write a checkpoint that `fit(resume=path)` goes on from. Collective, blocking."""
        if self.alone:
            return
        self.position.callbacks = states(self.callbacks)
        checkpoint.save(self._job, path, self.position, keep)

    def see_folder(self, path: str | os.PathLike[str]) -> None:
        """Raise ValueError or TypeError on rank 0 where `save(path)` could not write after the next step. Local."""
        if self.rank == 0:
            checkpoint.see_folder(path, self.step)

    def update_optimizer(self, **numbers: Any) -> None:
        """Change numbers of the optimizer, such as `learning_rate`; its state stays. Collective, blocking."""
        if not self.alone:
            update_optimizer(self._job, numbers)


def order_of(job: Job, source: Source, workers: int) -> str:
    """Return what decides which samples come in which step, in words."""
    accumulate = job.blocking.accumulate if job.blocking is not None else 1
    return source.order(workers) + (f", accumulate={accumulate}" if accumulate > 1 else "")


def see_order(position: Position, order: str, same: Collection[str] = ()) -> None:
    """Raise ValueError where a fit goes on in the middle of an epoch with other batches, or other exchanges of them.

    `same`: orders that differ in the number of workers alone, to whom the rest of the epoch is dealt.
    """
    if position.batches and position.order and position.order not in (order, *same):
        raise ValueError(
            f"resume: the checkpoint is in the middle of epoch {position.epoch} of {position.order}, and "
            f"this fit has {order}: give the same, or a checkpoint at the end of an epoch"
        )


class Callback:
    """Override what you need. Every worker has one of each, and calls it at the same step: methods that are collective
    may be called by all or by none. What one computes must not differ between workers where it decides what they do.

    Time spent here is not in the history's seconds.
    """

    last: ClassVar[bool] = False
    """True where it comes after the others, as what saves their state."""

    def check(self, fit: Fitting) -> None:
        """Raise ValueError or TypeError where it cannot do its work in this fit. Local. Then no worker begins.

        Epoch and step are those where the fit begins, of a checkpoint, too.
        """

    def on_begin(self, fit: Fitting) -> None:
        """Before the first step, of a fit that goes on from a checkpoint, too. On a spare that takes a place, before
        its first step: what the others did together then, such as `update_optimizer`, does nothing there."""

    def on_step(self, fit: Fitting) -> None:
        """After each exchange. Where it is overridden, and `overlap=` is used, the exchange may still be under way.

        Where the fit survives a death, it comes again for the last step, unless all workers had been through it."""

    def on_epoch(self, fit: Fitting, epoch: Epoch) -> bool | None:
        """After each epoch; True, on all workers, ends the training."""

    def on_end(self, fit: Fitting) -> None:
        """After the last epoch."""

    def close(self) -> None:
        """The fit is over, or has failed. Local."""

    def state(self) -> Any:
        """Return what is to be saved with a checkpoint: JSON data, of this worker. None: nothing."""

    def restore(self, state: Any) -> None:
        """Take it back: before `on_begin` of a fit that goes on from a checkpoint, and after a death that the fit
        survives (option `spares`), when the last step may come again. A spare has the state of another worker."""


@dataclass
class Checkpoint(Callback):
    """Saves to the folder `path` after every `every` steps, or after each epoch (None), and at the end.

    `keep`: how many of the newest stay; None: all. `fit(resume=path)` goes on from the newest. A kill at any moment
    leaves the last complete one. Blocking on all workers; in an asynchronous store they wait for each other here.
    """

    path: str | os.PathLike[str]
    every: int | None = None
    keep: int | None = 2
    last: ClassVar[bool] = True
    _saved: tuple[int, int] = field(default=(0, 1), init=False, repr=False)
    """The step and the epoch of what is in the folder."""

    def __post_init__(self) -> None:
        for name, number in (("every", self.every), ("keep", self.keep)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise ValueError(f"Checkpoint({name}={number!r}): give a whole number of at least 1, or None")

    def check(self, fit: Fitting) -> None:
        """Raise ValueError where workers do not come to the same step, or the folder cannot take what is saved."""
        if self.every is not None and fit.joined and fit.asynchronous:
            raise ValueError(
                f"Checkpoint(every={self.every}): workers of an asynchronous store take unlike numbers of "
                "steps over batches of their own, and a checkpoint is of all: give every=None, which "
                "saves after each epoch"
            )
        fit.see_folder(self.path)

    def on_begin(self, fit: Fitting) -> None:
        """Note the step that the fit goes on from, which is not saved again."""
        self._saved = fit.step, fit.epoch

    def on_step(self, fit: Fitting) -> None:
        """Save, if it is time."""
        if self.every is not None and fit.step % self.every == 0:
            self._save(fit)

    def on_epoch(self, fit: Fitting, epoch: Epoch) -> None:
        """Save, if it is time."""
        if self.every is None:
            self._save(fit)

    def on_end(self, fit: Fitting) -> None:
        """Save, so that a resume finds the training at its end."""
        if self._saved != (fit.step, fit.epoch):
            self._save(fit)

    def _save(self, fit: Fitting) -> None:
        fit.save(self.path, self.keep)
        self._saved = fit.step, fit.epoch


def of_job(
    kv: KVStore, callbacks: Sequence[Callback], resume: str | os.PathLike[str] | None
) -> tuple[Sequence[Callback], str | os.PathLike[str] | None]:
    """Return the callbacks of a fit, and from where it goes on. Where `mpips run --checkpoint` asks for it, the first
    fit saves, in place of the store."""
    if kv.worker.regular is None or isinstance(callbacks, Callback):
        return callbacks, resume
    folder, every = kv.worker.regular.leave()
    kv.worker.regular = None
    return (*callbacks, Checkpoint(folder, every)), folder if resume is None else resume


@dataclass
class EarlyStop(Callback):
    """Ends the training after `patience` epochs in which what is monitored has not become better by `min_delta`.

    `monitor`: "loss", or "test_loss", "test_accuracy" and so on with `fit(test=)`. It is the mean over the workers, so
    all decide alike; they meet for that after each epoch, those of an asynchronous store, too. `mode`: "min" or "max";
    None: "min" where the name ends in "loss". NaN is never better.
    """

    monitor: str = "test_loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: str | None = None
    best: float | None = field(default=None, init=False, repr=False)
    """The best value so far."""
    waited: int = field(default=0, init=False, repr=False)
    """Epochs since then."""
    _restored: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.patience, int) or self.patience < 1:
            raise ValueError(f"EarlyStop(patience={self.patience!r}): give a number of epochs, at least 1")
        if not (math.isfinite(self.min_delta) and self.min_delta >= 0):
            raise ValueError(f"EarlyStop(min_delta={self.min_delta!r}): give a finite number of at least 0")
        if self.mode not in ("min", "max", None):
            raise ValueError(f"EarlyStop(mode={self.mode!r}): give 'min' or 'max'")

    def check(self, fit: Fitting) -> None:
        """Raise ValueError where nothing of that name is measured."""
        if self.monitor not in fit.measures:
            raise ValueError(
                f"EarlyStop(monitor={self.monitor!r}): this fit measures {', '.join(fit.measures)}"
                + ("" if len(fit.measures) > 1 else "; test= adds more")
            )

    def on_begin(self, fit: Fitting) -> None:
        """Begin anew, unless this fit goes on from a checkpoint."""
        if not self._restored:
            self.best, self.waited = None, 0
        self._restored = False

    def on_epoch(self, fit: Fitting, epoch: Epoch) -> bool:
        """Return whether it has waited long enough."""
        value = fit.mean(epoch.value(self.monitor))
        smaller = self.mode == "min" or (self.mode is None and self.monitor.endswith("loss"))
        gain = (
            -math.inf
            if math.isnan(value)
            else math.inf
            if self.best is None
            else (self.best - value if smaller else value - self.best)
        )
        if gain > self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def close(self) -> None:
        """Let the next fit begin anew, though a death has brought the state back in this one."""
        self._restored = False

    def state(self) -> Any:
        """Return the best value, and how long ago it was."""
        return [self.best, self.waited]

    def restore(self, state: Any) -> None:
        """Take them back."""
        self.best, self.waited = state
        self._restored = True


@dataclass
class LearningRate(Callback):
    """Sets the learning rate before each epoch to `rate(epoch)`, epochs from 1. Every worker computes the same.

    Workers meet for it, those of an asynchronous store, too. For a rate that depends on the step give the optimizer a
    schedule (`learning_rate=mpips.optimizers.Cosine(0.1, 1000)`), which costs nothing and needs no callback.
    """

    rate: Callable[[int], float] = field(repr=False)

    def check(self, fit: Fitting) -> None:
        """Raise whatever `rate` raises for the first epoch; TypeError where it is no function."""
        if not callable(self.rate):
            raise TypeError(
                f"LearningRate({self.rate!r}): give a function of the epoch, or give the optimizer learning_rate="
            )
        if fit.epoch <= fit.epochs:
            self.rate(fit.epoch)

    def on_begin(self, fit: Fitting) -> None:
        """Set the rate of the first epoch."""
        if fit.epoch <= fit.epochs:
            fit.update_optimizer(learning_rate=self.rate(fit.epoch))

    def on_epoch(self, fit: Fitting, epoch: Epoch) -> None:
        """Set the rate of the next."""
        if fit.epoch <= fit.epochs:
            fit.update_optimizer(learning_rate=self.rate(fit.epoch))


class Progress(Callback):
    """Rank 0 shows on standard error how far the training is: a line after each epoch, with what was measured, and one
    every few seconds of a long epoch, as "epoch 2 of 9, 124 of 460 steps, loss 0.31". On a terminal, a bar beside it.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._say: Callable[[str], None] = lambda line: None
        self._done: Callable[[str], None] = lambda what: None
        self._last, self._begun = 0.0, 0

    def on_begin(self, fit: Fitting) -> None:
        """Begin to show."""
        if fit.rank:
            return
        from mpips.collectives.terminal import console, show_progress  # a fit without it needs no terminal

        target, left = console(stderr=True), max(0, fit.epochs - fit.epoch + 1)
        self._say = partial(target.print, markup=False)
        self._last, self._begun = time.monotonic(), fit.step
        if target.is_terminal:
            self._done = self._stack.enter_context(show_progress("training", left * (fit.steps or 1)))

    def on_step(self, fit: Fitting) -> None:
        """Show a step."""
        if fit.rank:
            return
        if fit.steps:
            self._done(f"epoch {fit.epoch}, loss {fit.loss:.4g}")
        if (now := time.monotonic()) - self._last >= QUIET_SECONDS:
            self._last = now
            steps = f"{fit.step - self._begun:,}{f' of {fit.steps:,}' if fit.steps else ''} steps"
            self._say(f"epoch {fit.epoch} of {fit.epochs}, {steps}, loss {fit.loss:.4g}")

    def on_epoch(self, fit: Fitting, epoch: Epoch) -> None:
        """Show an epoch."""
        if fit.rank:
            return
        if not fit.steps:
            self._done(f"epoch {epoch.epoch}, loss {epoch.loss:.4g}")
        tested = [f"test {name} {shown(name, value)}" for name, value in (epoch.test or {}).items()]
        self._say(", ".join([f"epoch {epoch.epoch} of {fit.epochs}, loss {epoch.loss:.4g}", *tested]))
        self._last, self._begun = time.monotonic(), fit.step

    def close(self) -> None:
        """Show nothing more."""
        self._stack.close()


def shown(name: str, value: float) -> str:
    """Return what was measured, as a text: a share that is an accuracy as "97.31 %"."""
    return f"{100 * value:.2f} %" if name.endswith("accuracy") else f"{value:.4g}"


class OnEpoch(Callback):
    """`fit(on_epoch=f)` as a callback."""

    def __init__(self, call: Callable[[Epoch], object]) -> None:
        self._call = call

    def on_epoch(self, fit: Fitting, epoch: Epoch) -> None:
        """Tell it."""
        self._call(epoch)


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return the callbacks as a checkpoint calls them: by class, and a number among those of the class."""
    result: dict[str, Callback] = {}
    for each in callbacks:
        kind = type(each).__name__
        result[f"{kind} {sum(name.rpartition(' ')[0] == kind for name in result)}"] = each
    return result


def states(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return what callbacks keep, by name; TypeError where it is no JSON data."""
    found = {name: each.state() for name, each in named(callbacks).items()}
    for name, state in found.items():
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise TypeError(f"the state of callback {name} is no JSON data: {error}") from error
    return {name: state for name, state in found.items() if state is not None}


def words_of(callbacks: Sequence[Callback]) -> str:
    """Return the callbacks, to be compared between workers: ours with their numbers, others by their class."""
    ours = [type(each).__module__ == __name__ and isinstance(each, Checkpoint | EarlyStop) for each in callbacks]
    words = [repr(each) if known else type(each).__name__ for each, known in zip(callbacks, ours)]
    return ", ".join(words) or "none"

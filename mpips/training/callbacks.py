"""Callbacks, which `fit` calls between steps and epochs: `Checkpoint`, `EarlyStop`, `LearningRate`, `Progress`."""

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
from mpips.training.step import TrainerParts, update_optimizer

if TYPE_CHECKING:
    from mpips.store.api import KVStore

# seconds between two lines that `Progress` prints within an epoch
QUIET_SECONDS = 3.0


class Fitting:
    """The object that callbacks get: it describes the current fit.

    Attributes:
        rank: This worker's rank. Rank 0 prints and writes.
        epochs: The total number of epochs.
        steps: The number of exchanges in an epoch, or None if it is not known because batches come from an iterable.
        uneven: True if workers may take different numbers of steps, because each worker has batches of its own.
        asynchronous: True if workers do not wait for each other.
        measures: The names that `Epoch.value` accepts: "loss", and with test data also "test_loss" and similar names.
        alone: True while a spare that has replaced a dead worker calls `on_begin`. The other workers called it long
            ago, so the collective calls of this class do nothing then.
    """

    rank: int
    epochs: int
    steps: int | None
    uneven: bool
    asynchronous: bool
    measures: tuple[str, ...]

    def __init__(
        self,
        parts: TrainerParts,
        position: Position,
        source: Source,
        test: Source | None,
        epochs: int,
        callbacks: Sequence[Callback],
    ) -> None:
        self.epochs = epochs
        self.uneven = source.uneven
        self.asynchronous = parts.kv.layout.asynchronous
        tested = (LOSS, *names_of(parts, test)) if test is not None else ()
        self.measures = (LOSS, *(f"test_{name}" for name in tested))
        self.callbacks = sorted(callbacks, key=lambda callback: callback.last)
        self.alone = False
        self.position = position
        self._parts = parts
        self._source = source
        self.count_workers()

    def count_workers(self) -> None:
        """Set the attributes that depend on the number of workers."""
        kv, source, blocking = self._parts.kv, self._source, self._parts.blocking
        per_epoch, accumulate = source.steps(kv.num_workers), 1 if blocking is None else blocking.accumulate
        self.rank, self.steps = kv.rank, None if per_epoch is None else -(-per_epoch // accumulate)
        self.position.order = order_of(self._parts, source, kv.num_workers)

    def restore(self) -> None:
        """Give each callback the state that is saved in the position."""
        for name, callback in named(self.callbacks).items():
            if name in self.position.callbacks:
                callback.restore(self.position.callbacks[name])

    @property
    def epoch(self) -> int:
        """The number of the current epoch, from 1."""
        return self.position.epoch

    @property
    def step(self) -> int:
        """The number of exchanges since the training began."""
        return self.position.step

    @property
    def loss(self) -> float:
        """The mean loss of the batches that this worker has taken in this epoch."""
        return self.position.loss

    @property
    def last_loss(self) -> float:
        """The loss of this worker's last batch."""
        return self.position.last_loss

    @property
    def history(self) -> Sequence[Epoch]:
        """The epochs that have ended."""
        return tuple(self.position.history)

    def mean(self, value: float) -> float:
        """Return the mean of a value over the workers. NaNs do not count. Collective, blocking."""
        if self.alone:
            return value
        encoded = self._parts.kv.worker.agree("fit: a mean", data=struct.pack("<d", value))
        values = [each for data in encoded for each in struct.unpack("<d", data) if not math.isnan(each)]
        return sum(values) / len(values) if values else math.nan

    def save(self, path: str | os.PathLike[str], keep: int | None = None) -> None:
        """Write a checkpoint into a folder. `fit(resume=path)` continues from it. Collective, blocking.

        `keep` is the number of newest checkpoints that stay in the folder. None keeps all.
        """
        if self.alone:
            return
        self.position.callbacks = states(self.callbacks)
        checkpoint.save(self._parts, path, self.position, keep)

    def check_folder(self, path: str | os.PathLike[str]) -> None:
        """Raise ValueError or TypeError on rank 0 if a later `save(path)` could not write. Local."""
        if self.rank == 0:
            checkpoint.check_folder(path, self.step)

    def update_optimizer(self, **numbers: Any) -> None:
        """Change hyperparameters of the optimizer, such as `learning_rate`. Its state stays. Collective, blocking."""
        if not self.alone:
            update_optimizer(self._parts, numbers)


def order_of(parts: TrainerParts, source: Source, workers: int) -> str:
    """Return a text that describes which samples come in which step. Equal texts mean equal steps."""
    accumulate = parts.blocking.accumulate if parts.blocking is not None else 1
    return source.order(workers) + (f", accumulate={accumulate}" if accumulate > 1 else "")


def check_order(position: Position, order: str, same: Collection[str] = ()) -> None:
    """Raise ValueError if a fit would continue in the middle of an epoch with other batches or other exchanges.

    Args:
        position: The position where the fit would continue.
        order: The result of `order_of` for this fit.
        same: Further orders that are accepted. They differ from `order` only in the number of workers. The rest of the
            epoch is then divided again among the workers.
    """
    if position.batches and position.order and position.order not in (order, *same):
        raise ValueError(
            f"resume: the checkpoint is in the middle of epoch {position.epoch} of {position.order}, and "
            f"this fit has {order}: give the same, or a checkpoint at the end of an epoch"
        )


class Callback:
    """Base class of callbacks. Override the methods that you need.

    Every worker has one object of each callback, and all workers call it at the same step. So a method may make
    collective calls, if it makes them on all workers. If the decisions of a callback depend on a value, the value must
    be the same on all workers.

    The time that callbacks take does not count as seconds of an epoch.

    Attributes:
        last: True to call this callback after the others, for a callback that saves the state of the other callbacks.
    """

    last: ClassVar[bool] = False

    def check(self, fit: Fitting) -> None:
        """Raise ValueError or TypeError if the callback cannot work in this fit. Then no worker begins. Local.

        `fit.epoch` and `fit.step` give the point where the fit begins. If it continues from a checkpoint, this is the
        point where the checkpoint was saved.
        """

    def on_begin(self, fit: Fitting) -> None:
        """Called before the first step, also when a fit continues from a checkpoint.

        On a spare that replaces a dead worker, it is called before the spare's first step. Collective calls of `fit`,
        such as `update_optimizer`, do nothing there, because the other workers have already made them.
        """

    def on_step(self, fit: Fitting) -> None:
        """Called after each exchange. With `overlap=` the exchange may still be under way.

        After a death that the fit survives, `on_step` may be called again for the last step, unless it had returned on
        all workers.
        """

    def on_epoch(self, fit: Fitting, epoch: Epoch) -> bool | None:
        """Called after each epoch. Return True, on all workers, to end the training."""

    def on_end(self, fit: Fitting) -> None:
        """Called after the last epoch."""

    def close(self) -> None:
        """Called when the fit is over or has failed. Local."""

    def state(self) -> Any:
        """Return this worker's state to save with a checkpoint, as JSON data, or None."""

    def restore(self, state: Any) -> None:
        """Restore a state that `state` has returned.

        Called before `on_begin` of a fit that continues from a checkpoint. Also called after a death that the fit
        survives (option `spares`), because `on_step` may then run again for the last step. A spare gets the state of
        another worker.
        """


@dataclass
class Checkpoint(Callback):
    """Saves a checkpoint to a folder after every `every` steps, or after each epoch, and at the end.

        trainer.fit(x, y, batch_size=32, epochs=20, callbacks=[Checkpoint("saved", every=500)], resume="saved")

    `fit(resume=path)` continues from the newest checkpoint. If the job is killed at any moment, the last complete
    checkpoint stays. Saving blocks on all workers, and even the workers of an asynchronous store wait for each other.

    Args:
        path: The folder.
        every: The number of steps between two checkpoints. None saves after each epoch.
        keep: The number of newest checkpoints that stay. None keeps all.
    """

    path: str | os.PathLike[str]
    every: int | None = None
    keep: int | None = 2
    last: ClassVar[bool] = True
    # step and epoch of the checkpoint that was saved last
    _saved: tuple[int, int] = field(default=(0, 1), init=False, repr=False)

    def __post_init__(self) -> None:
        for name, number in (("every", self.every), ("keep", self.keep)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise ValueError(f"Checkpoint({name}={number!r}): give a whole number of at least 1, or None")

    def check(self, fit: Fitting) -> None:
        """Raise ValueError if workers do not all reach the same steps, or if the folder cannot be written."""
        if self.every is not None and fit.uneven and fit.asynchronous:
            raise ValueError(
                f"Checkpoint(every={self.every}): workers of an asynchronous store take unlike numbers of "
                "steps over batches of their own, and a checkpoint is of all: give every=None, which "
                "saves after each epoch"
            )
        fit.check_folder(self.path)

    def on_begin(self, fit: Fitting) -> None:
        # The checkpoint that the fit continues from is not saved again.
        self._saved = fit.step, fit.epoch

    def on_step(self, fit: Fitting) -> None:
        if self.every is not None and fit.step % self.every == 0:
            self._save(fit)

    def on_epoch(self, fit: Fitting, epoch: Epoch) -> None:
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
    """Return the callbacks of a fit, and the folder that it continues from.

    With `mpips run --checkpoint`, the first fit gets a `Checkpoint`, and the store stops saving on its own.
    """
    if kv.worker.regular is None or isinstance(callbacks, Callback):
        return callbacks, resume
    folder, every = kv.worker.regular.leave()
    kv.worker.regular = None
    return (*callbacks, Checkpoint(folder, every)), folder if resume is None else resume


@dataclass
class EarlyStop(Callback):
    """Ends the training after `patience` epochs without an improvement of the monitored value by more than `min_delta`.

        trainer.fit(x, y, batch_size=32, epochs=99, test=(test_x, test_y), callbacks=[EarlyStop("test_accuracy")])

    The value is averaged over the workers, so all workers decide in the same way. To average it, they wait for each
    other after each epoch, even in an asynchronous store. NaN never counts as an improvement.

    Args:
        monitor: The name of the value: "loss", or with `fit(test=)` "test_loss", "test_accuracy" and so on.
        patience: The number of epochs without improvement.
        min_delta: An improvement must be larger than this.
        mode: "min" if smaller values are better, "max" if larger ones are. None means "min" if the name ends in "loss",
            and otherwise "max".

    Attributes:
        best: The best value of this fit.
        waited: The number of epochs since the best value.
    """

    monitor: str = "test_loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: str | None = None
    best: float | None = field(default=None, init=False, repr=False)
    waited: int = field(default=0, init=False, repr=False)
    # True if `restore` has set the state, from a checkpoint or after a death
    _restored: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.patience, int) or self.patience < 1:
            raise ValueError(f"EarlyStop(patience={self.patience!r}): give a number of epochs, at least 1")
        if not (math.isfinite(self.min_delta) and self.min_delta >= 0):
            raise ValueError(f"EarlyStop(min_delta={self.min_delta!r}): give a finite number of at least 0")
        if self.mode not in ("min", "max", None):
            raise ValueError(f"EarlyStop(mode={self.mode!r}): give 'min' or 'max'")

    def check(self, fit: Fitting) -> None:
        """Raise ValueError if the fit measures no value named `monitor`."""
        if self.monitor not in fit.measures:
            raise ValueError(
                f"EarlyStop(monitor={self.monitor!r}): this fit measures {', '.join(fit.measures)}"
                + ("" if len(fit.measures) > 1 else "; test= adds more")
            )

    def on_begin(self, fit: Fitting) -> None:
        """Reset the state, unless this fit continues from a checkpoint."""
        if not self._restored:
            self.best, self.waited = None, 0
        self._restored = False

    def on_epoch(self, fit: Fitting, epoch: Epoch) -> bool:
        """Return True after `patience` epochs without improvement."""
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
        # The next fit starts with a fresh state, even if `restore` was called after a death in this fit.
        self._restored = False

    def state(self) -> Any:
        return [self.best, self.waited]

    def restore(self, state: Any) -> None:
        self.best, self.waited = state
        self._restored = True


@dataclass
class LearningRate(Callback):
    """Sets the learning rate before each epoch.

        trainer.fit(x, y, batch_size=32, epochs=20, callbacks=[LearningRate(lambda epoch: 0.1 / epoch)])

    To set the rate, workers wait for each other, even in an asynchronous store. For a rate that depends on the step,
    give the optimizer a schedule instead (`learning_rate=mpips.optimizers.Cosine(0.1, 1000)`), which costs nothing.

    Args:
        rate: A function that takes the number of the epoch, from 1, and returns the rate. It must return the same rate
            on every worker.
    """

    rate: Callable[[int], float] = field(repr=False)

    def check(self, fit: Fitting) -> None:
        """Raise TypeError if `rate` is not a function. An error of `rate` for the first epoch is also raised."""
        if not callable(self.rate):
            raise TypeError(
                f"LearningRate({self.rate!r}): give a function of the epoch, or give the optimizer learning_rate="
            )
        if fit.epoch <= fit.epochs:
            self.rate(fit.epoch)

    def on_begin(self, fit: Fitting) -> None:
        if fit.epoch <= fit.epochs:
            fit.update_optimizer(learning_rate=self.rate(fit.epoch))

    def on_epoch(self, fit: Fitting, epoch: Epoch) -> None:
        """Set the rate of the next epoch."""
        if fit.epoch <= fit.epochs:
            fit.update_optimizer(learning_rate=self.rate(fit.epoch))


class Progress(Callback):
    """Shows on rank 0's standard error how far the training is: `callbacks=[Progress()]`.

    It prints a line with the measured values after each epoch. During a long epoch it prints a line every few seconds,
    such as "epoch 2 of 9, 124 of 460 steps, loss 0.31". On a terminal it also shows a bar.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._say: Callable[[str], None] = lambda line: None
        self._done: Callable[[str], None] = lambda what: None
        # time.monotonic() when the last line was printed
        self._last = 0.0
        # the step at which the epoch began
        self._begun = 0

    def on_begin(self, fit: Fitting) -> None:
        if fit.rank:
            return
        # Import this module only in a fit that uses Progress.
        from mpips.collectives.terminal import console, show_progress

        target, left = console(stderr=True), max(0, fit.epochs - fit.epoch + 1)
        self._say = partial(target.print, markup=False)
        self._last, self._begun = time.monotonic(), fit.step
        if target.is_terminal:
            self._done = self._stack.enter_context(show_progress("training", left * (fit.steps or 1)))

    def on_step(self, fit: Fitting) -> None:
        if fit.rank:
            return
        if fit.steps:
            self._done(f"epoch {fit.epoch}, loss {fit.loss:.4g}")
        if (now := time.monotonic()) - self._last >= QUIET_SECONDS:
            self._last = now
            steps = f"{fit.step - self._begun:,}{f' of {fit.steps:,}' if fit.steps else ''} steps"
            self._say(f"epoch {fit.epoch} of {fit.epochs}, {steps}, loss {fit.loss:.4g}")

    def on_epoch(self, fit: Fitting, epoch: Epoch) -> None:
        if fit.rank:
            return
        if not fit.steps:
            self._done(f"epoch {epoch.epoch}, loss {epoch.loss:.4g}")
        tested = [f"test {name} {format_value(name, value)}" for name, value in (epoch.test or {}).items()]
        self._say(", ".join([f"epoch {epoch.epoch} of {fit.epochs}, loss {epoch.loss:.4g}", *tested]))
        self._last, self._begun = time.monotonic(), fit.step

    def close(self) -> None:
        self._stack.close()


def format_value(name: str, value: float) -> str:
    """Format a measured value. An accuracy becomes a percentage, such as "97.31 %"."""
    return f"{100 * value:.2f} %" if name.endswith("accuracy") else f"{value:.4g}"


class OnEpoch(Callback):
    """The callback for `fit(on_epoch=f)`: it calls `f` after each epoch."""

    def __init__(self, call: Callable[[Epoch], object]) -> None:
        self._call = call

    def on_epoch(self, fit: Fitting, epoch: Epoch) -> None:
        self._call(epoch)


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return the callbacks by the names that a checkpoint gives them: class and number, such as "EarlyStop 0"."""
    result: dict[str, Callback] = {}
    for each in callbacks:
        kind = type(each).__name__
        result[f"{kind} {sum(name.rpartition(' ')[0] == kind for name in result)}"] = each
    return result


def states(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the states of the callbacks by name. A state of None is left out.

    Raises TypeError if a state is not JSON data.
    """
    every_state = {name: each.state() for name, each in named(callbacks).items()}
    for name, state in every_state.items():
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise TypeError(f"the state of callback {name} is no JSON data: {error}") from error
    return {name: state for name, state in every_state.items() if state is not None}


def describe(callbacks: Sequence[Callback]) -> str:
    """Return a text that workers compare to check that they have the same callbacks.

    `Checkpoint` and `EarlyStop` are described with their options, other callbacks by their class only.
    """
    texts = [repr(each) if type(each) in (Checkpoint, EarlyStop) else type(each).__name__ for each in callbacks]
    return ", ".join(texts) or "none"

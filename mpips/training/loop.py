"""The one training loop (`Fit`): epochs, steps, callbacks, from any position on; workers with unlike batches."""

from __future__ import annotations

import itertools
import math
import os
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import collectives
from mpips.runtime.rendezvous import attempt
from mpips.training import callbacks as hooks
from mpips.training import checkpoint
from mpips.training.batches import Batch, Source, see_again, see_enough, source_of, test_of, whole
from mpips.training.callbacks import Callback
from mpips.training.evaluation import LOSS, evaluate, evaluate_here, names_of, test_words
from mpips.training.exchange import Blocking, Job
from mpips.training.history import Epoch, Position
from mpips.training.model import samples_of


class Request(NamedTuple):
    """What `fit` was asked for, checked."""

    source: Source
    epochs: int
    test: Source | None
    callbacks: tuple[Callback, ...]


class Fit:
    """A fit under way on this worker; what callbacks are given (`callbacks.Fitting`)."""

    def __init__(self, job: Job, request: Request, position: Position) -> None:
        self.rank, self.epochs = job.kv.rank, request.epochs
        self.joined, self.asynchronous = request.source.joined, job.kv.layout.asynchronous
        per_epoch, self._accumulate = request.source.steps(job.kv.num_workers), 1
        if job.blocking is not None:
            self._accumulate = job.blocking.accumulate
        self.steps = None if per_epoch is None else -(-per_epoch // self._accumulate)
        tested = (LOSS, *names_of(job, request.test)) if request.test is not None else ()
        self.measures = (LOSS, *(f"test_{name}" for name in tested))
        self.last_loss = math.nan
        self._job, self._source, self._test, self._position = job, request.source, request.test, position
        self._callbacks = sorted(request.callbacks, key=lambda callback: callback.last)
        self._on_step = [each for each in self._callbacks if type(each).on_step is not Callback.on_step]
        self._began = 0.0

    # ---- what callbacks see

    @property
    def epoch(self) -> int:
        """The epoch that is under way, from 1."""
        return self._position.epoch

    @property
    def step(self) -> int:
        """Exchanges since the training began."""
        return self._position.step

    @property
    def loss(self) -> float:
        """Mean loss of this worker's batches in this epoch so far."""
        return self._position.loss

    @property
    def history(self) -> Sequence[Epoch]:
        """All epochs that have ended."""
        return tuple(self._position.history)

    def mean(self, value: float) -> float:
        """The mean over the workers, equal on all; those that bring NaN are left out. Collective, blocking."""
        told = self._job.kv.settings.agree("fit: a mean", data=struct.pack("<d", value))
        found = [each for data in told for each in struct.unpack("<d", data) if not math.isnan(each)]
        return sum(found) / len(found) if found else math.nan

    def save(self, path: str | os.PathLike[str], keep: int | None = None) -> None:
        """Write a checkpoint that `fit(resume=path)` goes on from. Collective, blocking."""
        self._position.callbacks = hooks.states(self._callbacks)
        checkpoint.save(self._job, path, self._position, keep)

    def see_folder(self, path: str | os.PathLike[str]) -> None:
        """ValueError or TypeError on rank 0 where `save(path)` could not write after the next step. Local."""
        if self.rank == 0:
            checkpoint.see_folder(path, self.step)

    def update_optimizer(self, **numbers: Any) -> None:
        """Change numbers of the optimizer; its state stays. Collective, blocking."""
        update_optimizer(self._job, numbers)

    # ---- the loop

    def run(self) -> list[Epoch]:
        """Train from the position on; the history."""
        try:
            self._restore()
            for callback in self._callbacks:
                callback.on_begin(self)
            while self.epoch <= self.epochs and not self._position.stopped:
                self._one_epoch()
            if self.epoch <= self.epochs:
                self._meet()
            for callback in self._callbacks:
                callback.on_end(self)
        finally:
            for callback in self._callbacks:
                callback.close()
        return list(self._position.history)

    def _restore(self) -> None:
        for name, callback in hooks.named(self._callbacks).items():
            if name in self._position.callbacks:
                callback.restore(self._position.callbacks[name])

    def _one_epoch(self) -> None:
        """Train, evaluate, tell the callbacks. Nothing is sent between two epochs where there is nothing to do."""
        at = self._position
        self._meet()
        self._began = time.perf_counter()
        batches = self._source.epoch(at.epoch, self._job.kv, at.batches)
        if self.joined:
            assert self._job.blocking is not None
            self._train_joined(batches, self._job.blocking)
        else:
            self._train(batches)
        self._job.exchange.finish()
        at.seconds += time.perf_counter() - self._began
        trained = at.batches
        epoch = at.end_epoch(self._tested())
        if trained and not math.isfinite(epoch.loss):
            warnings.warn(f"the loss of epoch {epoch.epoch} is {epoch.loss} on rank {self.rank}: lower the learning "
                          "rate, or give clip_norm", RuntimeWarning, stacklevel=4)  # fmt: skip
        for callback in self._callbacks:
            at.stopped |= bool(callback.on_epoch(self, epoch))

    def _train(self, batches: Iterator[Batch]) -> None:
        """All workers have equally many batches."""
        step, at, blocking = self._job.exchange.step, self._position, self._job.blocking
        for x, y in batches:
            self.last_loss = step(x, y)
            at.took(self.last_loss)
            if blocking is None or not blocking.waiting:
                self._stepped()
        if blocking is not None and blocking.flush():
            self._stepped()

    def _train_joined(self, batches: Iterator[Batch], blocking: Blocking) -> None:
        """Workers have unlike numbers of batches: until nobody has one."""
        while True:
            samples = 0
            for x, y in itertools.islice(batches, self._accumulate):
                self.last_loss = blocking.add(x, y)
                self._position.took(self.last_loss)
                samples += samples_of(x, y)
            joined = blocking.join(samples)
            if not joined.batches:
                if not (self.step or self.asynchronous):
                    raise ValueError(f"fit: no worker has a batch in epoch {self.epoch}: give some batches to one")
                return
            if joined.samples:
                self._stepped()

    def _stepped(self) -> None:
        """An exchange is over."""
        self._position.step += 1
        if self._on_step:
            self._position.seconds += time.perf_counter() - self._began
            for callback in self._on_step:
                callback.on_step(self)
            self._began = time.perf_counter()

    def _tested(self) -> dict[str, float] | None:
        """Together where workers have the same parameters; in an asynchronous store nobody waits for it."""
        if self._test is None:
            return None
        measure = evaluate_here if self.asynchronous else evaluate
        return measure(self._job, self._test, self.epoch)

    def _meet(self) -> None:
        """Workers that wait for each other in steps begin together: what one did before is in nobody's seconds.

        ValueError on all where callbacks have ended the training on some alone.
        """
        if not self._callbacks and self._test is None:
            return
        if not self.asynchronous:
            ended = ("ended the training", str(self._position.stopped))
            self._job.kv.settings.agree("fit", [ended], noun="callback")
        elif (client := self._job.kv.layout.client).Get_size() > 1:
            collectives.allreduce(np.zeros(1), client, label="fit: the next epoch")


def requested(
    job: Job, x: Any, y: Any, batch_size: int | None, epochs: int, seed: int, test: Any,
    callbacks: Sequence[Callback], on_epoch: Callable[[Epoch], object] | None, resume: object = None,
) -> Request:  # fmt: skip
    """The arguments of `fit`; TypeError or ValueError where they are wrong. Local."""
    epochs = whole("epochs", epochs, 0)
    source, workers = source_of(x, y, batch_size, seed), job.kv.num_workers
    see_again(source, epochs)
    see_joined(job, source)
    if not source.joined:
        see_enough(len(source.x), source.batch_size, workers)  # type: ignore[union-attr]
    if isinstance(callbacks, Callback) or not all(isinstance(each, Callback) for each in callbacks):
        raise TypeError(f"callbacks={callbacks!r}: give a list of mpips.training.Callback objects")
    if resume is not None:
        checkpoint.saved_by(job, "resume")
    found = (*callbacks, hooks.OnEpoch(on_epoch)) if on_epoch is not None else tuple(callbacks)
    return Request(source, epochs, test_of(test), found)


def begin(job: Job, request: Request, resume: str | os.PathLike[str] | None, own: Sequence[Position]) -> Position:
    """Where this worker begins: at the folder's newest checkpoint, which is taken back, or else at its `own` position.

    `own`: of one worker, or of all those that a checkpoint was of. Collective; ValueError or TypeError on all workers,
    before anything has changed, where the fit cannot go on from there.
    """
    found = checkpoint.find(job, resume, begin=True) if resume is not None else None
    position, refusal = attempt(lambda: _start(job, request, own if found is None else found.positions))
    job.kv.settings.agree("fit", refusal=refusal)
    if found is not None:
        checkpoint.take(job, found)
    if job.blocking is not None and job.blocking.flush():  # what `step` has left
        position.step += 1
    started: Position = position
    return started


def _start(job: Job, request: Request, positions: Sequence[Position]) -> Position:
    """This worker's position of those of all; ValueError or TypeError where the order or a callback does not fit."""
    order = order_of(job, request.source)
    for position in positions:
        see_order(position, order)
    position = replace(checkpoint.of_worker(positions, job.kv.rank), order=order)
    fit = Fit(job, request, position)
    for callback in request.callbacks:
        callback.check(fit)
    return position


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


def words(request: Request, workers: int) -> list[tuple[str, str]]:
    """What of a fit must be equal on all workers, by name."""
    source = request.source
    arrays = [] if source.joined else [
        ("x", str(source.x.shape)), ("y", str(source.y.shape)),  # type: ignore[union-attr]
        ("batch_size", str(source.batch_size)), ("seed", str(source.seed)),  # type: ignore[union-attr]
    ]  # fmt: skip
    return [*arrays, ("batches", str(source.joined)), ("epochs", str(request.epochs)), *test_words(request.test),
            ("callbacks", hooks.words_of(request.callbacks))]


def order_of(job: Job, source: Source) -> str:
    """What decides which samples come in which step, in words."""
    accumulate = job.blocking.accumulate if job.blocking is not None else 1
    return source.order(job.kv.num_workers) + (f", accumulate={accumulate}" if accumulate > 1 else "")


def see_order(position: Position, order: str) -> None:
    """ValueError where a fit goes on in the middle of an epoch with other batches, or other exchanges of them."""
    if position.batches and position.order and position.order != order:
        raise ValueError(f"resume: the checkpoint is in the middle of epoch {position.epoch} of {position.order}, and "
                         f"this fit has {order}: give the same, or a checkpoint at the end of an epoch")


def update_optimizer(job: Job, numbers: dict[str, Any]) -> None:
    """Change numbers of the optimizer. Collective; ValueError or TypeError on all workers."""
    if job.blocking is None:
        raise ValueError("update_optimizer: a Trainer with overlap= sets its optimizer in the first step: give a "
                         "schedule, as learning_rate=mpips.optimizers.Cosine(0.1, 1000), or use kv.update_optimizer")
    if "rescale" in numbers:
        raise ValueError("update_optimizer: rescale is the Trainer's, which divides it by the workers of a sum")
    job.exchange.finish()
    job.blocking.update.change(numbers)

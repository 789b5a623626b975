"""Run the training loop (`Fit`); `begin` restores a checkpoint, also one from the middle of an epoch.

`Request` holds the arguments of a fit. In a store that survives deaths the fit survives them, too: it goes back to a
moment that all workers know (`rejoin`).
"""

from __future__ import annotations

import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

import mpips.collectives as collectives
from mpips.collectives import log
from mpips.collectives.errors import CollectiveError, MismatchError
from mpips.collectives.recorder import own as recorder
from mpips.store.runtime.rendezvous import attempt
from mpips.training import callbacks as hooks
from mpips.training import checkpoint
from mpips.training.batches import (
    Arrays,
    Batch,
    Batches,
    Source,
    samples_shown,
    see_again,
    see_enough,
    see_same,
    see_samples,
    source_of,
    test_of,
    whole,
)
from mpips.training.callbacks import Callback, Fitting, order_of, see_order
from mpips.training.checkpoint import Epoch, Position
from mpips.training.evaluation import evaluate, evaluate_here, test_words
from mpips.training.model import Samples, samples_of
from mpips.training.rejoin import BEGIN, COUNTED, ENDED, OVER, TOLD, SurvivingFit
from mpips.training.step import Blocking, Job, see_joined

LOG = log.get("mpips.training")

# A worker's batches may be an endless stream if it has had more than UNEVEN times as many steps as another worker, plus
# MANY.
UNEVEN = 100
MANY = 2000


class Fit:
    """The training loop of one call of `fit` on this worker."""

    def __init__(self, job: Job, request: Request, position: Position, survival: SurvivingFit | None = None) -> None:
        self._job = job
        self._source = request.source
        self._test = request.test
        self._position = position
        self._fit = Fitting(job, position, request.source, request.test, request.epochs, request.callbacks)
        self._callbacks = self._fit.callbacks
        self._on_step = [each for each in self._callbacks if type(each).on_step is not Callback.on_step]
        self._began = 0.0
        self._survival = survival
        # the stage to which the fit has come, a constant of `rejoin`
        self._stage = BEGIN

    def run(self) -> list[Epoch]:
        """Train from the position on and return the history. Continues after deaths if the store survives them."""
        at = self._position
        LOG.info("fit begins at epoch %d of %d, step %d", at.epoch, self._fit.epochs, at.step)
        try:
            self._enter()
            while True:
                try:
                    self._go_on()
                    break
                except CollectiveError as error:
                    if self._survival is None or isinstance(error, MismatchError):
                        raise
                    self._put_back(self._survival.recover(error))
        finally:
            for callback in self._callbacks:
                callback.close()
        LOG.info("fit has ended after step %d", at.step)
        return list(at.history)

    def _enter(self) -> None:
        """Begin with all workers, or, as a spare, join workers that are in the middle of the fit."""
        if self._survival is None or not self._survival.fresh:
            self._fit.restore()
            if self._survival is not None:
                self._survival.begin(self._position)
            self._mark(BEGIN)
            return
        self._put_back(self._survival.join())
        if self._stage != BEGIN:
            self._fit.alone = True
            for callback in self._callbacks:
                callback.on_begin(self._fit)
            self._fit.alone = False

    def _go_on(self) -> None:
        """Run from the current stage to the end of the fit."""
        if self._stage == BEGIN:
            for callback in self._callbacks:
                callback.on_begin(self._fit)
            self._mark(OVER)
        if self._stage == COUNTED:
            self._tell()
        while self._position.epoch <= self._fit.epochs and not self._position.stopped:
            self._meet()
            if (growing := self._growing()) is not None:
                self._put_back(growing.recover(None, grow=True))
            else:
                self._one_epoch()
        if self._stage != ENDED:
            if self._position.epoch <= self._fit.epochs:
                self._meet()
            for callback in self._callbacks:
                callback.on_end(self._fit)
            self._mark(ENDED)
        # Wait for all: a worker that has left could not help the others to recover from a death.
        if self._survival is not None:
            self._job.kv.worker.agree("fit: the end")

    def _mark(self, stage: int) -> None:
        """Note that the fit has come to this stage."""
        self._stage = stage
        if self._survival is not None:
            states = None if stage == COUNTED else hooks.states(self._callbacks)
            self._survival.mark(self._position, stage, states)

    def _put_back(self, back: tuple[Position, int]) -> None:
        """Go to the position and the stage from which all workers continue."""
        position, self._stage = back
        for field in fields(Position):
            setattr(self._position, field.name, getattr(position, field.name))
        self._fit.count_workers()
        self._fit.restore()
        self._began = time.perf_counter()

    def _growing(self) -> SurvivingFit | None:
        """Return the object by which spares can become workers now, or None if none should.

        Spares join only between two epochs.
        """
        between = self._stage == OVER and bool(self._position.history)
        return self._survival if between and self._survival is not None and self._survival.grows else None

    def _one_epoch(self) -> None:
        """Train, evaluate, and call the callbacks. Without a test and callbacks, nothing is sent between two epochs."""
        at = self._position
        self._began = time.perf_counter()
        batches = self._source.epoch(at.epoch, self._job.kv, at.batches - at.since, at.dealt)
        if self._fit.joined:
            assert self._job.blocking is not None
            self._train_joined(batches, self._job.blocking)
        else:
            self._train(batches)
        self._job.exchange.finish()
        at.seconds += time.perf_counter() - self._began
        trained, test = at.batches, None
        # Workers with the same parameters evaluate together. In an asynchronous store each evaluates alone, so that
        # nobody waits.
        if self._test is not None:
            test = (evaluate_here if self._fit.asynchronous else evaluate)(self._job, self._test, at.epoch)
        epoch = at.end_epoch(test)
        if trained and not math.isfinite(epoch.loss):
            warnings.warn(
                f"the loss of epoch {epoch.epoch} is {epoch.loss} on rank {self._fit.rank}: lower the "
                "learning rate, give clip_norm, or look for NaN in the data",
                RuntimeWarning,
                stacklevel=4,
            )
        LOG.info("epoch %d of %d is over: loss %.6g, %.2f s", epoch.epoch, self._fit.epochs, epoch.loss, epoch.seconds)
        measured = {("test_loss" if name == "loss" else name): value for name, value in (test or {}).items()}
        recorder.note(**{**measured, "loss": epoch.loss, "epoch": float(epoch.epoch)})
        for callback in self._callbacks:
            at.stopped |= bool(callback.on_epoch(self._fit, epoch))
        self._mark(OVER)

    def _train(self, batches: Iterator[Batch]) -> None:
        """Train one epoch in which all workers have equally many batches."""
        at, blocking = self._position, self._job.blocking
        for x, y in batches:
            at.took(self._job.exchange.step(x, y) if blocking is None else blocking.add(x, y))
            if blocking is None:
                self._stepped()
            elif blocking.full:
                self._exchange(blocking)
        if blocking is not None and blocking.waiting:
            self._exchange(blocking)

    def _exchange(self, blocking: Blocking) -> None:
        if self._survival is not None:
            self._survival.ahead(self._position)
        blocking.flush()
        self._stepped()

    def _train_joined(self, batches: Iterator[Batch], blocking: Blocking) -> None:
        """Train one epoch in which workers may have different numbers of batches, until no worker has one left."""
        at = self._position
        # steps of this epoch in which every worker had a batch
        together = 0
        for taken in itertools.count(1):
            samples = 0
            for x, y in itertools.islice(batches, blocking.accumulate):
                if count := samples_of(x, y):
                    at.took(blocking.add(x, y))
                else:
                    blocking.add_empty()
                    at.batches += 1
                samples += count
            if self._survival is not None:
                self._survival.ahead(at)
            has_batch = blocking.waiting > 0
            joined = blocking.join(samples)
            if not joined.batches:
                if not (at.step or self._fit.asynchronous):
                    raise ValueError(f"fit: no worker has a batch in epoch {at.epoch}: give some batches to one")
                if taken == 1 and not at.batches and self._fit.rank == 0:
                    warnings.warn(
                        f"fit: no worker has a batch in epoch {at.epoch}: give batches that can be gone "
                        "through in every epoch",
                        RuntimeWarning,
                        stacklevel=5,
                    )
                return
            together = taken if joined.everybody else together
            if together and taken == UNEVEN * together + MANY:
                self._see_end(has_batch, together, taken)
            if joined.samples:
                self._stepped()
            elif self._survival is not None:
                self._survival.no_exchange()

    def _see_end(self, has_batch: bool, together: int, taken: int) -> None:
        """Raise ValueError on all workers if one of them seems to have endless batches while others have none left."""
        assert self._job.blocking is not None
        group, endless = self._job.blocking.update.group, has_batch and not self._source.bounded
        ranks = np.zeros(group.Get_size())
        ranks[group.Get_rank()] = endless
        collectives.allreduce(ranks, group, label="fit: batches without an end")
        if ranks.any():
            raise ValueError(
                f"fit: epoch {self._position.epoch} has batches for {taken:,} steps on rank "
                f"{int(ranks.argmax())}, where another worker has them for {together:,}: of a stream "
                "without an end give steps=, the steps of an epoch"
            )

    def _stepped(self) -> None:
        """Count an exchange that has been made."""
        self._position.step += 1
        log.rank_state.step = self._position.step
        # Mark the step before the callbacks run. If a worker dies now, the fit knows that the step is counted and that
        # `on_step` is still due.
        self._mark(COUNTED)
        self._tell()

    def _tell(self) -> None:
        """Call the callbacks of a step."""
        if self._on_step:
            self._position.seconds += time.perf_counter() - self._began
            for callback in self._on_step:
                callback.on_step(self._fit)
            self._began = time.perf_counter()
        self._mark(TOLD)

    def _meet(self) -> None:
        """Wait for the other workers at the start of an epoch, unless nothing was done since the last one.

        Otherwise the wait for a worker whose callbacks or evaluation took long would count as training seconds of the
        others. Workers that do not wait for each other in steps do not wait here.

        Raises ValueError on all workers if callbacks have ended the training on some of them only.
        """
        if not self._callbacks and self._test is None and self._growing() is None:
            return
        if not self._fit.asynchronous:
            ended = ("ended the training", str(self._position.stopped))
            self._job.kv.worker.agree("fit", [ended], noun="callback")
        elif (client := self._job.kv.layout.client) is not None and client.Get_size() > 1:
            collectives.allreduce(np.zeros(1), client, label="fit: the next epoch")


class Request(NamedTuple):
    """The checked arguments of `fit`."""

    source: Source
    epochs: int
    test: Source | None
    callbacks: tuple[Callback, ...]


def requested(
    job: Job,
    x: Samples,
    y: Samples,
    batch_size: int | None,
    epochs: int,
    seed: int,
    steps: int | None,
    test: Any,
    callbacks: Sequence[Callback],
    on_epoch: Callable[[Epoch], object] | None,
    resume: object,
    spares: int,
) -> Request:
    """Check the arguments of `fit`. Raises TypeError or ValueError if one is wrong. Local.

    `spares` is the number of spares that may become workers.
    """
    epochs = whole("epochs", epochs, 0)
    accumulate = 1 if job.blocking is None else job.blocking.accumulate
    most = None if steps is None else whole("steps", steps, 1) * accumulate
    source, workers = source_of(x, y, batch_size, seed, most=most), job.kv.num_workers + spares
    see_again(source, epochs, job.kv.layout.survives)
    see_joined(job, source)
    if isinstance(source, Arrays):
        see_enough(len(source.x), source.batch_size, workers)
    if isinstance(callbacks, Callback) or not all(isinstance(each, Callback) for each in callbacks):
        raise TypeError(f"callbacks={callbacks!r}: give a list of mpips.training.Callback objects")
    if resume is not None:
        checkpoint.saved_by(job, "resume")
    found, tested = (*callbacks, hooks.OnEpoch(on_epoch)) if on_epoch is not None else tuple(callbacks), test_of(test)
    for given in (source, tested):
        see_samples(job.model, given)
    return Request(source, epochs, tested, found)


def begin(job: Job, request: Request, resume: str | os.PathLike[str] | None, own: Sequence[Position]) -> Position:
    """Return the position at which this worker begins: at the folder's newest checkpoint, or else at its `own`.

    The checkpoint is restored. Collective. If the fit cannot continue from there, all workers raise ValueError or
    TypeError before anything has changed.

    Args:
        resume: The folder of checkpoints, or None.
        own: The position of this worker alone, or those of all workers of a checkpoint that was restored before.
    """
    shown = samples_shown(request.source, request.test)
    see_same([np.frombuffer(told) for told in job.kv.worker.agree("fit", data=shown.tobytes())])
    found = checkpoint.find(job, resume, begin=True) if resume is not None else None
    position, refusal = attempt(lambda: _start(job, request, own if found is None else found.positions))
    job.kv.worker.agree("fit", refusal=refusal)
    if found is not None:
        checkpoint.take(job, found, any(isinstance(each, hooks.LearningRate) for each in request.callbacks))
    # Exchange the batches that `Trainer.step` has accumulated.
    if job.blocking is not None and job.blocking.flush():
        position.step += 1
    started: Position = position
    return started


def _start(job: Job, request: Request, positions: Sequence[Position]) -> Position:
    """Return this worker's position.

    Raises ValueError or TypeError if the order of samples or a callback does not fit.
    """
    source, before, workers = request.source, len(positions), job.kv.num_workers
    order = order_of(job, source, workers)
    same = {order, order_of(job, source, before)} if isinstance(source, Arrays) else {order}
    for position in positions:
        see_order(position, order, same)
    position = replace(checkpoint.of_worker(positions, job.kv.rank))
    if isinstance(source, Arrays) and position.batches and before != workers and position.order != order:
        position.deal(source.batch_size * before)
    fit = Fitting(job, position, source, request.test, request.epochs, request.callbacks)
    for callback in request.callbacks:
        callback.check(fit)
    return position


def words_of(request: Request | None, resume: object) -> list[tuple[str, str]]:
    """Return the arguments of a fit that must be equal on all workers, by name, as texts.

    `request` is None if the arguments were refused; then there is little to compare.
    """
    given = ("resume", "not given" if resume is None else "given")
    if request is None:
        return [given]
    source = request.source
    arrays = (
        [("steps", str(source.steps(1)))]
        if isinstance(source, Batches)
        else [
            ("x", str(source.x.shape)),
            ("y", str(source.y.shape)),
            ("batch_size", str(source.batch_size)),
            ("seed", str(source.seed)),
        ]
    )
    return [
        *arrays,
        ("batches", str(source.joined)),
        ("epochs", str(request.epochs)),
        *test_words(request.test),
        ("callbacks", hooks.words_of(request.callbacks)),
        given,
    ]

"""The training loop (`Fit`). It can begin at a checkpoint, even in the middle of an epoch (`begin`).

If the store survives the death of a process, the loop goes back to a moment that all workers know (`rejoin`), and
continues from there.
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
from mpips.collectives.recorder import own as recorder
from mpips.store.runtime.rendezvous import attempt
from mpips.training import callbacks as hooks
from mpips.training import checkpoint
from mpips.training.batches import (
    Arrays,
    Batch,
    Batches,
    Source,
    check_enough,
    check_repeatable,
    check_same_arrays,
    check_samples,
    samples_shown,
    source_of,
    test_of,
    whole,
)
from mpips.training.callbacks import Callback, Fitting, check_order, order_of
from mpips.training.checkpoint import Epoch, Position
from mpips.training.evaluation import compared_test, evaluate, evaluate_here
from mpips.training.model import Samples, samples_of
from mpips.training.recovery import Recovery
from mpips.training.rejoin import BEGIN, CALLED, COUNTED, ENDED, OVER, SurvivingFit
from mpips.training.step import Blocking, TrainerParts, check_uneven_batches

LOG = log.get("mpips.training")

# A worker's batches seem to be endless if they last for MANY + UNEVEN * n steps when another worker's last for only n.
UNEVEN = 100
MANY = 2000


class Fit:
    """The training loop of one call of `fit` on this worker."""

    def __init__(
        self, parts: TrainerParts, arguments: FitArguments, position: Position, survival: SurvivingFit | None = None
    ) -> None:
        self._parts = parts
        self._source = arguments.source
        self._test = arguments.test
        self._position = position
        self._fit = Fitting(parts, position, arguments.source, arguments.test, arguments.epochs, arguments.callbacks)
        self._callbacks = self._fit.callbacks
        # the callbacks that override `on_step`
        self._on_step = [each for each in self._callbacks if type(each).on_step is not Callback.on_step]
        # time.perf_counter() when `Position.seconds` was last updated, or when the training continued after that
        self._began = 0.0
        self._survival = survival
        self._recovery = Recovery(parts.kv, () if parts.blocking is None else parts.blocking.update.keys, self._go_back)
        # how far the fit is within a step: a constant of `rejoin`, such as BEGIN (before `on_begin`)
        self._stage = BEGIN

    def run(self) -> list[Epoch]:
        """Train from the current position to the end, and return the history.

        If the store survives deaths, training continues after a death.
        """
        position = self._position
        LOG.info("fit begins at epoch %d of %d, step %d", position.epoch, self._fit.epochs, position.step)
        try:
            self._enter()
            self._recovery.run(self._go_on)
        finally:
            for callback in self._callbacks:
                callback.close()
        LOG.info("fit has ended after step %d", position.step)
        return list(position.history)

    def _enter(self) -> None:
        """Begin the fit together with all workers. A spare that has replaced a dead worker joins it in the middle."""
        if self._survival is None or not self._parts.kv.worker.fresh:
            self._fit.restore()
            if self._survival is not None:
                self._survival.begin(self._position)
            self._come_to(BEGIN)
            return
        self._recovery.run_once(self._go_back)
        if self._stage != BEGIN:
            self._fit.alone = True
            for callback in self._callbacks:
                callback.on_begin(self._fit)
            self._fit.alone = False

    def _go_on(self) -> None:
        """Run the fit from its current stage (`_stage`) to the end."""
        if self._stage == BEGIN:
            for callback in self._callbacks:
                callback.on_begin(self._fit)
            self._come_to(OVER)
        if self._stage == COUNTED:
            self._call_on_step()
        while self._position.epoch <= self._fit.epochs and not self._position.stopped:
            self._wait_for_others()
            if self._grows():
                self._recovery.recover(grow=True)
            else:
                self._one_epoch()
        if self._stage != ENDED:
            if self._position.epoch <= self._fit.epochs:
                self._wait_for_others()
            for callback in self._callbacks:
                callback.on_end(self._fit)
            self._come_to(ENDED)
        # Wait for all workers. A worker that has left this call could not help the other workers to recover.
        if self._survival is not None:
            self._parts.kv.worker.agree("fit: the end")

    def _come_to(self, stage: int) -> None:
        """Set the stage of the fit to `stage`, a constant of `rejoin` such as BEGIN.

        If the store survives deaths, also remember this moment, so that the fit can go back to it after a death.
        """
        self._stage = stage
        if self._survival is not None:
            states = None if stage == COUNTED else hooks.states(self._callbacks)
            self._survival.note_stage(self._position, stage, states)

    def _go_back(self) -> None:
        """Go to the position and the stage where all workers continue after a recovery. Collective, blocking."""
        assert self._survival is not None
        position, self._stage = self._survival.meet()
        for field in fields(Position):
            setattr(self._position, field.name, getattr(position, field.name))
        self._fit.count_workers()
        self._fit.restore()
        self._began = time.perf_counter()

    def _grows(self) -> bool:
        """True if waiting spares must become workers now. They join only between two epochs."""
        between = self._stage == OVER and bool(self._position.history)
        return between and self._survival is not None and self._survival.grows

    def _one_epoch(self) -> None:
        """Train one epoch, evaluate, and call the callbacks.

        Without test data and callbacks, workers send nothing between two epochs.
        """
        position = self._position
        self._began = time.perf_counter()
        batches = self._source.epoch(position.epoch, self._parts.kv, position.batches - position.since, position.dealt)
        if self._fit.uneven:
            assert self._parts.blocking is not None
            self._train_uneven(batches, self._parts.blocking)
        else:
            self._train(batches)
        self._parts.exchange.finish()
        position.seconds += time.perf_counter() - self._began
        trained, test = position.batches, None
        # Workers of a synchronous store evaluate together, because their parameters are the same. In an asynchronous
        # store each worker evaluates alone, so that it does not wait for the others.
        if self._test is not None:
            test = (evaluate_here if self._fit.asynchronous else evaluate)(self._parts, self._test, position.epoch)
        epoch = position.end_epoch(test)
        if trained and not math.isfinite(epoch.loss):
            warnings.warn(
                f"the loss of epoch {epoch.epoch} is {epoch.loss} on rank {self._fit.rank}: lower the "
                "learning rate, give clip_norm, or look for NaN in the data",
                RuntimeWarning,
                stacklevel=6,
            )
        LOG.info("epoch %d of %d is over: loss %.6g, %.2f s", epoch.epoch, self._fit.epochs, epoch.loss, epoch.seconds)
        measured = {("test_loss" if name == "loss" else name): value for name, value in (test or {}).items()}
        recorder.note(**{**measured, "loss": epoch.loss, "epoch": float(epoch.epoch)})
        for callback in self._callbacks:
            position.stopped |= bool(callback.on_epoch(self._fit, epoch))
        self._come_to(OVER)

    def _train(self, batches: Iterator[Batch]) -> None:
        """Train one epoch in which all workers have equally many batches."""
        position, blocking = self._position, self._parts.blocking
        for x, y in batches:
            position.took(self._parts.exchange.step(x, y) if blocking is None else blocking.add(x, y))
            if blocking is None:
                self._count_step()
            elif blocking.full:
                self._exchange(blocking)
        if blocking is not None and blocking.waiting:
            self._exchange(blocking)

    def _exchange(self, blocking: Blocking) -> None:
        if self._survival is not None:
            self._survival.note_exchange(self._position)
        blocking.flush()
        self._count_step()

    def _train_uneven(self, batches: Iterator[Batch], blocking: Blocking) -> None:
        """Train one epoch in which workers may have different numbers of batches.

        The epoch ends when every worker has used all its batches.
        """
        position = self._position
        # number of steps of this epoch in which every worker had a batch
        together = 0
        for taken in itertools.count(1):
            samples = 0
            for x, y in itertools.islice(batches, blocking.accumulate):
                if count := samples_of(x, y):
                    position.took(blocking.add(x, y))
                else:
                    blocking.add_empty()
                    position.batches += 1
                samples += count
            if self._survival is not None:
                self._survival.note_exchange(position)
            has_batch = blocking.waiting > 0
            totals = blocking.flush_uneven(samples)
            if not totals.batches:
                if not (position.step or self._fit.asynchronous):
                    raise ValueError(f"fit: no worker has a batch in epoch {position.epoch}: give some batches to one")
                if taken == 1 and not position.batches and self._fit.rank == 0:
                    warnings.warn(
                        f"fit: no worker has a batch in epoch {position.epoch}: give batches that can be gone "
                        "through in every epoch",
                        RuntimeWarning,
                        stacklevel=7,
                    )
                return
            together = taken if totals.everybody else together
            if together and taken == UNEVEN * together + MANY:
                self._check_end(has_batch, together, taken)
            if totals.samples:
                self._count_step()
            elif self._survival is not None:
                self._survival.cancel_exchange()

    def _check_end(self, has_batch: bool, together: int, taken: int) -> None:
        """Raise ValueError on all workers if one worker's batches seem to be endless and another worker has none left.

        Args:
            has_batch: True if this worker had a batch in this step.
            together: The number of steps of this epoch in which every worker had a batch.
            taken: The number of steps of this epoch so far.
        """
        assert self._parts.blocking is not None
        group, endless = self._parts.blocking.update.group, has_batch and not self._source.bounded
        ranks = np.zeros(group.Get_size())
        ranks[group.Get_rank()] = endless
        collectives.allreduce(ranks, group, label="fit: batches without an end")
        if ranks.any():
            raise ValueError(
                f"fit: epoch {self._position.epoch} has batches for {taken:,} steps on rank "
                f"{int(ranks.argmax())}, where another worker has them for {together:,}: of a stream "
                "without an end give steps=, the steps of an epoch"
            )

    def _count_step(self) -> None:
        """Count an exchange, and call the callbacks of the step."""
        self._position.step += 1
        log.rank_state.step = self._position.step
        # Note this stage before the callbacks run. If a worker dies in a callback, the fit knows that the step is
        # counted and that `on_step` is still due.
        self._come_to(COUNTED)
        self._call_on_step()

    def _call_on_step(self) -> None:
        """Call `on_step` of the callbacks."""
        if self._on_step:
            self._position.seconds += time.perf_counter() - self._began
            for callback in self._on_step:
                callback.on_step(self._fit)
            self._began = time.perf_counter()
        self._come_to(CALLED)

    def _wait_for_others(self) -> None:
        """Wait for the other workers before an epoch, if callbacks or an evaluation may have run before it.

        Otherwise a worker would count the time in which it waits for the slowest callback as training time. Workers
        that do not wait for each other in steps do not wait between epochs either.

        Raises ValueError on all workers if callbacks have ended the training on only some of them.
        """
        if not self._callbacks and self._test is None and not self._grows():
            return
        if not self._fit.asynchronous:
            ended = ("ended the training", str(self._position.stopped))
            self._parts.kv.worker.agree("fit", [ended], noun="callback")
        elif (client := self._parts.kv.layout.client) is not None and client.Get_size() > 1:
            collectives.allreduce(np.zeros(1), client, label="fit: the next epoch")


class FitArguments(NamedTuple):
    """The arguments of `fit`, after they were checked."""

    source: Source
    epochs: int
    test: Source | None
    callbacks: tuple[Callback, ...]


def check_arguments(
    parts: TrainerParts,
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
) -> FitArguments:
    """Check the arguments of `fit`. Raises TypeError or ValueError if an argument is invalid. Local.

    `spares` is the number of spares that may become workers during this fit.
    """
    epochs = whole("epochs", epochs, 0)
    accumulate = 1 if parts.blocking is None else parts.blocking.accumulate
    most = None if steps is None else whole("steps", steps, 1) * accumulate
    source, workers = source_of(x, y, batch_size, seed, most=most), parts.kv.num_workers + spares
    check_repeatable(source, epochs, parts.kv.layout.survives)
    check_uneven_batches(parts, source)
    if isinstance(source, Arrays):
        check_enough(len(source.x), source.batch_size, workers)
    if isinstance(callbacks, Callback) or not all(isinstance(each, Callback) for each in callbacks):
        raise TypeError(f"callbacks={callbacks!r}: give a list of mpips.training.Callback objects")
    if resume is not None:
        checkpoint.update_to_save(parts, "resume")
    test_source = test_of(test)
    for samples in (source, test_source):
        check_samples(parts.model, samples)
    every = callbacks if on_epoch is None else [*callbacks, hooks.OnEpoch(on_epoch)]
    return FitArguments(source, epochs, test_source, tuple(every))


def begin(
    parts: TrainerParts, arguments: FitArguments, resume: str | os.PathLike[str] | None, own: Sequence[Position]
) -> Position:
    """Return the position where this worker begins. If the folder `resume` has a checkpoint, restore the newest one.

    Collective, blocking.

    Args:
        resume: The folder of checkpoints, or None.
        own: The positions to begin at if the folder has no checkpoint: a single one, of this worker, or the positions
            of all workers from a checkpoint that was restored before.

    Raises:
        ValueError, TypeError: The fit cannot continue from this position. All workers raise it, and nothing has
            changed.
    """
    shown = samples_shown(arguments.source, arguments.test)
    check_same_arrays([np.frombuffer(data) for data in parts.kv.worker.agree("fit", data=shown.tobytes())])
    found = checkpoint.find(parts, resume, begin=True) if resume is not None else None
    position, refusal = attempt(lambda: _start(parts, arguments, own if found is None else found.positions))
    parts.kv.worker.agree("fit", refusal=refusal)
    if found is not None:
        checkpoint.take(parts, found, any(isinstance(each, hooks.LearningRate) for each in arguments.callbacks))
    # Exchange the batches that `Trainer.step` has accumulated.
    if parts.blocking is not None and parts.blocking.flush():
        position.step += 1
    return position


def _start(parts: TrainerParts, arguments: FitArguments, positions: Sequence[Position]) -> Position:
    """Return the position where this worker begins. Local.

    Args:
        positions: The saved positions of all workers, or this worker's position only.

    Raises:
        ValueError, TypeError: A saved position has another order of samples, or a callback cannot work in this fit.
    """
    source, before, workers = arguments.source, len(positions), parts.kv.num_workers
    order = order_of(parts, source, workers)
    same = {order, order_of(parts, source, before)} if isinstance(source, Arrays) else {order}
    for position in positions:
        check_order(position, order, same)
    position = replace(checkpoint.position_of(positions, parts.kv.rank))
    if isinstance(source, Arrays) and position.batches and before != workers and position.order != order:
        position.deal(source.batch_size * before)
    fit = Fitting(parts, position, source, arguments.test, arguments.epochs, arguments.callbacks)
    for callback in arguments.callbacks:
        callback.check(fit)
    return position


def compared_arguments(arguments: FitArguments | None, resume: object) -> list[tuple[str, str]]:
    """Return the arguments of a fit that must be equal on all workers, as (name, text) pairs.

    `arguments` is None if the arguments of this worker are invalid. Then only `resume` can be compared.
    """
    resumes = ("resume", "not given" if resume is None else "given")
    if arguments is None:
        return [resumes]
    source = arguments.source
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
        ("batches", str(source.uneven)),
        ("epochs", str(arguments.epochs)),
        *compared_test(arguments.test),
        ("callbacks", hooks.describe(arguments.callbacks)),
        resumes,
    ]

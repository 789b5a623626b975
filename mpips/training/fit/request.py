"""The arguments of a fit, and where it begins."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpips.store.runtime.rendezvous import attempt
from mpips.training import callbacks as hooks
from mpips.training import checkpoint
from mpips.training.batches import (
    Arrays,
    samples_shown,
    see_again,
    see_enough,
    see_same,
    see_samples,
    source_of,
    test_of,
    whole,
)
from mpips.training.callbacks import Callback
from mpips.training.evaluation import test_words
from mpips.training.exchange import Job, see_joined
from mpips.training.fit.course import Course, Request, order_of
from mpips.training.history import Epoch, Position, see_order


def requested(
    job: Job, x: Any, y: Any, batch_size: int | None, epochs: int, seed: int, steps: int | None, test: Any,
    callbacks: Sequence[Callback], on_epoch: Callable[[Epoch], object] | None, resume: object, spares: int,
) -> Request:  # fmt: skip
    """The arguments of `fit`; TypeError or ValueError where they are wrong. `spares`: may become workers. Local."""
    epochs = whole("epochs", epochs, 0)
    accumulate = 1 if job.blocking is None else job.blocking.accumulate
    most = None if steps is None else whole("steps", steps, 1) * accumulate
    source, workers = source_of(x, y, batch_size, seed, most=most), job.kv.num_workers + spares
    see_again(source, epochs, job.kv.layout.survives)
    see_joined(job, source)
    if not source.joined:
        see_enough(len(source.x), source.batch_size, workers)  # type: ignore[union-attr]
    if isinstance(callbacks, Callback) or not all(isinstance(each, Callback) for each in callbacks):
        raise TypeError(f"callbacks={callbacks!r}: give a list of mpips.training.Callback objects")
    if resume is not None:
        checkpoint.saved_by(job, "resume")
    found, tested = (*callbacks, hooks.OnEpoch(on_epoch)) if on_epoch is not None else tuple(callbacks), test_of(test)
    for given in (source, tested):
        see_samples(job.model, given)
    return Request(source, epochs, tested, found)


def begin(job: Job, request: Request, resume: str | os.PathLike[str] | None, own: Sequence[Position]) -> Position:
    """Where this worker begins: at the folder's newest checkpoint, which is taken back, or else at its `own` position.

    `own`: of one worker, or of all those that a checkpoint was of. Collective; ValueError or TypeError on all workers,
    before anything has changed, where the fit cannot go on from there.
    """
    shown = samples_shown(request.source, request.test)
    see_same([np.frombuffer(told) for told in job.kv.settings.agree("fit", data=shown.tobytes())])
    found = checkpoint.find(job, resume, begin=True) if resume is not None else None
    position, refusal = attempt(lambda: _start(job, request, own if found is None else found.positions))
    job.kv.settings.agree("fit", refusal=refusal)
    if found is not None:
        checkpoint.take(job, found, any(isinstance(each, hooks.LearningRate) for each in request.callbacks))
    if job.blocking is not None and job.blocking.flush():  # what `step` has left
        position.step += 1
    started: Position = position
    return started


def _start(job: Job, request: Request, positions: Sequence[Position]) -> Position:
    """This worker's position of those of all; ValueError or TypeError where the order or a callback does not fit."""
    source, before, workers = request.source, len(positions), job.kv.num_workers
    order = order_of(job, source, workers)
    same = {order, order_of(job, source, before)} if isinstance(source, Arrays) else {order}
    for position in positions:
        see_order(position, order, same)
    position = replace(checkpoint.of_worker(positions, job.kv.rank))
    if isinstance(source, Arrays) and position.batches and before != workers and position.order != order:
        position.deal(source.batch_size * before)
    course = Course(job, request, position)
    for callback in request.callbacks:
        callback.check(course)
    return position


def words_of(request: Request | None, resume: object) -> list[tuple[str, str]]:
    """What of a fit must be equal on all workers, by name; little of one that is refused."""
    given = ("resume", "not given" if resume is None else "given")
    if request is None:
        return [given]
    source = request.source
    arrays = [("steps", str(source.steps(1)))] if source.joined else [
        ("x", str(source.x.shape)), ("y", str(source.y.shape)),  # type: ignore[union-attr]
        ("batch_size", str(source.batch_size)), ("seed", str(source.seed)),  # type: ignore[union-attr]
    ]  # fmt: skip
    return [*arrays, ("batches", str(source.joined)), ("epochs", str(request.epochs)), *test_words(request.test),
            ("callbacks", hooks.words_of(request.callbacks)), given]

"""A fit under way, as its callbacks are given it."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpips.training import callbacks as hooks
from mpips.training import checkpoint
from mpips.training.batches import Source
from mpips.training.callbacks import Callback
from mpips.training.evaluation import LOSS, names_of
from mpips.training.exchange import Job, update_optimizer
from mpips.training.history import Epoch, Position


class Request(NamedTuple):
    """What `fit` was asked for, checked."""

    source: Source
    epochs: int
    test: Source | None
    callbacks: tuple[Callback, ...]


class Course:
    """How far a fit is on this worker, and what its callbacks may do (`callbacks.Fitting`)."""

    def __init__(self, job: Job, request: Request, position: Position) -> None:
        self.epochs, self.joined, self.asynchronous = request.epochs, request.source.joined, job.kv.layout.asynchronous
        self.accumulate = 1 if job.blocking is None else job.blocking.accumulate
        tested = (LOSS, *names_of(job, request.test)) if request.test is not None else ()
        self.measures = (LOSS, *(f"test_{name}" for name in tested))
        self.callbacks = sorted(request.callbacks, key=lambda callback: callback.last)
        self.alone = False
        """Whether the other workers are elsewhere: then nothing is sent."""
        self.position, self._job, self._source = position, job, request.source
        self.count_workers()

    def count_workers(self) -> None:
        """What depends on how many there are."""
        kv, source = self._job.kv, self._source
        per_epoch = source.steps(kv.num_workers)
        self.rank, self.steps = kv.rank, None if per_epoch is None else -(-per_epoch // self.accumulate)
        self.position.order = order_of(self._job, source, kv.num_workers)

    def restore(self) -> None:
        """Callbacks have again what they kept at this position."""
        for name, callback in hooks.named(self.callbacks).items():
            if name in self.position.callbacks:
                callback.restore(self.position.callbacks[name])

    @property
    def epoch(self) -> int:
        """The epoch that is under way, from 1."""
        return self.position.epoch

    @property
    def step(self) -> int:
        """Exchanges since the training began."""
        return self.position.step

    @property
    def loss(self) -> float:
        """Mean loss of this worker's batches in this epoch so far."""
        return self.position.loss

    @property
    def last_loss(self) -> float:
        """Loss of this worker's last batch."""
        return self.position.last_loss

    @property
    def history(self) -> Sequence[Epoch]:
        """All epochs that have ended."""
        return tuple(self.position.history)

    def mean(self, value: float) -> float:
        """The mean over the workers, equal on all; those that bring NaN are left out. Collective, blocking."""
        if self.alone:
            return value
        told = self._job.kv.settings.agree("fit: a mean", data=struct.pack("<d", value))
        found = [each for data in told for each in struct.unpack("<d", data) if not math.isnan(each)]
        return sum(found) / len(found) if found else math.nan

    def save(self, path: str | os.PathLike[str], keep: int | None = None) -> None:
        """Write a checkpoint that `fit(resume=path)` goes on from. Collective, blocking."""
        if self.alone:
            return
        self.position.callbacks = hooks.states(self.callbacks)
        checkpoint.save(self._job, path, self.position, keep)

    def see_folder(self, path: str | os.PathLike[str]) -> None:
        """ValueError or TypeError on rank 0 where `save(path)` could not write after the next step. Local."""
        if self.rank == 0:
            checkpoint.see_folder(path, self.step)

    def update_optimizer(self, **numbers: Any) -> None:
        """Change numbers of the optimizer; its state stays. Collective, blocking."""
        if not self.alone:
            update_optimizer(self._job, numbers)


def order_of(job: Job, source: Source, workers: int) -> str:
    """What decides which samples come in which step, in words."""
    accumulate = job.blocking.accumulate if job.blocking is not None else 1
    return source.order(workers) + (f", accumulate={accumulate}" if accumulate > 1 else "")

"""What a fit remembers: `Epoch`, an entry of the history, and `Position`, where a worker is in its training."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec


class Epoch(NamedTuple):
    """One epoch as this worker saw it.

    epoch: its number, from 1. seconds: of training alone since `fit` began, without evaluation and callbacks. loss: the
    mean over this worker's batches; NaN where it had none. test: what `evaluate` says of the test data, if any.
    """

    epoch: int
    seconds: float
    loss: float
    test: dict[str, float] | None = None

    @property
    def accuracy(self) -> float | None:
        """`test["accuracy"]`, None where it was not measured."""
        return None if self.test is None else self.test.get("accuracy")

    def value(self, monitor: str) -> float:
        """"loss", or "test_" and the name of what was measured on test data. KeyError where there is none."""
        if monitor == "loss":
            return self.loss
        return (self.test or {})[monitor.removeprefix("test_")]


@dataclass
class Position:
    """Where a worker is in its training, as a checkpoint keeps it."""

    epoch: int = 1
    """The epoch that is under way, from 1."""
    batches: int = 0
    """Batches of it that this worker has taken."""
    step: int = 0
    """Exchanges since the training began."""
    seconds: float = 0.0
    """Of training alone."""
    loss_sum: float = 0.0
    """Of the batches of this epoch."""
    last_loss: float = math.nan
    """Of the last batch."""
    stopped: bool = False
    """Whether a callback has ended the training."""
    order: str = ""
    """What decides which samples come in which step, in words; a resume in the middle of an epoch needs the same."""
    dealt: int = 0
    """Samples of this epoch's order that were used when its rest was dealt to another number of workers."""
    since: int = 0
    """Batches of this epoch that this worker had taken then."""
    history: list[Epoch] = field(default_factory=list)
    callbacks: dict[str, Any] = field(default_factory=dict)
    """What callbacks keep, by their class and number, as "EarlyStop 0"."""

    @property
    def loss(self) -> float:
        """The mean over this worker's batches of the epoch so far."""
        return self.loss_sum / self.batches if self.batches else float("nan")

    def took(self, loss: float) -> None:
        """A batch was computed."""
        self.last_loss = float(loss)
        self.loss_sum += self.last_loss
        self.batches += 1

    def deal(self, mini_batch: int) -> None:
        """The rest of the epoch goes to another number of workers: from the first sample on that no step has used.

        `mini_batch`: samples that a batch of every worker had before.
        """
        self.dealt, self.since = self.dealt + (self.batches - self.since) * mini_batch, self.batches

    def end_epoch(self, test: dict[str, float] | None) -> Epoch:
        """The epoch's entry, which is in the history now; the next epoch begins."""
        ended = Epoch(self.epoch, self.seconds, self.loss, test)
        self.history.append(ended)
        self.epoch, self.batches, self.loss_sum, self.dealt, self.since = self.epoch + 1, 0, 0.0, 0, 0
        return ended

    def encode(self) -> bytes:
        """As JSON. Floats come back with the same bits, also those that are not finite."""
        return json.dumps(msgspec.to_builtins(self)).encode()


def decode(data: Any) -> Position:
    """A Position from JSON data; ValueError where it is none."""
    try:
        return msgspec.convert(data, Position)
    except msgspec.ValidationError as error:
        raise ValueError(f"a worker's position is not as a Trainer writes it: {error}") from error


def see_order(position: Position, order: str, same: Collection[str] = ()) -> None:
    """ValueError where a fit goes on in the middle of an epoch with other batches, or other exchanges of them.

    `same`: orders that differ in the number of workers alone, to whom the rest of the epoch is dealt.
    """
    if position.batches and position.order and position.order not in (order, *same):
        raise ValueError(f"resume: the checkpoint is in the middle of epoch {position.epoch} of {position.order}, and "
                         f"this fit has {order}: give the same, or a checkpoint at the end of an epoch")

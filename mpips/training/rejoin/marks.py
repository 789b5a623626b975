"""Moments of a fit (`Mark`), what a worker says of them (`Word`), and the moment that all go back to. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from mpips.store.runtime.errors import LostError
from mpips.training.history import Epoch, Position

BEGIN, COUNTED, TOLD, OVER, ENDED = range(-1, 4)
"""Stages of a step: `on_begin` is due; it is counted, and `on_step` due; callbacks were told; the epoch that ended with
it is over, `on_epoch` too; so is the fit, with `on_end`."""
KEPT = 2
"""Steps of which marks are kept: the last one, and the one before."""

Row = tuple[float, int, float]
"""Of one worker: the sum of its losses in the epoch, its batches, and the loss of the last one."""


class Mark(msgspec.Struct, frozen=True):
    """A moment that a worker can be put back to."""

    position: Position
    """Without its history."""
    stage: int
    ended: int
    """Epochs in the history."""
    workers: int
    """How many there were."""
    rows: list[Row]
    """Of all of them; empty in an asynchronous store, where each is elsewhere."""
    optimizer: Any
    """With the numbers of then: an Optimizer; in a `Word`, its data."""

    @property
    def step(self) -> int:
        """Exchanges until then."""
        return self.position.step

    @property
    def place(self) -> tuple[int, int]:
        """Which of the marks of a step it is: they come in this order."""
        return self.ended, self.stage


class Word(msgspec.Struct, frozen=True):
    """What a worker brings that knows where the training was; a spare brings nothing."""

    ranks: dict[int, int]
    """Its rank in the epochs of the store, by their number."""
    numbered: int
    """The epoch whose ranks number the rows of its marks, and its losses."""
    marks: list[Mark]
    ahead: Mark | None
    """As after the exchange that was under way."""
    stored: int | None
    """The step of the parameters in a synchronous store that updates them."""
    whole: bool
    """Whether it has all arrays that the store has not."""
    history: list[Epoch]
    losses: list[list[float]]
    """Of every epoch in it, those of all workers."""

    @property
    def done(self) -> int:
        """The last step that it has taken."""
        return self.marks[-1].step

    @property
    def furthest(self) -> int:
        """The last step to which it has contributed all that it had to."""
        return self.done if self.ahead is None else self.ahead.step

    def last(self, step: int) -> tuple[int, int] | None:
        """The place of its last mark of a step; None where it does not remember the step."""
        return max((mark.place for mark in self._all() if mark.step == step), default=None)

    def at(self, step: int, place: tuple[int, int]) -> Mark:
        """The last mark of a step up to this place."""
        marks = [mark for mark in self._all() if mark.step == step and mark.place <= place]
        return sorted(marks, key=lambda mark: mark.place)[-1]

    def _all(self) -> list[Mark]:
        return self.marks if self.ahead is None else [*self.marks, self.ahead]


class Agreed(NamedTuple):
    """The moment that workers go back to."""

    step: int
    place: tuple[int, int]
    source: int
    """The lowest of them that knows it."""


def agreed(words: Sequence[Word | None], group: Sequence[int], stored: bool, asynchronous: bool) -> Agreed:
    """The moment that a group of workers goes back to: all of a synchronous store, a client of an asynchronous one.

    Where the store updates (`stored`) it is the step that the store stands at; where workers update alike, the step of
    the one that is furthest; in an asynchronous store the last step that all of the group have contributed to.
    LostError where nobody knows, or one does not remember that step.
    """
    here = [rank for rank in group if words[rank] is not None] or [
        rank for rank, word in enumerate(words) if word is not None
    ][:1]
    told = [word for rank in here if (word := words[rank]) is not None]
    if not told:
        raise LostError("fit: no worker is left that knows where the training was: go on from a checkpoint")
    if asynchronous:
        step = min(word.furthest for word in told)
    elif stored:
        steps = {word.stored for word in told}
        if len(steps) > 1 or None in steps:
            raise LostError(f"fit: the parameters in the store are of unlike steps, {sorted(map(str, steps))}: go on "
                            "from a checkpoint")
        step = next(number for number in steps if number is not None)
    else:
        step = max(word.done for word in told)
    places = []
    for rank, word in zip(here, told):
        place = word.last(step)
        if place is None:
            raise LostError(f"fit: the parameters in the store are of step {step}, and worker {rank} remembers none "
                            f"but its last {KEPT}, up to {word.done}: go on from a checkpoint")
        places.append(place)
    return Agreed(step, min(places), here[0])


def rows_of(words: Sequence[Word | None], numbered: int, workers: int) -> list[int]:
    """For each worker that is here now the one whose place it has, of `workers` in the epoch `numbered`."""
    known = [None if word is None else word.ranks.get(numbered) for word in words]
    free = iter([row for row in range(workers) if row not in known])
    return [next(free, 0) if row is None else row for row in known]


def with_losses(history: Sequence[Epoch], losses: Sequence[Sequence[float]], row: int) -> list[Epoch]:
    """One worker's history of another's."""
    if not losses:
        return list(history)
    return [Epoch(epoch.epoch, epoch.seconds, of[row], epoch.test) for epoch, of in zip(history, losses)]

"""The moment to which the workers of a fit go back after a death, and everything that they need there.

When the store has recovered (`recovery`), all workers meet:

1. Each tells its last marks, the moments to which it can go back.
2. They agree on a moment.
3. Parameters come from the store, or from a worker that has them.

Before each exchange of a synchronous store the workers sum a few numbers, by which each knows the sums of losses of
all. A spare then has the history of the worker whose place it takes. A worker keeps its marks until it has everything
that it needs, because another death during the meeting brings all workers to a second meeting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

import mpips.collectives as collectives
from mpips.optimizers.registry import as_data, from_data
from mpips.store.runtime.errors import LostError
from mpips.store.runtime.rendezvous import Items
from mpips.training.batches import Arrays, Source
from mpips.training.checkpoint import Epoch, Position
from mpips.training.step import Blocking, Job

if TYPE_CHECKING:
    from mpips.store.api import KVStore


class SurvivingFit:
    """What one worker remembers of a fit, to go back to an earlier moment. Used only if the store survives deaths."""

    def __init__(self, job: Job, blocking: Blocking, source: Source, words: Items, grow: bool = False) -> None:
        self._kv = job.kv
        self._blocking = blocking
        self._source = source
        self._words = words
        self._grow = grow
        self._asynchronous = job.kv.layout.asynchronous
        # True if each step is an exchange of all workers
        self._synchronous = not (self._asynchronous or blocking.update.apart)
        # moments to which this worker can go back, the latest last
        self._marks: list[Mark] = []
        # the moment after the exchange that is under way
        self._ahead: Mark | None = None
        # the losses of all workers in this epoch; only in a synchronous store
        self._rows: list[Row] = []
        # the states of callbacks by name
        self._states: dict[str, Any] = {}
        self._history: list[Epoch] = []
        # for each epoch in the history the losses of all workers
        self._losses: list[list[float]] = []
        # generation -> this worker's rank in it
        self._ranks = {job.kv.generation: job.kv.rank}
        # the generation by whose ranks _rows and _losses are ordered
        self._numbered = job.kv.generation
        # steps minus rounds of the Trainer's keys: the store counts only its own rounds
        self._offset = 0
        # True if this worker has all arrays that the store does not have
        self._whole = False

    @property
    def fresh(self) -> bool:
        """True if this worker was a spare and has not met the others yet."""
        return bool(self._kv.worker.fresh)

    @property
    def grows(self) -> bool:
        """True if spares are to become workers at the end of this epoch. It is the same on all workers."""
        return self._grow and self._kv.spares > 0

    # ---- what is remembered

    def begin(self, position: Position) -> None:
        """Begin on all workers, which learn each other's histories. Collective."""
        told = self._kv.worker.agree("fit: it survives deaths", data=msgspec.msgpack.encode(position))
        every = [msgspec.msgpack.decode(data, type=Position) for data in told]
        if self._synchronous:
            self._rows = [(each.loss_sum, each.batches, each.last_loss) for each in every]
            self._losses = [[epoch.loss for epoch in of] for of in zip(*(each.history for each in every))]
        self._whole = True
        self._offset = position.step - self._round()
        self._hear()

    def ahead(self, position: Position) -> None:
        """Note that an exchange begins, which will make one more step of the batches taken until now.

        Collective in a synchronous store, where the losses of all workers are summed.
        """
        at = replace(position, step=position.step + 1)
        if self._synchronous:
            self._rows = self._all(at)
        self._ahead = self._mark(at, COUNTED)

    def no_exchange(self) -> None:
        """Take `ahead` back, because no worker had a sample and the exchange did not begin."""
        self._ahead = None

    def mark(self, position: Position, stage: int, states: dict[str, Any] | None) -> None:
        """Note that this worker has come to a stage. `states` are those of its callbacks, if they were called."""
        if states is not None:
            self._states = states
        if stage == OVER and self._synchronous and len(position.history) > len(self._losses):
            self._losses.append([total / batches if batches else math.nan for total, batches, _ in self._rows])
            self._rows = [(0.0, 0, last) for _, _, last in self._rows]
        self._ahead, self._history = None, position.history
        self._marks = [mark for mark in self._marks if mark.step > position.step - KEPT]
        self._marks.append(self._mark(position, stage))

    def _mark(self, position: Position, stage: int) -> Mark:
        alone = replace(position, history=[], callbacks=self._states)
        return Mark(
            alone, stage, len(position.history), self._kv.num_workers, self._rows, self._blocking.update.numbers
        )

    def _all(self, position: Position) -> list[Row]:
        """Return the sums of losses and the batches of all workers. Collective."""
        kv = self._kv
        table = np.zeros((kv.num_workers, 3))
        bits = table.view(np.int64)
        table[kv.rank] = position.loss_sum, position.batches, position.last_loss
        # Sum them as integers, because a NaN of one worker would spread when it is added to the zeros of the others.
        if kv.num_workers > 1:
            collectives.allreduce(bits, kv.layout.workers, label="fit: losses of all workers")
        return [(total, int(batches), last) for total, batches, last in table.tolist()]

    # ---- after a death

    def meet(self) -> tuple[Position, int]:
        """Meet the other workers, as one that has recovered or as a spare that has taken a place.

        Collective, blocking. Return the position from which to continue, with its history and the states of callbacks,
        and the stage.
        """
        kv = self._kv
        self._ranks[kv.generation] = kv.rank
        mine = b"" if self.fresh else msgspec.msgpack.encode(self._word())
        told = kv.worker.agree("fit: all meet anew", self._words, noun="argument", data=mine)
        words = [msgspec.msgpack.decode(data, type=Word) if data else None for data in told]
        group = self._group()
        stored = not self._blocking.update.owners()
        apart = not (self._synchronous or self._asynchronous)
        moment = agreed(words, furthest_of(words) if apart else group, stored, not self._synchronous)
        word = words[kv.rank]
        if word is None or word.last(moment.step) is None:
            word = words[moment.source]
        assert word is not None
        mark = word.at(moment.step, moment.place)
        back = self._take(words, word, mark)
        kv.worker.fresh = False
        self._restore(words, group, mark)
        return back

    def _word(self) -> Word:
        sent = [msgspec.structs.replace(mark, optimizer=as_data(mark.optimizer)) for mark in self._marks]
        ahead = self._ahead
        if ahead is not None:
            ahead = msgspec.structs.replace(ahead, optimizer=as_data(ahead.optimizer))
        keys = self._kv.worker.keys
        rounds = {keys[key].round for key in self._blocking.update.keys}
        stored = self._offset + rounds.pop() if len(rounds) == 1 else None
        return Word(self._ranks, self._numbered, sent, ahead, stored, self._whole, self._history, self._losses)

    def _take(self, words: Sequence[Word | None], word: Word, mark: Mark) -> tuple[Position, int]:
        """Return to a mark, this worker's own or another's. Local."""
        kv, rows = self._kv, rows_of(words, word.numbered, mark.workers)
        position = replace(mark.position, history=list(word.history[: mark.ended]))
        self._rows = [mark.rows[row] for row in rows] if mark.rows else []
        self._losses = [[of[row] for row in rows] for of in word.losses[: mark.ended]]
        if self.fresh and self._synchronous:
            position.loss_sum, position.batches, position.last_loss = self._rows[kv.rank]
            position.history = with_losses(position.history, self._losses, kv.rank)
        if mark.workers != kv.num_workers and isinstance(self._source, Arrays) and position.batches:
            position.deal(self._source.batch_size * mark.workers)
        self._marks, self._numbered = [], kv.generation
        self._ranks = {kv.generation: kv.rank}
        self._offset = mark.step - self._round()
        self._blocking.forget()
        self._states = mark.position.callbacks
        self._ahead, self._history = None, position.history
        self._marks = [
            msgspec.structs.replace(
                mark,
                position=replace(position, history=[]),
                workers=kv.num_workers,
                rows=self._rows,
                optimizer=from_data(mark.optimizer),
            )
        ]
        return position, mark.stage

    def _restore(self, words: Sequence[Word | None], group: range, mark: Mark) -> None:
        """Restore parameters, and what the store does not have, from the worker of the group that is furthest.

        Collective.
        """
        self._hear()
        update = self._blocking.update
        # max() takes the worker that is furthest, and the lowest rank if there are several.
        whole = [(word.done, -rank) for rank in group if (word := words[rank]) is not None and word.whole]
        arrays = None
        if update.owners() and whole:
            root = -max(whole)[1] - group.start
            arrays = {name: array.copy() for name, array in update.arrays().items()}
            for name, array in arrays.items() if len(group) > 1 else ():
                collectives.broadcast(array, update.group, root=root, label=f"fit: {name} of a worker that has it")
        elif update.owners() and self._synchronous:
            raise LostError("fit: no worker is left that has the optimizer's state: go on from a checkpoint")
        update.rejoin(arrays, from_data(mark.optimizer))
        self._whole = True

    def _group(self) -> range:
        """Return the workers that make every exchange together with this one."""
        layout = self._kv.layout
        if self._synchronous:
            return range(layout.num_workers)
        client = layout.clients[layout.client_number]
        return range(client.start, client.stop)

    def _hear(self) -> None:
        """Let waits for these workers end when the generation ends.

        Collective, so it is called only after a meeting.
        """
        if len(group := self._group()) > 1:
            self._kv.worker.generation.within(self._blocking.update.group, list(group))

    def _round(self) -> int:
        """Return how many times the Trainer's keys were pushed."""
        key: int = self._kv.worker.keys[self._blocking.update.keys[0]].round
        return key


def see_alike(kv: KVStore, what: str, words: Items, refusal: BaseException | None) -> None:
    """Check that all workers make this call with equal arguments. If not, all raise the same error.

    A spare that has taken a place compares nothing here, because the others made the call long ago. `join` compares.
    """
    if not kv.worker.fresh:
        kv.worker.agree(what, words, refusal, noun="argument")
    elif refusal is not None:
        raise refusal


def survival_of(job: Job, source: Source, number: int, words: Items, grow: bool) -> SurvivingFit | None:
    """Return the SurvivingFit of a Trainer's fit, or None if the store does not survive deaths.

    Args:
        number: The fit's number, from 1.
        words: Arguments that must be equal on all workers.
        grow: Let spares become workers. Only the first fit can, because spares begin with it.
    """
    blocking = job.blocking
    if blocking is None or not job.kv.layout.survives:
        return None
    fit = f"{number} of the Trainer of key {blocking.update.keys[0]!r}"
    return SurvivingFit(job, blocking, source, [("fit", fit), *words], grow and number == 1)


# Stages of a step:
#     BEGIN: `on_begin` is due.
#     COUNTED: The step is counted, and `on_step` is due.
#     TOLD: `on_step` was called.
#     OVER: The epoch that ended with this step is over, and `on_epoch` was called.
#     ENDED: The fit is over, and `on_end` was called.
BEGIN, COUNTED, TOLD, OVER, ENDED = range(-1, 4)
# the number of latest steps whose marks are kept
KEPT = 2

# one worker's sum of losses in the epoch, its batches, and the loss of its last batch
Row = tuple[float, int, float]


class Mark(msgspec.Struct, frozen=True):
    """A moment to which a worker can go back."""

    # the position, without its history
    position: Position
    stage: int
    # number of epochs in the history
    ended: int
    # the number of workers at that moment
    workers: int
    # a row for each worker; empty in an asynchronous store, where each worker is at another step
    rows: list[Row]
    # the optimizer with its numbers of that moment; in a `Word` as plain data
    optimizer: Any

    @property
    def step(self) -> int:
        """Exchanges up to this moment."""
        return self.position.step

    @property
    def place(self) -> tuple[int, int]:
        """The place among the marks of a step, by which they are ordered."""
        return self.ended, self.stage


class Word(msgspec.Struct, frozen=True):
    """What a worker that knows where the training was tells the others. A spare tells nothing."""

    # generation of the store -> the worker's rank in it
    ranks: dict[int, int]
    # the generation by whose ranks the rows of the marks and the losses are ordered
    numbered: int
    marks: list[Mark]
    # the moment after the exchange that was under way
    ahead: Mark | None
    # the step of the parameters in the store, if a synchronous store updates them
    stored: int | None
    # True if the worker has all arrays that the store does not have
    whole: bool
    history: list[Epoch]
    # for each epoch in the history the losses of all workers
    losses: list[list[float]]

    @property
    def done(self) -> int:
        """The last step that the worker has completed."""
        return self.marks[-1].step

    @property
    def furthest(self) -> int:
        """The last step to which the worker has contributed everything."""
        return self.done if self.ahead is None else self.ahead.step

    def last(self, step: int) -> tuple[int, int] | None:
        """Return the place of the last mark of a step, or None if the worker does not remember the step."""
        return max((mark.place for mark in self._all() if mark.step == step), default=None)

    def at(self, step: int, place: tuple[int, int]) -> Mark:
        """Return the last mark of a step up to this place."""
        marks = [mark for mark in self._all() if mark.step == step and mark.place <= place]
        return sorted(marks, key=lambda mark: mark.place)[-1]

    def _all(self) -> list[Mark]:
        return self.marks if self.ahead is None else [*self.marks, self.ahead]


class Agreed(NamedTuple):
    """The moment to which workers go back."""

    step: int
    place: tuple[int, int]
    # the lowest rank that knows this moment
    source: int


def agreed(words: Sequence[Word | None], group: Sequence[int], stored: bool, asynchronous: bool) -> Agreed:
    """Return the moment to which a group of workers goes back.

    If the store updates parameters it is the step of the store. If workers update, all alike, it is the step of the
    worker that is furthest. In an asynchronous store it is the last step to which the whole group has contributed; a
    group of spares only takes the step of the slowest worker.

    Raises LostError if no worker knows where the training was, or one does not remember that step.

    Args:
        words: For each rank its word, or None for a spare.
        group: All workers of a synchronous store, or those of a client.
        stored: The store updates the parameters.
        asynchronous: Workers do not wait for each other in every step.
    """
    here = [rank for rank in group if words[rank] is not None]
    if not here:
        left = [(word.furthest, rank) for rank, word in enumerate(words) if word is not None]
        here = [rank for _, rank in sorted(left)[:1]]
    told = [word for rank in here if (word := words[rank]) is not None]
    if not told:
        raise LostError("fit: no worker is left that knows where the training was: go on from a checkpoint")
    if asynchronous:
        step = min(word.furthest for word in told)
    elif stored:
        steps = {word.stored for word in told}
        if len(steps) > 1 or None in steps:
            raise LostError(
                f"fit: the parameters in the store are of unlike steps, {sorted(map(str, steps))}: go on "
                "from a checkpoint"
            )
        step = next(number for number in steps if number is not None)
    else:
        step = max(word.done for word in told)
    places = []
    for rank, word in zip(here, told):
        place = word.last(step)
        if place is None:
            raise LostError(
                f"fit: the parameters in the store are of step {step}, and worker {rank} remembers none "
                f"but its last {KEPT}, up to {word.done}: go on from a checkpoint"
            )
        places.append(place)
    return Agreed(step, min(places), here[0])


def furthest_of(words: Sequence[Word | None]) -> list[int]:
    """Return the rank of the worker that is furthest, the lowest if there are several, in a list of one.

    When workers of a synchronous store train apart, all continue from its step. The list is empty if no worker knows
    where the training was.
    """
    steps = [(word.furthest, -rank) for rank, word in enumerate(words) if word is not None]
    return [-rank for _, rank in sorted(steps)[-1:]]


def rows_of(words: Sequence[Word | None], numbered: int, workers: int) -> list[int]:
    """Return, for each worker that is here now, its rank in the generation `numbered`, by which rows are ordered.

    A spare gets the rank of a worker that has died.

    Args:
        workers: How many workers that generation had.
    """
    known = [None if word is None else word.ranks.get(numbered) for word in words]
    free = iter([row for row in range(workers) if row not in known])
    return [next(free, 0) if row is None else row for row in known]


def with_losses(history: Sequence[Epoch], losses: Sequence[Sequence[float]], row: int) -> list[Epoch]:
    """Return a history in which the losses are those of the worker `row`."""
    if not losses:
        return list(history)
    return [Epoch(epoch.epoch, epoch.seconds, of[row], epoch.test) for epoch, of in zip(history, losses)]

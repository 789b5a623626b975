"""A fit that goes on by itself after a death, on the workers that are left and on spares that take a place.

    the store has recovered -> all workers meet once, each with its last marks -> they agree on a moment
    -> parameters come from the store, or from a worker that has them -> training goes on from there

Before each exchange of a synchronous store the workers sum a few numbers, so that each knows the sums of losses of all:
a spare then has the history of the worker whose place it takes. A worker that meets the others anew keeps its marks
until all that it needs is there: another death in between brings all to another meeting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

import mpips.collectives as collectives
from mpips.collectives.errors import CollectiveError, MismatchError
from mpips.optimizers.registry import as_data, from_data
from mpips.store.runtime.errors import LostError, StoreError
from mpips.store.runtime.rendezvous import Items
from mpips.training.batches import Arrays, Source
from mpips.training.checkpoint import Epoch, Position
from mpips.training.step import Blocking, Job

if TYPE_CHECKING:
    from mpips.store.api import KVStore


class SurvivingFit:
    """The memory of one worker of a fit. Only where the store survives."""

    def __init__(self, job: Job, blocking: Blocking, source: Source, words: Items, grow: bool = False) -> None:
        self._kv, self._blocking, self._source, self._words = job.kv, blocking, source, words
        self._grow = grow
        self._asynchronous = job.kv.layout.asynchronous
        self._synchronous = not (self._asynchronous or blocking.update.apart)
        """Whether each step is an exchange of all workers."""
        self._marks: list[Mark] = []
        self._ahead: Mark | None = None
        self._rows: list[Row] = []
        self._states: dict[str, Any] = {}
        self._history: list[Epoch] = []
        self._losses: list[list[float]] = []
        self._ranks = {job.kv.generation: job.kv.rank}
        self._numbered, self._offset, self._whole = job.kv.generation, 0, False
        self._before: tuple[int, int] | None = None
        """Step and stage of the last recovery in which nobody had died."""

    @property
    def fresh(self) -> bool:
        """Return whether this worker was a spare, and has not met the others yet."""
        return bool(self._kv.worker.fresh)

    @property
    def grows(self) -> bool:
        """Return whether spares are to become workers at the end of this epoch of training: the same on all workers."""
        return self._grow and self._kv.spares > 0

    # ---- what is remembered

    def begin(self, position: Position) -> None:
        """Begin on all workers. Collective: each learns the histories of all."""
        told = self._kv.worker.agree("fit: it survives deaths", data=msgspec.msgpack.encode(position))
        every = [msgspec.msgpack.decode(data, type=Position) for data in told]
        if self._synchronous:
            self._rows = [(each.loss_sum, each.batches, each.last_loss) for each in every]
            self._losses = [[epoch.loss for epoch in of] for of in zip(*(each.history for each in every))]
        self._whole = True
        self._offset = position.step - self._round()
        self._hear()

    def ahead(self, position: Position) -> None:
        """Begin an exchange, which makes another step of all batches so far. Collective where synchronous."""
        at = replace(position, step=position.step + 1)
        if self._synchronous:
            self._rows = self._all(at)
        self._ahead = self._mark(at, COUNTED)

    def no_exchange(self) -> None:
        """Take `ahead` back: nobody had a sample, and the exchange did not begin."""
        self._ahead = None

    def mark(self, position: Position, stage: int, states: dict[str, Any] | None) -> None:
        """Note that this worker has come to a stage. `states`: of its callbacks, where they were called."""
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
        """Return the sums of all workers' losses, and their batches. Collective."""
        kv = self._kv
        table = np.zeros((kv.num_workers, 3))
        bits = table.view(np.int64)
        table[kv.rank] = position.loss_sum, position.batches, position.last_loss
        if kv.num_workers > 1:  # as whole numbers, so that one worker's NaN stays its own
            collectives.allreduce(bits, kv.layout.workers, label="fit: losses of all workers")
        return [(total, int(batches), last) for total, batches, last in table.tolist()]

    # ---- after a death

    def recover(self, error: CollectiveError | None, grow: bool = False) -> tuple[Position, int]:
        """Let the store recover, meet the other workers, and spares that join by `grow`; return where to go on: the
        position, with its history and what callbacks keep, and the stage. Collective, blocking.

        `error` is raised again where nobody has died, and the training has come no further since the last time.
        """
        while True:
            rounds = self._kv.recover(grow)
            if rounds.torn:
                raise StoreError(
                    f"fit: {rounds.torn[0]!r} has a round that was applied in part: go on from a checkpoint"
                ) from error
            try:
                return self._meet(error)
            except (MismatchError, LostError):
                raise
            except CollectiveError as other:
                if other is error:
                    raise

    def join(self) -> tuple[Position, int]:
        """Meet the others, on a spare that has taken a place; return where to go on. Collective, blocking."""
        try:
            return self._meet(None)
        except (MismatchError, LostError):
            raise
        except CollectiveError as error:
            return self.recover(error)

    def _meet(self, error: CollectiveError | None) -> tuple[Position, int]:
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
        # `error` would only come again where no death has made it: the same on all workers.
        died = any(word is None for word in words) or mark.workers != len(words)
        at = None if died else (mark.step, mark.stage)
        if at is not None and at == self._before and error is not None:
            raise error
        self._before = at
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
        """Go on from a mark, this worker's own or another's. Local."""
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
        """Restore parameters, and what the store does not have, from the furthest of the group. Collective."""
        self._hear()
        update = self._blocking.update
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
        """Let who waits for those workers hear of the generation's end. Collective: only behind a meeting."""
        if len(group := self._group()) > 1:
            self._kv.worker.generation.within(self._blocking.update.group, list(group))

    def _round(self) -> int:
        """Return how often the Trainer's keys were pushed."""
        key: int = self._kv.worker.keys[self._blocking.update.keys[0]].round
        return key


def see_alike(kv: KVStore, what: str, words: Items, refusal: BaseException | None) -> None:
    """See that all workers make this call with equal words, or all raise the same. A spare that has taken a place
    compares nothing here: the others have made the call long ago, and `join` compares."""
    if not kv.worker.fresh:
        kv.worker.agree(what, words, refusal, noun="argument")
    elif refusal is not None:
        raise refusal


def survival_of(job: Job, source: Source, number: int, words: Items, grow: bool) -> SurvivingFit | None:
    """Return that of a Trainer's fit with this number, where the store survives. `words` are equal on all workers.

    Only the first fit may `grow`: spares begin with it.
    """
    blocking = job.blocking
    if blocking is None or not job.kv.layout.survives:
        return None
    fit = f"{number} of the Trainer of key {blocking.update.keys[0]!r}"
    return SurvivingFit(job, blocking, source, [("fit", fit), *words], grow and number == 1)


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
    """The number of workers then."""
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
        """Return the place among the marks of a step: they come in this order."""
        return self.ended, self.stage


class Word(msgspec.Struct, frozen=True):
    """The word of a worker that knows where the training was; a spare brings nothing."""

    ranks: dict[int, int]
    """Its rank in the generations of the store, by their number."""
    numbered: int
    """The generation whose ranks number the rows of its marks, and its losses."""
    marks: list[Mark]
    ahead: Mark | None
    """As after the exchange that was under way."""
    stored: int | None
    """The step of the parameters in a synchronous store that updates them."""
    whole: bool
    """True where it has all arrays that the store has not."""
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
        """Return the place of its last mark of a step; None where it does not remember the step."""
        return max((mark.place for mark in self._all() if mark.step == step), default=None)

    def at(self, step: int, place: tuple[int, int]) -> Mark:
        """Return the last mark of a step up to this place."""
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
    """Return the moment that a group of workers goes back to: all of a synchronous store, a client of another.

    Where the store updates (`stored`) it is the step that the store stands at; where workers update alike, the step of
    the one that is furthest; in an asynchronous store the last step that all of the group have contributed to, and of a
    group that is new that of the slowest worker.
    LostError where nobody knows, or one does not remember that step.
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
    """Return the worker that has come furthest, the lowest of several: where workers of a synchronous store train apart
    all go on from its step. Nobody, where none knows it."""
    steps = [(word.furthest, -rank) for rank, word in enumerate(words) if word is not None]
    return [-rank for _, rank in sorted(steps)[-1:]]


def rows_of(words: Sequence[Word | None], numbered: int, workers: int) -> list[int]:
    """Return, for each worker here now, whose place it has, of `workers` in the generation `numbered`."""
    known = [None if word is None else word.ranks.get(numbered) for word in words]
    free = iter([row for row in range(workers) if row not in known])
    return [next(free, 0) if row is None else row for row in known]


def with_losses(history: Sequence[Epoch], losses: Sequence[Sequence[float]], row: int) -> list[Epoch]:
    """Return one worker's history of another's."""
    if not losses:
        return list(history)
    return [Epoch(epoch.epoch, epoch.seconds, of[row], epoch.test) for epoch, of in zip(history, losses)]

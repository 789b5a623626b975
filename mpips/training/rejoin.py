"""Continue a fit after a death: the workers choose a moment of the training, and go back to it.

When the store has recovered (`recovery`), all workers hold a meeting, an exchange of reports:

1. Each worker reports the last moments that it remembers.
2. All workers choose the same moment from the reports, and go back to it.
3. They take the parameters from the store, or from a worker that has them.

Before each exchange of gradients in a synchronous store, the workers sum a few numbers, so that each worker knows the
losses of all. A spare can then continue the history of the worker that it replaces. A worker forgets its moments only
after the meeting, because another death during the meeting leads to a second meeting.

A generation is the life of the store between two failures. A worker may have another rank in the next generation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

import mpips.collectives as collectives
from mpips.optimizers.registry import as_data, from_data
from mpips.store.runtime.errors import LostError
from mpips.store.runtime.rendezvous import Items
from mpips.training.batches import Arrays, Source
from mpips.training.checkpoint import Epoch, Position
from mpips.training.step import Blocking, TrainerParts

# Stages of a fit:
#     BEGIN: `on_begin` is due.
#     COUNTED: The step is counted, and `on_step` is due.
#     CALLED: `on_step` was called.
#     OVER: The epoch that ended with this step is over, and `on_epoch` was called.
#     ENDED: The fit is over, and `on_end` was called.
BEGIN, COUNTED, CALLED, OVER, ENDED = range(-1, 4)
# A worker remembers the moments of this many last steps.
KEPT = 2

# the losses of one worker: their sum in the epoch, the number of batches, and the loss of the last batch
Losses = tuple[float, int, float]


class SurvivingFit:
    """Remembers a worker's last positions in a fit, so that after a death the workers agree on where to continue.

    Used only if the store survives deaths.

    Args:
        parts: The Trainer's store, model and so on.
        blocking: Makes the Trainer's collective calls to the other workers.
        source: The batches of the fit.
        arguments: The arguments of the Trainer and of the fit. A spare must pass the same arguments as the workers.
        grow: True to let waiting spares become workers.
    """

    def __init__(
        self, parts: TrainerParts, blocking: Blocking, source: Source, arguments: Items, grow: bool = False
    ) -> None:
        self._kv = parts.kv
        self._blocking = blocking
        self._source = source
        self._arguments = arguments
        self._grow = grow
        self._asynchronous = parts.kv.layout.asynchronous
        # True if each step is an exchange of all workers
        self._synchronous = not (self._asynchronous or blocking.update.apart)
        # the moments that this worker can go back to, the latest one last
        self._moments: list[Moment] = []
        # the moment after the exchange in flight, or None
        self._ahead: Moment | None = None
        # for each worker, its losses in this epoch; empty in an asynchronous store
        self._losses: list[Losses] = []
        # for each epoch in the history, the mean losses of all workers
        self._ended_losses: list[list[float]] = []
        # the states of callbacks by name
        self._states: dict[str, Any] = {}
        self._history: list[Epoch] = []
        # generation (number of failures of the store so far) -> this worker's rank in it
        self._ranks = {parts.kv.generation: parts.kv.rank}
        # Lists of losses are in the order of the ranks of this generation of the store.
        self._ordered_by = parts.kv.generation
        # The number of steps minus the number of pushes to the Trainer's keys. It is not 0 after a resume, for example.
        self._offset = 0
        # True if this worker has all arrays that the store does not have
        self._has_arrays = False

    @property
    def grows(self) -> bool:
        """True if waiting spares must become workers at the end of this epoch. The value is the same on all workers."""
        return self._grow and self._kv.spares > 0

    # ---- moments

    def begin(self, position: Position) -> None:
        """Begin the fit. In a synchronous store, the workers exchange their histories. Collective, blocking."""
        encoded = self._kv.worker.agree("fit: it survives deaths", data=msgspec.msgpack.encode(position))
        positions = [msgspec.msgpack.decode(data, type=Position) for data in encoded]
        if self._synchronous:
            self._losses = [(each.loss_sum, each.batches, each.last_loss) for each in positions]
            epochs = zip(*(each.history for each in positions))
            self._ended_losses = [[entry.loss for entry in entries] for entries in epochs]
        self._has_arrays = True
        self._offset = position.step - self._round()
        self._watch_group()

    def note_exchange(self, position: Position) -> None:
        """Note that an exchange begins. When it ends, the step has increased by one.

        Collective in a synchronous store, where the workers report their losses to each other.
        """
        after = replace(position, step=position.step + 1)
        if self._synchronous:
            self._losses = self._gather_losses(after)
        self._ahead = self._moment(after, COUNTED)

    def cancel_exchange(self) -> None:
        """Undo `note_exchange`. Call this if no worker had a sample, so that the exchange did not begin."""
        self._ahead = None

    def note_stage(self, position: Position, stage: int, states: dict[str, Any] | None) -> None:
        """Note that this worker has reached a stage. `states` are the callbacks' states, or None if unchanged."""
        if states is not None:
            self._states = states
        if stage == OVER and self._synchronous and len(position.history) > len(self._ended_losses):
            self._ended_losses.append([total / batches if batches else math.nan for total, batches, _ in self._losses])
            self._losses = [(0.0, 0, last) for _, _, last in self._losses]
        self._ahead = None
        self._history = position.history
        self._moments = [moment for moment in self._moments if moment.step > position.step - KEPT]
        self._moments.append(self._moment(position, stage))

    def _moment(self, position: Position, stage: int) -> Moment:
        short = replace(position, history=[], callbacks=self._states)
        workers, optimizer = self._kv.num_workers, self._blocking.update.numbers
        return Moment(short, stage, len(position.history), workers, self._losses, optimizer)

    def _gather_losses(self, position: Position) -> list[Losses]:
        """Return the losses of all workers in this epoch. Collective, blocking."""
        kv = self._kv
        table = np.zeros((kv.num_workers, 3))
        table[kv.rank] = position.loss_sum, position.batches, position.last_loss
        # Sum the numbers as integers, so that all bits stay as they are, even those of a NaN.
        if kv.num_workers > 1:
            collectives.allreduce(table.view(np.int64), kv.layout.workers, label="fit: losses of all workers")
        return [(total, int(batches), last) for total, batches, last in table.tolist()]

    # ---- after a death

    def meet(self) -> tuple[Position, int]:
        """After a recovery, agree with all other workers where the training continues, and go back to that moment.

        Collective, blocking. A spare that has just become a worker also calls it.

        Returns:
            The position where this worker continues, which contains the history and the states of the callbacks; and
            the stage at that position, such as COUNTED.
        """
        kv = self._kv
        self._ranks[kv.generation] = kv.rank
        data = b"" if kv.worker.fresh else msgspec.msgpack.encode(self._report())
        encoded = kv.worker.agree("fit: all meet anew", self._arguments, noun="argument", data=data)
        reports = [msgspec.msgpack.decode(report, type=WorkerReport) if report else None for report in encoded]
        group = self._group()
        stored = not self._blocking.update.owners()
        apart = not (self._synchronous or self._asynchronous)
        chosen = choose_moment(reports, furthest_of(reports) if apart else group, stored, not self._synchronous)
        report = reports[kv.rank]
        if report is None or report.last(chosen.step) is None:
            report = reports[chosen.source]
        assert report is not None
        moment = report.at(chosen.step, chosen.place)
        position = self._go_back_to(moment, reports, report)
        kv.worker.fresh = False
        self._restore(moment, reports, group)
        return position, moment.stage

    def _report(self) -> WorkerReport:
        """Return this worker's report to the other workers."""
        moments = [_with_data(moment) for moment in self._moments]
        ahead = None if self._ahead is None else _with_data(self._ahead)
        keys = self._kv.worker.keys
        rounds = {keys[key].round for key in self._blocking.update.keys}
        stored = self._offset + rounds.pop() if len(rounds) == 1 else None
        return WorkerReport(
            self._ranks,
            self._ordered_by,
            moments,
            ahead,
            stored,
            self._has_arrays,
            self._history,
            self._ended_losses,
        )

    def _go_back_to(self, moment: Moment, reports: Sequence[WorkerReport | None], report: WorkerReport) -> Position:
        """Go back to a moment from `report`, the report of this worker or of another worker. Local."""
        kv, order = self._kv, order_of_losses(reports, report.ordered_by, moment.workers)
        position = replace(moment.position, history=list(report.history[: moment.ended]))
        self._losses = [moment.losses[number] for number in order] if moment.losses else []
        ended = report.ended_losses[: moment.ended]
        self._ended_losses = [[losses[number] for number in order] for losses in ended]
        if kv.worker.fresh and self._synchronous:
            position.loss_sum, position.batches, position.last_loss = self._losses[kv.rank]
            position.history = with_losses(position.history, self._ended_losses, kv.rank)
        if moment.workers != kv.num_workers and isinstance(self._source, Arrays) and position.batches:
            position.deal(self._source.batch_size * moment.workers)
        self._ordered_by = kv.generation
        self._ranks = {kv.generation: kv.rank}
        self._offset = moment.step - self._round()
        self._blocking.forget()
        self._states = moment.position.callbacks
        self._ahead = None
        self._history = position.history
        self._moments = [
            msgspec.structs.replace(
                moment,
                position=replace(position, history=[]),
                workers=kv.num_workers,
                losses=self._losses,
                optimizer=from_data(moment.optimizer),
            )
        ]
        return position

    def _restore(self, moment: Moment, reports: Sequence[WorkerReport | None], group: range) -> None:
        """Restore the parameters, and the arrays that the store does not have.

        The arrays come from the worker of the group that is furthest ahead. Collective, blocking.
        """
        self._watch_group()
        update = self._blocking.update
        # max() selects the worker that is furthest ahead, and among equal ones the lowest rank.
        owners = [(report.done, -rank) for rank in group if (report := reports[rank]) is not None and report.has_arrays]
        arrays = None
        if update.owners() and owners:
            root = -max(owners)[1] - group.start
            arrays = {name: array.copy() for name, array in update.arrays().items()}
            for name, array in arrays.items() if len(group) > 1 else ():
                collectives.broadcast(array, update.group, root=root, label=f"fit: {name} of a worker that has it")
        elif update.owners() and self._synchronous:
            raise LostError("fit: no worker is left that has the optimizer's state: go on from a checkpoint")
        update.rejoin(arrays, from_data(moment.optimizer))
        self._has_arrays = True

    def _group(self) -> range:
        """Return the ranks of the workers that make every exchange together with this worker."""
        layout = self._kv.layout
        if self._synchronous:
            return range(layout.num_workers)
        client = layout.clients[layout.client_number]
        return range(client.start, client.stop)

    def _watch_group(self) -> None:
        """Make waits inside of the group end when the store fails.

        Collective over the group, so call it only when all workers are known to be at the same point.
        """
        if len(group := self._group()) > 1:
            self._kv.worker.generation.within(self._blocking.update.group, list(group))

    def _round(self) -> int:
        """Return the number of pushes to each of the Trainer's keys."""
        return self._kv.worker.keys[self._blocking.update.keys[0]].round


def survival_of(parts: TrainerParts, source: Source, number: int, arguments: Items, grow: bool) -> SurvivingFit | None:
    """Return the SurvivingFit of a Trainer's fit, or None if the store does not survive deaths.

    Args:
        parts: The parts of the Trainer.
        source: The batches of the fit.
        number: The number of the fit, from 1.
        arguments: The arguments that must be equal on all workers.
        grow: True to let spares become workers. Only the first fit can do so, because spares begin with the first fit.
    """
    blocking = parts.blocking
    if blocking is None or not parts.kv.layout.survives:
        return None
    fit = f"{number} of the Trainer of key {blocking.update.keys[0]!r}"
    return SurvivingFit(parts, blocking, source, [("fit", fit), *arguments], grow and number == 1)


class Moment(msgspec.Struct, frozen=True):
    """A moment of the training that a worker can go back to."""

    # the position, without the history
    position: Position
    stage: int
    # number of epochs in the history
    ended: int
    # the number of workers at that moment
    workers: int
    # for each worker, its losses; empty in an asynchronous store, where each worker is at another step
    losses: list[Losses]
    # the optimizer with the hyperparameters of that moment; in a `WorkerReport` as plain data
    optimizer: Any

    @property
    def step(self) -> int:
        """The number of exchanges up to this moment."""
        return self.position.step

    @property
    def place(self) -> tuple[int, int]:
        """The order of moments within one step: the larger pair is the later moment."""
        return self.ended, self.stage


def _with_data(moment: Moment) -> Moment:
    """Return the moment with its optimizer as plain data, so that it can be sent."""
    return msgspec.structs.replace(moment, optimizer=as_data(moment.optimizer))


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker's report in the meeting after a death. A spare, which knows nothing about the training, sends None."""

    # generation of the store -> the worker's rank in it
    ranks: dict[int, int]
    # The lists of losses are in the order of the ranks of this generation.
    ordered_by: int
    moments: list[Moment]
    # the moment after the exchange that was in flight, or None
    ahead: Moment | None
    # the step of the parameters in the store, or None if not all keys are at the same step
    stored: int | None
    # True if the worker has all arrays that the store does not have
    has_arrays: bool
    history: list[Epoch]
    # for each epoch in the history, the mean losses of all workers
    ended_losses: list[list[float]]

    @property
    def done(self) -> int:
        """The last step that the worker has completed."""
        return self.moments[-1].step

    @property
    def furthest(self) -> int:
        """The last step to which the worker has contributed all its batches."""
        return self.done if self.ahead is None else self.ahead.step

    def last(self, step: int) -> tuple[int, int] | None:
        """Return the place (`Moment.place`) of the step's last moment, or None if the worker has forgotten the step."""
        return max((moment.place for moment in self._all() if moment.step == step), default=None)

    def at(self, step: int, place: tuple[int, int]) -> Moment:
        """Return the last moment of a step whose place is at most `place`."""
        moments = [moment for moment in self._all() if moment.step == step and moment.place <= place]
        return sorted(moments, key=lambda moment: moment.place)[-1]

    def _all(self) -> list[Moment]:
        return self.moments if self.ahead is None else [*self.moments, self.ahead]


class ChosenMoment(NamedTuple):
    """The moment that workers go back to."""

    step: int
    place: tuple[int, int]
    # the lowest rank that knows this moment
    source: int


def choose_moment(
    reports: Sequence[WorkerReport | None], group: Sequence[int], stored: bool, asynchronous: bool
) -> ChosenMoment:
    """Choose the moment that a group of workers goes back to. Pure.

    - If the store updates the parameters, the moment is at the step of the parameters in the store.
    - If every worker updates its own parameters, with equal results, it is at the step of the worker that is furthest
      ahead.
    - If workers do not wait for each other in every step, it is at the last step to which the whole group has
      contributed. A group that consists only of spares takes the step of the slowest worker.

    Args:
        reports: For each rank its report, or None for a spare.
        group: The ranks of all workers of a synchronous store, or of the workers of a client.
        stored: True if the store updates the parameters.
        asynchronous: True if workers do not wait for each other in every step.

    Raises:
        LostError: No worker knows where the training was, or a worker does not remember the step.
    """
    known = {rank: report for rank in group if (report := reports[rank]) is not None}
    if not known:
        others = [(report.furthest, rank) for rank, report in enumerate(reports) if report is not None]
        known = {rank: report for _, rank in sorted(others)[:1] if (report := reports[rank]) is not None}
    if not known:
        raise LostError("fit: no worker is left that knows where the training was: go on from a checkpoint")
    if asynchronous:
        step = min(report.furthest for report in known.values())
    elif stored:
        steps = {report.stored for report in known.values()}
        if len(steps) > 1 or None in steps:
            raise LostError(
                f"fit: the parameters in the store are of unlike steps, {sorted(map(str, steps))}: go on "
                "from a checkpoint"
            )
        step = next(number for number in steps if number is not None)
    else:
        step = max(report.done for report in known.values())
    places = []
    for rank, report in known.items():
        place = report.last(step)
        if place is None:
            raise LostError(
                f"fit: the parameters in the store are of step {step}, and worker {rank} remembers none "
                f"but its last {KEPT}, up to {report.done}: go on from a checkpoint"
            )
        places.append(place)
    return ChosenMoment(step, min(places), min(known))


def furthest_of(reports: Sequence[WorkerReport | None]) -> list[int]:
    """Return a list with the rank of the worker that is furthest ahead, or the lowest such rank.

    All workers continue from the step of this worker if they train independently (`local=`) in a synchronous store. The
    list is empty if no worker knows where the training was.
    """
    steps = [(report.furthest, -rank) for rank, report in enumerate(reports) if report is not None]
    return [-rank for _, rank in sorted(steps)[-1:]]


def order_of_losses(reports: Sequence[WorkerReport | None], generation: int, workers: int) -> list[int]:
    """Return the index of each current worker's losses in lists that are in the order of an older generation's ranks.

    A spare gets the index of a worker that has died.

    Args:
        reports: For each current rank its report, or None for a spare.
        generation: The older generation, whose ranks give the order.
        workers: The number of workers in the older generation.
    """
    known = [None if report is None else report.ranks.get(generation) for report in reports]
    free = iter([place for place in range(workers) if place not in known])
    return [next(free, 0) if place is None else place for place in known]


def with_losses(history: Sequence[Epoch], losses: Sequence[Sequence[float]], worker: int) -> list[Epoch]:
    """Return the history with the losses of one worker. `losses` has, for each epoch, the losses of all workers."""
    if not losses:
        return list(history)
    return [entry._replace(loss=of_all[worker]) for entry, of_all in zip(history, losses)]

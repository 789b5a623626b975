"""Rare requests of workers to a server: new units, settings, states and snapshots.

Settings count from the next push on, so they wait until everything that was pushed before has been applied. What
concerns no push is answered at once: others may push only after it.

Values and states of units as they were at one moment, while updates go on: copied before a unit is next written to.

Nothing is copied when a snapshot is taken. A unit that is about to be written to is copied first, whole; while the
server has nothing else to do, it copies the others. So it needs memory for a copy of what is frozen, until that is
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mpips import compression, optimizers
from mpips.compression import Compressor
from mpips.store.recovery.memory import UnitMemory, encode_settings
from mpips.store.server.state import ServerState
from mpips.store.server.unit import Frozen, Unit
from mpips.store.transport import frames
from mpips.store.transport.frames import Answer, Bytes, Frame, Op, OpenStore, Request, Snapshotted
from mpips.store.transport.lines import Line

REFUSALS = (ValueError, TypeError, MemoryError)
"""What a server answers with its sentence; it has changed nothing."""


class Requests:
    """What one server answers, in one generation. `generation`: its number."""

    def __init__(
        self, state: ServerState, name: str, memory: UnitMemory, generation: int = 0,
        compressor: Compressor | None = None,
    ) -> None:
        self._state, self._name, self._memory, self._generation = state, name, memory, generation
        self.compressor = compressor
        self.snapshots = FrozenUnits()
        self.waiting: list[tuple[int, Line, int, Request]] = []
        """(worker, line, token, request) of what waits until all that was pushed has been applied."""
        self._unsaid: list[tuple[Line, int, bytes, list[Unit]]] = []
        """(line, token, answer, units) of what is said once these units are with the mirror."""
        self.opening: dict[int, OpenStore] = {}
        """By workers that have asked for one more store: for which."""
        self._answers: dict[type[Request], Callable[[Any], Answer]] = {
            frames.Create: self._create, frames.Forget: self._forget, frames.Flush: self._flush,
            frames.SetOptimizer: self._set, frames.UpdateOptimizer: self._set, frames.SetCompression: self._set,
            frames.GetState: self._get_state, frames.PutState: self._put_state, frames.SetTorn: self._set_torn,
            frames.Snapshot: self._snapshot, frames.ReadSnapshot: self._read_snapshot,
            frames.DropSnapshot: self._drop_snapshot,
        }  # fmt: skip

    def heard(self, worker: int, line: Line, frame: Frame) -> bool:
        """A worker asks: answer, or keep the question for `answer_all`. Whether there are other units now."""
        request = frames.decode_request(line.body(frame))
        if self._at_once(request):
            return self._reply(worker, line, frame.token, request)
        self.waiting.append((worker, line, frame.token, request))
        return False

    def answer_all(self) -> bool:
        """All that was pushed has been applied: answer what has waited. Whether there are other units now."""
        waiting, self.waiting = self.waiting, []
        changed = [self._reply(*question) for question in waiting]
        return any(changed)

    def drop(self) -> None:
        """The generation is over: nobody waits for an answer."""
        self.waiting.clear()
        self._unsaid.clear()
        self.opening.clear()
        self.snapshots.clear()

    def _at_once(self, request: Request) -> bool:
        if isinstance(request, frames.Forget | frames.SetTorn):
            return self._state.idle(request.units)
        return isinstance(request, frames.Create | OpenStore | frames.ReadSnapshot | frames.DropSnapshot)

    def _reply(self, worker: int, line: Line, token: int, request: Request) -> bool:
        """Answer; where a request cannot be served, nothing has changed, and the worker hears why."""
        try:
            answer = self._answer(worker, request)
        except REFUSALS as error:
            line.post_body(f"{self._name}: {error}".encode(), Op.ANSWER, token=token, flags=1)
            return False
        unsaid = [unit for unit in self._changed(request) if not unit.mirrored]
        self._unsaid.append((line, token, frames.encode(answer), unsaid))
        self.say()
        return isinstance(request, frames.Create | frames.Forget)

    def _changed(self, request: Request) -> Iterable[Unit]:
        """Return the units that a request may have changed."""
        if isinstance(request, frames.SetOptimizer):
            return self._state.units.values()
        if isinstance(request, frames.PutState | frames.SetTorn):
            return [self._state.units[number] for number in request.units]
        return ()

    def say(self) -> None:
        """Answer what the mirror has by now, too; to be called after each look at the mirror."""
        unsaid, self._unsaid = self._unsaid, []
        for line, token, answer, units in unsaid:
            if rest := [unit for unit in units if not unit.mirrored]:
                self._unsaid.append((line, token, answer, rest))
            else:
                line.post_body(answer, Op.ANSWER, token=token)

    def _answer(self, worker: int, request: Request) -> Answer:
        if isinstance(request, OpenStore):
            self.opening[worker] = request
            return frames.Done()
        return self._answers[type(request)](request)

    # ---- units

    def _create(self, request: frames.Create) -> frames.Created:
        made = self._memory.make(request.units, self._state.optimizers)
        for unit in made.units:
            self._state.create(unit)
        self.publish()
        return made.where

    def _forget(self, request: frames.Forget) -> frames.Done:
        gone = [self._state.units.get(number) for number in request.units]
        self._state.forget(request.units)
        self.publish()
        del gone  # their memory may be another's only when the ledger does not name it any more
        return frames.Done()

    def _flush(self, request: frames.Flush) -> frames.Done:
        return frames.Done()

    # ---- settings

    def change(self, request: frames.Change) -> None:
        """Make a change of settings; one of `REFUSALS` where it cannot be made."""
        before = [unit.undo for unit in self._state.units.values()]
        if isinstance(request, frames.SetOptimizer):
            self._state.set_optimizer(optimizers.decode(request.optimizer), request.keys)
        elif isinstance(request, frames.UpdateOptimizer):
            self._state.update_optimizer(optimizers.decode_numbers(request.numbers), request.keys)
        else:
            self.compressor = compression.create(request.options)
        self.publish()
        del before  # as in `_forget`

    def once_more(self, change: frames.Change | None) -> str:
        """A generation begins: make the change that the end of the last one has interrupted; why it cannot be made, or
        "". The ledger says then what there is."""
        try:
            if change is not None:
                self.change(change)
        except REFUSALS as error:
            return f"{self._name}: {error}"
        self.publish()
        return ""

    def publish(self) -> None:
        """Tell those who outlive this server what it has."""
        if self._memory.ledger is not None:
            settings = encode_settings(self._state.optimizers, self.compressor)
            self._memory.publish(self._state.units.values(), settings, self._generation)

    def _set(self, request: frames.Change) -> frames.Done:
        self.change(request)
        return frames.Done()

    # ---- states

    def _get_state(self, request: frames.GetState) -> frames.StatePart:
        unit = self._state.units[request.unit]
        arrays = list(unit.state or ())
        return frames.StatePart(unit.step, [array.dtype.name for array in arrays], [a.tobytes() for a in arrays])

    def _put_state(self, request: frames.PutState) -> frames.Done:
        units = [self._state.units[number] for number in request.units]
        states = [_fitting(unit, part) for unit, part in zip(units, request.states, strict=True)]
        for unit, part, state in zip(units, request.states, states):
            unit.put_state(state, part.step)
            self._state.changed(unit)
        return frames.Done()

    def _set_torn(self, request: frames.SetTorn) -> frames.Done:
        for number in request.units:
            unit = self._state.units[number]
            unit.overwritten(request.torn)
            self._state.changed(unit)
        return frames.Done()

    # ---- snapshots

    def _snapshot(self, request: frames.Snapshot) -> frames.Snapshotted:
        return self.snapshots.take(request.number, [self._state.units[number] for number in request.units])

    def _read_snapshot(self, request: frames.ReadSnapshot) -> frames.Bytes:
        return self.snapshots.read(request.number, request.unit, request.slot, request.start, request.stop)

    def _drop_snapshot(self, request: frames.DropSnapshot) -> frames.Done:
        self.snapshots.drop(request.number)
        return frames.Done()


def _fitting(unit: Unit, part: frames.StatePart) -> list[np.ndarray] | None:
    """Return the arrays of a unit's new state, None where it has none yet; ValueError where they do not fit."""
    if unit.optimizer is None:
        raise ValueError(f"key {unit.key!r} has no optimizer, so it takes no state: call set_optimizer first")
    if not part.arrays and not part.step:
        return None
    state = optimizers.initial(unit.optimizer, unit.stored)
    given = [np.frombuffer(data, frames.dtype_of(name)) for data, name in zip(part.arrays, part.dtypes)]
    if [array.shape for array in given] != [array.shape for array in state]:
        unfit = f"the saved state does not fit {unit.optimizer!r}"
        raise ValueError(f"key {unit.key!r}: {unfit}: set the optimizer that it was saved of")
    for array, values in zip(state, given, strict=True):
        array[...] = values
    return state


class FrozenUnits:
    """The snapshots of one server, by number."""

    def __init__(self) -> None:
        self._frozen: dict[int, dict[int, tuple[Unit, Frozen]]] = {}
        self._due: list[Unit] = []
        """Units that may be copied while there is time."""

    def take(self, number: int, units: Iterable[Unit]) -> Snapshotted:
        """Freeze these units, of which none is being written to."""
        taken = self._frozen[number] = {}
        for unit in units:
            frozen = Frozen(unit)
            unit.frozen.append(frozen)
            taken[unit.number] = unit, frozen
            self._due.append(unit)
        every = [frozen for _, frozen in taken.values()]
        return Snapshotted([(it.round, it.step, [array.dtype.name for array in it.arrays[1:]]) for it in every])

    def read(self, number: int, unit: int, slot: int, start: int, stop: int) -> Bytes:
        """Elements [start, stop) of a frozen unit's values (slot -1), or of array `slot` of its state."""
        array = self._frozen[number][unit][1].arrays[1 + slot][start:stop]
        return Bytes(array.tobytes())

    def copy_next(self) -> None:
        """Copy one unit; call it when there is nothing else to do."""
        if self._due:
            self._due.pop().thaw()

    def drop(self, number: int) -> None:
        """What is frozen under this number may go; it may have gone already."""
        for unit, frozen in self._frozen.pop(number, {}).values():
            unit.frozen = [other for other in unit.frozen if other is not frozen]

    def clear(self) -> None:
        """Drop all."""
        for number in list(self._frozen):
            self.drop(number)

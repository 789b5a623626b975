"""Rare requests of workers to a server: new units, settings, states and snapshots.

Settings count from the next push on, so they wait until everything that was pushed before has been applied. What
concerns no push is answered at once: others may push only after it.

A snapshot holds values and states of units as they were at one moment, while updates go on. Nothing is copied when it
is taken. A unit that is about to be written to is copied first, whole; while the server has nothing else to do, it
copies the others. So it needs memory for a copy of what is frozen, until that is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from mpips import compression, optimizers
from mpips.collectives.errors import CollectiveError
from mpips.store.recovery.memory import UnitMemory
from mpips.store.recovery.plan import encode_settings
from mpips.store.server.service import Answers, Asker, Payload, Service
from mpips.store.server.state import ServerState
from mpips.store.server.unit import FrozenUnit, Known, Replies, Unit, UnknownError
from mpips.store.transport import frames
from mpips.store.transport.frames import Answer, Frame, Op, OpenStore, Request
from mpips.store.transport.lines import Line

AT_ONCE = (frames.Create, OpenStore, frames.ReadSnapshot, frames.DropSnapshot, frames.GetVersions)
"""What concerns no push, or what has been applied by now."""
REFUSALS = (ValueError, TypeError, MemoryError)
"""What a server answers with its sentence; it has changed nothing."""


class Requests:
    """The requests to one server in one generation, of this number. `name`: the server's, in sentences."""

    def __init__(
        self,
        state: ServerState,
        name: str,
        memory: UnitMemory,
        generation: int = 0,
        services: Sequence[Service] = (),
    ) -> None:
        self.services = services
        self._state, self._name, self._memory, self._generation = state, name, memory, generation
        self.snapshots: Known[int, Known[int, tuple[Unit, FrozenUnit]]] = Known("snapshot")
        """Snapshots by number: their units by number, with what is frozen of each."""
        self._due: list[Unit] = []
        """Units that may be copied while there is time."""
        self.waiting: list[tuple[int, Line, int, Request]] = []
        """(worker, line, token, request) of what waits until all that was pushed has been applied."""
        self._unsaid: list[tuple[Line, int, bytes, list[Unit]]] = []
        """(line, token, answer, units) of what is said once these units are with the mirror."""
        self._deferred: list[tuple[Service, int, Asker, Request, Payload]] = []
        """(service, worker, asker, request, payload) of what is heard once the mirror has what it needs."""
        self.opening: dict[int, OpenStore] = {}
        """By workers that have asked for one more store: for which."""

    # ---- questions and answers

    def answer(self, worker: int, line: Line, frame: Frame) -> bool:
        """Answer a request, or keep it for `answer_all`; return whether there are other units now."""
        body = line.body(frame)
        try:
            request = frames.decode_request(body[frame.aux :].data)
        except msgspec.MsgspecError as error:
            text = f"{self._name}: a request cannot be read: {error}: run the same version of mpips on all ranks"
            line.post_body(text.encode(), Op.ANSWER, token=frame.token, flags=1)
            return False
        for service in self.services:
            if isinstance(request, service.requests):
                self._ask(service, worker, (line, frame.token), request, body[: frame.aux])
                return False
        if isinstance(request, frames.Forget | frames.SetTorn):
            at_once = self._state.idle(request.units)
        else:
            at_once = isinstance(request, AT_ONCE)
        if at_once:
            return self._reply(worker, line, frame.token, request)
        self.waiting.append((worker, line, frame.token, request))
        self._state.asks(worker)
        return False

    def _ask(self, service: Service, worker: int, asker: Asker, request: Request, payload: Payload) -> None:
        """Let a service have a request, and say what it answers by now, to whomever it is."""
        if service.waits(request):
            self._deferred.append((service, worker, asker, request, payload))
            return
        try:
            answers = service.answer(worker, asker, request, payload)
        except REFUSALS as error:
            if isinstance(error, CollectiveError):
                raise
            self._refuse(*asker, error)
            return
        if service.take_changed():
            self.publish()
        self._post(answers)

    def _refuse(self, line: Line, token: int, error: Exception) -> None:
        flags = frames.NO_MEMORY if isinstance(error, MemoryError) else frames.REFUSED
        line.post_body(f"{self._name}: {error}".encode(), Op.ANSWER, token=token, flags=flags)

    def left(self, worker: int) -> None:
        """Let services know that a worker has left, and say what they answer."""
        for service in self.services:
            self._post(service.left(worker))

    def meets(self, worker: int) -> None:
        """Let services know that a worker waits for all others, and say what they answer."""
        for service in self.services:
            self._post(service.meets(worker))

    def all_met(self) -> None:
        """Let services know that all workers have waited for all."""
        for service in self.services:
            service.all_met()

    def tick(self, clock: float) -> Replies:
        """Look for waits that have become too long, of keys and services; see `ServerState.tick`."""
        rounds = [one for service in self.services for one in service.open]
        return self._state.tick(clock, rounds, [wait for service in self.services for wait in service.waits_to_hear()])

    def _post(self, answers: Answers) -> None:
        """Say what a service answers."""
        for (line, token), answer in answers:
            line.post_body(frames.encode(answer), Op.ANSWER, token=token)

    def answer_all(self) -> bool:
        """Answer what has waited, as all that was pushed has been applied; return whether there are other units now."""
        waiting, self.waiting = self.waiting, []
        self._state.asking.clear()
        changed = [self._reply(*question) for question in waiting]
        return any(changed)

    def post_mirrored(self) -> None:
        """Say what the mirror had to have first, and has by now; to be called after each look at the mirror."""
        for service in self.services:
            self._post(service.take_mirrored())
        deferred, self._deferred = self._deferred, []
        for request in deferred:
            self._ask(*request)
        unsaid, self._unsaid = self._unsaid, []
        for line, token, answer, units in unsaid:
            if rest := [unit for unit in units if not unit.mirrored]:
                self._unsaid.append((line, token, answer, rest))
            else:
                line.post_body(answer, Op.ANSWER, token=token)

    def drop(self) -> None:
        """Drop all, as the generation is over: nobody waits for an answer."""
        self.waiting.clear()
        self._unsaid.clear()
        self._deferred.clear()
        self.opening.clear()
        for number in list(self.snapshots):
            self._drop_snapshot(number)

    def _reply(self, worker: int, line: Line, token: int, request: Request) -> bool:
        """Answer; where a request cannot be served, nothing has changed, and the worker hears why."""
        try:
            answer = frames.encode(self._answer(worker, request))
        except REFUSALS as error:
            self._refuse(line, token, error)
            return False
        changed: list[Unit] = []
        if isinstance(request, frames.SetOptimizer):
            changed = list(self._state.units.values())
        elif isinstance(request, frames.PutState | frames.SetTorn):
            changed = [self._state.units[number] for number in request.units]
        self._unsaid.append((line, token, answer, changed))
        self.post_mirrored()
        return isinstance(request, frames.Create | frames.Forget)

    def _answer(self, worker: int, request: Request) -> Answer:
        """Do what is asked."""
        units = self._state.units
        match request:
            case frames.Create():
                made, where = self._memory.make(request.units, self._state.optimizers)
                for unit in made:
                    self._state.create(unit)
                self.publish()
                return where
            case frames.Forget():
                gone = [units.get(number) for number in request.units]
                self._state.forget(request.units)
                self.publish()
                del gone  # their memory may be another's only when the ledger does not name it any more
            case frames.SetOptimizer() | frames.UpdateOptimizer() | frames.SetCompression():
                self.change(request)
            case frames.GetState():
                unit = units[request.unit]
                arrays = list(unit.state or ())
                return frames.StatePart(unit.step, [one.dtype.name for one in arrays], [a.tobytes() for a in arrays])
            case frames.GetVersions():
                return frames.Versions([sum(units[number].done) for number in request.units])
            case frames.PutState():
                chosen = [units[number] for number in request.units]
                states = [_fitting(unit, part) for unit, part in zip(chosen, request.states, strict=True)]
                for unit, part, state in zip(chosen, request.states, states):
                    unit.put_state(state, part.step)
                    self._state.changed(unit)
            case frames.SetTorn():
                for unit in [units[number] for number in request.units]:
                    unit.note_overwrite(request.torn)
                    self._state.changed(unit)
            case frames.TakeSnapshot():
                return self._take_snapshot(request.number, [units[number] for number in request.units])
            case frames.ReadSnapshot():
                frozen = self.snapshots[request.number][request.unit][1]
                if not -1 <= request.slot < len(frozen.arrays) - 1:
                    raise UnknownError(f"unit {request.unit} has no state {request.slot} in the snapshot")
                return frames.Bytes(frozen.arrays[1 + request.slot][request.start : request.stop].tobytes())
            case frames.DropSnapshot():
                self._drop_snapshot(request.number)
            case OpenStore():
                self.opening[worker] = request
            case frames.Flush():  # it was due when all before it was applied
                pass
            case _:
                raise UnknownError(f"nothing here answers {type(request).__name__}")
        return frames.RequestDone()

    # ---- settings

    def change(self, request: frames.Change) -> None:
        """Make a change of settings; one of `REFUSALS` where it cannot be made."""
        before = [unit.undo for unit in self._state.units.values()]
        if isinstance(request, frames.SetOptimizer):
            self._state.set_optimizer(optimizers.decode(request.optimizer), request.keys)
        elif isinstance(request, frames.UpdateOptimizer):
            self._state.update_optimizer(optimizers.decode_numbers(request.numbers), request.keys)
        else:
            self._state.set_compressor(compression.create(request.options))
        self.publish()
        del before  # their memory may be another's only when the ledger does not name it any more

    def repeat_change(self, change: frames.Change | None) -> str:
        """Make the change that the end of the last generation has interrupted; return why it cannot be made, or "". The
        ledger says then what there is, for whoever needs it if this server dies next."""
        refused = ""
        if change is not None:
            try:
                self.change(change)
            except REFUSALS as error:
                refused = f"{self._name}: {error}"
        self.publish()
        return refused

    def publish(self) -> None:
        """Tell those who outlive this server what it has."""
        if self._memory.ledger is not None:
            settings = encode_settings(self._state.optimizers, self._state.compressor)
            entries = [entry for service in self.services for entry in service.entries()]
            self._memory.publish(self._state.units.values(), settings, self._generation, entries)

    # ---- snapshots

    def _take_snapshot(self, number: int, units: list[Unit]) -> frames.Snapshotted:
        """Freeze these units, none of which is being written to."""
        taken = self.snapshots[number] = Known("unit of the snapshot")
        for unit in units:
            frozen = FrozenUnit(unit)
            unit.frozen.append(frozen)
            taken[unit.number] = unit, frozen
            self._due.append(unit)
        every = [frozen for _, frozen in taken.values()]
        return frames.Snapshotted([(it.round, it.step, [array.dtype.name for array in it.arrays[1:]]) for it in every])

    def copy_next(self) -> None:
        """Copy one unit that is frozen; call it when there is nothing else to do."""
        if self._due:
            self._due.pop().thaw()

    def _drop_snapshot(self, number: int) -> None:
        """Let go what is frozen under this number; it may have gone already."""
        for unit, frozen in self.snapshots.pop(number, {}).values():
            unit.frozen = [other for other in unit.frozen if other is not frozen]


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

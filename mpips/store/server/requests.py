"""Requests of workers to a server that are not pushes or pulls of keys.

These requests concern new units, settings, states and snapshots. All requests of services, such as pushes to tables,
are also handled here.

A new setting takes effect from the next push on, so its request waits until all earlier pushes have been applied.
Requests that concern no push are answered at once, because other workers may push only after the answer.

A snapshot holds values and optimizer states of units as they were at one moment, while updates continue. Taking a
snapshot copies nothing. A unit is copied as a whole just before it is next written, or while the server has nothing
else to do. So until a snapshot is dropped, it may need as much memory as its units.

The mirror is another server, which keeps copies of this server's units. The ledger is a list of this server's units and
settings in shared memory, which other ranks read after this server's death.
"""

from __future__ import annotations

from collections.abc import Mapping

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

# requests that are answered at once, because they concern no push, or only pushes that have already been applied
AT_ONCE = (frames.Create, OpenStore, frames.ReadSnapshot, frames.DropSnapshot, frames.GetVersions)
# If a request raises one of these, the server answers with its message, and nothing has changed.
REFUSALS = (ValueError, TypeError, MemoryError)


class Requests:
    """The rare requests to one server in one generation.

    Args:
        name: The name of the server in error messages.
        generation: The number of the generation.
        services: name -> service
    """

    def __init__(
        self,
        state: ServerState,
        name: str,
        memory: UnitMemory,
        generation: int = 0,
        services: Mapping[str, Service] | None = None,
    ) -> None:
        # name -> service
        self.services = services or {}
        self._decode = frames.request_decoder(service.requests for service in self.services.values())
        self._state = state
        self._name = name
        self._memory = memory
        self._generation = generation
        # snapshot number -> unit number -> (unit, its frozen content)
        self.snapshots: Known[int, Known[int, tuple[Unit, FrozenUnit]]] = Known("snapshot")
        # units of snapshots, to be copied while the server has nothing else to do
        self._due: list[Unit] = []
        # (worker, line, token, request) of each request that waits until all pushes have been applied
        self.waiting: list[tuple[int, Line, int, Request]] = []
        # (line, token, answer, units) of each answer that is sent once the mirror has these units
        self._unsaid: list[tuple[Line, int, bytes, list[Unit]]] = []
        # (service, worker, asker, request, payload) of each request that waits until the mirror has the data for it
        self._deferred: list[tuple[Service, int, Asker, Request, Payload]] = []
        # worker -> the store that this worker has asked to open
        self.opening: dict[int, OpenStore] = {}

    # ---- questions and answers

    def answer(self, worker: int, line: Line, frame: Frame) -> bool:
        """Answer a request, or keep it for `answer_all`. Return True if units were made or forgotten."""
        body = line.body(frame)
        try:
            request = self._decode(body[frame.aux :].data)
        except msgspec.MsgspecError as error:
            text = f"{self._name}: a request cannot be read: {error}: run the same version of mpips on all ranks"
            line.post_body(text.encode(), Op.ANSWER, token=frame.token, flags=frames.REFUSED)
            return False
        for service in self.services.values():
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
        """Pass a request to its service, and send all answers that the service returns."""
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
        """Tell the services that a worker has left, and send their answers."""
        for service in self.services.values():
            self._post(service.left(worker))

    def meets(self, worker: int) -> None:
        """Tell the services that a worker waits in a barrier, and send their answers."""
        for service in self.services.values():
            self._post(service.meets(worker))

    def all_met(self) -> None:
        """Tell the services that all workers have passed a barrier."""
        for service in self.services.values():
            service.all_met()

    def tick(self, clock: float) -> Replies:
        """Check for waits that have become too long, for keys and for services. See `ServerState.tick`."""
        services = self.services.values()
        rounds = [part for service in services for part in service.open]
        return self._state.tick(clock, rounds, [wait for service in services for wait in service.waits_to_hear()])

    def _post(self, answers: Answers) -> None:
        for (line, token), answer in answers:
            line.post_body(frames.encode(answer), Op.ANSWER, token=token)

    def answer_all(self) -> bool:
        """Answer requests that waited until all pushes were applied. Return True if units were made or forgotten."""
        waiting, self.waiting = self.waiting, []
        self._state.asking.clear()
        changed = [self._reply(*question) for question in waiting]
        return any(changed)

    def post_mirrored(self) -> None:
        """Send the answers and handle the requests that waited for the mirror. Called after each look at the mirror."""
        for service in self.services.values():
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
        """Discard all requests at the end of a generation. No worker waits for an answer any more."""
        self.waiting.clear()
        self._unsaid.clear()
        self._deferred.clear()
        self.opening.clear()
        for number in list(self.snapshots):
            self._drop_snapshot(number)

    def _reply(self, worker: int, line: Line, token: int, request: Request) -> bool:
        """Answer a request. If the request is refused, nothing has changed, and the worker gets the reason.

        Return True if units were made or forgotten.
        """
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
                # Keep the old units until the ledger no longer lists them. Otherwise their memory could be reused while
                # it is listed.
                del gone
            case frames.SetOptimizer() | frames.UpdateOptimizer() | frames.SetCompression():
                self.change(request)
            case frames.GetState():
                unit = units[request.unit]
                arrays = list(unit.state or ())
                dtypes = [array.dtype.name for array in arrays]
                return frames.StatePart(unit.step, dtypes, [array.tobytes() for array in arrays])
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
            case frames.Flush():  # The worker only waits until all earlier pushes have been applied, and they have.
                pass
            case _:
                raise UnknownError(f"nothing here answers {type(request).__name__}")
        return frames.RequestDone()

    # ---- settings

    def change(self, request: frames.Change) -> None:
        """Change settings. Raises one of `REFUSALS` if the change is impossible."""
        before = [unit.undo for unit in self._state.units.values()]
        if isinstance(request, frames.SetOptimizer):
            self._state.set_optimizer(optimizers.decode(request.optimizer), request.keys)
        elif isinstance(request, frames.UpdateOptimizer):
            self._state.update_optimizer(optimizers.decode_numbers(request.numbers), request.keys)
        else:
            self._state.set_compressor(compression.create(request.options))
        self.publish()
        # Keep the old undo copies until the ledger no longer lists them. Otherwise their memory could be reused while
        # it is listed.
        del before

    def repeat_change(self, change: frames.Change | None) -> str:
        """Repeat the change of settings that the end of the last generation has interrupted.

        Return "", or the reason why the change is impossible. In any case also write the ledger (see `publish`).
        """
        refused = ""
        if change is not None:
            try:
                self.change(change)
            except REFUSALS as error:
                refused = f"{self._name}: {error}"
        self.publish()
        return refused

    def publish(self) -> None:
        """Write this server's units, settings and services into the ledger."""
        if self._memory.ledger is not None:
            settings = encode_settings(self._state.optimizers, self._state.compressor)
            entries = {name: entry for name, service in self.services.items() if (entry := service.ledger_entry())}
            self._memory.publish(self._state.units.values(), settings, self._generation, entries)

    # ---- snapshots

    def _take_snapshot(self, number: int, units: list[Unit]) -> frames.Snapshotted:
        """Take a snapshot of units, none of which is being written."""
        taken = self.snapshots[number] = Known("unit of the snapshot")
        for unit in units:
            frozen = FrozenUnit(unit)
            unit.frozen.append(frozen)
            taken[unit.number] = unit, frozen
            self._due.append(unit)
        every = [frozen for _, frozen in taken.values()]
        return frames.Snapshotted([(it.round, it.step, [array.dtype.name for array in it.arrays[1:]]) for it in every])

    def copy_next(self) -> None:
        """Copy one unit of a snapshot. Called when the server has nothing else to do."""
        if self._due:
            self._due.pop().thaw()

    def _drop_snapshot(self, number: int) -> None:
        """Drop a snapshot, if it exists."""
        for unit, frozen in self.snapshots.pop(number, {}).values():
            unit.frozen = [other for other in unit.frozen if other is not frozen]


def _fitting(unit: Unit, part: frames.StatePart) -> list[np.ndarray] | None:
    """Return the arrays of a unit's new state, or None if the unit gets no state.

    Raise ValueError if the arrays do not fit the unit's optimizer.
    """
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

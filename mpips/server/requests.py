"""Rare requests of workers to a server: new units, settings, states, snapshots, and rounds after a recovery.

Settings count from the next push on, so they wait until everything that was pushed before has been applied. What
concerns no push is answered at once: others may push only after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.node import arena
from mpips import compression, optimizers
from mpips.compression import Compressor
from mpips.server.snapshot import Snapshots
from mpips.server.state import State
from mpips.server.unit import Unit
from mpips.transport import frames
from mpips.transport.frames import Answer, Frame, Op, OpenStore, Request, UnitCard
from mpips.transport.line import Line

REFUSALS = (ValueError, TypeError, MemoryError)
"""What a server answers with its sentence; it has changed nothing."""


class Requests:
    """What one server answers."""

    def __init__(self, state: State, name: str) -> None:
        self._state, self._name = state, name
        self.compressor: Compressor | None = None
        self.snapshots = Snapshots()
        self.waiting: list[tuple[int, Line, int, Request]] = []
        """(worker, line, token, request) of what waits until all that was pushed has been applied."""
        self.opening: dict[int, OpenStore] = {}
        """By workers that have asked for one more store: for which."""
        self._answers: dict[type[Request], Callable[[Any], Answer]] = {
            frames.Create: self._create, frames.Forget: self._forget, frames.Flush: self._flush,
            frames.SetOptimizer: self._set_optimizer, frames.UpdateOptimizer: self._update_optimizer,
            frames.SetCompression: self._set_compression, frames.GetState: self._get_state,
            frames.PutState: self._put_state, frames.Rounds: self._rounds, frames.SetRounds: self._set_rounds,
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
        """The epoch is over: nobody waits for an answer."""
        self.waiting.clear()
        self.opening.clear()
        self.snapshots.clear()

    def _at_once(self, request: Request) -> bool:
        if isinstance(request, frames.Forget):
            return self._state.idle(request.units)
        return isinstance(request, frames.Create | OpenStore | frames.ReadSnapshot | frames.DropSnapshot)

    def _reply(self, worker: int, line: Line, token: int, request: Request) -> bool:
        """Answer; where a request cannot be served, nothing has changed, and the worker hears why."""
        try:
            answer = self._answer(worker, request)
        except REFUSALS as error:
            line.post_body(f"{self._name}: {error}".encode(), Op.ANSWER, token=token, flags=1)
            return False
        line.post_body(frames.encode(answer), Op.ANSWER, token=token)
        return isinstance(request, frames.Create | frames.Forget | frames.Rounds)

    def _answer(self, worker: int, request: Request) -> Answer:
        if isinstance(request, OpenStore):
            self.opening[worker] = request
            return frames.Done()
        return self._answers[type(request)](request)

    # ---- units

    def _create(self, request: frames.Create) -> frames.Created:
        cards = request.units
        itemsizes = [frames.dtype_of(card.dtype).itemsize for card in cards]
        first_words, words, first_bytes, nbytes = frames.arrange(cards, itemsizes)
        word_memory = arena.empty(max(words, 8), np.uint64)
        word_memory[...] = 0
        memory = arena.empty(nbytes, np.uint8)
        for card, itemsize, word, byte in zip(cards, itemsizes, first_words, first_bytes, strict=True):
            size = card.stop - card.start
            stored = memory[byte : byte + size * itemsize].view(frames.dtype_of(card.dtype))
            self._state.create(_unit(card, stored, word_memory[word : word + 1 + len(card.contributors)]))
        word_region, region = arena.locate(word_memory), arena.locate(memory)
        assert word_region is not None
        assert region is not None
        return frames.Created(tuple(word_region), tuple(region))

    def _forget(self, request: frames.Forget) -> frames.Done:
        self._state.forget(request.units)
        return frames.Done()

    def _flush(self, request: frames.Flush) -> frames.Done:
        return frames.Done()

    # ---- settings

    def _set_optimizer(self, request: frames.SetOptimizer) -> frames.Done:
        self._state.set_optimizer(optimizers.decode(request.optimizer), request.keys)
        return frames.Done()

    def _update_optimizer(self, request: frames.UpdateOptimizer) -> frames.Done:
        self._state.update_optimizer(optimizers.decode_numbers(request.numbers), request.keys)
        return frames.Done()

    def _set_compression(self, request: frames.SetCompression) -> frames.Done:
        self.compressor = compression.create(request.options)
        return frames.Done()

    # ---- states

    def _get_state(self, request: frames.GetState) -> frames.StatePart:
        unit = self._state.units[request.unit]
        arrays = list(unit.state or ())
        return frames.StatePart(unit.step, [array.dtype.name for array in arrays], [a.tobytes() for a in arrays])

    def _put_state(self, request: frames.PutState) -> frames.Done:
        unit, part = self._state.units[request.unit], request.state
        if unit.optimizer is None:
            raise ValueError(f"key {unit.key!r} has no optimizer, so it takes no state: call set_optimizer first")
        if not part.arrays and not part.step:
            unit.state, unit.step = None, 0
            return frames.Done()
        state = optimizers.initial(unit.optimizer, unit.stored)
        given = [np.frombuffer(data, frames.dtype_of(name)) for data, name in zip(part.arrays, part.dtypes)]
        if [array.shape for array in given] != [array.shape for array in state]:
            unfit = f"the saved state does not fit {unit.optimizer!r}"
            raise ValueError(f"key {unit.key!r}: {unfit}: set the optimizer that it was saved of")
        for array, values in zip(state, given, strict=True):
            array[...] = values
        unit.state, unit.step = state, part.step
        return frames.Done()

    # ---- after a recovery

    def _rounds(self, request: frames.Rounds) -> frames.RoundsAre:
        units = self._state.units
        self._state.forget(set(units) - set(request.units))
        return frames.RoundsAre(
            [units[number].round for number in request.units], [units[number].torn for number in request.units]
        )

    def _set_rounds(self, request: frames.SetRounds) -> frames.Done:
        for number, round_, torn in zip(request.units, request.rounds, request.torn, strict=True):
            unit = self._state.units[number]
            unit.torn = torn
            if unit.round != round_:
                self._state.count_from(unit, round_)
        return frames.Done()

    # ---- snapshots

    def _snapshot(self, request: frames.Snapshot) -> frames.Snapshotted:
        return self.snapshots.take(request.number, [self._state.units[number] for number in request.units])

    def _read_snapshot(self, request: frames.ReadSnapshot) -> frames.Bytes:
        return self.snapshots.read(request.number, request.unit, request.slot, request.start, request.stop)

    def _drop_snapshot(self, request: frames.DropSnapshot) -> frames.Done:
        self.snapshots.drop(request.number)
        return frames.Done()


def _unit(card: UnitCard, stored: np.ndarray, words: np.ndarray) -> Unit:
    """A new unit. Its words are looked at as a memoryview, which is faster than an array."""
    mine = memoryview(words)  # type: ignore[arg-type]
    return Unit(card.number, card.key, stored, mine, card.contributors, card.block_elements, card.row_elements)

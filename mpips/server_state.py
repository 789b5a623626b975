"""What a server knows and does, without MPI: events in, replies out, arithmetic on arrays in between.

The server loop turns frames into events (`pushed`, `refused`, `pulled`, `released`, `left`) and calls `work` as long as
it says that something was done; each returns the replies to send. A unit (see `sharding`) is independent of all others.

Synchronous: round r of a unit is complete when every contributor has pushed it r times. It is summed in the order of
the contributors (so results are bitwise reproducible), block by block while a block is in cache, each block is updated
by the optimizer (or replaces the stored one), and the unit's progress word tells readers how many blocks are done.
A contributor that has waited long is read ahead of the others into an accumulator, so that pushes of different
orders on different workers do not wait in a circle. A refusal fails the round for everybody; what is stored stays.
Asynchronous: every contribution is an update of its own, in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.optimizers import Optimizer
from mpips.row_sparse import RowSparse, add, update_rows
from mpips.unit import Reply, Source, Unit

BURST = 4  # blocks done before the server listens again
Array = NDArray[Any]
Replies = list[Reply]


class ServerState:
    """All units of one server. `clock` values are seconds of any monotonic clock."""

    def __init__(
        self, workers: Sequence[int], asynchronous: bool, staleness: int = -1, stall_seconds: float = 60.0,
        timeout_seconds: float = 0.0, remote: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self.workers = tuple(workers)
        self.asynchronous, self.staleness = asynchronous, staleness
        self.stall_seconds, self.timeout_seconds = stall_seconds, timeout_seconds
        self.remote = frozenset(remote)
        self.units: dict[int, Unit] = {}
        self.optimizer: Optimizer | None = None
        self.gone: set[int] = set()
        self.ready: dict[int, Unit] = {}  # units with work that can be done, or may be by now
        self.open: dict[int, Unit] = {}  # units with contributions that wait for others
        self.setting: deque[tuple[Unit, Source, int]] = deque()
        self._scratch = np.empty(0, np.uint8)

    # ---- events

    def create(self, unit: Unit) -> None:
        self.units[unit.number] = unit

    def forget(self, numbers: Iterable[int]) -> None:
        """Units that no worker will use again, though one may still say that it has read."""
        for number in numbers:
            for units in (self.units, self.ready, self.open):
                units.pop(number, None)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """From the next update on; state starts anew."""
        self.optimizer = optimizer
        for unit in self.units.values():
            unit.state, unit.step = None, 0

    def set(self, number: int, worker: int, source: Source) -> None:
        """The first value of a unit, written by one worker."""
        self.setting.append((self.units[number], source, worker))

    def pushed(self, number: int, worker: int, source: Source, priority: int, clock: float) -> Replies | None:
        """A contribution has come."""
        unit = self.units[number]
        unit.priority = priority
        index = unit.position[worker]
        if self.asynchronous:
            unit.push(index, source)
            unit.arrivals.append(index)
            self.ready[number] = unit
            return None
        queue = unit.queues[index]
        if not queue:
            if unit.missing == len(unit.queues):
                unit.opened, unit.warned = clock, False
                self.open[number] = unit
            unit.missing -= 1
        queue.append(source)
        if not unit.missing:
            self.ready[number] = unit
        elif self.gone or unit.poison:
            self.ready[number] = unit
            return self._open_round(unit)
        return None

    def refused(self, number: int, worker: int, sentence: str, clock: float) -> Replies:
        """A worker has failed locally: the open round fails for all. The worker need not be a contributor."""
        unit = self.units[number]
        index = unit.position.get(worker)
        if self.asynchronous:
            if index is not None:
                unit.push(index, sentence)
                unit.arrivals.append(index)
                self.ready[number] = unit
            return []
        if index is None:
            return [] if unit.poison else self._fail(unit, sentence)
        if not unit.waits:
            unit.opened, unit.warned = clock, False
            self.open[number] = unit
        unit.push(index, sentence)
        self.ready[number] = unit
        return self._open_round(unit)

    def pulled(self, number: int, worker: int, round_: int) -> Replies:
        """A worker asks to read a unit once `round_` of its own pushes count."""
        unit = self.units[number]
        unit.pulls.append((worker, round_))
        return self._grant(unit)

    def released(self, number: int, worker: int) -> None:
        """A reader has finished."""
        unit = self.units.get(number)
        if unit is None:
            return  # forgotten
        unit.readers -= 1
        if unit.waits:
            self.ready[number] = unit

    def left(self, worker: int) -> Replies:
        """A worker has closed the store: rounds that wait for it fail, nothing waits for it any more."""
        self.gone.add(worker)
        replies: Replies = []
        for unit in list(self.units.values()):
            if worker in unit.position and unit.waits:
                replies += self._open_round(unit)
                self.ready[unit.number] = unit
            replies += self._grant(unit)
        return replies

    def tick(self, clock: float) -> Replies:
        """Look for waits that have become too long; call now and then while idle."""
        replies: Replies = []
        for unit in list(self.open.values()):
            waited = clock - unit.opened
            if unit.poison or not unit.waits:
                continue
            if self.timeout_seconds and waited > self.timeout_seconds:
                replies += self._fail(unit, self._waiting(unit, waited), timed_out=True)
            elif waited > self.stall_seconds and not unit.warned:
                unit.warned = True
                came = [w for w, queue in zip(unit.contributors, unit.queues) if queue and w not in self.gone]
                replies += [Reply("WARNING", w, unit.number, text=self._waiting(unit, waited)) for w in came]
        return replies

    @property
    def quiet(self) -> bool:
        """Whether everything that was pushed has been applied, but for rounds that failed or are too far ahead."""
        return not self.ready and not self.setting and all(unit.poison for unit in self.open.values())

    # ---- work

    def work(self, ahead: bool = False) -> tuple[bool, Replies]:
        """Do one slice of what can be done, the highest priority first: (whether anything was done, replies).

        `ahead`: there was nothing to do for a while, so read early what waits for others.
        """
        if self.setting:
            return self._set_next()
        if self.ready:
            for unit in self._by_priority():
                worked, replies = self._async(unit) if self.asynchronous else self._sync(unit)
                if worked or replies:
                    return True, replies
        if ahead and not self.asynchronous:
            for unit in self.open.values():
                if not unit.poison and unit.queues[unit.ahead] and not isinstance(unit.queues[unit.ahead][0], str):
                    worked, replies = self._accumulate(unit)
                    if worked:
                        return True, replies
        return False, []

    def _by_priority(self) -> list[Unit]:
        if len(self.ready) == 1:
            return list(self.ready.values())
        return sorted(self.ready.values(), key=lambda unit: -unit.priority)

    def _set_next(self) -> tuple[bool, Replies]:
        unit, source, worker = self.setting[0]
        while unit.block < unit.blocks:
            if not source.ready(unit.block):
                return False, []
            start, stop = unit.bounds(unit.block)
            unit.stored[start:stop] = source.part(unit.block, start, stop)
            unit.block += 1
        unit.block = 0
        self.setting.popleft()
        return True, [Reply("CONSUMED", worker, unit.number)]

    def _open_round(self, unit: Unit) -> Replies:
        """Fail the open round if one of its contributions is a refusal or can never come."""
        if unit.poison or self.asynchronous:
            return []
        for worker, queue in zip(unit.contributors, unit.queues):
            if queue and isinstance(queue[0], str):
                return self._fail(unit, queue[0])
            if not queue and worker in self.gone and unit.waits:
                return self._fail(
                    unit, f"key {unit.key!r}: round {unit.round + 1} needs rank {worker}, which has left the store"
                )
        return []

    def _fail(self, unit: Unit, sentence: str, timed_out: bool = False) -> Replies:
        unit.poison = sentence
        self.ready[unit.number] = unit
        # Highest first: a client's master, its lowest rank, hears last and can count on the others' having been told.
        present = [worker for worker in reversed(self.workers) if worker not in self.gone]
        return [Reply("FAILED", worker, unit.number, unit.round + 1, sentence, timed_out) for worker in present]

    def _waiting(self, unit: Unit, waited: float) -> str:
        absent = [w for w, queue in zip(unit.contributors, unit.queues) if not queue and w not in self.gone]
        came = [w for w, queue in zip(unit.contributors, unit.queues) if queue]
        return (
            f"key {unit.key!r}: round {unit.round + 1} has waited {waited:.3g} s for ranks {absent}; "
            f"ranks {came} have pushed"
        )

    def _scratch_block(self, dtype: np.dtype, size: int) -> Array:
        if self._scratch.nbytes < size * dtype.itemsize:
            self._scratch = np.empty(size * dtype.itemsize, np.uint8)
        return self._scratch[: size * dtype.itemsize].view(dtype)

    # ---- synchronous

    def _sync(self, unit: Unit) -> tuple[bool, Replies]:
        if unit.poison:
            return self._drop(unit)
        if unit.missing:
            self.ready.pop(unit.number, None)
            return False, []
        if unit.readers:
            return False, []
        sources: list[Source] = [queue[0] for queue in unit.queues]  # type: ignore[misc]
        try:
            if unit.accumulator is None:
                steady = [array for source in sources if (array := source.steady) is not None]
                if len(steady) == len(sources):
                    return self._sum_there(unit, steady)
                if not any(source.coded for source in sources):
                    return self._sum_blocks(unit, sources)
            if unit.accumulator is None and (worked := self._apply_rows(unit, sources)) is not None:
                return worked
            if unit.ahead < len(sources):
                return self._accumulate(unit)
            return self._apply_accumulator(unit)
        except (TypeError, ValueError) as error:
            return True, self._fail(unit, f"key {unit.key!r}: the update on the server failed: {error}")

    def _sum_there(self, unit: Unit, arrays: Sequence[Array]) -> tuple[bool, Replies]:
        """Sum and apply blocks of contributions that are all there."""
        blocks, size = unit.blocks, unit.block_elements
        for number in range(unit.block, min(unit.block + BURST, blocks)):
            start = number * size
            stop = min(start + size, unit.stored.size)
            parts = arrays if blocks == 1 else [array[start:stop] for array in arrays]
            replies = self._apply(unit, self._sum(unit, parts, start, stop), start, stop)
        return True, replies

    def _sum_blocks(self, unit: Unit, sources: Sequence[Source]) -> tuple[bool, Replies]:
        """Sum a few blocks over the contributors, in their order, and apply them."""
        if not all(source.local for source in sources):
            return self._sum_arriving(unit, sources)
        began = unit.block
        for _ in range(BURST):
            number = unit.block
            if not all(source.ready(number) for source in sources):
                return number > began, []
            start, stop = unit.bounds(number)
            parts = [source.part(number, start, stop) for source in sources]
            replies = self._apply(unit, self._sum(unit, parts, start, stop), start, stop)
            if not unit.block:
                return True, replies
        return True, []

    def _sum_arriving(self, unit: Unit, sources: Sequence[Source]) -> tuple[bool, Replies]:
        """Sum one block whose contributions come as messages; goes on later where one is not there yet."""
        number, count, first = unit.block, len(sources), unit.part
        start, stop = unit.bounds(number)
        if unit.total is None:
            unit.total = np.empty(stop - start, unit.stored.dtype)
        while unit.part < count and sources[unit.part].ready(number):
            part = sources[unit.part].part(number, start, stop)
            if unit.part:
                np.add(unit.total, part, out=unit.total)
            else:
                unit.total[...] = part
            unit.part += 1
        if unit.part < count:
            for source in sources[unit.part + 1 :]:
                source.ready(number)  # it may start to come; or else all servers would wait for the same worker's link
            return unit.part > first, []
        total, unit.part, unit.total = unit.total, 0, None
        return True, self._apply(unit, total, start, stop)

    def _sum(self, unit: Unit, parts: Sequence[Array], start: int, stop: int) -> Array | None:
        """The parts added from first to last; None where the stored block was replaced by the sum."""
        if len(parts) == 1:
            return parts[0]
        if self.optimizer is None:
            total = unit.stored[start:stop]
        else:
            total = self._scratch_block(unit.stored.dtype, stop - start)
        np.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            np.add(total, part, out=total)
        return None if self.optimizer is None else total

    def _apply(self, unit: Unit, total: Array | None, start: int, stop: int) -> Replies:
        """Update the stored block by the sum (None: it has replaced the block already); the last block ends a round."""
        if total is not None:
            self._update(unit, start, stop, total)
        unit.block += 1
        if unit.block == unit.blocks:
            return self._finish(unit)
        unit.words[0] = unit.round * unit.blocks + unit.block
        return []

    def _update(self, unit: Unit, start: int, stop: int, gradient: Array) -> None:
        if self.optimizer is None:
            unit.stored[start:stop] = gradient
            return
        if unit.state is None:
            unit.state, unit.step = self.optimizer.init(unit.stored), 0
        if start == 0:
            unit.step += 1
        state = [array[start:stop] for array in unit.state]
        self.optimizer.update(unit.stored[start:stop], gradient, state, unit.step)

    def _apply_rows(self, unit: Unit, sources: Sequence[Source]) -> tuple[bool, Replies] | None:
        """A round to which everybody contributes rows updates only those rows; None where others contribute too."""
        if not all(source.coded and source.ready(0) for source in sources):
            return None
        parts = [source.rows() for source in sources]
        if any(part is None for part in parts):
            return None
        self._update_rows(unit, add(parts))  # type: ignore[arg-type]
        return True, self._finish(unit)

    def _update_rows(self, unit: Unit, gradient: RowSparse) -> None:
        table = unit.stored.reshape(gradient.shape)
        if self.optimizer is None:
            table[...] = 0
            table[gradient.rows] = gradient.values
            return
        if unit.state is None:
            unit.state, unit.step = self.optimizer.init(unit.stored), 0
        unit.step += 1
        update_rows(self.optimizer, table, gradient, unit.state, unit.step)

    def _accumulate(self, unit: Unit) -> tuple[bool, Replies]:
        """Add the next contributor, or a block of it, to the accumulator."""
        source = unit.queues[unit.ahead][0]
        assert not isinstance(source, str)
        if not source.ready(unit.ahead_block):
            return False, []
        if unit.accumulator is None:
            unit.accumulator = np.zeros_like(unit.stored)
        if source.coded:
            source.add_to(unit.accumulator)
            unit.ahead_block = unit.blocks
        else:
            start, stop = unit.bounds(unit.ahead_block)
            part = source.part(unit.ahead_block, start, stop)
            if unit.ahead:
                unit.accumulator[start:stop] += part
            else:
                unit.accumulator[start:stop] = part
            unit.ahead_block += 1
        if unit.ahead_block < unit.blocks:
            return True, []
        unit.ahead_block = 0
        unit.ahead += 1
        return True, self._consumed(unit, unit.ahead - 1, unit.round + 1)

    def _apply_accumulator(self, unit: Unit) -> tuple[bool, Replies]:
        assert unit.accumulator is not None
        start, stop = unit.bounds(unit.block)
        return True, self._apply(unit, unit.accumulator[start:stop], start, stop)

    def _consumed(self, unit: Unit, index: int, round_: int) -> Replies:
        unit.words[1 + index] = round_
        if unit.contributors[index] in self.remote:
            return [Reply("CONSUMED", unit.contributors[index], unit.number, round_)]
        return []

    def _drop(self, unit: Unit) -> tuple[bool, Replies]:
        """End a failed round once everybody has come to it or has left."""
        if any(not queue and worker not in self.gone for worker, queue in zip(unit.contributors, unit.queues)):
            self.ready.pop(unit.number, None)
            return False, []
        unit.poison = ""
        return True, self._finish(unit)

    def _finish(self, unit: Unit) -> Replies:
        """End the round: readers may have it, contributors may go on, the next round may already be there."""
        told = unit.ahead
        unit.round += 1
        unit.block = unit.part = unit.ahead = unit.ahead_block = 0
        unit.accumulator = unit.total = None
        unit.pop()
        words, round_ = unit.words, unit.round
        for index in range(told, len(unit.queues)):
            words[1 + index] = round_
        words[0] = round_ * unit.blocks
        number = unit.number
        self.ready.pop(number, None)
        self.open.pop(number, None)
        replies: Replies = []
        if self.remote:
            distant = [worker for worker in unit.contributors[told:] if worker in self.remote]
            replies += [Reply("CONSUMED", worker, number, round_) for worker in distant]
        if unit.missing < len(unit.queues):
            self.open[number] = unit
            replies += self._open_round(unit)
            if not unit.missing:
                self.ready[number] = unit
        if unit.pulls:
            replies += self._grant(unit)
        return replies

    # ---- asynchronous

    def _async(self, unit: Unit) -> tuple[bool, Replies]:
        if unit.readers:
            return False, []
        if unit.active < 0:
            unit.active = next(
                (i for i in unit.arrivals if not self._too_far(unit, unit.done[i])), -1
            )
        if unit.active < 0:
            self.ready.pop(unit.number, None)  # until something comes, or somebody leaves
            return False, []
        index = unit.active
        worker = unit.contributors[index]
        try:
            worked, finished = self._async_block(unit, unit.queues[index][0])
            failure = ""
        except (TypeError, ValueError) as error:
            worked, finished, failure = True, True, f"key {unit.key!r}: the update on the server failed: {error}"
        if not finished:
            return worked, []
        unit.arrivals.remove(index)
        unit.active = -1
        unit.queues[index].popleft()
        unit.missing += not unit.queues[index]
        unit.block = 0
        unit.done[index] += 1
        replies: Replies = []
        if failure:
            replies.append(Reply("FAILED", worker, unit.number, unit.done[index], failure))
        replies += self._consumed(unit, index, unit.done[index])
        return True, replies + self._grant(unit)

    def _async_block(self, unit: Unit, source: Source | str) -> tuple[bool, bool]:
        """Apply the next block of one contribution: (whether something was done, whether it was the last)."""
        if isinstance(source, str):
            return True, True
        if self.optimizer is None:
            raise ValueError("an asynchronous store needs an optimizer; call set_optimizer before the first push")
        if not source.ready(unit.block):
            return False, False
        if source.coded:
            rows = source.rows()
            if rows is not None:
                self._update_rows(unit, rows)
            else:
                total = np.zeros_like(unit.stored)
                source.add_to(total)
                self._update(unit, 0, total.size, total)
            return True, True
        start, stop = unit.bounds(unit.block)
        self._update(unit, start, stop, source.part(unit.block, start, stop))
        unit.block += 1
        return True, unit.block == unit.blocks

    def _too_far(self, unit: Unit, steps: int) -> bool:
        """Whether a worker after `steps` pushes of the unit is more than `staleness` ahead of the slowest."""
        if self.staleness < 0:
            return False
        slowest = min(
            (done for worker, done in zip(unit.contributors, unit.done) if worker not in self.gone), default=steps
        )
        return steps - slowest > self.staleness

    # ---- reading

    def _grant(self, unit: Unit) -> Replies:
        """Let those read whose own pushes count by now; nothing is written until they have finished."""
        if unit.block or not unit.pulls:
            return []
        replies: Replies = []
        waiting = []
        for worker, round_ in unit.pulls:
            if self._may_read(unit, worker, round_):
                unit.readers += 1
                replies.append(Reply("GRANT", worker, unit.number, round_))
            else:
                waiting.append((worker, round_))
        unit.pulls = waiting
        return replies

    def _may_read(self, unit: Unit, worker: int, round_: int) -> bool:
        if not self.asynchronous:
            return unit.round >= round_
        index = unit.position.get(worker)
        return (index is None or unit.done[index] >= round_) and not self._too_far(unit, round_)

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
from collections.abc import Iterable, MutableSequence, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mpips.optimizers import Optimizer, State
from mpips.row_sparse import RowSparse, add, update_rows

Array = NDArray[Any]
Replies = list["Reply"]


class Source(Protocol):
    """A contribution's payload, wherever it lies."""

    local: bool
    """Whether it lies in memory of this node."""
    coded: bool
    """Whether it is compressed or row-sparse: then `ready(0)` is asked and it is taken whole, else block by block."""

    def ready(self, block: int) -> bool:
        """Whether this block can be read; asking may start to fetch it."""
        ...

    def part(self, block: int, start: int, stop: int) -> Array:
        """Elements [start, stop) of the unit, which are this block's. Plain payloads only."""
        ...

    def add_to(self, out: Array) -> None:
        """Add all elements to `out`. Coded payloads only."""
        ...

    def rows(self) -> RowSparse | None:
        """The payload as rows, or None where it is not row-sparse."""
        ...


class Reply(NamedTuple):
    """Something a worker must hear. `what` names an `Op`: CONSUMED, GRANT, FAILED or WARNING."""

    what: str
    worker: int
    unit: int
    round: int = 0
    text: str = ""
    timed_out: bool = False


class Contribution(NamedTuple):
    """One push in a queue: a payload, or the sentence of a refusal."""

    round: int
    source: Source | None
    refusal: str = ""


class Unit:
    """One unit on its server. `words[0]` counts finished blocks over all rounds, `words[1 + i]` the rounds of
    contributor i that have been read; both are all that readers on the same node need to see."""

    def __init__(
        self, number: int, key: int | str, stored: Array, words: MutableSequence[int] | memoryview, contributors: Sequence[int],
        block_elements: int, row_elements: int = 1,
    ) -> None:  # fmt: skip
        self.number, self.key, self.stored, self.words = number, key, stored, words
        self.contributors = tuple(contributors)
        self.position = {worker: index for index, worker in enumerate(self.contributors)}
        self.block_elements = max(1, block_elements)
        self.blocks = max(1, -(-stored.size // self.block_elements))
        self.row_elements = row_elements
        self.queues: list[deque[Contribution]] = [deque() for _ in self.contributors]
        self.arrivals: deque[int] = deque()  # asynchronous: positions in order of arrival
        self.done = [0] * len(self.contributors)  # rounds of each contributor that are finished
        self.round = 0
        self.block = 0
        self.part = 0  # contributors already summed into the scratch of this block
        self.ahead = 0  # contributors already in `accumulator`, whole
        self.ahead_block = 0
        self.accumulator: Array | None = None
        self.total: Array | None = None  # sum of a block so far, kept while the next contributor's is awaited
        self.active = -1  # asynchronous: the contributor whose push is being applied
        self.readers = 0
        self.poison = ""
        self.opened = 0.0
        self.warned = False
        self.state: State | None = None
        self.step = 0
        self.priority = 0
        self.pulls: list[tuple[int, int]] = []  # (worker, its rounds) that wait for a grant

    @property
    def progress(self) -> int:
        return int(self.words[0])


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

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """From the next update on; state starts anew."""
        self.optimizer = optimizer
        for unit in self.units.values():
            unit.state, unit.step = None, 0

    def set(self, number: int, worker: int, source: Source) -> None:
        """The first value of a unit, written by one worker."""
        self.setting.append((self.units[number], source, worker))

    def pushed(self, number: int, worker: int, round_: int, source: Source, priority: int, clock: float) -> Replies:
        """A contribution has come."""
        unit = self.units[number]
        queue = unit.queues[unit.position[worker]]
        queue.append(Contribution(round_, source))
        return self._arrived(unit, worker, priority, clock)

    def refused(self, number: int, worker: int, round_: int, sentence: str, clock: float) -> Replies:
        """A contributor has failed locally: its round will fail for all."""
        unit = self.units[number]
        unit.queues[unit.position[worker]].append(Contribution(round_, None, sentence))
        return self._arrived(unit, worker, 0, clock)

    def pulled(self, number: int, worker: int, round_: int) -> Replies:
        """A worker asks to read a unit once `round_` of its own pushes count."""
        unit = self.units[number]
        unit.pulls.append((worker, round_))
        return self._grant(unit)

    def released(self, number: int, worker: int) -> None:
        """A reader has finished."""
        unit = self.units[number]
        unit.readers -= 1
        if any(unit.queues):
            self.ready[number] = unit

    def left(self, worker: int) -> Replies:
        """A worker has closed the store: rounds that wait for it fail, nothing waits for it any more."""
        self.gone.add(worker)
        replies: Replies = []
        for unit in list(self.units.values()):
            if worker in unit.position and any(unit.queues):
                replies += self._open_round(unit)
                self.ready[unit.number] = unit
            replies += self._grant(unit)
        return replies

    def tick(self, clock: float) -> Replies:
        """Look for waits that have become too long; call now and then while idle."""
        replies: Replies = []
        for unit in list(self.open.values()):
            waited = clock - unit.opened
            if unit.poison or not any(unit.queues):
                continue
            if self.timeout_seconds and waited > self.timeout_seconds:
                replies += self._fail(unit, self._waiting(unit, waited), timed_out=True)
            elif waited > self.stall_seconds and not unit.warned:
                unit.warned = True
                came = [worker for worker, queue in zip(unit.contributors, unit.queues) if queue]
                replies += [Reply("WARNING", w, unit.number, text=self._waiting(unit, waited)) for w in came]
        return replies

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
                if not unit.poison and unit.queues[unit.ahead] and unit.queues[unit.ahead][0].source:
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
            start, stop = self._bounds(unit)
            unit.stored[start:stop] = source.part(unit.block, start, stop)
            unit.block += 1
        unit.block = 0
        self.setting.popleft()
        return True, [Reply("CONSUMED", worker, unit.number)]

    def _arrived(self, unit: Unit, worker: int, priority: int, clock: float) -> Replies:
        unit.priority = priority
        if self.asynchronous:
            unit.arrivals.append(unit.position[worker])
            self.ready[unit.number] = unit
            return []
        replies: Replies = []
        if unit.number not in self.open:
            unit.opened, unit.warned = clock, False
            self.open[unit.number] = unit
        if self.gone or not unit.queues[unit.position[worker]][-1].source:
            replies = self._open_round(unit)
        if all(unit.queues) or unit.poison:
            self.ready[unit.number] = unit
        return replies

    def _open_round(self, unit: Unit) -> Replies:
        """Fail the open round if one of its contributions is a refusal or can never come."""
        if unit.poison or self.asynchronous:
            return []
        for worker, queue in zip(unit.contributors, unit.queues):
            if queue and not queue[0].source:
                return self._fail(unit, queue[0].refusal)
            if not queue and worker in self.gone and any(unit.queues):
                return self._fail(
                    unit, f"key {unit.key!r}: round {unit.round + 1} needs rank {worker}, which has left the store"
                )
        return []

    def _fail(self, unit: Unit, sentence: str, timed_out: bool = False) -> Replies:
        unit.poison = sentence
        self.ready[unit.number] = unit
        return [
            Reply("FAILED", worker, unit.number, unit.round + 1, sentence, timed_out)
            for worker in self.workers
            if worker not in self.gone
        ]

    def _waiting(self, unit: Unit, waited: float) -> str:
        absent = [w for w, queue in zip(unit.contributors, unit.queues) if not queue and w not in self.gone]
        came = [w for w, queue in zip(unit.contributors, unit.queues) if queue]
        return (
            f"key {unit.key!r}: round {unit.round + 1} has waited {waited:.3g} s for ranks {absent}; "
            f"ranks {came} have pushed"
        )

    def _bounds(self, unit: Unit) -> tuple[int, int]:
        start = unit.block * unit.block_elements
        return start, min(start + unit.block_elements, unit.stored.size)

    def _scratch_block(self, dtype: np.dtype, size: int) -> Array:
        if self._scratch.nbytes < size * dtype.itemsize:
            self._scratch = np.empty(size * dtype.itemsize, np.uint8)
        return self._scratch[: size * dtype.itemsize].view(dtype)

    # ---- synchronous

    def _sync(self, unit: Unit) -> tuple[bool, Replies]:
        if unit.poison:
            return self._drop(unit)
        if not all(unit.queues):
            self.ready.pop(unit.number, None)
            return False, []
        if unit.readers:
            return False, []
        sources = [queue[0].source for queue in unit.queues]
        try:
            if unit.accumulator is None and not any(source.coded for source in sources):  # type: ignore[union-attr]
                return self._sum_block(unit, sources)  # type: ignore[arg-type]
            if unit.accumulator is None and (worked := self._apply_rows(unit, sources)) is not None:  # type: ignore[arg-type]
                return worked
            if unit.ahead < len(sources):
                return self._accumulate(unit)
            return self._apply_accumulator(unit)
        except (TypeError, ValueError) as error:
            return True, self._fail(unit, f"key {unit.key!r}: the update on the server failed: {error}")

    def _sum_block(self, unit: Unit, sources: Sequence[Source]) -> tuple[bool, Replies]:
        """Sum one block over the contributors in their order and apply it; goes on later where one is not there yet."""
        start, stop = self._bounds(unit)
        number, count = unit.block, len(sources)
        if unit.total is None:
            if all(source.local and source.ready(number) for source in sources):
                parts = [source.part(number, start, stop) for source in sources]
                return True, self._apply(unit, self._sum(unit, parts, start, stop))
            unit.total = np.empty(stop - start, unit.stored.dtype)
        first = unit.part
        while unit.part < count and sources[unit.part].ready(number):
            part = sources[unit.part].part(number, start, stop)
            if unit.part:
                np.add(unit.total, part, out=unit.total)
            else:
                unit.total[...] = part
            unit.part += 1
        if unit.part < count:
            if unit.part + 1 < count:
                sources[unit.part + 1].ready(number)  # it may start to come
            return unit.part > first, []
        total, unit.part, unit.total = unit.total, 0, None
        return True, self._apply(unit, total)

    def _sum(self, unit: Unit, parts: list[Array], start: int, stop: int) -> Array | None:
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

    def _apply(self, unit: Unit, total: Array | None) -> Replies:
        """Update the stored block by the sum (None: it has replaced the block already); the last block ends a round."""
        start, stop = self._bounds(unit)
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
        source = unit.queues[unit.ahead][0].source
        assert source is not None
        if not source.ready(unit.ahead_block):
            return False, []
        if unit.accumulator is None:
            unit.accumulator = np.zeros_like(unit.stored)
        if source.coded:
            source.add_to(unit.accumulator)
            unit.ahead_block = unit.blocks
        else:
            start = unit.ahead_block * unit.block_elements
            stop = min(start + unit.block_elements, unit.stored.size)
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
        start, stop = self._bounds(unit)
        return True, self._apply(unit, unit.accumulator[start:stop])

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
        replies: Replies = []
        for index, queue in enumerate(unit.queues):
            if queue:
                queue.popleft()
            if index >= told:
                replies += self._consumed(unit, index, unit.round)
        unit.words[0] = unit.round * unit.blocks
        self.ready.pop(unit.number, None)
        self.open.pop(unit.number, None)
        if any(unit.queues):
            self.open[unit.number] = unit
            replies += self._open_round(unit)
            if all(unit.queues):
                self.ready[unit.number] = unit
        if unit.pulls:
            replies += self._grant(unit)
        return replies

    # ---- asynchronous

    def _async(self, unit: Unit) -> tuple[bool, Replies]:
        if unit.readers:
            return False, []
        if unit.active < 0:
            unit.active = next(
                (i for i in unit.arrivals if not self._too_far(unit, unit.queues[i][0].round - 1)), -1
            )
        if unit.active < 0:
            if not unit.arrivals:
                self.ready.pop(unit.number, None)
            return False, []
        index = unit.active
        contribution = unit.queues[index][0]
        worker = unit.contributors[index]
        try:
            worked, finished = self._async_block(unit, contribution)
            failure = ""
        except (TypeError, ValueError) as error:
            worked, finished, failure = True, True, f"key {unit.key!r}: the update on the server failed: {error}"
        if not finished:
            return worked, []
        unit.arrivals.remove(index)
        unit.active = -1
        unit.queues[index].popleft()
        unit.block = 0
        unit.done[index] = contribution.round
        replies: Replies = []
        if failure:
            replies.append(Reply("FAILED", worker, unit.number, contribution.round, failure))
        replies += self._consumed(unit, index, contribution.round)
        return True, replies + self._grant(unit)

    def _async_block(self, unit: Unit, contribution: Contribution) -> tuple[bool, bool]:
        """Apply the next block of one contribution: (whether something was done, whether it was the last)."""
        source = contribution.source
        if source is None:
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
        start, stop = self._bounds(unit)
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

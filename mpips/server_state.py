"""What a server knows and does, without MPI: events in, replies out, arithmetic on arrays in between.

The server loop turns frames into events (`pushed`, `refused`, `pulled`, `released`, `left`) and calls `work` as long as
it says that something was done; each returns the replies to send. A unit (see `sharding`) is independent of all others.

Synchronous: round r of a unit is complete when every contributor has pushed it r times. It is summed in the order of
the contributors (so results are bitwise reproducible), block by block while a block is in cache, each block is updated
by the optimizer (or replaces the stored one), and the unit's progress word tells readers how many blocks are done.
A contributor that has waited long is read ahead of the others into an accumulator, so that pushes of different
orders on different workers do not wait in a circle. A refusal fails the round for everybody; what is stored stays.
A contribution that is there and has begun to count is not taken back.
Asynchronous: every contribution is an update of its own, in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

from mpips.optimizers import Optimizer
from mpips.reads import Reads
from mpips.sums import Replies
from mpips.unit import Reply, Source, Unit, drop

TURNS, SHORT_BYTES = 8, 1 << 14
"""Before a server listens again: so many units of at most so many bytes, or one longer one."""
PRIORITY = attrgetter("priority")


class ServerState(Reads):
    """All units of one server. `clock` values are seconds of any monotonic clock."""

    def __init__(
        self, workers: Sequence[int], asynchronous: bool, staleness: int = -1, stall_seconds: float = 60.0,
        timeout_seconds: float = 0.0, remote: Iterable[int] = (), threads: int = 1,
        begin_thread: Callable[[], None] | None = None, cores_shared: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(asynchronous, staleness, remote, threads, begin_thread, cores_shared)
        self.workers = tuple(workers)
        self.stall_seconds, self.timeout_seconds = stall_seconds, timeout_seconds
        self.open: dict[int, Unit] = {}  # units with contributions that wait for others
        self._ranked = False  # whether any unit has a priority: to sort hundreds at every step takes as long as to sum
        self.setting: deque[tuple[Unit, Source, int]] = deque()

    # ---- events

    def create(self, unit: Unit) -> None:
        self.units[unit.number] = unit

    def forget(self, numbers: Iterable[int]) -> None:
        """Units that no worker will use again, though one may still say that it has read. Some may not be there, and
        some not have got their first value yet."""
        gone = [self.units[number] for number in numbers if number in self.units]
        drop(source for unit, source, _ in self.setting if unit in gone)
        self.setting = deque(item for item in self.setting if item[0] not in gone)
        for number in [unit.number for unit in gone]:
            for queue in self.units[number].queues:
                drop(queue)
            for units in (self.units, self.ready, self.open):
                units.pop(number, None)

    def idle(self, numbers: Iterable[int]) -> bool:
        """Whether all that was pushed of these units has been applied."""
        return not any(number in self.ready or number in self.open for number in numbers)

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
        if priority != unit.priority:
            unit.priority, self._ranked = priority, True
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

    def refused(self, number: int, worker: int, sentence: str, round_: int, clock: float) -> Replies:
        """A worker has failed locally: its contribution to the round will not come, or is withdrawn, so the round fails
        for all. The worker need not be a contributor."""
        unit = self.units[number]
        index = unit.position.get(worker)
        if index is None:
            return [] if unit.poison or self.asynchronous else self._fail(unit, sentence)
        place = round_ - 1 - (unit.done[index] if self.asynchronous else unit.round)
        if place < 0:
            return []  # it has ended
        if place == 0 and unit.counts(index):
            return []  # it is finished
        if place < len(unit.queues[index]):
            unit.withdraw(index, place, sentence)
        else:
            if self.asynchronous:
                unit.arrivals.append(index)
            elif not unit.waits:
                unit.opened, unit.warned = clock, False
                self.open[number] = unit
            unit.push(index, sentence)
        self.ready[number] = unit
        return self._open_round(unit)

    def left(self, worker: int) -> Replies:
        """A worker has closed the store: rounds that wait for it fail, nothing waits for it any more."""
        self.gone.add(worker)
        replies: Replies = []
        for unit in list(self.units.values()):
            self._read_no_more(unit, worker)
            if unit.waits:
                replies += self._open_round(unit)
                self.ready[unit.number] = unit
            replies += self._grant(unit)
        return replies

    def tick(self, clock: float) -> Replies:
        """Look for waits that have become too long; call now and then while idle."""
        replies: Replies = []
        late: dict[str, tuple[float, list[Unit]]] = {}
        """How long the first has waited, and the units to warn of now, by who waits for whom."""
        for unit in list(self.open.values()):
            if unit.poison or not unit.waits or not unit.missing:
                continue
            if unit.opened is None:
                unit.opened = clock
            waited = clock - unit.opened
            if self.timeout_seconds and waited > self.timeout_seconds:
                replies += self._fail(unit, self._waiting([unit], waited), timed_out=True)
            elif waited > self.stall_seconds and not unit.warned:
                unit.warned = True
                late.setdefault(self._who(unit), (waited, []))[1].append(unit)
        for waited, units in late.values():
            first, text = units[0], self._waiting(units, waited)
            came = [w for w, queue in zip(first.contributors, first.queues) if queue and w not in self.gone]
            replies += [Reply("WARNING", w, first.number, text=text) for w in came]
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
        if len(self.ready) == 1:
            unit = next(iter(self.ready.values()))
            worked, replies = self._turn(unit)
            if worked or replies:
                return True, replies
        elif self.ready and (said := self._turns()) is not None:
            return True, said
        if ahead and not self.asynchronous:
            for unit in self.open.values():
                if not unit.missing or unit.poison or not unit.queues[unit.ahead]:
                    continue
                if not isinstance(unit.queues[unit.ahead][0], str):
                    worked, replies = self._read_next(unit)
                    if worked:
                        return True, replies
        return False, []

    def _turns(self) -> Replies | None:
        """A turn for the first unit that can go on, or for some if they are short; None where none can."""
        said: Replies = []
        turns = 0
        for unit in self._by_priority() if self._ranked else self._as_they_came():
            worked, replies = self._turn(unit)
            if not (worked or replies):
                continue
            turns += 1
            said += replies
            if turns == TURNS or unit.stored.nbytes > SHORT_BYTES:
                break
        return said if turns else None

    def _turn(self, unit: Unit) -> tuple[bool, Replies]:
        return self._async(unit) if self.asynchronous else self._sync(unit)

    def _by_priority(self) -> list[Unit]:
        return sorted(self.ready.values(), key=PRIORITY, reverse=True)  # of one priority: as they came

    def _as_they_came(self) -> Iterator[Unit]:
        """Mostly the first one is enough, and of thousands a list takes longer than a sum."""
        first = next(iter(self.ready.values()))
        yield first
        few = [unit for unit in islice(self.ready.values(), TURNS) if unit is not first]
        yield from few
        yield from [unit for unit in self.ready.values() if unit is not first and unit not in few]

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

    def _waiting(self, units: Sequence[Unit], waited: float) -> str:
        """What is said of units that wait for the same workers, so long for the first."""
        first, others = units[0], {unit.key for unit in units} - {units[0].key}
        more = f" (and {len(others)} more key{'s' * (len(others) > 1)})" if others else ""
        return f"key {first.key!r}{more}: round {first.round + 1} has waited {waited:.3g} s for {self._who(first)}"

    def _who(self, unit: Unit) -> str:
        """Which workers have pushed to the unit's round, and which have not."""
        absent = [w for w, queue in zip(unit.contributors, unit.queues) if not queue and w not in self.gone]
        came = [w for w, queue in zip(unit.contributors, unit.queues) if queue]
        return f"ranks {absent}; ranks {came} have pushed"

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
                if unit.blocks == 1 and not self._worth_sharing(unit, sources, 0, 1):
                    steady = [array for source in sources if (array := source.steady) is not None]
                    if len(steady) == len(sources):
                        return self._sum_whole(unit, steady)
                if not any(source.coded for source in sources):
                    return self._sum_blocks(unit, sources)
            if unit.accumulator is None:
                return self._sum_rows(unit)
            if unit.ahead < len(sources):
                return self._read_next(unit)
            return self._apply_accumulator(unit)
        except (TypeError, ValueError) as error:
            return True, self._fail(unit, f"key {unit.key!r}: the update on the server failed: {error}")

    def _drop(self, unit: Unit) -> tuple[bool, Replies]:
        """End a failed round once everybody has come to it or has left."""
        if any(not queue and worker not in self.gone for worker, queue in zip(unit.contributors, unit.queues)):
            self.ready.pop(unit.number, None)
            return False, []
        unit.poison = ""
        for queue in unit.queues:
            drop(islice(queue, 1))
        return True, self._finish(unit)

    def _finish(self, unit: Unit) -> Replies:
        """End the round: readers may have it, contributors may go on, the next round may already be there."""
        told = unit.ahead
        unit.round += 1
        unit.block = unit.part = unit.ahead = unit.ahead_block = 0
        unit.accumulator = unit.total = unit.rows = None
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
            unit.opened, unit.warned = None, False
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
        except (TypeError, ValueError) as error:
            failure = f"key {unit.key!r}: the update on the server failed: {error}"
            unit.withdraw(index, 0, failure)  # it ends in the next step: who sees that has been told why
            return True, [Reply("FAILED", worker, unit.number, unit.done[index] + 1, failure)]
        if not finished:
            return worked, []
        unit.words[0] += unit.words[0] & 1
        unit.arrivals.remove(index)
        unit.active = -1
        unit.queues[index].popleft()
        unit.missing += not unit.queues[index]
        unit.block = 0
        unit.done[index] += 1
        replies = self._consumed(unit, index, unit.done[index])
        return True, replies + self._grant(unit)

"""Decide when a server applies pushes and lets pulls return: in rounds, or as they come within `staleness`. No MPI.

Events come in, replies go out, arithmetic lies in between.

The loop turns frames into events (`pushed`, `pulled`, `released`, `waits`, `meets`, `left`), and calls `work` as long
as it says that something was done; each returns the replies to send. A unit is independent of all others. What is
raised ends the generation: then `finish` goes on as far as it can, and `abandon` drops the rest. The next generation
has another state.

`SynchronousState` applies rounds: round r of a unit is complete when every contributor has pushed it r times. It is
summed in the order of the contributors, block by block. Each block is updated by the optimizer, or replaces the stored
one, and the unit's progress word tells readers how many blocks are done. A worker may be any number of rounds ahead.

`AsynchronousState` applies every contribution as an update of its own, as they come. A worker that is too far ahead of
the slowest has its pushes and pulls held back. Who waits for all workers, in a barrier or to close, pushes nothing
until all do: it holds nobody back, and pushes are counted anew from there. Workers of this node may read a unit of one
block unasked, between two updates: `words[0]` is odd while one is being written, and counts up. Updates that follow
each other closely leave them no time: then they ask.

Who reads under a grant holds updates back until it has finished. Workers of this node read a synchronous store without
asking, behind its progress word.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.errors import CollectiveError, MismatchError
from mpips.collectives.kernels import sums
from mpips.collectives.recorder import own as recorder
from mpips.collectives.recorder.ring import Ring, form
from mpips.compression import Compressor
from mpips.optimizers import Groups, Optimizer
from mpips.optimizers.equation import prepare
from mpips.store.server.late import BEFORE_LEAVING, InRounds, Late, Wait
from mpips.store.server.reduce import Reduce
from mpips.store.server.unit import Contribution, Known, Replies, Reply, Unit, UnitMirror

TURNS, SHORT_BYTES = 8, 1 << 14
"""What a server does before it listens again: turns of units of at most so many bytes, or one of a longer one."""
PRIORITY = attrgetter("priority")
LANE = 3 << 62
"""Of the recorder: what this process' servers do. Above the lanes that stores have."""
Name = int | str


@cache
def _marks() -> recorder.Marks:
    """Return the lane of this process' server."""
    return recorder.Marks(LANE)


class ServerState(ABC):
    """All units of one server. `clock` values are seconds of any monotonic clock.

    `remote`: workers of other nodes, which read by messages. `mirror`: where a unit is sent that has changed.
    """

    asynchronous: bool

    def __init__(
        self,
        remote: Iterable[int] = (),
        late: Late | None = None,
        reduce: Reduce | None = None,
        optimizers: Groups | None = None,
        mirror: UnitMirror | None = None,
        compressor: Compressor | None = None,
    ) -> None:
        self.units: Known[int, Unit] = Known("unit")
        self.lane = LANE
        """Of records: that of the store, once it is known."""
        self.optimizers, self.compressor = optimizers or Groups(), compressor
        self.late = late or Late()
        self.ready: dict[int, Unit] = {}
        """Units with something to apply."""
        self.open: dict[int, Unit] = {}
        """Units to whose round anybody has contributed; none where nobody waits for another's contribution."""
        self.gone: set[int] = set()
        """Workers that have left."""
        self.meeting: set[int] = set()
        """Workers that wait for all."""
        self.asking: set[int] = set()
        """Workers that wait until all that was pushed has been applied."""
        self._clock = 0.0
        self._remote, self._reduce, self._mirror = frozenset(remote), reduce or Reduce(), mirror
        self._word = _marks().word
        """Where others see which unit this server summed, or let read, last."""
        self._begun: dict[int, tuple[Ring, int]] = {}
        """Records of rounds that are being summed, by the unit's number,"""
        self._every = False
        """of long units, or of all."""
        recorder.add_timeable(self)
        self._ranked = False  # whether any unit has a priority: to sort hundreds at every step takes as long as to sum

    # ---- events

    @abstractmethod
    def pushed(self, unit: Unit, index: int, source: Contribution, priority: int, clock: float) -> None:
        """Take a contribution of the contributor at `index`. MismatchError if its round can never end."""

    def pulled(self, number: int, worker: int, round_: int, rows: NDArray[Any] | None = None) -> Replies:
        """Let a worker read a unit, or some rows of it, once `round_` of its own pushes count."""
        unit = self.units[number]
        unit.pulls.append((worker, round_, rows))
        return self._grant(unit)

    def hold(self, number: int, worker: int, pushes: int) -> Replies:
        """Let a worker hold a unit as it is, once so many pushes of all workers are in it."""
        unit = self.units[number]
        unit.holds.append((worker, pushes))
        return self._grant(unit)

    def released(self, number: int, worker: int) -> None:
        """Note that a reader has finished."""
        unit = self.units.get(number)
        if unit is not None and worker in unit.readers:
            unit.readers.remove(worker)

    def waits(self, number: int, worker: int, round_: int) -> None:
        """Note that a worker's program has waited long for a round of a unit."""
        unit = self.units.get(number)
        if unit is not None and not self.asynchronous:
            self.late.note_wait(unit, worker, round_)

    def meets(self, worker: int) -> Replies:
        """Hold nobody back for a worker that waits for all, until `all_met`."""
        self.meeting.add(worker)
        return self._see_absent()

    def asks(self, worker: int) -> None:
        """Note that a worker waits until all that was pushed has been applied, and pushes nothing meanwhile."""
        self.asking.add(worker)

    def all_met(self) -> None:
        """Count anew how far workers are ahead: all have waited for all, and what they had pushed is applied."""
        self.meeting.clear()
        for unit in self.units.values():
            unit.met = list(unit.done)

    def left(self, worker: int) -> Replies:
        """Wait no more for a worker that has closed the store. MismatchError if a round needs it."""
        self.gone.add(worker)
        for unit in self.units.values():
            unit.pulls = [pull for pull in unit.pulls if pull[0] != worker]
            unit.holds = [hold for hold in unit.holds if hold[0] != worker]
            if worker not in self._remote:  # what is on its way to it ends by itself
                unit.readers = [reader for reader in unit.readers if reader != worker]
        return self._see_absent()

    def _see_absent(self) -> Replies:
        """Go on without workers that push no more, for now or for good."""
        replies: Replies = []
        for unit in self.units.values():
            self._see_gone(unit)
            replies += self._grant(unit)
        return replies

    def tick(self, clock: float, others: Iterable[InRounds] = (), waits: Iterable[Wait] = ()) -> Replies:
        """Look for waits that have become too long; call now and then while idle. StallError or MismatchError where one
        will not end. `others`, `waits`: what services have open, and who waits in them for anything but a push."""
        self.late.check_circles(clock, waits)
        return self.late.tick(clock, [*self.open.values(), *others])

    def wake(self, clock: float) -> None:
        """Take note of the time; call it often while idle."""
        self._clock = clock

    @property
    def quiet(self) -> bool:
        """Return whether all that was pushed has been applied, and is with the mirror, where there is one.

        Rounds that are too far ahead do not count."""
        return not self.ready and not self.open and (self._mirror is None or self._mirror.quiet)

    # ---- work

    def work(self) -> tuple[bool, Replies]:
        """Do one slice of what can be done, the highest priority first: (whether anything was done, replies)."""
        ready = self.ready
        if len(ready) == 1:
            for unit in ready.values():
                return self._turn(unit)
        if not ready:
            return False, []
        said: Replies = []
        turns = 0
        for unit in sorted(ready.values(), key=PRIORITY, reverse=True) if self._ranked else self._as_they_came():
            worked, replies = self._turn(unit)
            if not worked:
                continue
            turns += 1
            said += replies
            if turns == TURNS or unit.stored.nbytes > SHORT_BYTES:
                break
        return turns > 0, said

    def _as_they_came(self) -> Iterator[Unit]:
        """Yield units that are ready. Mostly the first is enough, and of thousands a list takes longer than a sum."""
        first = next(iter(self.ready.values()))
        yield first
        few = [unit for unit in islice(self.ready.values(), TURNS) if unit is not first]
        yield from few
        yield from [unit for unit in self.ready.values() if unit is not first and unit not in few]

    @abstractmethod
    def _turn(self, unit: Unit) -> tuple[bool, Replies]:
        """Go on with a unit: (whether anything was done, replies). CollectiveError where an update fails."""

    @abstractmethod
    def _see_gone(self, unit: Unit) -> None:
        """See what follows for a unit from who has left. MismatchError if the open round waits for such a worker."""

    @abstractmethod
    def _may_read(self, unit: Unit, worker: int, round_: int) -> bool:
        """Return whether a worker may read after `round_` of its own pushes."""

    def _grant(self, unit: Unit) -> Replies:
        """Let those read whose own pushes count by now; nothing is written until they have finished."""
        if unit.block or not (unit.pulls or unit.holds):
            return []
        replies: Replies = []
        if unit.holds:
            pushes = sum(unit.done)
            due = [worker for worker, wanted in unit.holds if wanted <= pushes]
            unit.holds = [hold for hold in unit.holds if hold[1] > pushes]
            unit.readers += due
            replies += [Reply("HELD", worker, unit.number, pushes) for worker in due]
        waiting = []
        for worker, round_, rows in unit.pulls:
            if self._may_read(unit, worker, round_):
                self._word[0] = unit.token_of_pulls
                unit.readers.append(worker)
                replies.append(Reply("GRANT", worker, unit.number, round_, rows=rows))
            else:
                waiting.append((worker, round_, rows))
        unit.pulls = waiting
        return replies

    def _written(self, unit: Unit) -> None:
        """Close what a unit's undo copy keeps, and send the unit to its mirror: all blocks are written."""
        if unit.undo is not None:
            unit.undo.close(unit.stands_at)
        if self._mirror is not None:
            self._mirror.changed(unit)

    def set_timed(self, every: bool) -> None:
        """Record the rounds of every unit from now on, or of long ones; see `recorder.own.trace`."""
        self._every = every
        for unit in list(self.units.values()):
            unit.is_timed = every or unit.is_long

    def _begin(self, unit: Unit, number: int) -> None:
        """Begin the record of a round, or of a contribution, that is being applied."""
        into = recorder.ring
        self._begun[unit.number] = into, into.begin(unit.form, 0, number)

    def _end(self, unit: Unit) -> None:
        begun = self._begun.pop(unit.number, None)
        if begun is not None:
            begun[0].end(begun[1])

    def _failed(self, unit: Unit, error: Exception) -> CollectiveError:
        """Return what is raised where an update has failed; nobody goes on with the unit."""
        self._forget(unit)
        return unit.failed(error)

    def _forget(self, unit: Unit) -> None:
        self.ready.pop(unit.number, None)
        self.open.pop(unit.number, None)

    # ---- units and optimizers

    def create(self, unit: Unit) -> None:
        """Add a unit that is new, with its optimizer."""
        self.units[unit.number] = unit
        part = f", from element {unit.start}" if unit.start else ""
        name = f"of key {unit.key!r}{part}"
        unit.token, unit.token_of_pulls = _marks().new_token(f"sum {name}"), _marks().new_token(f"pull {name}")
        unit.is_long = unit.stored.nbytes >= recorder.LONG_BYTES
        unit.is_timed = self._every or unit.is_long
        self._prepare(unit)

    def _prepare(self, unit: Unit) -> None:
        """Ask for what will sum and update a unit, so that it is there in time."""
        if self.compressor is not None:
            self.compressor.prepare(unit.stored.dtype)
        nbytes, size, dtype = unit.stored.nbytes, unit.stored.size, unit.stored.dtype.name
        what = "sum" if unit.optimizer is None else "update"
        unit.form = form(self.lane, what, repr(unit.key), nbytes, size, dtype, unit.start)
        count = len(unit.contributors)
        if self.asynchronous or self.compressor is not None:
            parts = 1
        elif self._remote.isdisjoint(unit.contributors):
            parts = count
        else:  # each is added when it comes; the last one is added and written
            parts = min(2, count)
        if unit.optimizer is None:
            sums.prepare(np.add, unit.stored.dtype, parts, unit.stored.nbytes)
        else:
            prepare(unit.optimizer, unit.stored.dtype, parts)

    def changed(self, unit: Unit) -> None:
        """Let the mirror have a unit that was changed not by a push."""
        if self._mirror is not None:
            self._mirror.changed(unit)

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget units that no worker will use again, though one may still say that it has read. Some may not be
        there."""
        gone = [self.units.pop(number) for number in numbers if number in self.units]
        if self._mirror is not None:
            self._mirror.forget(gone)
        for unit in gone:
            unit.abandon()
            self._forget(unit)
        self.late.forget(gone)
        kept = {unit.key for unit in self.units.values()}
        self.optimizers.forget({unit.key for unit in gone} - kept)

    def idle(self, numbers: Iterable[int]) -> bool:
        """Return whether all that was pushed of these units has been applied."""
        return not any(number in self.ready or number in self.open for number in numbers)

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None = None) -> None:
        """Update these keys, or all, by an optimizer from now on; their state begins anew."""
        self.optimizers.set(optimizer, keys)
        chosen = None if keys is None else set(keys)
        for unit in self.units.values():
            if chosen is None or unit.key in chosen:
                unit.set_optimizer(optimizer)
                self._prepare(unit)
                self.changed(unit)

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None = None) -> None:
        """Change numbers of these keys' optimizers, or of all, from the next update on; state and steps stay."""
        self.optimizers.update(numbers, keys)
        for unit in self.units.values():
            unit.optimizer = self.optimizers.of(unit.key)
            self._prepare(unit)

    def set_compressor(self, compressor: Compressor) -> None:
        """Decode by this compressor what is pushed compressed from now on."""
        self.compressor = compressor
        for unit in self.units.values():
            self._prepare(unit)

    # ---- the end of a generation

    def finish(self) -> bool:
        """Go on with what all have contributed to, as the generation is over; whether anything was done. What fails is
        left."""
        worked = False
        for unit in list(self.ready.values()):
            unit.readers.clear()
            with suppress(CollectiveError):
                worked |= self._turn(unit)[0]
        return worked

    def abandon(self) -> None:
        """Drop every contribution that is left, as the generation is over. A unit with a round half applied
        goes back, or is torn (`Unit.give_up`)."""
        self.late.clear()
        self._begun.clear()
        for unit in self.units.values():
            unit.abandon()
            self._forget(unit)


class SynchronousState(ServerState):
    """Units to whose round all must have contributed before it is applied."""

    asynchronous = False

    def pushed(self, unit: Unit, index: int, source: Contribution, priority: int, clock: float) -> None:
        """Take a contribution of the contributor at `index`. MismatchError if its round can never end."""
        if priority != unit.priority:
            unit.priority, self._ranked = priority, True
        queue = unit.queues[index]
        if not queue:
            if unit.missing == len(unit.queues):
                unit.opened, unit.warned = clock, False
                self.open[unit.number] = unit
            unit.missing -= 1
        queue.append(source)
        if not unit.missing:
            self.ready[unit.number] = unit
        elif self.gone:
            self._see_gone(unit)

    def _see_gone(self, unit: Unit) -> None:
        for worker in unit.absent() if unit.waits else ():
            if worker in self.gone:
                round_ = f"key {unit.key!r}: round {unit.round + 1}"
                raise MismatchError(f"{round_} needs rank {worker}, which has left the store: {BEFORE_LEAVING}")

    def _may_read(self, unit: Unit, worker: int, round_: int) -> bool:
        return unit.round >= round_

    def _turn(self, unit: Unit) -> tuple[bool, Replies]:
        if unit.missing:
            self.ready.pop(unit.number, None)
            return False, []
        if unit.readers or not unit.mirrored:
            return False, []
        if unit.block == unit.blocks:
            return True, self._end_round(unit)  # its mirror has it
        if not unit.block:
            self._word[0] = unit.token
            if unit.is_timed and unit.number not in self._begun:
                self._begin(unit, unit.round + 1)
        try:
            worked = self._sum(unit, [queue[0] for queue in unit.queues])
        except Exception as error:
            raise self._failed(unit, error) from error
        if unit.block < unit.blocks:
            return worked, []
        if unit.undo is not None or self._mirror is not None:
            self._written(unit)
        return worked, self._end_round(unit) if unit.mirrored else []

    def _sum(self, unit: Unit, sources: Sequence[Contribution]) -> bool:
        """Sum what is there; whether anything was."""
        reduce = self._reduce
        if unit.blocks == 1 and not reduce.worth_sharing(unit, sources, 0, 1):
            steady = [array for source in sources if (array := source.steady) is not None]
            if len(steady) == len(sources):
                reduce.sum_whole(unit, steady)
                return True
        if any(source.coded for source in sources):
            return reduce.sum_coded(unit, sources)
        if all(source.local for source in sources):
            return reduce.sum_blocks(unit, sources)
        return reduce.sum_arriving(unit, sources)

    def _end_round(self, unit: Unit) -> Replies:
        """End the round: readers may have it, contributors may go on, the next round may already be there."""
        if self._begun:
            self._end(unit)
        unit.round = round_ = unit.round + 1
        if unit.optimizer is None:
            unit.torn = False  # nothing is left of what was there before
        unit.begin()
        missing = 0
        for queue in unit.queues:
            queue.popleft()
            if not queue:
                missing += 1
        unit.missing = missing
        words, number = unit.words, unit.number
        for index in range(1, len(unit.queues) + 1):
            words[index] = round_
        words[0] = round_ * unit.blocks
        self.ready.pop(number, None)
        self.open.pop(number, None)
        replies: Replies = []
        if self._remote:
            remote = [worker for worker in unit.contributors if worker in self._remote]
            replies += [Reply("CONSUMED", worker, number, round_) for worker in remote]
        if missing < len(unit.queues):
            self.open[number] = unit
            unit.opened, unit.warned = None, False
            if not missing:
                self.ready[number] = unit
            elif self.gone:
                self._see_gone(unit)
        if unit.pulls:
            replies += self._grant(unit)
        return replies


class AsynchronousState(ServerState):
    """Units to which every contribution is applied by itself.

    `staleness`: how many steps of a unit a worker may be ahead of the slowest since all met; -1: any number.
    """

    asynchronous = True

    def __init__(
        self,
        staleness: int = -1,
        remote: Iterable[int] = (),
        late: Late | None = None,
        reduce: Reduce | None = None,
        optimizers: Groups | None = None,
        mirror: UnitMirror | None = None,
        compressor: Compressor | None = None,
    ) -> None:
        super().__init__(remote, late, reduce, optimizers, mirror, compressor)
        self.staleness = staleness

    def pushed(self, unit: Unit, index: int, source: Contribution, priority: int, clock: float) -> None:
        """Take a contribution of the contributor at `index`."""
        if priority != unit.priority:
            unit.priority, self._ranked = priority, True
        queue = unit.queues[index]
        unit.missing -= not queue
        queue.append(source)
        unit.arrivals.append(index)
        self.ready[unit.number] = unit

    def _see_gone(self, unit: Unit) -> None:
        if unit.waits:  # what the worker held back may go on
            self.ready[unit.number] = unit

    def _may_read(self, unit: Unit, worker: int, round_: int) -> bool:
        index = unit.position.get(worker)
        return index is None or (unit.done[index] >= round_ and not self._too_far(unit, index, round_))

    def _too_far(self, unit: Unit, index: int, steps: int) -> bool:
        """Return whether `steps` pushes of the unit are more than `staleness` ahead of the slowest contributor."""
        if self.staleness < 0:
            return False
        steps -= unit.met[index]
        counts, absent = zip(unit.contributors, unit.done, unit.met), self.gone | self.meeting
        present = (done - met for worker, done, met in counts if worker not in absent)
        return steps - min(present, default=steps) > self.staleness

    def _turn(self, unit: Unit) -> tuple[bool, Replies]:
        if unit.readers or not unit.mirrored:
            return False, []
        if unit.block == unit.blocks:
            return True, self._end_update(unit)  # its mirror has it
        if unit.active < 0:
            unit.active = next((i for i in unit.arrivals if not self._too_far(unit, i, unit.done[i])), -1)
        index = unit.active
        if index < 0:
            self.ready.pop(unit.number, None)  # until something comes, or somebody leaves
            return False, []
        source = unit.queues[index][0]
        if not source.ready(unit.block):
            return False, []
        if not unit.block:
            self._word[0] = unit.token
            if unit.is_timed and unit.number not in self._begun:
                self._begin(unit, unit.done[index] + 1)
        if unit.blocks == 1:  # in a longer unit's word its outboxes look for blocks that have been summed: none here
            unit.words[0] |= 1
        if unit.block == 0 and unit.undo is not None:
            unit.undo.note_pushes([count + (at == index) for at, count in enumerate(unit.done)])
        try:
            self._reduce.apply_single(unit, source)
        except Exception as error:
            raise self._failed(unit, error) from error
        if unit.block < unit.blocks:
            return True, []
        unit.done[index] += 1
        self._written(unit)
        return True, self._end_update(unit) if unit.mirrored else []

    def _end_update(self, unit: Unit) -> Replies:
        """End the update by the contributor whose turn it is."""
        index = unit.active
        if self._begun:
            self._end(unit)
        unit.words[0] += unit.words[0] & 1
        unit.arrivals.remove(index)
        unit.active = -1
        queue = unit.queues[index]
        queue.popleft()
        unit.missing += not queue
        unit.begin()
        unit.words[1 + index] = round_ = unit.done[index]
        replies: Replies = []
        if (worker := unit.contributors[index]) in self._remote:
            replies.append(Reply("CONSUMED", worker, unit.number, round_))
        return replies + self._grant(unit)

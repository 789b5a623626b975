"""Decide when a server applies pushes and lets pulls return: in rounds, or one by one within `staleness`. No MPI calls.

`ServerState` is a state machine for the units of a server, which are independent of each other. A unit is a part of a
key on one server. The same workers, its contributors, always push to it. The server's loop turns messages into events
(the methods `pushed`, `pulled`, `released`, `waits`, `meets`, `left`), and calls `work` as long as there is something
to do. The loop sends the replies that these methods return. An exception ends the generation, which is the life of the
store between two failures: `finish` then applies the rounds that it can still complete, and `abandon` discards all
other pushes. The next generation has a new state.

`SynchronousState` applies rounds. Round r of a unit is complete when every contributor has pushed the unit r times. The
round is summed in the order of the contributors, block by block. The optimizer updates the stored values by each summed
block. Without an optimizer the sum replaces the values. The unit's progress word tells readers how many blocks are
done. A worker may be any number of rounds ahead.

`AsynchronousState` applies every push as an update of its own, in the order of arrival. Pushes and pulls of a worker
that is too far ahead of the slowest worker are held back. A worker that waits for all other workers, in a barrier or to
close the store, pushes nothing until all have come. So other workers need not wait for its pushes. Once all have come,
the server again counts from 0 how far each worker is ahead.

Reading: in a synchronous store, workers of this node read without asking, as far as the progress word allows. In an
asynchronous store they may read a unit of one block without asking, between two updates: `words[0]` is odd while an
update is being written, and grows with each update. If updates follow each other too closely for that, a worker asks
the server. While a worker reads a unit with the server's permission (GRANT), the unit is not updated.
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
from mpips.collectives.recorder.ring import RecordRing, form
from mpips.compression import Compressor
from mpips.optimizers import Groups, Optimizer
from mpips.optimizers.equation import prepare
from mpips.store.server.late import BEFORE_LEAVING, InRounds, Late, Wait
from mpips.store.server.reduce import Reduce
from mpips.store.server.unit import Contribution, Known, Replies, Reply, Unit, UnitMirror

# The work of a server between two checks for messages: TURNS turns with units of at most SHORT_BYTES, or one turn with
# a longer unit.
TURNS, SHORT_BYTES = 8, 1 << 14
PRIORITY = attrgetter("priority")
# The recorder stores under this number what the servers of this process do. It is larger than the numbers of stores.
LANE = 3 << 62
Name = int | str


@cache
def _marks() -> recorder.Marks:
    """Return the shared words that show other processes what the servers of this process do.

    The words are made only once.
    """
    return recorder.Marks(LANE)


class ServerState(ABC):
    """All units of one server. Subclasses decide when a push is applied to a unit.

    This class does not read a clock. Its caller passes the current time as `clock`, in seconds, always from the same
    clock, which must never go backward.

    Args:
        remote: The workers on other nodes, which read units by messages.
        late: Finds the waits that have become too long.
        reduce: Sums the pushes.
        optimizers: The optimizers of the keys.
        mirror: The connection over which changed units are sent to the server that keeps copies of them.
        compressor: Decodes pushes. None if pushes are not compressed.
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
        # the number of the store in timing records; set once it is known
        self.lane = LANE
        self.optimizers = optimizers or Groups()
        self.compressor = compressor
        self.late = late or Late()
        # units that have something to apply
        self.ready: dict[int, Unit] = {}
        # Units with an open round, to which some workers have pushed. Always empty in a store in which no worker waits
        # for the pushes of other workers.
        self.open: dict[int, Unit] = {}
        # workers that have left
        self.gone: set[int] = set()
        # workers that wait for all other workers
        self.meeting: set[int] = set()
        # workers that wait until all pushes have been applied
        self.asking: set[int] = set()
        self._clock = 0.0
        self._remote = frozenset(remote)
        self._reduce = reduce or Reduce()
        self._mirror = mirror
        # shows other processes the unit that this server last summed, or last allowed a worker to read
        self._word = _marks().word
        # unit number -> (ring, record id) of the round that is being summed
        self._begun: dict[int, tuple[RecordRing, int]] = {}
        # time the rounds of every unit, not only of long ones
        self._every = False
        recorder.add_timeable(self)
        # True once any unit has a priority. Until then units are not sorted: sorting hundreds of units at every step
        # takes as long as summing them.
        self._ranked = False

    # ---- events

    @abstractmethod
    def pushed(self, unit: Unit, index: int, source: Contribution, priority: int, clock: float) -> None:
        """Take a push of the contributor at `index`. Raise MismatchError if the round of this push can never end.

        `clock` (the time now) is used only in a store with a quorum. In other stores the next `tick` notes the time at
        which a round began to wait, because reading the clock at every push would take time.
        """

    def pulled(self, number: int, worker: int, round_: int, rows: NDArray[Any] | None = None) -> Replies:
        """Let a worker read a unit, or some rows of it, once the unit contains `round_` pushes of this worker."""
        unit = self.units[number]
        unit.pulls.append((worker, round_, rows))
        return self._grant(unit)

    def hold(self, number: int, worker: int, pushes: int) -> Replies:
        """Keep a unit unchanged for a worker, once the unit contains this many pushes of all workers together."""
        unit = self.units[number]
        unit.holds.append((worker, pushes))
        return self._grant(unit)

    def released(self, number: int, worker: int) -> None:
        """Note that a worker has finished reading a unit."""
        unit = self.units.get(number)
        if unit is not None and worker in unit.readers:
            unit.readers.remove(worker)

    def waits(self, number: int, worker: int, round_: int) -> None:
        """Note that a worker's program has waited long for a round of a unit."""
        unit = self.units.get(number)
        if unit is not None and not self.asynchronous:
            self.late.note_wait(unit, worker, round_)

    def meets(self, worker: int) -> Replies:
        """Note that a worker waits in a barrier. Until `all_met`, no other worker has to wait for its pushes."""
        self.meeting.add(worker)
        return self._handle_absent()

    def asks(self, worker: int) -> None:
        """Note that a worker waits until all pushes have been applied, and pushes nothing until then."""
        self.asking.add(worker)

    def all_met(self) -> None:
        """Again count from 0 how far each worker is ahead. All workers have met, and all pushes have been applied."""
        self.meeting.clear()
        for unit in self.units.values():
            unit.met = list(unit.done)

    def left(self, worker: int) -> Replies:
        """Stop waiting for a worker that has closed the store.

        Raise MismatchError if an open round needs this worker.
        """
        self.gone.add(worker)
        for unit in self.units.values():
            unit.pulls = [pull for pull in unit.pulls if pull[0] != worker]
            unit.holds = [hold for hold in unit.holds if hold[0] != worker]
            # A worker of another node counts as reading until the messages to it are sent. That ends by itself.
            if worker not in self._remote:
                unit.readers = [reader for reader in unit.readers if reader != worker]
        return self._handle_absent()

    def _handle_absent(self) -> Replies:
        """Stop waiting for workers that have left or wait in a barrier. Return replies to workers that may read now."""
        replies: Replies = []
        for unit in self.units.values():
            self._handle_gone(unit)
            replies += self._grant(unit)
        return replies

    def tick(self, clock: float, others: Iterable[InRounds] = (), waits: Iterable[Wait] = ()) -> Replies:
        """Check for waits that have become too long. Called now and then.

        Args:
            others: Parts of services that have rounds.
            waits: Workers that wait for a service, but not for a push.

        Raises:
            StallError: A wait has lasted longer than `timeout_seconds`.
            MismatchError: Workers wait for one another in a circle.
        """
        self.late.check_circles(clock, waits)
        return self.late.tick(clock, [*self.open.values(), *others])

    def wake(self, clock: float) -> None:
        """Store the current time. Called more often than `tick`."""
        self._clock = clock

    @property
    def quiet(self) -> bool:
        """True if everything pushed has been applied and, if there is a mirror, has arrived at the mirror.

        Pushes that must wait because their worker is too far ahead are ignored.
        """
        return not self.ready and not self.open and (self._mirror is None or self._mirror.quiet)

    # ---- work

    def work(self) -> tuple[bool, Replies]:
        """Do a slice of the work, highest priority first. Return (True if anything was done, replies)."""
        ready = self.ready
        if len(ready) == 1:
            for unit in ready.values():
                return self._turn(unit)
        if not ready:
            return False, []
        every: Replies = []
        turns = 0
        for unit in sorted(ready.values(), key=PRIORITY, reverse=True) if self._ranked else self._as_they_came():
            worked, replies = self._turn(unit)
            if not worked:
                continue
            turns += 1
            every += replies
            if turns == TURNS or unit.stored.nbytes > SHORT_BYTES:
                break
        return turns > 0, every

    def _as_they_came(self) -> Iterator[Unit]:
        """Yield the units that are ready, in the order in which they became ready.

        There may be thousands of units, and the caller mostly needs only the first one. So do not build a list of all.
        """
        first = next(iter(self.ready.values()))
        yield first
        few = [unit for unit in islice(self.ready.values(), TURNS) if unit is not first]
        yield from few
        yield from [unit for unit in self.ready.values() if unit is not first and unit not in few]

    @abstractmethod
    def _turn(self, unit: Unit) -> tuple[bool, Replies]:
        """Do the next part of a unit's work. Return (True if anything was done, replies).

        Raise CollectiveError if an update fails.
        """

    @abstractmethod
    def _handle_gone(self, unit: Unit) -> None:
        """Handle the absence of workers for one unit.

        Raise MismatchError if the open round needs a worker that has left.
        """

    @abstractmethod
    def _may_read(self, unit: Unit, worker: int, round_: int) -> bool:
        """True if a worker that has pushed to the unit `round_` times may read the unit now."""

    def _grant(self, unit: Unit) -> Replies:
        """Grant the pulls and holds that are due. The unit is not written until their workers have finished reading.

        A pull is due once the worker's own pushes are in the unit. A hold is due once the unit has enough pushes of all
        workers.
        """
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
        """After all blocks of a unit have been written, close its undo copy and send the unit to the mirror."""
        if unit.undo is not None:
            unit.undo.close(unit.stands_at)
        if self._mirror is not None:
            self._mirror.changed(unit)

    def set_timed(self, every: bool) -> None:
        """From now on time the rounds of all units if `every`, otherwise only those of long units.

        See `recorder.own.trace`.
        """
        self._every = every
        for unit in list(self.units.values()):
            unit.is_timed = every or unit.is_long

    def _begin(self, unit: Unit, number: int) -> None:
        """Begin to time a round that is being applied, or in an asynchronous store, a push that is being applied."""
        into = recorder.ring
        self._begun[unit.number] = into, into.begin(unit.form, 0, number)

    def _end(self, unit: Unit) -> None:
        begun = self._begun.pop(unit.number, None)
        if begun is not None:
            begun[0].end(begun[1])

    def _failed(self, unit: Unit, error: Exception) -> CollectiveError:
        """Return the exception to raise after an update has failed. The unit is not updated any more."""
        self._forget(unit)
        return unit.failed(error)

    def _forget(self, unit: Unit) -> None:
        self.ready.pop(unit.number, None)
        self.open.pop(unit.number, None)

    # ---- units and optimizers

    def create(self, unit: Unit) -> None:
        """Add a new unit, with its optimizer."""
        self.units[unit.number] = unit
        part = f", from element {unit.start}" if unit.start else ""
        name = f"of key {unit.key!r}{part}"
        unit.token, unit.token_of_pulls = _marks().new_token(f"sum {name}"), _marks().new_token(f"pull {name}")
        unit.is_long = unit.stored.nbytes >= recorder.LONG_BYTES
        unit.is_timed = self._every or unit.is_long
        self._prepare(unit)

    def _prepare(self, unit: Unit) -> None:
        """Load the compiled loops that will sum and update a unit, if they will probably save time.

        Loading may block for a second or two (`equation.prepare`). For small units the loops would save less time than
        that. Also make the text that all timing records of the unit share.
        """
        if self.compressor is not None:
            self.compressor.prepare(unit.stored.dtype, unit.stored.size)
        nbytes, size, dtype = unit.stored.nbytes, unit.stored.size, unit.stored.dtype.name
        what = "sum" if unit.optimizer is None else "update"
        unit.form = form(self.lane, what, repr(unit.key), nbytes, size, dtype, unit.start)
        count = len(unit.contributors)
        if self.asynchronous or self.compressor is not None:
            parts = 1
        elif self._remote.isdisjoint(unit.contributors):
            parts = count
        # Pushes from other nodes are added one by one as they arrive. A single loop adds the last push and writes the
        # result.
        else:
            parts = min(2, count)
        if unit.optimizer is None:
            sums.prepare(np.add, unit.stored.dtype, parts, unit.stored.nbytes)
        else:
            prepare(unit.optimizer, unit.stored.dtype, parts, unit.stored.size)

    def changed(self, unit: Unit) -> None:
        """Send a unit to its mirror after a change that was not a push."""
        if self._mirror is not None:
            self._mirror.changed(unit)

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget units that no worker will use again. Unknown numbers are ignored."""
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
        """True if everything pushed to these units has been applied."""
        return not any(number in self.ready or number in self.open for number in numbers)

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None = None) -> None:
        """Update keys (None: all keys) with this optimizer from now on, with new state."""
        self.optimizers.set(optimizer, keys)
        chosen = None if keys is None else set(keys)
        for unit in self.units.values():
            if chosen is None or unit.key in chosen:
                unit.set_optimizer(optimizer)
                self._prepare(unit)
                self.changed(unit)

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None = None) -> None:
        """Change hyperparameters of keys (None: of all keys) from the next update on. State and step are kept."""
        self.optimizers.update(numbers, keys)
        for unit in self.units.values():
            unit.optimizer = self.optimizers.of(unit.key)
            self._prepare(unit)

    def set_compressor(self, compressor: Compressor) -> None:
        """Decode compressed pushes with this compressor from now on."""
        self.compressor = compressor
        for unit in self.units.values():
            self._prepare(unit)

    # ---- the end of a generation

    def finish(self) -> bool:
        """Apply rounds to which all workers have pushed, at the end of a generation. Return True if anything was done.

        If an update fails, its unit is left as it is.
        """
        worked = False
        for unit in list(self.ready.values()):
            unit.readers.clear()
            with suppress(CollectiveError):
                worked |= self._turn(unit)[0]
        return worked

    def abandon(self) -> None:
        """Drop all pushes that have not been applied, at the end of a generation.

        A unit with a partly applied round goes back to the round before, or is marked as torn (`Unit.give_up`).
        """
        self.late.clear()
        self._begun.clear()
        for unit in self.units.values():
            unit.abandon()
            self._forget(unit)


class SynchronousState(ServerState):
    """Units whose rounds are applied when all contributors have pushed."""

    asynchronous = False

    def pushed(self, unit: Unit, index: int, source: Contribution, priority: int, clock: float) -> None:
        if priority != unit.priority:
            unit.priority, self._ranked = priority, True
        queue = unit.queues[index]
        if not queue:
            if unit.missing == len(unit.queues):
                unit.opened, unit.warned = None, False
                self.open[unit.number] = unit
            unit.missing -= 1
        queue.append(source)
        if not unit.missing:
            self.ready[unit.number] = unit
        elif self.gone:
            self._handle_gone(unit)

    def _handle_gone(self, unit: Unit) -> None:
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
            # The round was written at an earlier turn, and has now arrived at the mirror.
            return True, self._end_round(unit)
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
        """Sum the blocks whose contributions have arrived. Return True if there were any."""
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
        """End a round: workers may read its result, and contributors may continue.

        The next round may be complete already.
        """
        if self._begun:
            self._end(unit)
        unit.round = round_ = unit.round + 1
        if unit.optimizer is None:
            # The sum has replaced every value, so the unit is no longer torn.
            unit.torn = False
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
                self._handle_gone(unit)
        if unit.pulls:
            replies += self._grant(unit)
        return replies


class AsynchronousState(ServerState):
    """Units to which each push is applied as an update of its own.

    Args:
        staleness: Number of pushes of a unit by which a worker may be ahead of the slowest worker, counted from the
            last time that all workers met. -1: any number.
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
        if priority != unit.priority:
            unit.priority, self._ranked = priority, True
        queue = unit.queues[index]
        unit.missing -= not queue
        queue.append(source)
        unit.arrivals.append(index)
        self.ready[unit.number] = unit

    def _handle_gone(self, unit: Unit) -> None:
        # Pushes that had to wait for the absent worker may be applied now.
        if unit.waits:
            self.ready[unit.number] = unit

    def _may_read(self, unit: Unit, worker: int, round_: int) -> bool:
        index = unit.position.get(worker)
        return index is None or (unit.done[index] >= round_ and not self._too_far(unit, index, round_))

    def _too_far(self, unit: Unit, index: int, steps: int) -> bool:
        """True if `steps` pushes of the unit are more than `staleness` ahead of the slowest contributor."""
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
            # The update was written at an earlier turn, and has now arrived at the mirror.
            return True, self._end_update(unit)
        if unit.active < 0:
            unit.active = next((i for i in unit.arrivals if not self._too_far(unit, i, unit.done[i])), -1)
        index = unit.active
        if index < 0:
            # Nothing can be applied until a push comes or a worker leaves.
            self.ready.pop(unit.number, None)
            return False, []
        source = unit.queues[index][0]
        if not source.ready(unit.block):
            return False, []
        if not unit.block:
            self._word[0] = unit.token
            if unit.is_timed and unit.number not in self._begun:
                self._begin(unit, unit.done[index] + 1)
        # An odd word tells readers that an update is being written. Do this only in units of one block. In longer units
        # a worker's outbox reads this word as the number of summed blocks, and would reuse its slots too early.
        if unit.blocks == 1:
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
        """End the update that applied one push: workers may read the result, and the next update may begin."""
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

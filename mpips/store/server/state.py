"""All units of one server, without MPI: events in, replies out.

The loop turns frames into events (`pushed`, `pulled`, `released`, `waits`, `left`), and calls `work` as long as it says
that something was done; each returns the replies to send. A unit is independent of all others. What is raised ends the
generation: then `finish` goes on as far as it can, and `abandon` drops the rest. The next generation has another state.

Synchronous rounds of a server's units, without MPI: events in, replies out, arithmetic in between.

Round r of a unit is complete when every contributor has pushed it r times. It is summed in the order of the
contributors, block by block. Each block is updated by the optimizer, or replaces the stored one, and the unit's
progress word tells readers how many blocks are done. A worker may be any number of rounds ahead.

Asynchronous updates of a server's units, without MPI: every contribution is an update of its own, as they come.

Workers of this node may read a unit of one block unasked, between two updates: `words[0]` is odd while one is being
written, and counts up. AsynchronousUpdates that follow each other closely leave them no time: then they ask (`reads`).

When a pull may read a unit of a server: after its own pushes, and not too far ahead of the slowest worker.

A worker that is too far ahead has its pushes held back, too (`updates`). Who reads holds updates back until it has
finished. Workers of this node read a synchronous store without asking, behind its progress word; and a unit of one
block of an asynchronous store between two updates (see `updates`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from typing import Any

from numpy.typing import NDArray

from collectives.errors import CollectiveError, MismatchError
from mpips.optimizers import Groups, Optimizer
from mpips.store.server.late import Late
from mpips.store.server.reduce import Reduce
from mpips.store.server.unit import Mirrors, Replies, Reply, Source, Unit

TURNS, SHORT_BYTES = 8, 1 << 14
"""Before a server listens again: so many units of at most so many bytes, or one longer one."""
PRIORITY = attrgetter("priority")
Name = int | str


class ServerState:
    """All units of one server. `clock` values are seconds of any monotonic clock."""

    def __init__(
        self, asynchronous: bool = False, staleness: int = -1, remote: Iterable[int] = (), late: Late | None = None,
        reduce: Reduce | None = None, optimizers: Groups | None = None, mirror: Mirrors | None = None,
    ) -> None:  # fmt: skip
        self.units: dict[int, Unit] = {}
        self.optimizers = optimizers or Groups()
        self.late = late or Late()
        self.asynchronous = asynchronous
        self._mirror = mirror
        self._reads = Reads(asynchronous, staleness, remote)
        machine = AsynchronousUpdates if asynchronous else SynchronousRounds
        self._machine = machine(self._reads, reduce or Reduce(), mirror)
        self.ready, self.gone = self._machine.ready, self._reads.gone
        self._ranked = False  # whether any unit has a priority: to sort hundreds at every step takes as long as to sum

    # ---- events

    def pushed(self, unit: Unit, index: int, source: Source, priority: int, clock: float) -> None:
        """A contribution of the contributor at `index` has come. MismatchError if its round can never end."""
        if priority != unit.priority:
            unit.priority, self._ranked = priority, True
        self._machine.pushed(unit, index, source, clock)

    def pulled(self, number: int, worker: int, round_: int, rows: NDArray[Any] | None = None) -> Replies:
        """A worker asks to read a unit, or some rows of it, once `round_` of its own pushes count."""
        return self._reads.pulled(self.units[number], worker, round_, rows)

    def released(self, number: int, worker: int) -> None:
        """A reader has finished."""
        unit = self.units.get(number)
        if unit is not None:
            self._reads.released(unit, worker)

    def waits(self, number: int, worker: int, round_: int) -> None:
        """A worker's program has waited long for a round of a unit."""
        unit = self.units.get(number)
        if unit is not None and not self.asynchronous:
            self.late.waits(unit, worker, round_)

    def left(self, worker: int) -> Replies:
        """A worker has closed the store: nothing waits for it any more. MismatchError if a round needs it."""
        self.gone.add(worker)
        replies: Replies = []
        for unit in self.units.values():
            self._reads.left(unit, worker)
            self._machine.check(unit)
            replies += self._reads.grant(unit)
        return replies

    def tick(self, clock: float) -> Replies:
        """Look for waits that have become too long; call now and then while idle. StallError or MismatchError where one
        will not end."""
        self.late.look(clock)
        return self.late.tick(clock, list(self._machine.open.values()))

    @property
    def quiet(self) -> bool:
        """Whether everything that was pushed has been applied, but for rounds that are too far ahead; and is with the
        mirror, where there is one."""
        return not self.ready and not self._machine.open and (self._mirror is None or self._mirror.quiet)

    # ---- work

    def work(self) -> tuple[bool, Replies]:
        """Do one slice of what can be done, the highest priority first: (whether anything was done, replies)."""
        ready = self.ready
        if len(ready) == 1:
            for unit in ready.values():
                return self._machine.turn(unit)
        return self._turns() if ready else (False, [])

    def _turns(self) -> tuple[bool, Replies]:
        """A turn for the first unit that can go on, or for some if they are short."""
        said: Replies = []
        turns = 0
        for unit in self._by_priority() if self._ranked else self._as_they_came():
            worked, replies = self._machine.turn(unit)
            if not worked:
                continue
            turns += 1
            said += replies
            if turns == TURNS or unit.stored.nbytes > SHORT_BYTES:
                break
        return turns > 0, said

    def _by_priority(self) -> list[Unit]:
        return sorted(self.ready.values(), key=PRIORITY, reverse=True)  # of one priority: as they came

    def _as_they_came(self) -> Iterator[Unit]:
        """Mostly the first one is enough, and of thousands a list takes longer than a sum."""
        first = next(iter(self.ready.values()))
        yield first
        few = [unit for unit in islice(self.ready.values(), TURNS) if unit is not first]
        yield from few
        yield from [unit for unit in self.ready.values() if unit is not first and unit not in few]

    # ---- units and optimizers

    def create(self, unit: Unit) -> None:
        """A unit that is new, with its optimizer."""
        self.units[unit.number] = unit

    def changed(self, unit: Unit) -> None:
        """What a unit holds is another thing, not by a push: the mirror is to have it."""
        if self._mirror is not None:
            self._mirror.changed(unit)

    def forget(self, numbers: Iterable[int]) -> None:
        """Units that no worker will use again, though one may still say that it has read. Some may not be there."""
        gone = [self.units.pop(number) for number in numbers if number in self.units]
        if self._mirror is not None:
            self._mirror.forget(gone)
        for unit in gone:
            unit.abandon()
            self._machine.forget(unit.number)
        self.late.forget(gone)
        kept = {unit.key for unit in self.units.values()}
        self.optimizers.forget({unit.key for unit in gone} - kept)

    def idle(self, numbers: Iterable[int]) -> bool:
        """Whether all that was pushed of these units has been applied."""
        return not any(number in self.ready or number in self._machine.open for number in numbers)

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None = None) -> None:
        """For these keys, or all, from the next update on; their state begins anew."""
        self.optimizers.set(optimizer, keys)
        chosen = None if keys is None else set(keys)
        for unit in self.units.values():
            if chosen is None or unit.key in chosen:
                unit.set_optimizer(optimizer)
                self.changed(unit)

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None = None) -> None:
        """Other numbers of these keys' optimizers, or of all, from the next update on; state and steps stay."""
        self.optimizers.update(numbers, keys)
        for unit in self.units.values():
            unit.optimizer = self.optimizers.of(unit.key)

    # ---- the end of a generation

    def finish(self) -> bool:
        """The generation is over: go on with what all have contributed to; whether anything was done. What fails is
        left."""
        worked = False
        for unit in list(self.ready.values()):
            unit.readers.clear()
            with suppress(CollectiveError):
                worked |= self._machine.turn(unit)[0]
        return worked

    def abandon(self) -> None:
        """The generation is over: drop every contribution that is left. A unit with a round half applied is torn."""
        self.late.clear()
        for unit in self.units.values():
            unit.abandon()
            self._machine.forget(unit.number)


class SynchronousRounds:
    """The open rounds of one server."""

    def __init__(self, reads: Reads, reduce: Reduce, mirror: Mirrors | None) -> None:
        self._reads, self._reduce, self._mirror = reads, reduce, mirror
        self.ready: dict[int, Unit] = {}
        """Units to which all have contributed."""
        self.open: dict[int, Unit] = {}
        """Units to which anybody has contributed."""

    def pushed(self, unit: Unit, index: int, source: Source, clock: float) -> None:
        """A contribution of the contributor at `index` has come. MismatchError if its round can never end."""
        queue = unit.queues[index]
        if not queue:
            if unit.missing == len(unit.queues):
                unit.opened, unit.warned = clock, False
                self.open[unit.number] = unit
            unit.missing -= 1
        queue.append(source)
        if not unit.missing:
            self.ready[unit.number] = unit
        elif self._reads.gone:
            self.check(unit)

    def check(self, unit: Unit) -> None:
        """MismatchError if the open round waits for a worker that has left."""
        for worker in unit.absent() if unit.waits else ():
            if worker in self._reads.gone:
                round_ = f"key {unit.key!r}: round {unit.round + 1}"
                raise MismatchError(f"{round_} needs rank {worker}, which has left the store")

    def turn(self, unit: Unit) -> tuple[bool, Replies]:
        """Go on with a unit's round: (whether anything was done, replies). CollectiveError where its update fails."""
        if unit.missing:
            self.ready.pop(unit.number, None)
            return False, []
        if unit.readers or not unit.mirrored:
            return False, []
        if unit.block == unit.blocks:
            return True, self._finish(unit)  # its mirror has it
        try:
            worked = self._sum(unit, [queue[0] for queue in unit.queues])
        except Exception as error:
            self.forget(unit.number)  # nobody goes on with it
            raise unit.failed(error) from error
        if unit.block < unit.blocks:
            return worked, []
        if unit.undo is not None:
            unit.undo.close(unit.stands_at)
        if self._mirror is not None:
            self._mirror.changed(unit)
        return worked, self._finish(unit) if unit.mirrored else []

    def _sum(self, unit: Unit, sources: Sequence[Source]) -> bool:
        """Whether anything could be done."""
        reduce = self._reduce
        if unit.blocks == 1 and not reduce.worth_sharing(unit, sources, 0, 1):
            steady = [array for source in sources if (array := source.steady) is not None]
            if len(steady) == len(sources):
                reduce.whole(unit, steady)
                return True
        if any(source.coded for source in sources):
            return reduce.coded(unit, sources)
        if all(source.local for source in sources):
            return reduce.blocks(unit, sources)
        return reduce.arriving(unit, sources)

    def _finish(self, unit: Unit) -> Replies:
        """End the round: readers may have it, contributors may go on, the next round may already be there."""
        unit.round = round_ = unit.round + 1
        if unit.optimizer is None:
            unit.torn = False  # nothing is left of what was there before
        unit.begin()
        unit.pop()
        words, number = unit.words, unit.number
        for index in range(1, len(unit.queues) + 1):
            words[index] = round_
        words[0] = round_ * unit.blocks
        self.ready.pop(number, None)
        self.open.pop(number, None)
        replies: Replies = []
        remote = self._reads.remote
        if remote:
            replies += [Reply("CONSUMED", worker, number, round_) for worker in unit.contributors if worker in remote]
        if unit.missing < len(unit.queues):
            self.open[number] = unit
            unit.opened, unit.warned = None, False
            if not unit.missing:
                self.ready[number] = unit
            elif self._reads.gone:
                self.check(unit)
        if unit.pulls:
            replies += self._reads.grant(unit)
        return replies

    def forget(self, number: int) -> None:
        """A unit that nobody will use again."""
        self.ready.pop(number, None)
        self.open.pop(number, None)


class AsynchronousUpdates:
    """The contributions of one server that are to be applied."""

    def __init__(self, reads: Reads, reduce: Reduce, mirror: Mirrors | None) -> None:
        self._reads, self._reduce, self._mirror = reads, reduce, mirror
        self.ready: dict[int, Unit] = {}
        """Units with contributions that are not held back."""
        self.open: dict[int, Unit] = {}
        """None: nobody waits for another's contribution."""

    def pushed(self, unit: Unit, index: int, source: Source, clock: float) -> None:
        """A contribution of the contributor at `index` has come."""
        unit.push(index, source)
        unit.arrivals.append(index)
        self.ready[unit.number] = unit

    def check(self, unit: Unit) -> None:
        """A worker has left: what it held back may go on."""
        if unit.waits:
            self.ready[unit.number] = unit

    def turn(self, unit: Unit) -> tuple[bool, Replies]:
        """Go on with a unit's next update: (whether anything was done, replies). CollectiveError where it fails."""
        if unit.readers or not unit.mirrored:
            return False, []
        if unit.block == unit.blocks:
            return True, self._finish(unit, unit.active)  # its mirror has it
        if unit.active < 0:
            unit.active = next((i for i in unit.arrivals if not self._reads.too_far(unit, unit.done[i])), -1)
        index = unit.active
        if index < 0:
            self.ready.pop(unit.number, None)  # until something comes, or somebody leaves
            return False, []
        source = unit.queues[index][0]
        if not source.ready(unit.block):
            return False, []
        if unit.blocks == 1:  # in a longer unit's word its outboxes look for blocks that have been summed: none here
            unit.words[0] |= 1
        if unit.block == 0 and unit.undo is not None:
            unit.undo.pushed(index, unit.done[index] + 1)
        try:
            self._reduce.single(unit, source)
        except Exception as error:
            self.forget(unit.number)  # nobody goes on with it
            raise unit.failed(error) from error
        if unit.block < unit.blocks:
            return True, []
        if unit.undo is not None:
            unit.undo.close(unit.stands_at)
        unit.done[index] += 1
        if self._mirror is not None:
            self._mirror.changed(unit)
        return True, self._finish(unit, index) if unit.mirrored else []

    def _finish(self, unit: Unit, index: int) -> Replies:
        """End the update by the contributor at `index`."""
        unit.words[0] += unit.words[0] & 1
        unit.arrivals.remove(index)
        unit.active = -1
        queue = unit.queues[index]
        queue.popleft()
        unit.missing += not queue
        unit.begin()
        unit.words[1 + index] = round_ = unit.done[index]
        replies: Replies = []
        if (worker := unit.contributors[index]) in self._reads.remote:
            replies.append(Reply("CONSUMED", worker, unit.number, round_))
        return replies + self._reads.grant(unit)

    def forget(self, number: int) -> None:
        """A unit that nobody will use again."""
        self.ready.pop(number, None)


Array = NDArray[Any]


class Reads:
    """The readers of one server. `remote`: workers of other nodes, which read by messages.

    `staleness`: how many steps of a unit a worker of an asynchronous store may be ahead of the slowest; -1: any number.
    """

    def __init__(self, asynchronous: bool, staleness: int = -1, remote: Iterable[int] = ()) -> None:
        self.asynchronous, self.staleness = asynchronous, staleness
        self.remote = frozenset(remote)
        self.gone: set[int] = set()
        """Workers that have left."""

    def pulled(self, unit: Unit, worker: int, round_: int, rows: Array | None) -> Replies:
        """A worker asks to read a unit, or some rows of it, once `round_` of its own pushes count."""
        unit.pulls.append((worker, round_, rows))
        return self.grant(unit)

    def released(self, unit: Unit, worker: int) -> None:
        """A reader has finished."""
        if worker in unit.readers:
            unit.readers.remove(worker)

    def left(self, unit: Unit, worker: int) -> None:
        """A worker, which is in `gone`, reads no more."""
        unit.pulls = [pull for pull in unit.pulls if pull[0] != worker]
        if worker not in self.remote:  # what is on its way to it ends by itself
            unit.readers = [reader for reader in unit.readers if reader != worker]

    def grant(self, unit: Unit) -> Replies:
        """Let those read whose own pushes count by now; nothing is written until they have finished."""
        if unit.block or not unit.pulls:
            return []
        replies: Replies = []
        waiting = []
        for worker, round_, rows in unit.pulls:
            if self._may_read(unit, worker, round_):
                unit.readers.append(worker)
                replies.append(Reply("GRANT", worker, unit.number, round_, rows=rows))
            else:
                waiting.append((worker, round_, rows))
        unit.pulls = waiting
        return replies

    def _may_read(self, unit: Unit, worker: int, round_: int) -> bool:
        if not self.asynchronous:
            return unit.round >= round_
        index = unit.position.get(worker)
        return (index is None or unit.done[index] >= round_) and not self.too_far(unit, round_)

    def too_far(self, unit: Unit, steps: int) -> bool:
        """Whether a worker after `steps` pushes of the unit is more than `staleness` ahead of the slowest."""
        if self.staleness < 0:
            return False
        slowest = min(
            (done for worker, done in zip(unit.contributors, unit.done) if worker not in self.gone), default=steps
        )
        return steps - slowest > self.staleness

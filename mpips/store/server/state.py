"""All units of one server, without MPI: events in, replies out.

The loop turns frames into events (`pushed`, `pulled`, `released`, `waits`, `left`), and calls `work` as long as it says
that something was done; each returns the replies to send. A unit is independent of all others. What is raised ends the
generation: then `finish` goes on as far as it can, and `abandon` drops the rest. The next generation has another state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from typing import Any

from numpy.typing import NDArray

from collectives.errors import CollectiveError
from mpips.optimizers import Groups, Optimizer
from mpips.store.server.late import Late
from mpips.store.server.reads import Reads
from mpips.store.server.reduce import Reduce
from mpips.store.server.rounds import Rounds
from mpips.store.server.unit import Mirrors, Replies, Source, Unit
from mpips.store.server.updates import Updates

TURNS, SHORT_BYTES = 8, 1 << 14
"""Before a server listens again: so many units of at most so many bytes, or one longer one."""
PRIORITY = attrgetter("priority")
Name = int | str


class State:
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
        self._machine = (Updates if asynchronous else Rounds)(self._reads, reduce or Reduce(), mirror)
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

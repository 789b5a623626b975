"""Long waits at a server, who for whom: warnings, the end of a wait that is too long, and circles.

A worker whose program has waited long for a round says so (`waits`). It stands still until that round is complete, so
workers that wait for one another's pushes in a circle can be told: they use keys in different orders.
`Late` is a machine without MPI; by `Gossip` the first server hears who waits at the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Protocol

import msgspec

from mpips.collectives.errors import MismatchError, StallError, ranks
from mpips.collectives.fabric.wait import LONGER
from mpips.store.server.unit import Replies, Reply

if TYPE_CHECKING:
    from mpi4py import MPI

WAITS_TAG = 1
"""Of what servers tell the first one."""
CIRCLE_SECONDS = 0.5
"""How long a circle must have been seen."""

BEFORE_LEAVING = "give all workers the same number of batches, and close the store after the last one"
"""What to do where a worker has left while others push on."""


class Wait(msgspec.Struct, array_like=True, frozen=True):
    """A worker waits for a round of a key (`noun`: of what else), to which `absent` have not pushed."""

    worker: int
    key: int | str
    round: int
    absent: tuple[int, ...]
    noun: str = "key"


class InRounds(Protocol):
    """What workers push to in rounds: a unit of a key, or something of a service."""

    warned: bool
    opened: float | None
    """When the open round began to wait; None: since the next look at the clock."""

    @property
    def noun(self) -> str: ...
    @property
    def key(self) -> int | str: ...
    @property
    def number(self) -> int: ...
    @property
    def round(self) -> int: ...
    @property
    def contributors(self) -> Sequence[int]: ...
    @property
    def queues(self) -> Sequence[Sized]: ...
    @property
    def waits(self) -> bool: ...
    @property
    def missing(self) -> int: ...
    def absent(self) -> list[int]: ...


class Late:
    """The long waits of one server; `clock` values are seconds of any monotonic clock."""

    def __init__(self, stall_seconds: float = 60.0, timeout_seconds: float = 0.0) -> None:
        self.stall_seconds, self.timeout_seconds = stall_seconds, timeout_seconds
        self._said: dict[int, tuple[InRounds, int]] = {}
        self._told: dict[int, list[Wait]] = {}
        self._suspected: list[Wait] = []
        self._since = 0.0

    # ---- rounds that wait

    def tick(self, clock: float, units: Iterable[InRounds]) -> Replies:
        """Look at open rounds; call now and then while idle. Warnings for those who wait, once a round; StallError
        where one has waited for longer than `timeout_seconds`."""
        long: dict[str, tuple[float, list[InRounds]]] = {}
        """How long the first has waited, and the units to warn of now, by who waits for whom."""
        for unit in units:
            if not unit.waits or not unit.missing:
                continue
            if unit.opened is None:
                unit.opened = clock
            waited = clock - unit.opened
            if 0 < self.timeout_seconds < waited:
                raise StallError(f"{_sentence([unit], self.timeout_seconds)}; {LONGER}")
            if waited > self.stall_seconds and not unit.warned:
                unit.warned = True
                long.setdefault(f"{unit.noun} {_who(unit)}", (waited, []))[1].append(unit)
        replies: Replies = []
        for waited, late in long.values():
            text, first = _sentence(late, waited), late[0]
            came = [worker for worker, queue in zip(first.contributors, first.queues) if queue]
            replies += [Reply("WARNING", worker, first.number, text=text) for worker in came]
        return replies

    # ---- workers that wait for one another

    def note_wait(self, unit: InRounds, worker: int, round_: int) -> None:
        """Note that a worker's program waits until this round is complete, and does nothing else."""
        self._said[worker] = unit, round_

    def waits_here(self) -> list[Wait]:
        """Return who waits at this server for whom, as of now."""
        waits = []
        for worker, (unit, round_) in list(self._said.items()):
            if unit.round >= round_:
                del self._said[worker]
            elif absent := _absent(unit, round_, worker):
                waits.append(Wait(worker, unit.key, round_, absent, unit.noun))
        return waits

    def note_elsewhere(self, server: int, waits: list[Wait]) -> None:
        """Take what another server's `waits_here` says now."""
        self._told[server] = waits

    def check_circles(self, clock: float, more: Iterable[Wait] = ()) -> None:
        """Raise MismatchError if workers have waited in a circle for a while: another server's words may be old.
        `more`: other waits at this server."""
        waits = {wait.worker: wait for wait in self.waits_here()}
        for others in self._told.values():
            waits.update((wait.worker, wait) for wait in others)
        waits.update((wait.worker, wait) for wait in more)
        circle = find_circle(waits)
        if circle != self._suspected:
            self._suspected, self._since = circle, clock
        if circle and clock - self._since > CIRCLE_SECONDS:
            steps = "; ".join(
                f"rank {wait.worker} waits for round {wait.round} of {wait.noun} {wait.key!r}, to which "
                f"{ranks(wait.absent)} {'have' if len(wait.absent) > 1 else 'has'} not pushed"
                for wait in circle
            )
            nouns = " and ".join(sorted({f"{wait.noun}s" for wait in circle}))
            raise MismatchError(f"{steps}: use {nouns} in the same order on all ranks")

    def forget(self, units: Sequence[InRounds]) -> None:
        """Forget units that nobody will use again."""
        self._said = {worker: wait for worker, wait in self._said.items() if wait[0] not in units}

    def clear(self) -> None:
        """Forget all waits."""
        self._said, self._told, self._suspected = {}, {}, []


def find_circle(waits: dict[int, Wait]) -> list[Wait]:
    """Return waits in a circle, each for the next one's worker, from the lowest rank on; [] where there is none."""
    free: set[int] = set()  # workers from which no circle is reached
    for start in sorted(waits):
        way: list[int] = []
        stack = [iter((start,))]
        while stack:
            worker = next(stack[-1], None)
            if worker is None:
                stack.pop()
                if way:
                    free.add(way.pop())
            elif worker in way:
                circle = way[way.index(worker) :]
                first = circle.index(min(circle))
                return [waits[each] for each in circle[first:] + circle[:first]]
            elif worker in waits and worker not in free:
                way.append(worker)
                stack.append(iter(waits[worker].absent))
    return []


def _absent(unit: InRounds, round_: int, but: int) -> tuple[int, ...]:
    """Return the workers that have not pushed to a round of the unit, but for one."""
    behind = (worker for worker, queue in zip(unit.contributors, unit.queues) if unit.round + len(queue) < round_)
    return tuple(worker for worker in behind if worker != but)


def _sentence(units: Sequence[InRounds], waited: float) -> str:
    """Return the sentence on units that wait for the same workers, so long for the first."""
    first, others = units[0], {unit.key for unit in units} - {units[0].key}
    more = f" (and {len(others)} more {first.noun}{'s' * (len(others) > 1)})" if others else ""
    return f"{first.noun} {first.key!r}{more}: round {first.round + 1} has waited {waited:.3g} s for {_who(first)}"


def _who(unit: InRounds) -> str:
    """Return which workers have pushed to the unit's round, and which have not."""
    came = [worker for worker, queue in zip(unit.contributors, unit.queues) if queue]
    return f"ranks {unit.absent()}; ranks {came} have pushed"


class Gossip:
    """Words of the servers of one generation to the first one. `comm`: theirs."""

    def __init__(self, comm: MPI.Comm, late: Late) -> None:
        self._comm, self._late, self._alone = comm, late, comm.Get_size() == 1
        self._said: list[Wait] = []

    def tick(self) -> None:
        """Tell what has changed; or, on the first server, hear of it. Call it now and then while idle."""
        if self._alone:
            return
        from mpips.collectives.fabric.requests import received, tell

        if self._comm.Get_rank() == 0:
            while (message := received(self._comm, WAITS_TAG)) is not None:
                server, data = message
                self._late.note_elsewhere(server, msgspec.msgpack.decode(data, type=list[Wait]))
        elif (waits := self._late.waits_here()) != self._said:
            self._said = waits
            tell(self._comm, msgspec.msgpack.encode(waits), [0], WAITS_TAG)

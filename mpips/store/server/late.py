"""Long waits at a server: warnings, the end of a wait that is too long, and workers that wait in a circle.

A worker whose program has waited long for a round reports this to the servers. The worker does nothing else until that
round is complete. From these reports a server detects a deadlock: workers that wait for one another's pushes in a
circle. This happens if workers use keys in different orders. `Late` is a state machine without MPI. Through `Gossip`
the first server learns which workers wait at the other servers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Protocol

import msgspec

from mpips.collectives.errors import MismatchError, StallError, have_not
from mpips.collectives.fabric.requests import send_to_all
from mpips.collectives.fabric.wait import LONGER, late_sentence
from mpips.store.server.unit import Replies, Reply

if TYPE_CHECKING:
    from mpi4py import MPI

# tag of the messages that the other servers send to the first server
WAITS_TAG = 1
# A circle ends the generation after it has been seen for this many seconds.
CIRCLE_SECONDS = 0.5

# advice in error messages if a worker has left while other workers still push
BEFORE_LEAVING = "give all workers the same number of batches, and close the store after the last one"


class Wait(msgspec.Struct, array_like=True, frozen=True):
    """A worker's wait for a round to which the workers `absent` have not pushed. `noun`: "key" or "table"."""

    worker: int
    key: int | str
    round: int
    absent: tuple[int, ...]
    noun: str = "key"


class InRounds(Protocol):
    """Anything that workers push to in rounds: a unit of a key, or a part of a service."""

    warned: bool
    # time at which the open round began to wait; None until the next `Late.tick` sets it
    opened: float | None

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
    """The long waits at one server.

    This class does not read a clock. Its caller passes the current time as `clock`, in seconds, always from the same
    clock, which must never go backward.
    """

    def __init__(self, stall_seconds: float = 60.0, timeout_seconds: float = 0.0) -> None:
        self.stall_seconds = stall_seconds
        self.timeout_seconds = timeout_seconds
        # worker -> (unit, round) that its program waits for at this server
        self._waits: dict[int, tuple[InRounds, int]] = {}
        # server -> the waits at that server
        self._waits_elsewhere: dict[int, list[Wait]] = {}
        # the circle that the last check has found, and the time at which it was first found
        self._suspected: list[Wait] = []
        self._since = 0.0

    # ---- rounds that wait

    def tick(self, clock: float, units: Iterable[InRounds]) -> Replies:
        """Check how long open rounds have waited. Called now and then.

        Return warnings for workers that wait, once for each round. Raise StallError if a round has waited longer than
        `timeout_seconds`.
        """
        # (noun, late workers, all contributors) -> (how long the first unit has waited, units to warn about now)
        long: dict[Hashable, tuple[float, list[InRounds]]] = {}
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
                late = unit.noun, tuple(unit.absent()), tuple(unit.contributors)
                long.setdefault(late, (waited, []))[1].append(unit)
        replies: Replies = []
        for waited, waiting in long.values():
            text, first = _sentence(waiting, waited), waiting[0]
            came = [worker for worker, queue in zip(first.contributors, first.queues) if queue]
            replies += [Reply("WARNING", worker, first.number, text=text) for worker in came]
        return replies

    # ---- workers that wait for one another

    def note_wait(self, unit: InRounds, worker: int, round_: int) -> None:
        """Note that a worker's program is blocked until this round of the unit is complete."""
        self._waits[worker] = unit, round_

    def waits_here(self) -> list[Wait]:
        """Return the current waits at this server."""
        waits = []
        for worker, (unit, round_) in list(self._waits.items()):
            if unit.round >= round_:
                del self._waits[worker]
            elif absent := _absent(unit, round_, worker):
                waits.append(Wait(worker, unit.key, round_, absent, unit.noun))
        return waits

    def note_elsewhere(self, server: int, waits: list[Wait]) -> None:
        """Note the waits at another server."""
        self._waits_elsewhere[server] = waits

    def check_circles(self, clock: float, more: Iterable[Wait] = ()) -> None:
        """Raise MismatchError if workers have waited in a circle for CIRCLE_SECONDS.

        A circle must be seen for this time because reports of other servers may be out of date.

        Args:
            more: Further waits at this server.
        """
        waits = {wait.worker: wait for wait in self.waits_here()}
        for others in self._waits_elsewhere.values():
            waits.update((wait.worker, wait) for wait in others)
        waits.update((wait.worker, wait) for wait in more)
        circle = find_circle(waits)
        if circle != self._suspected:
            self._suspected, self._since = circle, clock
        if circle and clock - self._since > CIRCLE_SECONDS:
            steps = "; ".join(
                f"rank {wait.worker} waits for round {wait.round} of {wait.noun} {wait.key!r}, to which "
                f"{have_not(wait.absent, 'pushed')}"
                for wait in circle
            )
            nouns = " and ".join(sorted({f"{wait.noun}s" for wait in circle}))
            raise MismatchError(f"{steps}: use {nouns} in the same order on all ranks")

    def forget(self, units: Sequence[InRounds]) -> None:
        """Forget units that will not be used again."""
        self._waits = {worker: wait for worker, wait in self._waits.items() if wait[0] not in units}

    def clear(self) -> None:
        """Forget all waits."""
        self._waits, self._waits_elsewhere, self._suspected = {}, {}, []


def find_circle(waits: dict[int, Wait]) -> list[Wait]:
    """Find workers that wait in a circle. Return their waits, each for the worker of the next wait.

    The wait of the lowest rank comes first. Return [] if no workers wait in a circle.
    """
    # workers that are known not to lead into a circle
    free: set[int] = set()
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
    """Return the workers that have not pushed to a round of the unit, leaving out the worker `but`."""
    behind = (worker for worker, queue in zip(unit.contributors, unit.queues) if unit.round + len(queue) < round_)
    return tuple(worker for worker in behind if worker != but)


def _sentence(units: Sequence[InRounds], waited: float) -> str:
    """Return a message about units that wait for the same workers. The first unit has waited for `waited` seconds."""
    first, others = units[0], {unit.key for unit in units} - {units[0].key}
    more = f" (and {len(others)} more {first.noun}{'s' * (len(others) > 1)})" if others else ""
    what = f"{first.noun} {first.key!r}{more}: round {first.round + 1}"
    return late_sentence(what, waited, first.absent(), "pushed")


class Gossip:
    """Tells the first server which workers wait at the other servers. `comm`: the communicator of all servers."""

    def __init__(self, comm: MPI.Comm, late: Late) -> None:
        self._comm = comm
        self._late = late
        self._alone = comm.Get_size() == 1
        # the waits in the last message
        self._sent: list[Wait] = []

    def tick(self) -> None:
        """Send this server's waits to the first server if they have changed. On the first server, receive waits."""
        if self._alone:
            return
        from mpips.collectives.fabric.requests import receive_next

        if self._comm.Get_rank() == 0:
            while (message := receive_next(self._comm, WAITS_TAG)) is not None:
                server, data = message
                self._late.note_elsewhere(server, msgspec.msgpack.decode(data, type=list[Wait]))
        elif (waits := self._late.waits_here()) != self._sent:
            self._sent = waits
            send_to_all(self._comm, msgspec.msgpack.encode(waits), [0], WAITS_TAG)

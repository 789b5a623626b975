"""Rounds of an asynchronous store that close by a quorum: when they close, and the weight of a late push.

A client is one worker or a group of workers that push together. A client is in time if it has contributed to the last
round or has read its result. After its push such a client waits until the open round closes. A client that has missed n
rounds is n rounds late. Its push counts in the open round with less weight, and the client may read at once. After
that the client is in time again. So a client has at most one late push in a round. `OpenRound` implements this rule
without arrays, clock or MPI. `QuorumState` applies it to the units of a server.

Sources: the minimum number of learners, the grace time and weights by tokens are those of Decoupled DiLoCo (arXiv
2604.21428). The weight 1 / (1 + rounds late) is the polynomial of FedAsync (arXiv 1903.03934) with exponent 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.collectives import log
from mpips.collectives.kernels.quiet import quietly
from mpips.compression import Compressor
from mpips.optimizers import Groups
from mpips.store.server.late import InRounds, Late, Wait
from mpips.store.server.reduce import Reduce
from mpips.store.server.state import ServerState
from mpips.store.server.unit import Contribution, Replies, Reply, Unit, UnitMirror

LOG = log.get("mpips.store")
# seconds between two log messages about late workers
SAY_SECONDS = 10.0


@dataclass(frozen=True)
class Quorum:
    """The rule of a quorum: a round closes `grace_seconds` after `least` clients have contributed in time.

    A round closes at once when all clients have contributed in time.
    """

    least: int
    grace_seconds: float = 0.0


class QuorumContribution(NamedTuple):
    """A push in a round that closes by a quorum."""

    # the contributor's index in `Unit.contributors`
    position: int
    # number of this push among the contributor's pushes
    push: int
    # the number of tokens or steps in the push
    weight: float
    # number of rounds that the push is late; 0: in time
    late: int


class OpenRound:
    """The open round of one unit.

    `taken` has for each contributor the number of its pushes that were taken, in all rounds so far.
    """

    def __init__(self, quorum: Quorum, taken: Iterable[int]) -> None:
        self.quorum = quorum
        self.number = 0
        self.taken = list(taken)
        # the last round that each contributor has read or contributed to
        self._seen = [0] * len(self.taken)
        self.in_time: dict[int, QuorumContribution] = {}
        self.late: list[QuorumContribution] = []
        # time at which the quorum was reached; None before that
        self._reached: float | None = None

    def give(self, position: int, weight: float) -> QuorumContribution:
        """Take a contribution. It must not come from a contributor that is in `in_time` already."""
        self.taken[position] += 1
        given = QuorumContribution(position, self.taken[position], weight, max(self.number - self._seen[position], 0))
        self._seen[position] = self.number + (not given.late)
        if given.late:
            self.late.append(given)
        else:
            self.in_time[position] = given
        return given

    def read(self, position: int) -> None:
        """Note that a contributor has read the value after the last round."""
        self._seen[position] = max(self._seen[position], self.number)

    def answered(self, position: int) -> int:
        """Return the number of a contributor's pushes after which it may read.

        A contributor waits until the round with its push in time has closed, but does not wait for its late pushes.
        """
        return self.taken[position] - (position in self.in_time)

    def is_due(self, clock: float, expected: Collection[int]) -> bool:
        """True if the round closes at `clock` seconds. `expected`: contributors that may still contribute in time."""
        if not (self.in_time or self.late):
            return False
        rest = set(expected).difference(self.in_time)
        if not rest:
            return True
        if len(self.in_time) < min(self.quorum.least, len(self.in_time) + len(rest)):
            return False
        if self._reached is None:
            self._reached = clock
        return clock >= self.closes_at

    @property
    def closes_at(self) -> float:
        """The time at which the grace time is over. Infinity before the quorum is reached."""
        return math.inf if self._reached is None else self._reached + self.quorum.grace_seconds

    def close(self) -> list[tuple[QuorumContribution, float]]:
        """Close this round and begin the next. Return (contribution, factor) for all contributions to the closed round.

        The contributions are ordered by contributor, and then by push. The factor is the contribution's weight divided
        by the mean of all weights.
        """
        given = sorted([*self.late, *self.in_time.values()])
        weights = [push.weight / (1 + push.late) for push in given]
        total = sum(weights)
        self.in_time, self.late, self._reached = {}, [], None
        self.number += 1
        return [(push, weight * len(given) / total if total else 1.0) for push, weight in zip(given, weights)]


class QuorumState(ServerState):
    """Units of an asynchronous store whose rounds close by a quorum. All workers communicate with it by messages.

    The optimizer gets the weighted mean of a round. A push counts once it has arrived completely. So a worker that
    stops in the middle of a push delays nobody. Workers read a copy of the values, so that a slow link does not delay
    the next round.
    """

    asynchronous = True

    def __init__(
        self,
        quorum: Quorum,
        remote: Iterable[int] = (),
        late: Late | None = None,
        reduce: Reduce | None = None,
        optimizers: Groups | None = None,
        mirror: UnitMirror | None = None,
        compressor: Compressor | None = None,
    ) -> None:
        super().__init__(remote, late, reduce, optimizers, mirror, compressor)
        self._quorum = quorum
        self._rounds: dict[int, OpenRound] = {}
        # unit number -> late contributions to its open round, which are no longer in the queues
        self._sources: dict[int, dict[QuorumContribution, Contribution]] = {}
        # time at which the next grace time is over
        self._wakes = math.inf
        # True once the generation has ended
        self._is_over = False
        # late worker -> (number of its late pushes to the unit that got most of them, largest number of rounds that a
        # push was late)
        self.late_pushes: dict[int, tuple[int, int]] = {}
        # (worker, unit number) -> number of late pushes
        self._late: dict[tuple[int, int], int] = {}
        self._said: dict[int, tuple[int, int]] = {}
        self._says_at = 0.0
        self._closed = 0
        self._missed = Counter[int]()

    def pushed(self, unit: Unit, index: int, source: Contribution, priority: int, clock: float) -> None:
        queue = unit.queues[index]
        unit.missing -= not queue
        queue.append(source)
        self._clock = clock
        self.ready[unit.number] = unit

    def wake(self, clock: float) -> None:
        """Note the time. At the next turn, rounds whose grace time is over are closed."""
        super().wake(clock)
        if clock >= self._wakes:
            self._wakes = math.inf
            self.ready.update(self.open)

    def tick(self, clock: float, others: Iterable[InRounds] = (), waits: Iterable[Wait] = ()) -> Replies:
        """Check for waits that are too long, and log which workers have pushed late."""
        if clock >= self._says_at:
            self._say_late()
        return super().tick(clock, others, waits)

    def asks(self, worker: int) -> None:
        super().asks(worker)
        self.ready.update(self.open)

    def left(self, worker: int) -> Replies:
        self._say_late()
        return super().left(worker)

    def _say_late(self) -> None:
        if self.late_pushes != self._said:
            self._says_at, self._said = self._clock + SAY_SECONDS, dict(self.late_pushes)
            LOG.warning("%s", late_sentence(self.late_pushes))

    def take_rounds(self) -> tuple[int, Counter[int]]:
        """Return counts since the last call: closed rounds of units, and for each worker the rounds that it has missed.

        A worker has missed a round if a push was expected from it, and this push was late or did not arrive.
        """
        counted, self._closed, self._missed = (self._closed, self._missed), 0, Counter()
        return counted

    def _handle_gone(self, unit: Unit) -> None:
        # A worker has left or waits for all others, so the round may now close without its push.
        if unit.number in self.open:
            self.ready[unit.number] = unit

    def _may_read(self, unit: Unit, worker: int, round_: int) -> bool:
        index = unit.position.get(worker)
        return index is None or self._round(unit).answered(index) >= round_

    def _grant(self, unit: Unit) -> Replies:
        replies = super()._grant(unit)
        for reply in replies:
            if reply.what == "GRANT":
                # The worker reads a copy, so updates need not wait for it.
                unit.readers.remove(reply.worker)
                if unit.copy is None:
                    unit.copy = unit.stored.copy()
                if (index := unit.position.get(reply.worker)) is not None:
                    self._round(unit).read(index)
        return replies

    def _round(self, unit: Unit) -> OpenRound:
        if unit.number not in self._rounds:
            self._rounds[unit.number] = OpenRound(self._quorum, unit.done)
        return self._rounds[unit.number]

    def _turn(self, unit: Unit) -> tuple[bool, Replies]:
        if unit.readers or not unit.mirrored:
            return False, []
        if unit.block == unit.blocks:
            # The round was written at an earlier turn, and has now arrived at the mirror.
            return True, self._end_round(unit)
        replies, coming = self._take(unit)
        open_round, absent = self._round(unit), self.gone | self.meeting | self.asking
        present = [index for index, worker in enumerate(unit.contributors) if worker not in absent or index in coming]
        if open_round.is_due(self._clock, [] if self._is_over else present):
            return True, replies + self._close(unit, open_round)
        self._wakes = min(self._wakes, open_round.closes_at)
        if not coming:
            self.ready.pop(unit.number, None)
        return bool(replies), replies

    def _take(self, unit: Unit) -> tuple[Replies, set[int]]:
        """Take the contributions that have arrived.

        Return replies, and the positions of contributors whose pushes have begun to arrive.
        """
        open_round, replies, coming = self._round(unit), list[Reply](), set[int]()
        for index, queue in enumerate(unit.queues):
            while queue and index not in open_round.in_time:
                source = queue[0]
                if not source.ready(0):
                    coming.add(index)
                    break
                given = open_round.give(index, source.quorum_weight)
                if unit.number not in self.open:
                    self.open[unit.number] = unit
                    unit.opened, unit.warned = None, False
                if given.late:
                    queue.popleft()
                    unit.missing += not queue
                    self._sources.setdefault(unit.number, {})[given] = source
                    self._note_late(unit, unit.contributors[index], given.late)
                replies.append(Reply("CONSUMED", unit.contributors[index], unit.number, open_round.taken[index]))
        return (replies + self._grant(unit) if replies else []), coming

    def _note_late(self, unit: Unit, worker: int, rounds: int) -> None:
        count = self._late[worker, unit.number] = self._late.get((worker, unit.number), 0) + 1
        pushes, most = self.late_pushes.get(worker, (0, 0))
        self.late_pushes[worker] = max(pushes, count), max(most, rounds)

    def _close(self, unit: Unit, open_round: OpenRound) -> Replies:
        """Close the open round: update the unit with the weighted mean of the round's pushes."""
        late = self._sources.pop(unit.number, {})
        self._word[0] = unit.token
        if unit.is_timed:
            self._begin(unit, open_round.number + 1)
        self._closed += 1
        absent = self.gone | self.meeting | self.asking
        missed = (worker for at, worker in enumerate(unit.contributors) if at not in open_round.in_time)
        self._missed.update(worker for worker in missed if worker not in absent)
        given = open_round.close()
        if unit.undo is not None:
            unit.undo.note_pushes(open_round.taken)
        optimizer = unit.optimizer
        try:
            parts = [
                _weighed((late.get(push) or unit.queues[push.position][0]).whole(), factor) for push, factor in given
            ]
            unit.optimizer = replace(optimizer, rescale=optimizer.rescale / len(given))  # type: ignore
            self._reduce.sum_whole(unit, parts)
        except Exception as error:
            raise self._failed(unit, error) from error
        finally:
            unit.optimizer = optimizer
        unit.block = unit.blocks
        unit.done = list(open_round.taken)
        for push, _ in given:
            if not push.late:
                unit.queues[push.position].popleft()
                unit.missing += not unit.queues[push.position]
        self._written(unit)
        return self._end_round(unit) if unit.mirrored else []

    def _end_round(self, unit: Unit) -> Replies:
        """End a round, and let workers that wait for it read."""
        if self._begun:
            self._end(unit)
        unit.begin()
        unit.round += 1
        unit.copy = None
        for index, count in enumerate(unit.done):
            unit.words[1 + index] = count
        self.open.pop(unit.number, None)
        # Contributions to the next round may have arrived already.
        self.ready[unit.number] = unit
        return self._grant(unit)

    def finish(self) -> bool:
        """Close rounds with the contributions that have arrived, at the end of a generation."""
        self._is_over = True
        self.ready.update(self.open)
        return super().finish()

    def abandon(self) -> None:
        super().abandon()
        self._say_late()
        self._rounds, self._sources, self._is_over = {}, {}, False


def late_sentence(pushes: dict[int, tuple[int, int]]) -> str:
    """Return the warning about late workers.

    `pushes`: worker -> (number of its late pushes, largest number of rounds that a push was late).
    """
    words = [
        f"rank {worker} with {count} push{'es' * (count > 1)} of a key, by at most {most} round{'s' * (most > 1)}"
        for worker, (count, most) in sorted(pushes.items())
    ]
    return f"too late for a round, and in the next one with less weight: {'; '.join(words)}"


def _weighed(array: NDArray[Any], factor: float) -> NDArray[Any]:
    """Multiply an array by a factor, in place. A factor of 0 gives zeros even for NaN and infinity."""
    if not factor:
        array[...] = 0
    return array if factor in (0.0, 1.0) else quietly(np.multiply, array, factor, out=array)

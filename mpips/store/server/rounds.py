"""Synchronous rounds of a server's units, without MPI: events in, replies out, arithmetic in between.

Round r of a unit is complete when every contributor has pushed it r times. It is summed in the order of the
contributors, block by block. Each block is updated by the optimizer, or replaces the stored one, and the unit's
progress word tells readers how many blocks are done. A worker may be any number of rounds ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives.errors import MismatchError
from mpips.store.server.reads import Reads
from mpips.store.server.reduce import Reduce
from mpips.store.server.unit import Mirrors, Replies, Reply, Source, Unit


class Rounds:
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

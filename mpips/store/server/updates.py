"""Asynchronous updates of a server's units, without MPI: every contribution is an update of its own, as they come.

Workers of this node may read a unit of one block unasked, between two updates: `words[0]` is odd while one is being
written, and counts up. Updates that follow each other closely leave them no time: then they ask (`reads`).
"""

from __future__ import annotations

from mpips.store.server.reads import Reads
from mpips.store.server.reduce import Reduce
from mpips.store.server.unit import Mirrors, Replies, Reply, Source, Unit


class Updates:
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

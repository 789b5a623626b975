"""Who may read a unit of a server, and when: after its own pushes, and not too far ahead of the slowest worker.

Workers of this node may read a unit of one block of an asynchronous store unasked, between two updates: `words[0]` is
odd while one is being written, and counts up. Updates that follow each other closely leave them no time: then they ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from numpy.typing import NDArray

from mpips.sums import Replies, Sums
from mpips.unit import Reply, Unit

Array = NDArray[Any]


class Reads(Sums):
    """The units of one server and their readers."""

    def __init__(
        self, asynchronous: bool, staleness: int, remote: Iterable[int], threads: int,
        begin_thread: Callable[[], None] | None, cores_shared: bool,
    ) -> None:  # fmt: skip
        super().__init__(remote, threads, begin_thread, cores_shared)
        self.asynchronous, self.staleness = asynchronous, staleness
        self.units: dict[int, Unit] = {}
        self.gone: set[int] = set()
        self.ready: dict[int, Unit] = {}  # units with work that can be done, or may be by now

    def pulled(self, number: int, worker: int, round_: int, rows: Array | None = None) -> Replies:
        """A worker asks to read a unit, or some rows of it, once `round_` of its own pushes count."""
        unit = self.units[number]
        unit.pulls.append((worker, round_, rows))
        return self._grant(unit)

    def released(self, number: int, worker: int) -> Replies:
        """A reader has finished; one that gives up before it may read gets its answer all the same, but reads not."""
        unit = self.units.get(number)
        if unit is None:
            return []  # forgotten
        if worker in unit.readers:
            unit.readers.remove(worker)
            if unit.waits:
                self.ready[number] = unit
            return []
        kept = [pull for pull in unit.pulls if pull[0] != worker]
        replies = [Reply("GRANT", worker, number)] * (len(unit.pulls) - len(kept))
        unit.pulls = kept
        return replies

    def _read_no_more(self, unit: Unit, worker: int) -> None:
        """A worker has left."""
        unit.pulls = [pull for pull in unit.pulls if pull[0] != worker]
        if worker not in self.remote:  # what is on its way to it ends by itself
            unit.readers = [reader for reader in unit.readers if reader != worker]

    def _grant(self, unit: Unit) -> Replies:
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
        return (index is None or unit.done[index] >= round_) and not self._too_far(unit, round_)

    def _too_far(self, unit: Unit, steps: int) -> bool:
        """Whether a worker after `steps` pushes of the unit is more than `staleness` ahead of the slowest."""
        if self.staleness < 0:
            return False
        slowest = min(
            (done for worker, done in zip(unit.contributors, unit.done) if worker not in self.gone), default=steps
        )
        return steps - slowest > self.staleness

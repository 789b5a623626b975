"""When a pull may read a unit of a server: after its own pushes, and not too far ahead of the slowest worker.

A worker that is too far ahead has its pushes held back, too (`updates`). Who reads holds updates back until it has
finished. Workers of this node read a synchronous store without asking, behind its progress word; and a unit of one
block of an asynchronous store between two updates (see `updates`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from mpips.store.server.unit import Replies, Reply, Unit

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

"""Say on a server's page what it has taken in, and what waits: from outside, bytes a second and the queue are seen.

Nothing is counted on the way of a push: rounds of units are known anyway, and are looked at while there is time.
"""

from __future__ import annotations

import time
from collections import Counter

from mpips.collectives.recorder import own as recorder
from mpips.store.server.quorum import QuorumState
from mpips.store.server.state import ServerState
from mpips.tables.places import room
from mpips.tables.service import ServerTables

EVERY_SECONDS = 0.2
"""Between two looks, and more where a look takes more than 1 / `SHARE` of that."""
SHARE = 500
MOST_WORKERS = 128
"""Of which a page says what they have pushed."""
MOST_LATE = 32
"""Of which a page says how many rounds they have missed, those with the most."""


class Load:
    """Look at all stores of this process' server. Bytes are those of keys, and of rows of tables, as pushed."""

    def __init__(self) -> None:
        self.due = 0.0
        """When to look again, in seconds of the caller's clock."""
        self._pushed, self._missed, self._rounds = Counter[int](), Counter[int](), 0

    def write(self, now: float, states: list[tuple[ServerState, ServerTables]]) -> None:
        """Write it down, at `now`."""
        began, queued, found = time.monotonic(), 0, dict[str, Counter[int]]()
        more: dict[str, object] = {}
        for state, tables in states:
            for unit in state.units.values():
                for worker, count in zip(unit.contributors, unit.uncounted(state.asynchronous)):
                    self._pushed[worker] += count * unit.stored.nbytes
                queued += unit.queued
            for worker, nbytes in tables.take_counts().items():
                self._pushed[worker] += nbytes
            queued += tables.queued
            for table in tables.known():
                found.setdefault(table.key, Counter()).update(dict(enumerate(table.numbers)))
            if isinstance(state, QuorumState):
                rounds, missed = state.take_rounds()
                self._rounds += rounds
                self._missed += missed
                most = {str(worker): count for worker, count in self._missed.most_common(MOST_LATE)}
                more |= {"rounds": self._rounds, "missed": most}
        for name, sums in found.items():
            words = recorder.numbers_of(name)
            for at, number in sums.items():
                words[at] = number
        if found:
            more["room"] = room()
        pushed = {str(worker): self._pushed[worker] for worker in sorted(self._pushed)[:MOST_WORKERS]}
        recorder.write_load(sum(self._pushed.values()), queued, pushed, **more)
        self.due = now + max(EVERY_SECONDS, SHARE * (time.monotonic() - began))

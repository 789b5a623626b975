"""Say on a server's page what it has taken in, and what waits: from outside, bytes a second and the queue are seen.

Nothing is counted on the way of a push: rounds of units are known anyway, and are looked at while there is time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from mpips.collectives.recorder import own as recorder
from mpips.store.server.quorum import QuorumState
from mpips.store.server.service import Service
from mpips.store.server.state import ServerState

EVERY_SECONDS = 0.2
"""Between two looks, and more where a look takes more than 1 / `SHARE` of that."""
SHARE = 500
MOST_WORKERS = 128
"""Of which a page says what they have pushed."""
MOST_LATE = 32
"""Of which a page says how many rounds they have missed, those with the most."""


class Load:
    """Look at all stores of this process' server. Bytes are as pushed."""

    def __init__(self) -> None:
        self.due = 0.0
        """When to look again, in seconds of the caller's clock."""
        self._pushed, self._missed, self._rounds = Counter[int](), Counter[int](), 0

    def write(self, now: float, states: list[tuple[ServerState, Sequence[Service]]]) -> None:
        """Write it down, at `now`."""
        began, queued, found = time.monotonic(), 0, dict[str, Counter[int]]()
        more: dict[str, object] = {}
        for state, services in states:
            for unit in state.units.values():
                for worker, count in zip(unit.contributors, unit.uncounted(state.asynchronous)):
                    self._pushed[worker] += count * unit.stored.nbytes
                queued += unit.queued
            for service in services:
                self._pushed.update(service.take_counts())
                queued += service.queued
                figures, words = service.figures()
                for name, numbers in figures.items():
                    found.setdefault(name, Counter()).update(dict(enumerate(numbers)))
                more |= words
            if isinstance(state, QuorumState):
                rounds, missed = state.take_rounds()
                self._rounds += rounds
                self._missed += missed
                most = {str(worker): count for worker, count in self._missed.most_common(MOST_LATE)}
                more |= {"rounds": self._rounds, "missed": most}
        for name, sums in found.items():
            shown = recorder.numbers_of(name)
            for at, number in sums.items():
                shown[at] = number
        pushed = {str(worker): self._pushed[worker] for worker in sorted(self._pushed)[:MOST_WORKERS]}
        recorder.write_load(sum(self._pushed.values()), queued, pushed, **more)
        self.due = now + max(EVERY_SECONDS, SHARE * (time.monotonic() - began))

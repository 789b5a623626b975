"""Show a server's load to other processes: how many bytes workers have pushed to it, and how many pushes wait.

The figures are written to the server's page, a file that other processes read. They cost no time in the code that
handles a push: they are computed now and then from the round numbers that units have anyway.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection

from mpips.collectives.recorder import own as recorder
from mpips.store.server.quorum import QuorumState
from mpips.store.server.service import Service
from mpips.store.server.state import ServerState

# Seconds between two writes of the page. If a write takes more than 1 / SHARE of this time, the next write comes later.
EVERY_SECONDS = 0.2
SHARE = 500
# A page shows the bytes of at most this many workers.
MOST_WORKERS = 128
# A page shows the missed rounds of at most this many workers, namely those that missed the most.
MOST_LATE = 32


class Load:
    """The load of this process' servers, summed over all stores.

    A push to a key counts as many bytes as the key's values have, even if the push was compressed.
    """

    def __init__(self) -> None:
        # time of the next write, in seconds of the caller's clock
        self.due = 0.0
        self._pushed = Counter[int]()
        self._missed = Counter[int]()
        self._rounds = 0

    def write(self, now: float, states: list[tuple[ServerState, Collection[Service]]]) -> None:
        """Write the figures to the page. `now`: seconds of the caller's clock."""
        began, queued = time.monotonic(), 0
        # name of a service's figures -> position -> figure, summed over all stores
        sums: dict[str, Counter[int]] = {}
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
                    sums.setdefault(name, Counter()).update(dict(enumerate(numbers)))
                more |= words
            if isinstance(state, QuorumState):
                rounds, missed = state.take_rounds()
                self._rounds += rounds
                self._missed += missed
                most = {str(worker): count for worker, count in self._missed.most_common(MOST_LATE)}
                more |= {"rounds": self._rounds, "missed": most}
        for name, figures_of in sums.items():
            shown = recorder.table_numbers(name)
            for at, number in figures_of.items():
                shown[at] = number
        pushed = {str(worker): self._pushed[worker] for worker in sorted(self._pushed)[:MOST_WORKERS]}
        recorder.write_load(sum(self._pushed.values()), queued, pushed, **more)
        self.due = now + max(EVERY_SECONDS, SHARE * (time.monotonic() - began))

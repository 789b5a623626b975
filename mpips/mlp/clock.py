"""Where the time of a rank goes: seconds of computation and communication by phase, and what was hidden."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

PHASES = ("compute", "forward", "backward", "data", "evaluate")


class Clock:
    """Seconds by phase: compute; forward gathers and sums; backward reductions; data (reading and distribution);
    evaluate.

    A phase of communication counts what computation waits for, slower ranks too. `under_way`: seconds with a message on
    its way, whether computation goes on beside it or not.
    """

    def __init__(self) -> None:
        self.reset()
        self._messages = 0
        self._since = 0.0

    def reset(self) -> None:
        """Begin to count anew."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.under_way = 0.0

    def sent(self) -> None:
        """A message has left."""
        if not self._messages:
            self._since = perf_counter()
        self._messages += 1

    def arrived(self) -> None:
        """One that left is known to have arrived."""
        self._messages -= 1
        if not self._messages:
            self.under_way += perf_counter() - self._since

    def add(self, phase: str, since: float) -> float:
        """Count the time from `since` (perf_counter) to now for `phase`; returns now."""
        now = perf_counter()
        self.seconds[phase] += now - since
        return now

    def communication(self) -> float:
        """Seconds in forward and backward communication so far."""
        return exposed(self.seconds)


def exposed(seconds: Mapping[str, float]) -> float:
    """Seconds, of those by phase, in which computation waited for communication."""
    return seconds["forward"] + seconds["backward"]


def hidden(seconds: Mapping[str, float], under_way: float) -> float | None:
    """The share of the seconds with messages under way that computation did not wait for; None without messages."""
    return share(exposed(seconds), under_way)


def share(waited: float, under_way: float) -> float | None:
    """`hidden`, where computation waited so many seconds."""
    return max(0.0, 1 - waited / under_way) if under_way else None

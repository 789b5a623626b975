"""Where the time of a rank goes."""

from __future__ import annotations

from time import perf_counter

PHASES = ("compute", "forward", "backward", "data", "evaluate")


class Clock:
    """Seconds by phase: compute; forward gathers and sums; backward reductions; data (reading and distribution);
    evaluate.

    A phase of communication counts waiting for slower ranks too.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def add(self, phase: str, since: float) -> float:
        """Count the time from `since` (perf_counter) to now for `phase`; returns now."""
        now = perf_counter()
        self.seconds[phase] += now - since
        return now

    def communication(self) -> float:
        """Seconds in forward and backward communication so far."""
        return self.seconds["forward"] + self.seconds["backward"]

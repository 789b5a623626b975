"""`PhaseClock`: the time for which a rank of `mpips train` computes, waits for messages, and has messages in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

# forward: gathers and sums of the forward pass; backward: sums of gradients; data: reading and distributing rows
PHASES = ("compute", "forward", "backward", "data", "evaluate")


class PhaseClock:
    """The seconds that a rank has spent in each of the `PHASES`.

    The phases of communication, "forward" and "backward", count the time during which computation waited for messages.
    This includes the time of waiting for slower ranks.
    """

    def __init__(self) -> None:
        self.reset()
        # number of messages in flight, and the time when the first of them was sent
        self._messages = 0
        self._since = 0.0

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        # seconds with at least one message in flight, whether or not computation waited for it
        self.under_way = 0.0

    def sent(self) -> None:
        """Note that a message has been sent."""
        if not self._messages:
            self._since = perf_counter()
        self._messages += 1

    def arrived(self) -> None:
        """Note that a message has arrived."""
        self._messages -= 1
        if not self._messages:
            self.under_way += perf_counter() - self._since

    @contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to `phase`. The block begins messages, and waits until they have arrived."""
        start = perf_counter()
        self.sent()
        yield
        self.arrived()
        self.add(phase, start)

    def add(self, phase: str, since: float) -> None:
        """Add to `phase` the seconds that have passed since `since`, a value of perf_counter()."""
        self.seconds[phase] += perf_counter() - since

    def communication(self) -> float:
        """Return the seconds for which computation has waited for communication since the last `reset`."""
        return self.seconds["forward"] + self.seconds["backward"]


def hidden_share(waited: float, under_way: float) -> float | None:
    """Return the share of communication time that was hidden behind computation, or None if nothing was sent.

    Args:
        waited: Seconds for which computation waited for messages.
        under_way: Seconds with at least one message in flight.
    """
    return max(0.0, 1 - waited / under_way) if under_way else None

"""`PhaseClock`: how long a rank of `mpips train` has computed and has waited for messages, and how long they took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

# forward: gathers and sums of the forward pass; backward: sums of gradients; data: reading and distributing rows
PHASES = ("compute", "forward", "backward", "data", "evaluate")


class PhaseClock:
    """The seconds that a rank has spent in each of the `PHASES`.

    A phase of communication counts the time that computation waited for it, which includes waiting for slower ranks.
    """

    def __init__(self) -> None:
        self.reset()
        # messages under way, and when the first of them left
        self._messages = 0
        self._since = 0.0

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        # seconds with at least one message under way, whether computation waited for it or not
        self.under_way = 0.0

    def sent(self) -> None:
        """Note that a message has left."""
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
        """Add the duration of the block to `phase`. The block sends a message and waits for it."""
        start = perf_counter()
        self.sent()
        yield
        self.arrived()
        self.add(phase, start)

    def add(self, phase: str, since: float) -> None:
        """Add the time since `since`, a perf_counter(), to `phase`."""
        self.seconds[phase] += perf_counter() - since

    def communication(self) -> float:
        """Return the seconds that computation has waited for communication until now."""
        return self.seconds["forward"] + self.seconds["backward"]


def hidden_share(waited: float, under_way: float) -> float | None:
    """Return the share of communication time that was hidden behind computation, or None if nothing was sent.

    Args:
        waited: Seconds that computation waited for messages.
        under_way: Seconds with messages under way.
    """
    return max(0.0, 1 - waited / under_way) if under_way else None

"""The clock of all limits on waits. It stands still while this process does not run."""

from __future__ import annotations

import time

# Waits look at their clock every few milliseconds; where many processes share a core the looks may be a second apart.
GAP_SECONDS = 2.0
USED_SECONDS = 0.1  # between two readings of the processor time used: one costs as much as ten of the clock
GRACE_SECONDS = 10.0
GRACE_PACE = 0.1


class Clock:
    """Seconds since it was made in which this process could run. One is made for each wait, or for each loop that looks
    at it all the time; it belongs to one thread.

    A scheduler may suspend a job (`scontrol suspend`, `docker pause`, Ctrl-Z), and nothing tells a process of it:
    SIGSTOP cannot be caught, and a frozen control group sends no signal. What remains is a gap between two looks:

    1. All processes of a job are stopped for an hour and go on. Each of them finds an hour between two looks of its
       wait and takes it off. Nobody is late.
    2. Only rank 1 is stopped. The others go on looking, so their clocks run, and they name rank 1.
    3. A rank computes within its wait, say a server that sums a huge key, and does not look for a while. It has used
       processor time, which a stopped process does not: that time counts.
    4. A step of the wait blocks in the kernel again and again. The first gap is taken off. One that follows before the
       clock was looked at regularly for GAP_SECONDS counts, so the limit comes a little later, but it comes.
    5. After 1., rank 0 runs some seconds before rank 1 does: signals go out one by one, hosts wake up one by one,
       memory comes back from swap. So for as long as it was stopped, GRACE_SECONDS at most, the clock runs at
       GRACE_PACE.
    6. A laptop's lid is closed: CLOCK_MONOTONIC stands still by itself. (CLOCK_BOOTTIME would go on.)
    """

    def __init__(self) -> None:
        self._regular = GAP_SECONDS
        self._seconds, self._slow_until = 0.0, 0.0
        self._seen, self._used = time.monotonic(), time.process_time()
        self._used_due = self._seen + USED_SECONDS

    def seconds(self) -> float:
        """Look at the clock."""
        now = time.monotonic()
        passed = now - self._seen
        self._seen = now
        if now > self._used_due or passed >= GAP_SECONDS:
            before, self._used = self._used, time.process_time()
            self._used_due = now + USED_SECONDS
            if passed >= GAP_SECONDS:
                return self._after_gap(now, passed, min(self._used - before, passed))
        self._regular += passed
        self._seconds += passed * GRACE_PACE if now < self._slow_until else passed
        return self._seconds

    def _after_gap(self, now: float, passed: float, ran: float) -> float:
        if passed - ran < GAP_SECONDS or self._regular < GAP_SECONDS:
            self._seconds += passed
        else:
            self._seconds += ran
            self._slow_until = now + min(GRACE_SECONDS, passed - ran)
        self._regular = 0.0
        return self._seconds

"""The clock behind the time limits of all waits. It does not count time while this process is suspended."""

from __future__ import annotations

import time

# A gap of at least this length between two readings may mean that the process was stopped. A waiting call
# reads its clock every few milliseconds. If many processes share a core, readings may be a second apart.
GAP_SECONDS = 2.0
# Interval between two readings of the used processor time. Such a reading costs as much as ten readings of the clock.
USED_SECONDS = 0.1
# After a stop the clock runs at GRACE_PACE times real time, for as long as the process was stopped, but for at most
# GRACE_SECONDS.
GRACE_SECONDS = 10.0
GRACE_PACE = 0.1


class Clock:
    """A clock that counts, from its creation, only the time in which this process was able to run.

    Each wait makes a clock of its own, and so does each loop with a time limit. A clock belongs to a single thread.

    A scheduler may suspend a job (`scontrol suspend`, `docker pause`, Ctrl-Z), and nothing tells the processes: SIGSTOP
    cannot be caught, and a frozen control group sends no signal. All that a process can see is a gap between two
    readings of its clock. The cases:

    1. All processes of a job are stopped for an hour and then continue. Each finds a gap of an hour and does not count
       it. So no rank is reported as late.
    2. Only rank 1 is stopped. The other ranks keep reading their clocks, so they reach their time limits, and their
       errors name rank 1.
    3. A rank computes during its wait, say a server that sums a huge key, and does not read the clock for a while.
       Unlike a stopped process, the rank has used processor time, and this time is counted.
    4. A step of the wait blocks in the kernel again and again. The first gap is not counted. A later gap is counted
       unless the clock was read regularly for GAP_SECONDS before it. So the wait still reaches its limit, only a little
       late.
    5. After case 1, rank 0 continues some seconds before rank 1, because signals go out one by one, hosts wake up one
       by one, and memory comes back from swap. So after a stop the clock runs at only GRACE_PACE of real time, for as
       long as the process was stopped but at most for GRACE_SECONDS.
    6. A laptop's lid is closed. CLOCK_MONOTONIC stops by itself then; CLOCK_BOOTTIME would not.
    """

    def __init__(self) -> None:
        # the seconds for which the clock has been read regularly since the last gap
        self._regular = GAP_SECONDS
        self._seconds = 0.0
        self._slow_until = 0.0
        # the last reading of the monotonic clock
        self._seen = time.monotonic()
        # the last reading of the processor time, and when the next such reading is due
        self._used = time.process_time()
        self._used_due = self._seen + USED_SECONDS

    def seconds(self) -> float:
        """Return the seconds that the clock has counted."""
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
        """Count a gap of `passed` seconds, during which the process used `ran` seconds of processor time."""
        if passed - ran < GAP_SECONDS or self._regular < GAP_SECONDS:
            self._seconds += passed
        else:
            self._seconds += ran
            self._slow_until = now + min(GRACE_SECONDS, passed - ran)
        self._regular = 0.0
        return self._seconds

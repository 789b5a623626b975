"""What a job leaves behind in a lab: an MPI that has lost a host may forget its daemons, which hold the caller's output
open. All processes of a job have a variable of their own, by which the keeper finds them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

MOST_LOOKS, LOOK_SECONDS = 100, 0.01
VARIABLE = "LAB_JOB_OF_MPIPS"  # no MPIPS_*: those are options of a store, which refuses what it does not know


def end(job: str) -> int:
    """Kill every process whose environment says that it is of ``job``; how many there were. It looks until it has found
    none twice: a process that starts another program has no environment for a moment."""
    mark = f"{VARIABLE}={job}".encode()
    ended: set[int] = set()
    quiet = 0
    for _ in range(MOST_LOOKS):
        killed = {process for process in _processes() if _killed(process, mark)}
        ended |= killed
        quiet = 0 if killed else quiet + 1
        if quiet == 2:
            break
        time.sleep(LOOK_SECONDS)
    return len(ended)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _killed(process: int, mark: bytes) -> bool:
    """Kill it if it is of the job; whether it is."""
    try:
        if mark not in Path("/proc", str(process), "environ").read_bytes().split(b"\0"):
            return False
        os.kill(process, signal.SIGKILL)
    except OSError:  # it has ended, or is another user's
        return False
    return True

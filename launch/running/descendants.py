"""The processes that stem from this one, also those whose parents have ended: found, killed, waited for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)


def adopt() -> None:
    """From now on who is left behind by a child of this process becomes a child of it."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill(spared: int = 0) -> None:
    """Kill all that stems from this process, but for `spared`."""
    for pid in find():
        if pid != spared:
            send(pid, signal.SIGKILL)


def clear(seconds: float) -> None:
    """Kill those who are left, and wait for their end."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            kill()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)


def bury(spared: int) -> None:
    """Let go of those who were left to us and have ended; `spared`, a child which has not been waited for, is not."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (ended := os.waitid(os.P_ALL, 0, look)) and ended.si_pid != spared:
        os.waitpid(ended.si_pid, 0)


def find() -> list[int]:
    """Children of this process, and theirs, that have not ended."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, parent = stat.read_bytes().rpartition(b") ")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = children.get(os.getpid(), [])
    for pid in found:
        found.extend(children.get(pid, ()))
    return found

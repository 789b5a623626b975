"""A job as our child: signals reach it, its exit code becomes ours, and nothing of it on this machine outlives us."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT
LOOK_SECONDS = 1.0  # seldom enough to cost a job nothing
GRACE = 5.0  # seconds for a job to end after a signal, and again for mpirun once its ranks have been killed
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


def run(argv: Sequence[str], name: str) -> NoReturn:
    """Run `argv` and exit as it does; where it has failed after a signal, with 128 + its number, as shells do.

    `name`: the command that says after such a signal that it was interrupted.
    """
    sys.exit(wait(argv, name=name))


def wait(argv: Sequence[str], hopeless: Callable[[], bool] | None = None, name: str = "") -> int:
    """Run `argv`; the exit code of `run`. The job is ended once `hopeless`, asked every `LOOK_SECONDS`, says yes.

    A job that a signal does not end is killed after `GRACE`, with all that it has started here.
    """
    heeded = {number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    waited = {*heeded, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    parent = os.getpid()
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # whom mpirun leaves behind becomes our child

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    job = subprocess.Popen(argv, preexec_fn=prepare)
    last, ends_by = 0, math.inf
    while job.poll() is None:
        timed = hopeless or ends_by < math.inf
        heard = signal.sigtimedwait(waited, LOOK_SECONDS) if timed else signal.sigwaitinfo(waited)
        _bury(job)
        if heard is None:
            if hopeless and hopeless():
                job.terminate()
                ends_by = min(ends_by, time.monotonic() + GRACE)
        elif heard.si_signo in heeded:
            last, ends_by = heard.si_signo, min(ends_by, time.monotonic() + GRACE)
            if heard.si_code <= 0:  # from a process; what a terminal sends, the job has, too
                job.send_signal(heard.si_signo)
        late = time.monotonic() - ends_by
        if late > 0:  # first the ranks, so that mpirun can still tidy up
            _kill(spared=0 if late > GRACE else job.pid)
    if ends_by < math.inf or job.returncode < 0:
        _clear()
    if last and job.returncode:
        if name:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, f"\n{name}: interrupted\n".encode())
        return 128 + last
    return job.returncode if job.returncode >= 0 else 128 - job.returncode


def _bury(job: subprocess.Popen[bytes]) -> None:
    """Lets go of those who were left to us and have ended; the job, which has not been waited for, is our child."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (ended := os.waitid(os.P_ALL, 0, look)) and ended.si_pid != job.pid:
        os.waitpid(ended.si_pid, 0)


def _clear() -> None:
    """Kills those whom the job has left behind, and waits for their end."""
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            _kill()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)


def _kill(spared: int = 0) -> None:
    """Kills all that stems from this process, but for `spared`."""
    for pid in _descendants():
        if pid != spared:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _descendants() -> list[int]:
    """Children of this process, and theirs."""
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

"""A job as our child: signals reach it, its exit code becomes ours, and it does not outlive us."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT
LOOK_SECONDS = 1.0  # seldom enough to cost a job nothing
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def run(argv: Sequence[str]) -> NoReturn:
    """Run `argv` and exit as it does; with 130 where it has failed after an interrupt."""
    sys.exit(wait(argv))


def wait(argv: Sequence[str], hopeless: Callable[[], bool] | None = None) -> int:
    """Run `argv`; the exit code of `run`. The job is ended once `hopeless`, asked every `LOOK_SECONDS`, says yes."""
    heeded = {number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    waited = {*heeded, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    parent = os.getpid()

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    job = subprocess.Popen(argv, preexec_fn=prepare)
    interrupted = False
    while job.poll() is None:
        heard = signal.sigtimedwait(waited, LOOK_SECONDS) if hopeless else signal.sigwaitinfo(waited)
        if heard is None:
            if hopeless and hopeless():
                job.terminate()
            continue
        interrupted |= heard.si_signo == signal.SIGINT
        if heard.si_signo in heeded and heard.si_code <= 0:  # from a process; what a terminal sends, the job has, too
            job.send_signal(heard.si_signo)
    code = job.returncode if job.returncode >= 0 else 128 - job.returncode
    return INTERRUPTED if interrupted and code else code

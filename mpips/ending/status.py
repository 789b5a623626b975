"""What a rank tells the `mpips run` of its machine, where one listens: that it is here, that MPI has started there, its
role, and how it ends.

Who ends without a word has died. The last word is said when all that closes at exit has closed. Where others have died
and none listens, as on another host, the first of those that are left says it on standard error.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import threading
from contextlib import suppress

from collectives.machine import find_peer
from mpips.ending.finalize import dead, survives
from mpips.ending.start import when_started
from mpips.store.world import FAILING, GOODBYE, INPUT, PRESENCE, PRESENT, ROLE, STARTED, STEP, WELL_WITHOUT, launched_as

SECONDS = 5.0  # to be heard by the launcher
PR_SET_PDEATHSIG = 1


class StatusLine:
    """The line of this process to its launcher; a word to nobody where none listens, or from a fork."""

    def __init__(self) -> None:
        self._process, self._well, job = os.getpid(), False, launched_as(os.environ)
        self._rank, self._is_heard = job[0] if job else 0, False
        self._line = socket.socket(socket.AF_UNIX)
        self._line.settimeout(SECONDS)
        name, has_input = os.environ.pop(PRESENCE, ""), os.environ.pop(INPUT, "")  # not for what this process starts
        if job and name:
            with suppress(OSError):
                self._line.connect(f"\0{name}")
                self._is_heard = find_peer(self._line).ours
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody outlives its mpirun
        self._say(b"%s %d\n" % (PRESENT, self._rank))
        if has_input and self._is_heard and self._rank == 0:
            self._take_input()
        when_started(self.started)
        atexit.register(self._leave)
        self._in_threads, threading.excepthook = threading.excepthook, self._thread_fails
        _lines.append(self)

    def _take_input(self) -> None:
        """Read from now on what `mpips run` would: what the program does not read is left to who started that."""
        with suppress(OSError):
            _, (file, *_), _, _ = socket.recv_fds(self._line, 1, 1)
            os.dup2(file, 0)
            os.close(file)

    def started(self) -> None:
        self._say(STARTED + b"\n")

    def has_role(self, role: str, step: int | None) -> None:
        self._say((b"" if step is None else b"%s %d\n" % (STEP, step)) + b"%s %s\n" % (ROLE, role.encode()))

    def ends_well(self) -> None:
        self._well = True

    def fails(self, code: int = 1) -> None:
        self._say(b"%s %d\n" % (FAILING, code & 255))

    def _leave(self) -> None:
        if not self._well or os.getpid() != self._process:
            return
        self._say(GOODBYE + b"\n")
        others = dead() if survives() and not self._is_heard else None
        if others and {*range(self._rank)} <= {*others}:
            ranks = ", ".join(map(str, others)).encode()
            with suppress(OSError):
                os.write(2, b"%s%s %s\n" % (WELL_WITHOUT, b"s"[: len(others) > 1], ranks))

    def _thread_fails(self, args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, SystemExit):
            self.fails()
        self._in_threads(args)

    def _say(self, word: bytes) -> None:
        if os.getpid() == self._process:
            with suppress(OSError):
                self._line.send(word)


_lines: list[StatusLine] = []
"""That of this process, where `python -m mpips` runs its program."""


def say_role(role: str, step: int | None = None) -> None:
    """A spare has got a role, such as "worker of client 1", and goes on from this step, where it is known: the launcher
    names it so, and the job is its own to end."""
    for line in _lines:
        line.has_role(role, step)


def say_failure(code: int) -> None:
    """This rank ends the job with this exit code."""
    for line in _lines:
        line.fails(code)

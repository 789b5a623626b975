"""A job as our child: signals reach it, its exit code becomes ours, and nothing of it on this machine outlives us.

The job ends when a rank has died, also where its mpirun would let the others wait for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from launch.presence import Death, Presence
from launch.signals import Heard, HeldSignals

INTERRUPTED = 128 + signal.SIGINT
LOOK_SECONDS = 1.0  # seldom enough to cost a job nothing
GRACE = 5.0  # seconds for a job to end after a signal, and again for mpirun once its ranks have been killed
AFTER_A_DEATH = 4.0  # seconds for mpirun to end a job, one of whose ranks has died, by itself
AFTER_A_FAILURE = 20.0  # the same where a rank said before that it ends the job: that is under way
BARE_CODES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGTERM)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


class Ended(NamedTuple):
    """How a job has ended: its exit code, as `wait` gives it, and mpirun's own, below 0 for a signal; the signal that
    we were sent to end it; what is to be said of it; and, where a rank here died of a signal, who and how."""

    code: int
    returned: int
    heard: int
    sentence: str
    death: str


def wait(
    argv: Sequence[str],
    hopeless: Callable[[], bool] | None = None,
    name: str = "",
    roles: Sequence[str] = (),
    here: int = 0,
) -> int:
    """Run `argv`; its exit code, or, where it has failed after a signal, 128 and the signal's number, as in shells.

    A job that a signal does not end is killed after `GRACE`, with all that it has started here. It is ended, too, once
    `hopeless`, asked every `LOOK_SECONDS`, says yes, and when a rank has died. `name`: the command that says that it
    was interrupted. `roles[i]` is what rank i is; `here` ranks are sure to start on this machine.
    """
    ended = run(argv, hopeless, name, roles, here)
    tell(ended.sentence)
    return ended.code


def run(
    argv: Sequence[str],
    hopeless: Callable[[], bool] | None = None,
    name: str = "",
    roles: Sequence[str] = (),
    here: int = 0,
) -> Ended:
    """The same, which says nothing; where it has failed, nothing of it is left on this machine."""
    signals, presence = HeldSignals(), Presence(here)
    try:
        watched = Watched(argv, signals, presence, hopeless)
        watched.until_it_ends()
        code, death = watched.code(), watched.death()
    finally:
        presence.close()
        signals.close()
    if code:
        _clear()
    sentence = who = ""
    if watched.heard and code == 128 + watched.heard and name:
        sentence = f"\n{name}: interrupted"
    elif death:
        role = f" ({roles[death.rank]})" if death.rank < len(roles) else ""
        who = f"rank {death.rank}{role} {_how_it_ended(death, code)}"
        sentence = f"mpips: {who}: the job has ended"
    died = who if death and death.code is None else ""
    return Ended(code, watched.returned, watched.heard, sentence, died)


class Watched:
    """A running job, and what has happened to it. `heard` is the last signal that is to end it."""

    def __init__(
        self, argv: Sequence[str], signals: HeldSignals, presence: Presence, hopeless: Callable[[], bool] | None
    ) -> None:
        self._signals, self._presence, self._hopeless = signals, presence, hopeless
        self.heard = 0
        self._ends_by = self._alone_until = math.inf
        self._deserted = False
        self._poll = select.poll()
        for source in (signals, presence):
            self._poll.register(source, select.POLLIN)
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # whom mpirun leaves behind becomes our child
        environment = {**os.environ, **presence.environment()}
        self._job = subprocess.Popen(argv, env=environment, preexec_fn=_child_of(os.getpid(), signals.before))

    def until_it_ends(self) -> None:
        while self._job.poll() is None:
            timed = self._hopeless or min(self._ends_by, self._alone_until) < math.inf
            news = self._poll.poll(1000 * LOOK_SECONDS if timed else None)
            self._bury()
            for heard in self._signals.read():
                self._pass_on(heard)
            self._presence.look()
            if self._presence.deaths and self._alone_until == math.inf:
                self._alone_until = time.monotonic() + (AFTER_A_FAILURE if self._presence.code else AFTER_A_DEATH)
            if time.monotonic() > self._alone_until and self._ends_by == math.inf:
                self._deserted = True
                self._end()
            if not news and self._hopeless and self._hopeless():
                self._end()
            late = time.monotonic() - self._ends_by
            if late > 0:  # first the ranks, so that mpirun can still tidy up
                _kill(spared=0 if late > GRACE else self._job.pid)
        if self._ends_by < math.inf or self._job.returncode < 0:
            _clear()
            _drop_session(self._job.pid)

    @property
    def returned(self) -> int:
        """What mpirun has left with; below 0 for the signal that ended it."""
        return int(self._job.returncode)

    def code(self) -> int:
        """As of a shell. Ranks know better than mpirun: MPICH's may have 0 after an interrupt."""
        code, well = self._job.returncode, self._presence.everyone_left_well()
        if self.heard and (code or not well):
            return 128 + self.heard
        if code and self._presence.code:  # mpirun may have crashed while it ended the others
            return self._presence.code
        if self._deserted and self._presence.deaths:
            first = self._presence.deaths[0]
            return 128 + first.signal if first.signal else first.code or 1
        return code if code >= 0 else 128 - code

    def death(self) -> Death | None:
        """The rank that died first, where that ended the job and nobody has said it yet.

        The others are ended by mpirun's signals, and may be seen to end before it. So one that left with the code that
        mpirun has is the first.
        """
        deaths, code = self._presence.deaths, self._job.returncode
        if self.heard or not deaths or self._presence.code:
            return None
        if self._deserted:
            return deaths[0]
        left = next((death for death in deaths if code and death.code == code), None)
        return left or (deaths[0] if signal_in(code) else None)

    def _pass_on(self, heard: Heard) -> None:
        if heard.is_for_ranks:  # to them, as MPICH's mpirun would die of one
            for pid in self._presence.pids() or [self._job.pid]:
                _send(pid, heard.number)
            return
        self.heard = heard.number
        self._ends_by = min(self._ends_by, time.monotonic() + GRACE)
        if not heard.by_terminal:
            self._job.send_signal(heard.number)

    def _end(self) -> None:
        if self._ends_by == math.inf:
            self._job.terminate()
            self._ends_by = time.monotonic() + GRACE

    def _bury(self) -> None:
        """Let go of those who were left to us and have ended; the job, which has not been waited for, is our child."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (ended := os.waitid(os.P_ALL, 0, look)) and ended.si_pid != self._job.pid:
            os.waitpid(ended.si_pid, 0)


def _child_of(parent: int, mask: Iterable[int]) -> Callable[[], None]:
    """What a child does before it becomes another program: it ends with its parent, and hears the signals of `mask`.
    Nothing is left of an mpirun of the same number."""

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        _drop_session(os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def _drop_session(pid: int) -> None:
    """Remove what Open MPI's mpirun with this number has left: where it is there, another one does not start."""
    shutil.rmtree(Path(tempfile.gettempdir(), f"ompi.{pid}"), ignore_errors=True)


def _how_it_ended(death: Death, code: int) -> str:
    """What is sure of it: as it was seen, or by mpirun's exit code. 128 and a number stands for a signal, as in shells.
    A lower code does not say whether it is a signal's number, as MPICH has it, or that of `os._exit`."""
    number = death.signal or code - 128
    if death.code is not None:
        return f"left with exit code {death.code}"
    return f"was ended by {signal.Signals(number).name}" if number in set(signal.Signals) else "ended without a word"


def signal_in(code: int) -> int:
    """The signal of a rank that mpirun's exit code tells of, 0 for none: 128 and its number, or, as MPICH has it, the
    number alone. A code below 0 is of a signal that ended mpirun itself."""
    number = code - 128 if code > 128 else code if code in BARE_CODES else 0
    return number if number in set(signal.Signals) else 0


def tell(text: str) -> None:
    """Write a line to standard error; "": nothing."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"{text}\n".encode() if text else b"")


def _clear() -> None:
    """Kill those whom the job has left behind, and wait for their end."""
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            _kill()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)


def _kill(spared: int = 0) -> None:
    """Kill all that stems from this process, but for `spared`."""
    for pid in _descendants():
        if pid != spared:
            _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


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

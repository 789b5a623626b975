"""A job as our child: signals reach it, its exit code becomes ours, and nothing of it on this machine outlives us.

What the end of a rank means for the job says `verdict`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from launch.mpirun import environment_of_job
from launch.running import descendants, leftovers
from launch.running.listener import Listener
from launch.running.presence import Death, Presence
from launch.running.signals import Heard, HeldSignals
from launch.running.unheard import Unheard
from launch.running.verdict import End, OneDeathEnds, OthersGoOn, Verdict

INTERRUPTED = 128 + signal.SIGINT
LOOK_SECONDS = 1.0  # seldom enough to cost a job nothing
NAP_SECONDS = 0.05  # while it ends
STARTING = 4.0  # seconds without another rank, though some are not there: one has ended before it could be seen
SILENT_SECONDS = 3.0  # until it is said that ranks are being started, where none is there
START_SECONDS = 0.05  # between two looks while ranks are not there
GRACE = 5.0  # seconds for a job to end after a signal, and again for mpirun once its ranks have been killed
GRACE_OF_NOBODY = 0.4  # the same of an mpirun that has no ranks to end
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Ended(NamedTuple):
    """How a job has ended: its exit code, 128 and the number after a signal, as in shells; mpirun's own, below 0 for a
    signal; the signal that we were sent to end it; what is to be said of it; and, where a signal to a rank has ended
    it, who died and how."""

    code: int
    returned: int
    heard: int
    sentence: str
    death: str


def wait(
    argv: Sequence[str], hopeless: Callable[[], bool] | None = None, name: str = "", roles: Sequence[str] = (),
    here: int = 0, spares: int = -1,
) -> int:  # fmt: skip
    """`run`, and say how the job has ended; its exit code."""
    ended = run(argv, hopeless, name, roles, here, spares)
    tell(ended.sentence)
    return ended.code


def run(
    argv: Sequence[str], hopeless: Callable[[], bool] | None = None, name: str = "", roles: Sequence[str] = (),
    here: int = 0, spares: int = -1,
) -> Ended:  # fmt: skip
    """Run `argv`; how it has ended. Where it has failed, nothing of it is left on this machine. Blocking.

    A job that a signal does not end is killed after `GRACE`, with all that it has started here. It is ended, too, once
    `hopeless`, asked every `LOOK_SECONDS`, says yes, and when a rank has died, unless `spares`, of which the last ranks
    are so many, is 0 or more: then the others go on. `name`: the command that says that it was interrupted. `roles[i]`
    is what rank i is; `here` ranks are sure to start on this machine. Where others may not, mpirun is listened to.
    """
    all_here = here >= max(1, len(roles))
    hands_over = _input_of_rank_0(argv) if all_here else -1
    signals, presence = HeldSignals(), Presence(here, survives=spares >= 0, hands_over=hands_over)
    verdict: Verdict = OneDeathEnds(presence, roles) if spares < 0 else OthersGoOn(presence, roles, spares)
    try:
        listener = None if all_here else Listener()
        watched = Watched(argv, signals, presence, verdict, hopeless, listener, here if roles else 0, len(roles))
        watched.until_it_ends()
        presence.look()
        end = watched.end()
        code, sentence, death = verdict.code(end), verdict.sentence(end), verdict.death(end)
        watched.clear(others=bool(code))
    finally:
        presence.close()
        signals.close()
    if end.heard and code == 128 + end.heard and name:
        sentence = f"\n{name}: interrupted"
    elif sentence:
        sentence = f"mpips: {sentence}"
    return Ended(code, end.returned, end.heard, sentence, death)


class Watched:
    """A running job, and what has happened to it. `speaking`: so many of `ranks`, here, say that they are there."""

    def __init__(
        self,
        argv: Sequence[str],
        signals: HeldSignals,
        presence: Presence,
        verdict: Verdict,
        hopeless: Callable[[], bool] | None,
        listener: Listener | None,
        speaking: int,
        ranks: int,
    ) -> None:
        self._speaking, self._ranks = speaking, ranks
        self._signals, self._presence, self._verdict, self._hopeless = signals, presence, verdict, hopeless
        self._heard, self._deserted, self._silent = 0, False, False
        self._known, self._since = 0, time.monotonic()
        self._ends_by, self._grace = math.inf, GRACE
        self._poll = select.poll()
        for source in (signals, presence):
            self._poll.register(source, select.POLLIN)
        descendants.adopt()
        environment = {**environment_of_job(os.environ), **presence.environment()}
        self._unheard = Unheard(presence.environment())
        self._began = time.time()
        output, errors = (listener.output, listener.errors) if listener else (None, None)
        prepare = _child_of(os.getpid(), signals.before)
        given = subprocess.DEVNULL if presence.hands_over >= 0 else None
        self._job = subprocess.Popen(
            argv, env=environment, stdin=given, stdout=output, stderr=errors, preexec_fn=prepare
        )  # fmt: skip
        self._listener = listener
        if listener:
            listener.start()

    def end(self) -> End:
        """How mpirun has ended, once all that it has written is read, or a signal has come. To be asked once."""
        lost = well = False
        if listener := self._listener:
            listener.finish()
            while not listener.has_finished(NAP_SECONDS) and not any(heard.ends for heard in self._signals.read()):
                pass
            lost, well = listener.lost and self._ends_by == math.inf, listener.well
        return End(self._job.returncode, self._heard, self._deserted, lost, well)

    def until_it_ends(self) -> None:
        due = math.inf
        while self._job.poll() is None:
            news = self._poll.poll(self._patience(due))
            descendants.bury(self._job.pid)
            for heard in self._signals.read():
                self._pass_on(heard)
            self._presence.look()
            if self._is_silent():
                tell(f"mpips: starting {self._ranks} rank{'s' * (self._ranks > 1)}{self._where()}")
            if not self._heard and not self._deserted:
                for sentence in self._verdict.news():
                    tell(f"mpips: {sentence}")
            due = self._verdict.due(time.monotonic())
            if time.monotonic() >= due and self._ends_by == math.inf:
                self._deserted = True
                self._end(GRACE_OF_NOBODY if self._verdict.nobody_works() else GRACE)
            if self._ends_by == math.inf and self._lacks_a_rank():
                self._presence.deaths += [Death(rank, None) for rank in self._missing()[:1]]
                self._deserted = True
                self._end(GRACE_OF_NOBODY)
            if not news and self._hopeless and self._hopeless():
                self._end(GRACE)
            late = time.monotonic() - self._ends_by
            if late > 0:  # first the ranks, so that mpirun can still tidy up
                descendants.kill(spared=0 if late > self._grace else self._job.pid)
        self._unheard.close()
        if self._ends_by < math.inf or self._job.returncode < 0:
            self.clear()

    def clear(self, others: bool = True) -> None:
        """Leave no shared memory of a job that has ended, and, but for `others` of one that ended well, no process."""
        if others:
            descendants.clear(GRACE)
        leftovers.drop(self._job.pid, self._began)

    def _lacks_a_rank(self) -> bool:
        """Whether one has ended before it could be heard or seen: the others would wait for it in MPI's start for ever.
        One that was seen is a death."""
        presence = self._presence
        if not self._is_starting():
            return False
        ended = [*self._unheard.look(presence.heard())]
        presence.look()  # what they have said just before
        presence.deaths += [death for death in ended if death.rank not in presence.heard()]
        known = len(self._unheard.ranks()) + len(presence.heard()) + len(presence.deaths)
        if not 0 < known < self._speaking or presence.deaths or known != self._known:
            self._known, self._since = known, time.monotonic()
        return time.monotonic() > self._since + STARTING

    def _missing(self) -> list[int]:
        """The ranks that have ended unseen, where all of the job are on this machine."""
        if self._speaking < self._ranks:
            return []
        return sorted({*range(self._ranks)} - self._presence.heard() - self._unheard.ranks())

    def _is_silent(self) -> bool:
        """Whether no rank has been there for a while, for the first time that this is asked."""
        if self._silent or self._presence.heard() or time.time() < self._began + SILENT_SECONDS:
            return False
        self._silent = True
        return self._speaking > 0

    def _where(self) -> str:
        here = self._speaking
        return " on this machine" if here == self._ranks else f", {here} of them on this machine"

    def _is_starting(self) -> bool:
        """Whether ranks are not there yet."""
        return not self._presence.started and len(self._presence.heard()) < self._speaking

    def _patience(self, due: float) -> float | None:
        """Milliseconds until there is something to do though nothing has come; None for ever."""
        starting = self._is_starting()
        if not starting and self._hopeless is None and min(due, self._ends_by) == math.inf:
            return None
        longest = START_SECONDS if starting else LOOK_SECONDS
        return 1000 * min(longest, max(NAP_SECONDS, min(due, self._ends_by) - time.monotonic()))

    def _pass_on(self, heard: Heard) -> None:
        if heard.is_for_ranks:  # to them, as MPICH's mpirun would die of one
            for pid in self._presence.pids() or [self._job.pid]:
                descendants.send(pid, heard.number)
            return
        self._heard = heard.number
        self._ends_by = min(self._ends_by, time.monotonic() + GRACE)
        if not heard.by_terminal:
            self._job.send_signal(heard.number)

    def _end(self, grace: float) -> None:
        if self._ends_by == math.inf:
            self._job.terminate()
            self._grace = grace
            self._ends_by = time.monotonic() + grace


def _input_of_rank_0(argv: Sequence[str]) -> int:
    """Return the file that rank 0 reads in place of what mpirun would pass on; -1: mpirun passes on ours.

    mpirun would read all of it, also what is for other commands of a shell's loop, and not pass on its end. It has to
    where that is a terminal, from which ranks may not read by themselves, and where its own options ask for it.
    """
    words = takewhile(lambda word: word != sys.executable, argv)
    if os.isatty(0) or not {"--stdin", "-stdin", "-s"}.isdisjoint(words):
        return -1
    return 0 if sys.stdin is not None else os.open(os.devnull, os.O_RDONLY)  # None: it was closed


def _child_of(parent: int, mask: Iterable[int]) -> Callable[[], None]:
    """What a child does before it becomes another program: it ends with its parent, and hears the signals of `mask`.
    Nothing is left of an mpirun of the same number."""

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        leftovers.drop_session(os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def tell(text: str) -> None:
    """Write a line to standard error; "": nothing."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"{text}\n".encode() if text else b"")

"""A job as our child: signals reach it, its exit code becomes ours, and nothing of it on this machine outlives us.

What the end of a rank means for the job is `verdict`'s. Signals are held back and read one by one, so that each is
passed on to the job once. Processes that stem from this one are found, killed and waited for, also where their parents
have ended. Among them are ranks whose Python is just starting: one that ends before it could say that it is there is
missed by the others for ever, while they start MPI.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from mpips.collectives import log
from mpips.collectives.clock import Clock
from mpips.collectives.machine import find_readable, read_stat
from mpips.collectives.recorder import folders
from mpips.launch.machine import remove_leftovers, remove_session
from mpips.launch.mpirun import environment_of_job
from mpips.launch.running.presence import Death, OutputListener, Presence, status_of
from mpips.launch.running.verdict import End, OneDeathEnds, OthersGoOn
from mpips.store.world import launched_as

LOOK_SECONDS = 1.0  # seldom enough to cost a job nothing
NAP_SECONDS = 0.05  # while it ends
STARTING = 4.0  # seconds without another rank, though some are not there: one has ended before it could be seen
SILENT_SECONDS = 3.0  # until it is said that ranks are being started, where none is there
START_SECONDS = 0.05  # between two looks while ranks are not there
GRACE = 5.0  # seconds for a job to end after a signal, and again for mpirun once its ranks have been killed
GRACE_OF_NOBODY = 0.4  # the same of an mpirun that has no ranks to end
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
SIGNAL_RECORD = struct.Struct("Iii116x")  # of signalfd: number, errno, code
MASK_BYTES = 128
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)
LOG = log.get("mpips.launch")


class Ended(NamedTuple):
    """The end of a job.

    Its exit code, 128 and the number after a signal, as in shells; mpirun's own, below 0 for a signal; the signal that
    we were sent to end it; what is to be said of it; and, where a signal to a rank has ended it, who died and how.
    """

    code: int
    returned: int
    heard: int
    sentence: str
    death: str


def run(
    argv: Sequence[str],
    hopeless: Callable[[], bool] | None = None,
    name: str = "",
    roles: Sequence[str] = (),
    here: int = 0,
    spares: int = -1,
) -> Ended:
    """Run `argv`; how it has ended. Where it has failed, nothing of it is left on this machine. Blocking.

    A job that a signal does not end is killed after `GRACE`, with all that it has started here. It is ended, too, once
    `hopeless`, asked every `LOOK_SECONDS`, says yes, and when a rank has died, unless `spares`, of which the last ranks
    are so many, is 0 or more: then the others go on. `name`: the command that says that it was interrupted. `roles[i]`
    is what rank i is; `here` ranks are sure to start on this machine. Where others may not, mpirun is listened to.
    """
    all_here = here >= max(1, len(roles))
    hands_over, began = _input_of_rank_0(argv) if all_here else -1, time.monotonic()
    LOG.info("job begins: %s", shlex.join(argv))
    signals, presence = HeldSignals(), Presence(here, survives=spares >= 0, hands_over=hands_over)
    verdict: OneDeathEnds | OthersGoOn
    verdict = OneDeathEnds(presence, roles) if spares < 0 else OthersGoOn(presence, roles, spares)
    try:
        listener = None if sys.stderr is None and all_here else OutputListener(errors_alone=all_here)
        watched = Watched(argv, signals, presence, verdict, hopeless, listener, here if roles else 0, len(roles))
        watched.until_it_ends()
        presence.look()
        end = watched.end()
        code, sentence, death = verdict.code(end), verdict.sentence(end), verdict.death(end)
        watched.clear(others=bool(code))
        if code and not end.heard:
            folders.write_end(str(os.getpid()), death=death, sentence=sentence)
        LOG.info(
            "job has ended after %.1f s: code %d, mpirun's %d, %s",
            time.monotonic() - began,
            code,
            end.returned,
            death or "no death that ended it",
        )
    finally:
        presence.close()
        signals.close()
    if end.heard and code == 128 + end.heard and name:
        sentence = f"\n{name}: interrupted"
    elif sentence := sentence or ("" if code or presence.deaths else presence.remark):
        sentence = f"mpips: {sentence}"
    return Ended(code, end.returned, end.heard, sentence, death)


class Watched:
    """A running job, and what has happened to it. `speaking`: so many of `ranks`, here, say that they are there."""

    def __init__(
        self,
        argv: Sequence[str],
        signals: HeldSignals,
        presence: Presence,
        verdict: OneDeathEnds | OthersGoOn,
        hopeless: Callable[[], bool] | None,
        listener: OutputListener | None,
        speaking: int,
        ranks: int,
    ) -> None:
        self._speaking, self._ranks, self._listener = speaking, ranks, listener
        self._signals, self._presence, self._verdict, self._hopeless = signals, presence, verdict, hopeless
        self._heard, self._deserted, self._starts_silently = 0, False, speaking > 0
        self._clock = Clock()
        self._known, self._since, self._now = 0, 0.0, 0.0
        self._ends_by, self._grace = math.inf, GRACE
        self._poll = select.poll()
        for source in (signals, presence):
            self._poll.register(source, select.POLLIN)
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a child of ours leaves behind becomes a child of ours
        self._unheard = SilentRanks(presence.environment())
        self._began = time.time()
        output, errors = (listener.output, listener.errors) if listener else (None, None)
        self._job = subprocess.Popen(
            argv,
            env={**environment_of_job(os.environ), **presence.environment(), folders.JOB: str(os.getpid())},
            stdin=subprocess.DEVNULL if presence.hands_over >= 0 else None,
            stdout=output,
            stderr=errors,
            preexec_fn=_child_of(os.getpid(), signals.before),
        )
        if listener:
            listener.start()

    def end(self) -> End:
        """Return how mpirun has ended, once all that it has written is read, or a signal has come. To be asked once."""
        lost = well = False
        cause = ""
        if listener := self._listener:
            listener.finish()
            while not listener.has_finished(NAP_SECONDS) and not any(n in ENDING for n, _ in self._signals.read()):
                pass
            if listener.output is not None:  # ranks may be on hosts that are lost
                lost, well = listener.lost and self._ends_by == math.inf, listener.well
            cause = listener.cause
        return End(self._job.returncode, self._heard, self._deserted, lost, well, cause)

    def until_it_ends(self) -> None:
        """Watch mpirun, and end the job where that is due, until mpirun has ended. Blocking."""
        due = math.inf
        while self._job.poll() is None:
            patience = self._patience(due)
            news = self._poll.poll(patience)
            if patience is None:  # no limit was open
                self._clock = Clock()
            self._now = self._clock.seconds()
            reap_orphans(self._job.pid)
            for number, by_terminal in self._signals.read():
                self._pass_on(number, by_terminal)
            self._presence.look()
            self._tell_of_a_slow_start()
            if self._ends_by == math.inf and self._lacks_a_rank():
                if self._speaking == self._ranks:  # else nobody knows which one it is
                    missing = {*range(self._ranks)} - self._presence.heard - self._unheard.ranks()
                    self._presence.deaths += [Death(rank, None) for rank in sorted(missing)[:1]]
                self._deserted = True
                self._end(GRACE_OF_NOBODY)
            # all that has been heard by now, also by the search for ranks, counts before the next wait
            if not self._heard and not self._deserted:
                for kind, sentence in self._verdict.news():
                    LOG.info("%s: %s", kind, sentence)
                    tell(f"mpips: {sentence}")
            due = self._verdict.due(self._now)
            if self._now >= due and self._ends_by == math.inf:
                self._deserted = True
                self._end(GRACE_OF_NOBODY if self._verdict.nobody_works() else GRACE)
            if not news and self._hopeless and self._hopeless():
                self._end(GRACE)
            late = self._now - self._ends_by
            if late > 0:  # first the ranks, so that mpirun can still tidy up
                kill_descendants(spared=0 if late > self._grace else self._job.pid)
        self._unheard.close()
        if self._ends_by < math.inf or self._job.returncode < 0:
            self.clear()

    def clear(self, others: bool = True) -> None:
        """Leave no shared memory of a job that has ended, and, but for `others` of one that ended well, no process."""
        if others:
            end_descendants(GRACE)
        remove_leftovers(self._job.pid, self._began)

    def _lacks_a_rank(self) -> bool:
        """Return whether one has ended before it could be heard or seen: the others would wait for it in MPI's start
        for ever. One that was seen is a death."""
        presence = self._presence
        if not self._is_starting():
            return False
        ended = [*self._unheard.look(presence.heard)]
        presence.look()  # what they have said just before
        presence.deaths += [death for death in ended if death.rank not in presence.heard]
        known = len(self._unheard.ranks()) + len(presence.heard) + len(presence.deaths)
        if not 0 < known < self._speaking or presence.deaths or known != self._known:
            self._known, self._since = known, self._now
        return self._now > self._since + STARTING

    def _tell_of_a_slow_start(self) -> None:
        """Say, once, that ranks are being started, where none has been there for a while."""
        if self._starts_silently and not self._presence.heard and time.time() >= self._began + SILENT_SECONDS:
            self._starts_silently, here = False, self._speaking
            where = " on this machine" if here == self._ranks else f", {here} of them on this machine"
            tell(f"mpips: starting {self._ranks} rank{'s' * (self._ranks > 1)}{where}")

    def _is_starting(self) -> bool:
        """Return whether ranks are not there yet."""
        return not self._presence.started and len(self._presence.heard) < self._speaking

    def _patience(self, due: float) -> float | None:
        """Return the milliseconds until there is something to do though nothing has come; None for ever."""
        starting = self._is_starting()
        if not starting and self._hopeless is None and min(due, self._ends_by) == math.inf:
            return None
        longest = START_SECONDS if starting else LOOK_SECONDS
        return 1000 * min(longest, max(NAP_SECONDS, min(due, self._ends_by) - self._now))

    def _pass_on(self, number: int, by_terminal: bool) -> None:
        if number in PASSED_ON:  # to the ranks, as MPICH's mpirun would die of one
            for pid in self._presence.pids() or [self._job.pid]:
                send_signal(pid, number)
            return
        if not self._heard:
            folders.write_end(str(os.getpid()), heard=signal.Signals(number).name)
        self._heard = number
        self._ends_by = min(self._ends_by, self._now + GRACE)
        if not by_terminal:
            self._job.send_signal(number)

    def _end(self, grace: float) -> None:
        if self._ends_by == math.inf:
            self._job.terminate()
            self._grace = grace
            self._ends_by = self._now + grace


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
    """Return what a child does before it becomes another program: it ends with its parent, and hears the signals of
    `mask`. Nothing is left of an mpirun of the same number."""

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        remove_session(os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def tell(text: str) -> None:
    """Write a line to standard error; "": nothing."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{text}\n".encode() if text else b"")


class HeldSignals:
    """Holds back what ends a process, what is passed on to a job, and news of children; not what is ignored here.

    `fileno` is readable when one has come. `close` gives the process its signals back.
    """

    def __init__(self) -> None:
        numbers = [number for number in (*ENDING, *PASSED_ON) if signal.getsignal(number) != signal.SIG_IGN]
        self._held = {*numbers, signal.SIGCHLD}
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._held)
        bits = sum(1 << (number - 1) for number in self._held)
        self._fd = _libc.signalfd(-1, bits.to_bytes(MASK_BYTES, "little"), os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.before)
            raise OSError(ctypes.get_errno(), "signalfd")

    def fileno(self) -> int:
        return self._fd

    def read(self) -> Iterator[tuple[int, bool]]:
        """Yield the number of each that has come, but for news of children, and whether a terminal sent it.

        A terminal's go to all processes of a job, those of another process to this one alone.
        """
        while True:
            try:
                number, _, code = SIGNAL_RECORD.unpack(os.read(self._fd, SIGNAL_RECORD.size))
            except BlockingIOError:
                return
            if number != signal.SIGCHLD:
                yield number, code > 0

    def close(self) -> None:
        os.close(self._fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)


def send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_descendants(spared: int = 0) -> None:
    """Kill all processes that stem from this one, but for `spared`."""
    for pid in find_descendants():
        if pid != spared:
            send_signal(pid, signal.SIGKILL)


def end_descendants(seconds: float) -> None:
    """Kill those who are left, and wait for their end."""
    clock = Clock()
    with suppress(ChildProcessError):  # none is left
        while clock.seconds() < seconds:
            kill_descendants()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)


def reap_orphans(spared: int) -> None:
    """Let go of those who were left to us and have ended; `spared`, a child which has not been waited for, is not."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (ended := os.waitid(os.P_ALL, 0, look)) and ended.si_pid != spared:
        os.waitpid(ended.si_pid, 0)


def find_descendants() -> list[int]:
    """Return children of this process, and theirs, that have not ended."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, parent = read_stat(int(stat.parent.name))[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = children.get(os.getpid(), [])
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


class SilentRanks:
    """The processes of this machine that a launcher has made ranks, with these variables of the job among theirs."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._mark = {f"{name}={value}" for name, value in environment.items()}
        self._known: dict[int, tuple[int, int]] = {}
        """Of each process the rank, and a descriptor (pidfd) by which it is seen to end."""

    def ranks(self) -> set[int]:
        """Return the ranks that were there at the last look."""
        return {rank for rank, _ in self._known.values()}

    def look(self, heard: Container[int]) -> Iterator[Death]:
        """Yield the ranks, but for those that are `heard` by now, that have ended since the last look."""
        for pid in set(find_descendants()) - self._known.keys():
            rank = self._rank(pid)
            if rank >= 0 and rank not in heard:
                with suppress(OSError):  # it has ended
                    self._known[pid] = rank, os.pidfd_open(pid)
        for pid, (rank, descriptor) in list(self._known.items()):
            ended = bool(find_readable([descriptor], 0))
            if ended and rank not in heard and (status := status_of(pid, descriptor)) != 0:
                yield Death(rank, status)
            if ended or rank in heard:
                os.close(descriptor)
                del self._known[pid]

    def close(self) -> None:
        for _, descriptor in self._known.values():
            os.close(descriptor)
        self._known.clear()

    def _rank(self, pid: int) -> int:
        """Return the rank that a process is; -1 where it is none."""
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return -1
        place = launched_as(dict(word.partition("=")[::2] for word in words if "=" in word))
        return place[0] if place and self._mark <= set(words) else -1

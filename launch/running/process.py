"""A job as our child: pass signals on to it, return its exit code, and leave nothing of it on this machine.

The module `verdict` decides what the end of a rank means for the job. Signals are blocked and read one by one, so that
each is passed on to the job once. All descendants of this process are found, killed and waited for at the end, also
those whose parents have ended. While the job starts, its ranks are looked for among these descendants: if one ends
before it can connect to `presence`, the others would wait for it in the start of MPI for ever.
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

# The longest wait between two looks at the job. Long enough to cost the job nothing.
LOOK_SECONDS = 1.0
# the shortest wait, while the job ends
NAP_SECONDS = 0.05
# If some ranks are still missing, and no further one has appeared for this long, one has ended unseen.
STARTING = 4.0
# If no rank is there after this long, print that ranks are being started.
SILENT_SECONDS = 3.0
# the wait between two looks while ranks are starting
START_SECONDS = 0.05
# how long a job may take to end after a signal, and then again mpirun, once its ranks have been killed
GRACE = 5.0
# the same for an mpirun whose ranks have all ended
GRACE_OF_NOBODY = 0.4
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
# struct signalfd_siginfo: signal number, errno, code
SIGNAL_RECORD = struct.Struct("Iii116x")
# size of glibc's sigset_t
MASK_BYTES = 128
# prctl(2)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
LOG = log.get("mpips.launch")


class Ended(NamedTuple):
    """The end of a job."""

    # the exit code for the user; after a signal it is 128 plus the signal's number, as in shells
    code: int
    # mpirun's own exit code, or minus the number of the signal that ended mpirun
    returned: int
    # the signal to this process that ended the job, or 0
    heard: int
    # what to print about the end; may be ""
    sentence: str
    # the rank whose death by a signal has ended the job, in words; otherwise ""
    death: str


def run(
    argv: Sequence[str],
    hopeless: Callable[[], bool] | None = None,
    name: str = "",
    roles: Sequence[str] = (),
    here: int = 0,
    spares: int = -1,
) -> Ended:
    """Run mpirun, and block until the job has ended. If it has failed, no process of it is left on this machine.

    A job that does not end within `GRACE` seconds of a signal is killed, with all that it has started here.

    Args:
        argv: The command line of mpirun.
        hopeless: Called about every `LOOK_SECONDS`; when it returns True the job is ended.
        name: The command to name in "interrupted" after a signal.
        roles: The role of each rank, for messages about deaths.
        here: How many ranks are certain to start on this machine. If there may be others, the output of mpirun is
            passed through this process and searched for signs of lost hosts.
        spares: How many of the last ranks are spares. With 0 or more the other ranks go on when one dies. With -1 the
            job ends then.
    """
    all_here = here >= max(1, len(roles))
    hands_over, began = _input_of_rank_0(argv) if all_here else -1, time.monotonic()
    LOG.info("job begins: %s", shlex.join(argv))
    signals, presence = HeldSignals(), Presence(here, survives=spares >= 0, hands_over=hands_over)
    verdict: OneDeathEnds | OthersGoOn
    verdict = OneDeathEnds(presence, roles) if spares < 0 else OthersGoOn(presence, roles, spares)
    try:
        # If our standard error is closed, there is nothing to pass mpirun's messages on to.
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
    """A running job.

    Args:
        argv: The command line of mpirun.
        signals: The signals to this process.
        presence: The ranks on this machine.
        verdict: Decides when the job must end.
        hopeless: See `run`.
        listener: Passes on mpirun's output; None: mpirun has our own standard output and error.
        speaking: How many ranks will connect to `presence`. 0 for programs that do not.
        ranks: How many ranks the job has.
    """

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
        self._speaking = speaking
        self._ranks = ranks
        self._listener = listener
        self._signals = signals
        self._presence = presence
        self._verdict = verdict
        self._hopeless = hopeless
        # the signal to this process that ends the job, or 0
        self._heard = 0
        # True once we have told the job to end because of what its ranks did: one died, failed or never connected.
        self._deserted = False
        # The line about a slow start is still to be printed.
        self._starts_silently = speaking > 0
        self._clock = Clock()
        # how many ranks are known while the job starts, and since when
        self._known = 0
        self._since = 0.0
        self._now = 0.0
        # when the job is killed if it has not ended by itself; infinite until it is told to end
        self._ends_by = math.inf
        # how long mpirun may live on after its ranks have been killed
        self._grace = GRACE
        self._poll = select.poll()
        for source in (signals, presence):
            self._poll.register(source, select.POLLIN)
        # When a descendant ends, its children become children of this process, and can be found and waited for.
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
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
        """Return how mpirun has ended. Call it once.

        Blocks until all output of mpirun is passed on, or until a signal comes.
        """
        lost = well = False
        cause = ""
        if listener := self._listener:
            listener.finish()
            while not listener.has_finished(NAP_SECONDS) and not any(n in ENDING for n, _ in self._signals.read()):
                pass
            # Output is listened to only if ranks may be on other hosts. A host that is lost after we have ended the job
            # does not count.
            if listener.output is not None:
                lost, well = listener.lost and self._ends_by == math.inf, listener.well
            cause = listener.cause
        return End(self._job.returncode, self._heard, self._deserted, lost, well, cause)

    def until_it_ends(self) -> None:
        """Watch the job, and end it when it has to end. Blocks until mpirun has ended."""
        due = math.inf
        while self._job.poll() is None:
            patience = self._patience(due)
            news = self._poll.poll(patience)
            # While no limit was running this process may have slept for hours. A new clock does not take that for a
            # time in which the process was stopped.
            if patience is None:
                self._clock = Clock()
            self._now = self._clock.seconds()
            reap_orphans(self._job.pid)
            for number, by_terminal in self._signals.read():
                self._pass_on(number, by_terminal)
            self._presence.look()
            self._tell_of_a_slow_start()
            if self._ends_by == math.inf and self._lacks_a_rank():
                # If some ranks are on other hosts, it is not known which one is missing.
                if self._speaking == self._ranks:
                    missing = {*range(self._ranks)} - self._presence.heard - self._unheard.ranks()
                    self._presence.deaths += [Death(rank, None) for rank in sorted(missing)[:1]]
                self._deserted = True
                self._end(GRACE_OF_NOBODY)
            # Ask the verdict only now, after everything above that reads what ranks say. Otherwise the job could hang:
            # 1. The verdict is asked, and no rank has died yet.
            # 2. The last rank connects and dies, and the search for starting ranks reads both.
            # 3. All ranks have connected, so the next wait has no limit, and nothing is left to read that would end it.
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
            # Kill the ranks first and mpirun only after another grace time, so that it can remove its files.
            if late > 0:
                kill_descendants(spared=0 if late > self._grace else self._job.pid)
        self._unheard.close()
        if self._ends_by < math.inf or self._job.returncode < 0:
            self.clear()

    def clear(self, others: bool = True) -> None:
        """Remove the shared memory of the job after it has ended and, with `others`, kill the processes it has left."""
        if others:
            end_descendants(GRACE)
        remove_leftovers(self._job.pid, self._began)

    def _lacks_a_rank(self) -> bool:
        """True if a rank ended while the job was starting, before it connected and before its process was seen.

        This happens as follows:

        1. mpirun starts all ranks.
        2. A signal ends one of them while its Python starts. It has not connected to `presence`, and this process has
           not seen it among its descendants.
        3. The other ranks start MPI and wait for it for ever.

        The loss is noticed because fewer ranks than expected are known for `STARTING` seconds. A rank
        whose process was seen before it ended is added to the deaths instead.
        """
        presence = self._presence
        if not self._is_starting():
            return False
        ended = [*self._unheard.look(presence.heard)]
        # They may have connected just before they ended.
        presence.look()
        presence.deaths += [death for death in ended if death.rank not in presence.heard]
        known = len(self._unheard.ranks()) + len(presence.heard) + len(presence.deaths)
        if not 0 < known < self._speaking or presence.deaths or known != self._known:
            self._known, self._since = known, self._now
        return self._now > self._since + STARTING

    def _tell_of_a_slow_start(self) -> None:
        """Print once that ranks are being started, if after `SILENT_SECONDS` none has connected yet."""
        if self._starts_silently and not self._presence.heard and time.time() >= self._began + SILENT_SECONDS:
            self._starts_silently, here = False, self._speaking
            where = " on this machine" if here == self._ranks else f", {here} of them on this machine"
            tell(f"mpips: starting {self._ranks} rank{'s' * (self._ranks > 1)}{where}")

    def _is_starting(self) -> bool:
        """True before MPI has started, as long as some ranks have not connected."""
        return not self._presence.started and len(self._presence.heard) < self._speaking

    def _patience(self, due: float) -> float | None:
        """Return the longest time to wait for news, in milliseconds; None: until there is news."""
        starting = self._is_starting()
        if not starting and self._hopeless is None and min(due, self._ends_by) == math.inf:
            return None
        longest = START_SECONDS if starting else LOOK_SECONDS
        return 1000 * min(longest, max(NAP_SECONDS, min(due, self._ends_by) - self._now))

    def _pass_on(self, number: int, by_terminal: bool) -> None:
        # These go to the ranks themselves, because MPICH's mpirun would die of one.
        if number in PASSED_ON:
            for pid in self._presence.pids() or [self._job.pid]:
                send_signal(pid, number)
            return
        if not self._heard:
            folders.write_end(str(os.getpid()), heard=signal.Signals(number).name)
        self._heard = number
        self._ends_by = min(self._ends_by, self._now + GRACE)
        # A signal from the terminal has reached mpirun as well.
        if not by_terminal:
            self._job.send_signal(number)

    def _end(self, grace: float) -> None:
        """Tell mpirun to end. After `grace` seconds its ranks are killed, and after twice that mpirun."""
        if self._ends_by == math.inf:
            self._job.terminate()
            self._grace = grace
            self._ends_by = self._now + grace


def _input_of_rank_0(argv: Sequence[str]) -> int:
    """Return the descriptor to give to rank 0 as its standard input, or -1 if mpirun shall pass on ours.

    mpirun reads all of its input, even lines that the next command of a shell loop should get, and Open MPI's does not
    pass on the end of it. So rank 0 gets the file itself. mpirun still has to pass on a terminal, because ranks may not
    read from it by themselves, and it does if its own options ask for that.
    """
    words = takewhile(lambda word: word != sys.executable, argv)
    if os.isatty(0) or not {"--stdin", "-stdin", "-s"}.isdisjoint(words):
        return -1
    # sys.stdin is None if this process was started with standard input closed.
    return 0 if sys.stdin is not None else os.open(os.devnull, os.O_RDONLY)


def _child_of(parent: int, mask: Iterable[int]) -> Callable[[], None]:
    """Return a function for a child to run between fork and exec.

    The child gets SIGTERM when this process ends, and the signal mask `mask`. It also removes the session folder that
    an earlier mpirun with the same pid has left, with which Open MPI would not start.
    """

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        # The parent may have ended before prctl, and then no signal comes.
        if os.getppid() != parent:
            os._exit(1)
        remove_session(os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def tell(text: str) -> None:
    """Write a line to standard error. Writes nothing if `text` is empty."""
    # The terminal may be gone.
    with suppress(OSError):
        os.write(2, f"{text}\n".encode() if text else b"")


class HeldSignals:
    """Blocks signals and reads them from a signalfd instead.

    These are the signals that end a process (`ENDING`), those that go to the ranks (`PASSED_ON`), and SIGCHLD. Signals
    that this process ignores, as under nohup, stay ignored. The object can be polled: it is readable when a signal has
    come. `close` restores the signal mask.
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
        """Yield the number of each signal that has come, except SIGCHLD, and True if a terminal sent it.

        A terminal sends a signal to all processes of the job, another process sends it to this process alone.
        """
        while True:
            try:
                number, _, code = SIGNAL_RECORD.unpack(os.read(self._fd, SIGNAL_RECORD.size))
            except BlockingIOError:
                return
            # A code above 0 (SI_KERNEL) means that the kernel sent it, as for Ctrl-C.
            if number != signal.SIGCHLD:
                yield number, code > 0

    def close(self) -> None:
        os.close(self._fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)


def send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_descendants(spared: int = 0) -> None:
    """Kill all descendants of this process, except `spared`."""
    for pid in find_descendants():
        if pid != spared:
            send_signal(pid, signal.SIGKILL)


def end_descendants(seconds: float) -> None:
    """Kill all descendants of this process, and wait until they have ended, for at most `seconds`."""
    clock = Clock()
    # waitpid raises ChildProcessError when none is left.
    with suppress(ChildProcessError):
        while clock.seconds() < seconds:
            kill_descendants()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)


def reap_orphans(spared: int) -> None:
    """Collect the exit status of orphans that became children of this process and have ended.

    Stops at `spared`, a child whose status subprocess.Popen still has to collect.
    """
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (ended := os.waitid(os.P_ALL, 0, look)) and ended.si_pid != spared:
        os.waitpid(ended.si_pid, 0)


def find_descendants() -> list[int]:
    """Return the pids of all descendants of this process that have not ended."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # A process that has ended in the meantime is left out.
        with suppress(OSError):
            state, parent = read_stat(int(stat.parent.name))[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = children.get(os.getpid(), [])
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


class SilentRanks:
    """Ranks of a job that are found among the descendants of this process before they connect to `Presence`.

    A process is a rank if a launcher's variables in its environment say so, and if it has the variables `environment`
    of the job.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._mark = {f"{name}={value}" for name, value in environment.items()}
        # pid -> (rank, pidfd that tells when the process ends)
        self._known: dict[int, tuple[int, int]] = {}

    def ranks(self) -> set[int]:
        """Return the ranks that were running at the last look."""
        return {rank for rank, _ in self._known.values()}

    def look(self, heard: Container[int]) -> Iterator[Death]:
        """Look for new ranks, and yield those that have ended since the last look.

        Ranks in `heard` are left out: they have connected by now.
        """
        for pid in set(find_descendants()) - self._known.keys():
            rank = self._rank(pid)
            if rank >= 0 and rank not in heard:
                # pidfd_open fails if the process has ended already.
                with suppress(OSError):
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
        """Return the rank of a process, or -1 if it is not a rank of the job."""
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return -1
        place = launched_as(dict(word.partition("=")[::2] for word in words if "=" in word))
        return place[0] if place and self._mark <= set(words) else -1

"""Run mpirun as a child process: pass signals on to the job, return its exit code, and leave no process behind.

The module `verdict` decides what the end of a rank means for the job. Signals are blocked and read one by one, so that
each signal is passed on to the job once. At the end this process kills all its descendants and waits until they have
ended. This includes descendants whose parents have ended. While the job starts, `UnconnectedRanks` looks for its ranks
among the descendants: a rank may end before it connects to `Presence`, and the other ranks would then wait for it in
MPI_Init forever.
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
from mpips.launch.mpirun import make_environment
from mpips.launch.running.presence import Death, OutputListener, Presence, read_status
from mpips.launch.running.verdict import MpirunEnd, OrdinaryVerdict, SurvivingVerdict
from mpips.store.world import launched_as

# The longest wait between two checks of the job. It is long, so that the checks do not slow down the job.
LOOK_SECONDS = 1.0
# the shortest wait between two checks, which is used while the job ends
NAP_SECONDS = 0.05
# If ranks are missing, and no further rank appears for this many seconds, assume that a rank has ended before this
# process could see it.
MISSING_SECONDS = 4.0
# If no rank has connected after this many seconds, print that ranks are being started.
SILENT_SECONDS = 3.0
# the wait between two checks while ranks are starting
START_SECONDS = 0.05
# Seconds that a job may take to end after a signal, before its ranks are killed. After that, mpirun may take this many
# seconds again.
GRACE = 5.0
# used instead of `GRACE` for a job whose ranks have all ended
GRACE_WITHOUT_RANKS = 0.4
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
# struct signalfd_siginfo: signal number, errno, code
SIGNAL_RECORD = struct.Struct("Iii116x")
# size of glibc's sigset_t
MASK_BYTES = 128
# operations of prctl(2), for which Python has no names
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
LOG = log.get("mpips.launch")


class JobEnd(NamedTuple):
    """How a job has ended: exit codes, and messages for the user."""

    # the exit code for the user; after a signal it is 128 plus the signal's number, as in shells
    code: int
    # the exit code of mpirun, or minus the number of the signal that ended mpirun
    mpirun_code: int
    # the signal to this process that ended the job, or 0
    signal: int
    # the message to print about the end, or ""
    sentence: str
    # a description of the death that has ended the job, or ""
    death: str


def run(
    argv: Sequence[str],
    must_end: Callable[[], bool] | None = None,
    name: str = "",
    roles: Sequence[str] = (),
    ranks_here: int = 0,
    spares: int = -1,
) -> JobEnd:
    """Run mpirun, and block until the job has ended. A job that has failed leaves no process on this machine.

    If a job does not end within `GRACE` seconds after a signal, all processes that it has started on this machine are
    killed.

    Args:
        argv: The command line of mpirun.
        must_end: A function that is called about every `LOOK_SECONDS`. When it returns True, the job is ended.
        name: The name of the command, for the message after a signal has interrupted the job.
        roles: The role of each rank, for messages about deaths.
        ranks_here: How many ranks are certain to start on this machine. If ranks may be on other hosts, the output of
            mpirun passes through this process, which searches the output for messages about lost hosts.
        spares: How many of the last ranks are spares. With 0 or more, the remaining ranks go on when a rank dies. With
            -1, the first death ends the job.
    """
    all_here = ranks_here >= max(1, len(roles))
    began = time.monotonic()
    input_of_rank_0 = _choose_input(argv) if all_here else -1
    LOG.info("job begins: %s", shlex.join(argv))
    signals = HeldSignals()
    presence = Presence(ranks_here, survives=spares >= 0, input_of_rank_0=input_of_rank_0)
    verdict: OrdinaryVerdict | SurvivingVerdict
    verdict = OrdinaryVerdict(presence, roles) if spares < 0 else SurvivingVerdict(presence, roles, spares)
    try:
        # If this process has no standard error, there is nothing to pass mpirun's messages on to.
        listener = None if sys.stderr is None and all_here else OutputListener(errors_only=all_here)
        expected = ranks_here if roles else 0
        job = RunningJob(argv, signals, presence, verdict, must_end, listener, expected, len(roles))
        job.watch()
        presence.look()
        end = job.end()
        code, sentence, death = verdict.code(end), verdict.sentence(end), verdict.death(end)
        job.clean_up(kill=bool(code))
        if code and not end.signal:
            folders.write_end(str(os.getpid()), death=death, sentence=sentence)
        LOG.info(
            "job has ended after %.1f s: code %d, mpirun's %d, %s",
            time.monotonic() - began,
            code,
            end.mpirun_code,
            death or "no death that ended it",
        )
    finally:
        presence.close()
        signals.close()
    if end.signal and code == 128 + end.signal and name:
        sentence = f"\n{name}: interrupted"
    elif sentence := sentence or ("" if code or presence.deaths else presence.remark):
        sentence = f"mpips: {sentence}"
    return JobEnd(code, end.mpirun_code, end.signal, sentence, death)


class RunningJob:
    """A running job.

    Args:
        argv: The command line of mpirun.
        signals: The signals that this process gets.
        presence: The ranks on this machine.
        verdict: Decides when the job must end.
        must_end: See `run`.
        listener: Passes on mpirun's output. None: mpirun writes directly to this process's standard output and error.
        expected: How many ranks will connect to `presence`. 0 for a program that does not connect.
        ranks: How many ranks the job has.
    """

    def __init__(
        self,
        argv: Sequence[str],
        signals: HeldSignals,
        presence: Presence,
        verdict: OrdinaryVerdict | SurvivingVerdict,
        must_end: Callable[[], bool] | None,
        listener: OutputListener | None,
        expected: int,
        ranks: int,
    ) -> None:
        self._expected = expected
        self._ranks = ranks
        self._listener = listener
        self._signals = signals
        self._presence = presence
        self._verdict = verdict
        self._must_end = must_end
        # the signal to this process that ends the job, or 0
        self._signal = 0
        # True once this process has told the job to end because a rank died, failed or never connected
        self._ended_for_ranks = False
        # True until "starting N ranks" has been printed or a rank has connected
        self._announce_start = expected > 0
        self._clock = Clock()
        # while the job starts, the number of ranks that this process has seen
        self._known = 0
        # the time at which `_known` last changed
        self._known_since = 0.0
        # the time of the current check
        self._now = 0.0
        # The time at which the job is killed if it has not ended by itself. Infinite until the job is told to end.
        self._deadline = math.inf
        # seconds that mpirun may still run after its ranks have been killed
        self._grace = GRACE
        self._poll = select.poll()
        for source in (signals, presence):
            self._poll.register(source, select.POLLIN)
        # When a descendant ends, its children become children of this process. So this process can find and await them.
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._unconnected = UnconnectedRanks(presence.environment())
        self._began = time.time()
        output, errors = (listener.output, listener.errors) if listener else (None, None)
        self._mpirun = subprocess.Popen(
            argv,
            env={**make_environment(os.environ), **presence.environment(), folders.JOB: str(os.getpid())},
            stdin=subprocess.DEVNULL if presence.input_of_rank_0 >= 0 else None,
            stdout=output,
            stderr=errors,
            preexec_fn=_prepare_child(os.getpid(), signals.before),
        )
        if listener:
            listener.start()

    def end(self) -> MpirunEnd:
        """Return how mpirun has ended. Call this once, after `watch`.

        Blocks until all output of mpirun is passed on, or until a signal arrives.
        """
        lost_host = survivors_ended_well = False
        cause = ""
        if listener := self._listener:
            listener.finish()
            while not listener.has_finished(NAP_SECONDS) and not any(n in ENDING for n, _ in self._signals.read()):
                pass
            # mpirun's standard output passes through the listener only if ranks may be on other hosts. A host that is
            # lost after the job was told to end does not count.
            if listener.output is not None:
                lost_host = listener.lost_host and self._deadline == math.inf
                survivors_ended_well = listener.survivors_ended_well
            cause = listener.cause
        code = self._mpirun.returncode
        return MpirunEnd(code, self._signal, self._ended_for_ranks, lost_host, survivors_ended_well, cause)

    def watch(self) -> None:
        """Watch the job, and end it when it must end. Blocks until mpirun has ended."""
        end_time = math.inf
        while self._mpirun.poll() is None:
            longest_wait = self._longest_wait(end_time)
            events = self._poll.poll(longest_wait)
            # Without a limit this process may have waited for hours. The old clock would assume that the process was
            # stopped during such a gap.
            if longest_wait is None:
                self._clock = Clock()
            self._now = self._clock.seconds()
            reap_orphans(self._mpirun.pid)
            for number, by_terminal in self._signals.read():
                self._pass_on(number, by_terminal)
            self._presence.look()
            self._print_slow_start()
            if self._deadline == math.inf and self._is_rank_missing():
                # If some ranks are on other hosts, it is not known which rank is missing.
                if self._expected == self._ranks:
                    missing = {*range(self._ranks)} - self._presence.connected - self._unconnected.ranks()
                    self._presence.deaths += [Death(rank, None) for rank in sorted(missing)[:1]]
                self._ended_for_ranks = True
                self._end(GRACE_WITHOUT_RANKS)
            # Ask the verdict only after all code above that reads messages of ranks. In another order the job could
            # hang:
            # 1. The verdict is asked, and no rank has died yet.
            # 2. The last rank connects and dies. `_is_rank_missing` reads both.
            # 3. All ranks have connected, so the next wait has no time limit, and no event is left that would end it.
            if not self._signal and not self._ended_for_ranks:
                for kind, sentence in self._verdict.news():
                    LOG.info("%s: %s", kind, sentence)
                    print_error(f"mpips: {sentence}")
            end_time = self._verdict.end_time(self._now)
            if self._now >= end_time and self._deadline == math.inf:
                self._ended_for_ranks = True
                self._end(GRACE_WITHOUT_RANKS if self._verdict.is_work_over() else GRACE)
            if not events and self._must_end and self._must_end():
                self._end(GRACE)
            late = self._now - self._deadline
            # Kill the ranks first, and mpirun only after the grace time, so that mpirun can remove its files.
            if late > 0:
                kill_descendants(spared=0 if late > self._grace else self._mpirun.pid)
        self._unconnected.close()
        if self._deadline < math.inf or self._mpirun.returncode < 0:
            self.clean_up()

    def clean_up(self, kill: bool = True) -> None:
        """Remove the shared memory of the job after it has ended. With `kill`, first kill its remaining processes."""
        if kill:
            end_descendants(GRACE)
        remove_leftovers(self._mpirun.pid, self._began)

    def _is_rank_missing(self) -> bool:
        """True if a rank ended while the job was starting, before it connected and before its process was seen.

        This happens as follows:

        1. mpirun starts all ranks.
        2. A signal ends one rank while its Python starts. The rank has not connected to `Presence`, and this process
           has not seen it among its descendants.
        3. The other ranks start MPI and wait for this rank forever.

        The loss is noticed because fewer ranks than expected have appeared for `MISSING_SECONDS`. If this process had
        seen the rank's process before it ended, the rank is added to the deaths instead.
        """
        presence = self._presence
        if not self._is_starting():
            return False
        ended = [*self._unconnected.look(presence.connected)]
        # The missing ranks may have connected just before they ended.
        presence.look()
        presence.deaths += [death for death in ended if death.rank not in presence.connected]
        known = len(self._unconnected.ranks()) + len(presence.connected) + len(presence.deaths)
        if not 0 < known < self._expected or presence.deaths or known != self._known:
            self._known, self._known_since = known, self._now
        return self._now > self._known_since + MISSING_SECONDS

    def _print_slow_start(self) -> None:
        """Print once that ranks are being started, if no rank has connected after `SILENT_SECONDS`."""
        if self._announce_start and not self._presence.connected and time.time() >= self._began + SILENT_SECONDS:
            self._announce_start = False
            all_here = self._expected == self._ranks
            where = " on this machine" if all_here else f", {self._expected} of them on this machine"
            print_error(f"mpips: starting {self._ranks} rank{'s' * (self._ranks > 1)}{where}")

    def _is_starting(self) -> bool:
        """True if MPI has not started yet and some expected ranks have not connected yet."""
        return not self._presence.started and len(self._presence.connected) < self._expected

    def _longest_wait(self, end_time: float) -> float | None:
        """Return the longest time to wait for an event, in milliseconds. None means no limit."""
        starting = self._is_starting()
        next_time = min(end_time, self._deadline)
        if not starting and self._must_end is None and next_time == math.inf:
            return None
        longest = START_SECONDS if starting else LOOK_SECONDS
        return 1000 * min(longest, max(NAP_SECONDS, next_time - self._now))

    def _pass_on(self, number: int, by_terminal: bool) -> None:
        # Send SIGUSR1 and SIGUSR2 to the ranks directly, because these signals would kill MPICH's mpirun.
        if number in PASSED_ON:
            for pid in self._presence.pids() or [self._mpirun.pid]:
                send_signal(pid, number)
            return
        if not self._signal:
            folders.write_end(str(os.getpid()), heard=signal.Signals(number).name)
        self._signal = number
        self._deadline = min(self._deadline, self._now + GRACE)
        # If a terminal sent the signal, it has already sent it to mpirun as well.
        if not by_terminal:
            self._mpirun.send_signal(number)

    def _end(self, grace: float) -> None:
        """Tell mpirun to end. `watch` kills the ranks after `grace` seconds, and mpirun after twice that time."""
        if self._deadline == math.inf:
            self._mpirun.terminate()
            self._grace = grace
            self._deadline = self._now + grace


def _choose_input(argv: Sequence[str]) -> int:
    """Return the file descriptor that rank 0 gets as its standard input, or -1 if mpirun passes on its own input.

    mpirun reads its whole input, even lines that are meant for the next command of a shell loop. Open MPI's mpirun also
    does not pass on the end of the input. So rank 0 gets the input file itself. There are two exceptions. Ranks may not
    read from a terminal directly, and mpirun's own options may choose the rank that gets the input.
    """
    options = takewhile(lambda word: word != sys.executable, argv)
    if os.isatty(0) or not {"--stdin", "-stdin", "-s"}.isdisjoint(options):
        return -1
    # sys.stdin is None if this process was started with standard input closed.
    return 0 if sys.stdin is not None else os.open(os.devnull, os.O_RDONLY)


def _prepare_child(parent: int, mask: Iterable[int]) -> Callable[[], None]:
    """Return a function that the child process runs between fork and exec.

    The function asks the kernel to send SIGTERM to the child when `parent` ends, and sets the child's signal mask. It
    also removes the session folder of an earlier mpirun with the child's pid, because Open MPI does not start if such a
    folder exists.
    """

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        # If the parent ended before prctl was called, the kernel will send no signal.
        if os.getppid() != parent:
            os._exit(1)
        remove_session(os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def print_error(text: str) -> None:
    """Write a line to standard error. Writes nothing if `text` is empty."""
    # The terminal may have been closed.
    with suppress(OSError):
        os.write(2, f"{text}\n".encode() if text else b"")


class HeldSignals:
    """Blocks signals and reads them from a signalfd instead.

    The blocked signals are those that end a process (`ENDING`), those for the ranks (`PASSED_ON`), and SIGCHLD. Signals
    that this process ignores, as under nohup, stay ignored. The object can be polled: it is readable when a signal has
    arrived. `close` restores the signal mask.
    """

    def __init__(self) -> None:
        numbers = [number for number in (*ENDING, *PASSED_ON) if signal.getsignal(number) != signal.SIG_IGN]
        self._blocked = {*numbers, signal.SIGCHLD}
        # the signal mask before this object blocked signals
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        bits = sum(1 << (number - 1) for number in self._blocked)
        self._fd = _libc.signalfd(-1, bits.to_bytes(MASK_BYTES, "little"), os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.before)
            raise OSError(ctypes.get_errno(), "signalfd")

    def fileno(self) -> int:
        return self._fd

    def read(self) -> Iterator[tuple[int, bool]]:
        """Yield (number, by_terminal) for each signal that has arrived, except SIGCHLD.

        `by_terminal` is True if a terminal sent the signal. A terminal sends a signal to all processes of the job, and
        any other sender only to this process.
        """
        while True:
            try:
                number, _, code = SIGNAL_RECORD.unpack(os.read(self._fd, SIGNAL_RECORD.size))
            except BlockingIOError:
                return
            # A code above 0 (SI_KERNEL) means that the kernel sent the signal, as it does for Ctrl-C.
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
    """Kill all descendants of this process, and wait for at most `seconds` until they have ended."""
    clock = Clock()
    # waitpid raises ChildProcessError when this process has no children left.
    with suppress(ChildProcessError):
        while clock.seconds() < seconds:
            kill_descendants()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)


def reap_orphans(spared: int) -> None:
    """Collect the exit status of ended orphans, which became children of this process when their parents ended.

    Stops at the child `spared`, because subprocess.Popen must collect this child's status itself.
    """
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (ended := os.waitid(os.P_ALL, 0, options)) and ended.si_pid != spared:
        os.waitpid(ended.si_pid, 0)


def find_descendants() -> list[int]:
    """Return the pids of all descendants of this process that have not ended."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # If the process has ended in the meantime, its file no longer exists.
        with suppress(OSError):
            state, parent = read_stat(int(stat.parent.name))[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    descendants = children.get(os.getpid(), [])
    for pid in descendants:
        descendants.extend(children.get(pid, ()))
    return descendants


class UnconnectedRanks:
    """Finds, among the descendants of this process, ranks of a job that have not connected to `Presence` yet.

    A process is a rank of the job if its environment has the variables in `environment`, and also the variables by
    which a launcher tells a process its rank.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._mark = {f"{name}={value}" for name, value in environment.items()}
        # pid -> (rank, a pidfd of the process)
        self._known: dict[int, tuple[int, int]] = {}

    def ranks(self) -> set[int]:
        """Return the numbers of the ranks that were running at the last call of `look`."""
        return {rank for rank, _ in self._known.values()}

    def look(self, connected: Container[int]) -> Iterator[Death]:
        """Look for new ranks, and yield a death for each rank that has died since the last call.

        Ranks in `connected` are left out, because `Presence` watches these ranks.
        """
        for pid in set(find_descendants()) - self._known.keys():
            rank = self._rank(pid)
            if rank >= 0 and rank not in connected:
                # pidfd_open fails if the process has already ended.
                with suppress(OSError):
                    self._known[pid] = rank, os.pidfd_open(pid)
        for pid, (rank, pidfd) in list(self._known.items()):
            ended = bool(find_readable([pidfd], 0))
            if ended and rank not in connected and (status := read_status(pid, pidfd)) != 0:
                yield Death(rank, status)
            if ended or rank in connected:
                os.close(pidfd)
                del self._known[pid]

    def close(self) -> None:
        for _, pidfd in self._known.values():
            os.close(pidfd)
        self._known.clear()

    def _rank(self, pid: int) -> int:
        """Return the rank of a process, or -1 if it is not a rank of the job."""
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return -1
        place = launched_as(dict(variable.partition("=")[::2] for variable in variables if "=" in variable))
        return place[0] if place and self._mark <= set(variables) else -1

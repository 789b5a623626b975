"""Run a command under a plan of faults: listen to its ranks, make faults, end it at a limit, and look for leftovers.

`watch` does all this. `FaultMaker` makes the faults that are due, in ranks and in the hosts of a lab, and ends the
faults that last some seconds. `Ranks` holds the processes of the job, with a connection and a pidfd for each.
"""

from __future__ import annotations

import heapq
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from mpips.chaos.faults import OF_HOSTS, Fault, FaultPlan, Point, Whom, check_lab, save
from mpips.chaos.injector import PLAN, SHOW_STACK, SOCKET, WATCHED, Message, PointReached, RankUp, StoreCreated
from mpips.collectives.clock import Clock
from mpips.collectives.machine import find_peer, find_processes_with, read_stat
from mpips.collectives.recorder import folders

# seconds that a job's last processes may take to end after the command has ended
GRACE = 2.0
# seconds that a command may take to end after SIGTERM, before it is killed
END_SECONDS = 8.0
# seconds that ranks get to write their stacks
STACK_SECONDS = 1.0
LOOK_SECONDS = 0.2
# How the names of Open MPI's session folders begin. The names end with the pid of an mpirun.
SESSIONS = "ompi.", "prte."


class WatchedRun(msgspec.Struct):
    """A run of a command: the messages of its ranks, the faults that were made, and how it ended."""

    plan: FaultPlan
    began: float = 0.0
    ended: float = 0.0
    code: int = 0
    hung: bool = False
    messages: list[Message] = []
    attempts: list[FaultAttempt] = []
    # descriptions of processes that outlived the job, and of files that it left behind
    left: list[str] = []


def watch(
    argv: Sequence[str],
    plan: FaultPlan,
    limit: float = 600.0,
    output: IO[bytes] | None = None,
    lab: str = "",
    look: Callable[[WatchedRun], None] | None = None,
) -> WatchedRun:
    """Run a command that starts an MPI job whose program makes a store, and make the faults of a plan in it. Blocking.

    Faults hit only ranks on this machine or on the hosts of `lab`.

    Args:
        argv: The command and its arguments.
        plan: The faults. An empty plan only records the job.
        limit: Seconds after which the job counts as hung. Then each rank writes its stacks, and the job is ended.
        output: A file for the output of the job. Default: the output of this process.
        lab: The name of the lab in which the job runs.
        look: A function that is called several times a second with the record of the run so far.

    Returns:
        The run, for `judge`.

    Raises:
        PlanError: The plan has faults that hit hosts, and `lab` is "".
        OSError: The command cannot be run.

    >>> run = mpips.chaos.watch(["true"], mpips.chaos.FaultPlan(), limit=20)
    >>> run.code, run.hung, run.left
    (0, False, [])
    """
    check_lab(plan, lab)
    run = WatchedRun(plan, messages=[], attempts=[], left=[])
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        save(plan, Path(name, PLAN))
        ranks = Ranks(Path(name))
        faults = FaultMaker(plan, ranks, lab)
        run.began, clock = time.monotonic(), Clock()
        errors = subprocess.STDOUT if output else None
        job = subprocess.Popen(
            argv, env={**os.environ, WATCHED: name}, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )
        try:
            while job.poll() is None and not run.hung:
                if look is not None:
                    look(run)
                for message in ranks.hear(min(LOOK_SECONDS, faults.wait())):
                    run.messages.append(message)
                    faults.take(message)
                faults.make()
                run.hung = clock.seconds() > limit
            if run.hung:
                for rank in ranks.all.values():
                    if rank.rank >= 0:
                        rank.signal(SHOW_STACK)
                time.sleep(STACK_SECONDS)
        finally:
            faults.end()
            if job.poll() is None:
                job.terminate()
                try:
                    job.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    job.kill()
                    job.wait()
            run.code, run.ended, run.attempts = job.returncode, time.monotonic(), faults.attempts
            run.messages += ranks.hear(0)
            run.left += _processes(name) + _files(ranks)
            ranks.close()
    return run


def _processes(folder: str) -> list[str]:
    """Kill processes of the job that have not ended in time, and return a description of each.

    All processes of a watched job are found by `folder`, the value of a variable in their environment.
    """
    variable, clock = f"{WATCHED}={folder}", Clock()
    while any(find_processes_with(variable)) and clock.seconds() < GRACE:
        time.sleep(0.02)
    left = []
    for pid in find_processes_with(variable):
        # The process may have ended in the meantime.
        with suppress(OSError):
            command_line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            os.kill(pid, signal.SIGKILL)
            left.append(f"process {pid} ({command_line.strip()[:120]})")
    return left


def _files(ranks: Ranks) -> list[str]:
    """Return the files in shared memory and the session folders of mpirun that the job has left behind.

    The status pages of ranks in the folder of jobs are not counted: after a failure they are kept on purpose.
    """
    existing = sorted(path for rank in ranks.all.values() for path in rank.memory if path.exists())
    memory = [path for path in existing if path.parent.parent != folders.jobs_folder()]
    ends = tuple(f".{pid}" for pid in ranks.parents)
    sessions = (path for path in Path(tempfile.gettempdir()).glob("*.[0-9]*") if path.name.startswith(SESSIONS))
    return [str(path) for path in (*dict.fromkeys(memory), *(path for path in sessions if path.name.endswith(ends)))]


# seconds that `mpips lab link` may take
LINK_SECONDS = 20.0


class FaultAttempt(msgspec.Struct, frozen=True):
    """A fault of the plan that was due: when it was made and whom it hit, or why it was not made.

    Attributes:
        fault: The number of the fault in the plan.
        time: When the fault was made or, if it was not made, when it was due.
        rank: The rank that the fault hit, or whose host it hit.
        role: The role of this rank.
        host: The name of the host, if the fault hit a whole host.
        killed: All ranks that the fault has killed.
        undone: Why the fault was not made, or "".
    """

    fault: int
    time: float
    rank: int = -1
    role: str = ""
    host: str = ""
    killed: tuple[int, ...] = ()
    undone: str = ""


class FaultMaker:
    """Makes the faults of a plan when they are due, and ends the faults that last some seconds.

    All times are values of time.monotonic().
    """

    def __init__(self, plan: FaultPlan, ranks: Ranks, lab: str) -> None:
        self.attempts: list[FaultAttempt] = []
        self._plan = plan
        self._ranks = ranks
        self._lab = lab
        # True once the first store was made. The times of faults are measured from that moment.
        self._timed = False
        # heap of the faults to make, each as (time, number of the fault)
        self._due: list[tuple[float, int]] = []
        # the faults that are active now, each as (time at which it ends, fault, rank)
        self._until: list[tuple[float, Fault, WatchedRank]] = []

    def take(self, message: Message) -> None:
        """Schedule the faults whose time this message determines.

        The message about the first store schedules all faults whose `at` is in seconds. A message that a rank has
        reached a point schedules the fault of that point.
        """
        if isinstance(message, StoreCreated) and not self._timed:
            self._timed = True
            for number, fault in enumerate(self._plan.faults):
                if not isinstance(fault.at, Point):
                    heapq.heappush(self._due, (message.time + fault.at, number))
        elif isinstance(message, PointReached):
            point = self._plan.faults[message.fault].at
            assert isinstance(point, Point)
            heapq.heappush(self._due, (message.time + point.delay, message.fault))

    def wait(self) -> float:
        """Return the seconds until the next fault must be made or ended."""
        next_ = min([*(at for at, _ in self._due[:1]), *(at for at, _, _ in self._until)], default=math.inf)
        return next_ - time.monotonic()

    def make(self) -> None:
        """Make the faults that are due now, and end the faults whose time is over.

        A record of each fault is added to `attempts`, even if the fault could not be made.
        """
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, number = heapq.heappop(self._due)
            fault = self._plan.faults[number]
            rank = self._ranks.living(fault.whom)
            if rank is None:
                nobody = f"no {fault.whom.role} {fault.whom.number if fault.whom.role == 'rank' else ''}".rstrip()
                self.attempts.append(FaultAttempt(number, now, undone=f"{nobody} was alive"))
            elif fault.kind in OF_HOSTS and not rank.is_elsewhere:
                self.attempts.append(FaultAttempt(number, now, undone=f"rank {rank.rank} is on no host of a lab"))
            else:
                self.attempts.append(self._made(number, fault, rank))
        self.end(now)

    def end(self, now: float = math.inf) -> None:
        """End the faults whose time is over at `now`. Without `now`, end all faults that still last."""
        over = [(fault, rank) for at, fault, rank in self._until if at <= now]
        self._until = [entry for entry in self._until if entry[0] > now]
        for fault, rank in over:
            if fault.kind == "stop":
                rank.signal(signal.SIGCONT)
            elif fault.kind == "full":
                _limit_files(rank.pid, full=False)
            else:
                self._set_links(rank.host)

    def _made(self, number: int, fault: Fault, rank: WatchedRank) -> FaultAttempt:
        """Make a fault in `rank` or on its host. Return the record of it, for `attempts`.

        A fault that lasts some seconds is only begun here, and noted in `_until`. `end` ends it later: when its time is
        over, or when the run ends. If the fault could not be made, the record says why (`undone`).
        """
        now, host = time.monotonic(), rank.host if fault.kind in OF_HOSTS else ""
        if not fault.lasts:
            hit = self._ranks.beside(rank) if fault.kind == "host" else [rank]
            for each in hit:
                each.signal(signal.SIGKILL)
            return FaultAttempt(number, now, rank.rank, rank.role, host, tuple(sorted(each.rank for each in hit)))
        entry, undone = (now + fault.seconds, fault, rank), ""
        self._until.append(entry)
        if fault.kind == "stop":
            rank.signal(signal.SIGSTOP)
        elif fault.kind == "full":
            _limit_files(rank.pid, full=True)
        elif undone := self._set_links(rank.host):
            self._until.remove(entry)
        return FaultAttempt(number, now, rank.rank, rank.role, host, undone=undone)

    def _set_links(self, host: str) -> str:
        """Set the NICs of a host according to the faults that are active on this host now.

        The NICs are down while a "cut" lasts, and otherwise up. While a "slow" lasts, they keep only a share of their
        rate. Blocks while the command `mpips lab link` runs. Returns "", or the reason why the command failed.
        """
        faults = [fault for _, fault, rank in self._until if rank.host == host]
        state = "down" if any(fault.kind == "cut" for fault in faults) else "up"
        share = min((fault.share for fault in faults), default=1.0)
        options = ["link", "--name", self._lab, "--share", str(share), host, "all", state]
        argv = [sys.executable, "-P", "-m", "mpips.launch.lab", *options]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LINK_SECONDS)
        except subprocess.TimeoutExpired:
            return f"`mpips lab {' '.join(options)}` took longer than {LINK_SECONDS:g} s"
        lines = done.stderr.strip().splitlines() or [f"`mpips lab link` left with {done.returncode}"]
        return lines[-1] if done.returncode else ""


def _limit_files(pid: int, full: bool) -> None:
    """Stop the files that a process writes from growing, or let them grow again."""
    with suppress(ProcessLookupError, PermissionError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if full else most, most))


# the most bytes of a message
MOST_BYTES = 4096
SHARED = "/dev/shm/"


class WatchedRank:
    """A rank's connection, and its process as a pidfd."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.rank = -1
        self.role = ""
        self.host = ""
        # files of shared memory that the process has mapped at some time
        self.memory: set[Path] = set()
        self.pid = find_peer(line).pid
        try:
            self.process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            # The process has already ended, but its messages can still be read.
            self.process = -1

    def look(self) -> None:
        """Record which files of shared memory the process has mapped now."""
        with suppress(OSError):
            lines = Path(f"/proc/{self.pid}/maps").read_text(errors="replace").splitlines()
            self.memory |= {Path(line[line.index(SHARED) :]) for line in lines if SHARED in line}

    @property
    def alive(self) -> bool:
        if self.process < 0:
            return False
        ended = select.poll()
        ended.register(self.process, select.POLLIN)
        return not ended.poll(0)

    @property
    def is_elsewhere(self) -> bool:
        """True if the process runs on a host of a lab, and not directly on this machine."""
        with suppress(OSError):
            return os.readlink(f"/proc/{self.pid}/ns/net") != os.readlink("/proc/self/ns/net")
        return False

    def signal(self, number: int) -> None:
        if self.process >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.process, number)

    def close(self) -> None:
        self.line.close()
        if self.process >= 0:
            os.close(self.process)


class Ranks:
    """The ranks of a job that have connected to the socket in `folder`. `hear` waits for their messages."""

    def __init__(self, folder: Path) -> None:
        # file descriptor of the connection -> rank
        self.all: dict[int, WatchedRank] = {}
        # pids of the processes that started the ranks, such as an mpirun
        self.parents: set[int] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen(1024)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)

    def hear(self, seconds: float) -> list[Message]:
        """Wait at most `seconds` for messages to arrive, and return them."""
        news: list[Message] = []
        for descriptor, _ in self._poll.poll(max(0.0, 1000 * seconds)):
            if descriptor == self._listener.fileno():
                news += self._admit()
            else:
                news += self._read(descriptor)
        return news

    def living(self, whom: Whom) -> WatchedRank | None:
        """Return the process that a fault on `whom` hits, or None if no such process is alive."""
        if whom.role == "rank":
            return next((rank for rank in self.all.values() if rank.rank == whom.number and rank.alive), None)
        fit = [rank for rank in self.all.values() if whom.role in ("any", rank.role) and rank.alive]
        return sorted(fit, key=lambda rank: rank.rank)[whom.number % len(fit)] if fit else None

    def beside(self, rank: WatchedRank) -> list[WatchedRank]:
        """Return the living ranks on the host of `rank`, including `rank` itself."""
        return [other for other in self.all.values() if other.host == rank.host and other.alive]

    def close(self) -> None:
        for rank in self.all.values():
            rank.close()
        self._listener.close()

    def _admit(self) -> list[Message]:
        """Accept all new connections, and return the messages that have already arrived on them."""
        news: list[Message] = []
        # BlockingIOError: all waiting connections have been accepted.
        with suppress(BlockingIOError):
            while True:
                line, _ = self._listener.accept()
                line.setblocking(False)
                rank = self.all[line.fileno()] = WatchedRank(line)
                self._poll.register(line, select.POLLIN)
                # The rank may already have ended.
                with suppress(OSError):
                    self.parents.add(int(read_stat(rank.pid)[1]))
                news += self._read(line.fileno())
        return news

    def _read(self, descriptor: int) -> list[Message]:
        rank, news = self.all[descriptor], []
        try:
            while data := rank.line.recv(MOST_BYTES):
                news.append(msgspec.msgpack.decode(data, type=Message))
        except BlockingIOError:
            pass
        except OSError:
            self._poll.unregister(descriptor)
        else:
            self._poll.unregister(descriptor)
        for message in news:
            if isinstance(message, RankUp):
                rank.rank, rank.role, rank.host = message.rank, message.role, message.host
                rank.look()
        return news

"""Run a command under a plan of faults: hear its ranks, make the faults, end it at a limit, and look for leftovers.

`watch` is the call. `Faults` makes what is due in ranks and in the lab's hosts, and ends what lasts. `Ranks` are the
processes of the job, by a line and a pidfd each.
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
from mpips.chaos.injector import PLAN, SHOW_STACK, SOCKET, WATCHED, Here, Made, Reached, Told
from mpips.collectives.clock import Clock
from mpips.collectives.machine import find_carriers, find_peer, read_stat
from mpips.collectives.recorder import folders

GRACE = 2.0  # seconds for a job's last processes to leave once its command has ended
END_SECONDS = 8.0  # for a command that is asked to end, before it is killed
STACK_SECONDS = 1.0  # for stacks to be written
LOOK_SECONDS = 0.2
SESSIONS = "ompi.", "prte."  # with the number of an mpirun behind


class Run(msgspec.Struct):
    """One run of a command: what its ranks told, which faults were made, how it ended."""

    plan: FaultPlan
    began: float = 0.0
    ended: float = 0.0
    code: int = 0
    hung: bool = False
    told: list[Told] = []
    done: list[Done] = []
    left: list[str] = []
    """Processes that outlived it, and what else it left behind."""


def watch(
    argv: Sequence[str],
    plan: FaultPlan,
    limit: float = 600.0,
    output: IO[bytes] | None = None,
    lab: str = "",
    look: Callable[[Run], None] | None = None,
) -> Run:
    """Run `argv`, an MPI job of programs that make stores, under a plan; what came of it.

    After `limit` seconds it counts as hung: each rank writes its stacks, and all is ended. Its output goes to `output`,
    a file, or where ours goes. It is heard on this machine alone, or on the hosts of `lab`, where it runs in one.
    `look` is called with the run so far, several times a second. PlanError where the plan has faults of hosts, and no
    lab is named.
    """
    check_lab(plan, lab)
    run = Run(plan, told=[], done=[], left=[])
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        save(plan, Path(name, PLAN))
        ranks = Ranks(Path(name))
        faults = Faults(plan, ranks, lab)
        run.began, clock = time.monotonic(), Clock()
        errors = subprocess.STDOUT if output else None
        job = subprocess.Popen(
            argv, env={**os.environ, WATCHED: name}, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )
        try:
            while job.poll() is None and not run.hung:
                if look is not None:
                    look(run)
                for told in ranks.hear(min(LOOK_SECONDS, faults.wait())):
                    run.told.append(told)
                    faults.hear(told)
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
            run.code, run.ended, run.done = job.returncode, time.monotonic(), faults.done
            run.told += ranks.hear(0)
            run.left += _processes(name) + _files(ranks)
            ranks.close()
    return run


def _processes(folder: str) -> list[str]:
    """Return processes of the job that have not left in time, each as a sentence; they are killed.

    All of a watched job have this folder in their environment.
    """
    variable, clock = f"{WATCHED}={folder}", Clock()
    while any(find_carriers(variable)) and clock.seconds() < GRACE:
        time.sleep(0.02)
    found = []
    for pid in find_carriers(variable):
        with suppress(OSError):  # it has ended meanwhile
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            os.kill(pid, signal.SIGKILL)
            found.append(f"process {pid} ({words.strip()[:120]})")
    return found


def _files(ranks: Ranks) -> list[str]:
    """Return shared memory that its ranks had and session folders of its mpirun, which are there still.

    Pages of ranks that died in a job that did are kept on purpose.
    """
    had = sorted(path for rank in ranks.all.values() for path in rank.memory if path.exists())
    memory = [path for path in had if path.parent.parent != folders.of_jobs()]
    ends = tuple(f".{pid}" for pid in ranks.parents)
    sessions = (path for path in Path(tempfile.gettempdir()).glob("*.[0-9]*") if path.name.startswith(SESSIONS))
    return [str(path) for path in (*dict.fromkeys(memory), *(path for path in sessions if path.name.endswith(ends)))]


LINK_SECONDS = 20.0  # for links to be set


class Done(msgspec.Struct, frozen=True):
    """A fault that was made, or why it was not: `fault` of the plan, at `time`, to a rank with a role, or to its host.

    `killed`: all ranks that it ended.
    """

    fault: int
    time: float
    rank: int = -1
    role: str = ""
    host: str = ""
    killed: tuple[int, ...] = ()
    undone: str = ""


class Faults:
    """Makes the faults of a plan when they are due, and ends those that last some seconds."""

    def __init__(self, plan: FaultPlan, ranks: Ranks, lab: str) -> None:
        self.done: list[Done] = []
        self._plan, self._ranks, self._lab, self._timed = plan, ranks, lab, False
        self._due: list[tuple[float, int]] = []
        self._until: list[tuple[float, Fault, WatchedRank]] = []

    def hear(self, told: Told) -> None:
        if isinstance(told, Made) and not self._timed:
            self._timed = True
            for number, fault in enumerate(self._plan.faults):
                if not isinstance(fault.at, Point):
                    heapq.heappush(self._due, (told.time + fault.at, number))
        elif isinstance(told, Reached):
            point = self._plan.faults[told.fault].at
            assert isinstance(point, Point)
            heapq.heappush(self._due, (told.time + point.delay, told.fault))

    def wait(self) -> float:
        """Seconds until something is due."""
        next_ = min([*(at for at, _ in self._due[:1]), *(at for at, _, _ in self._until)], default=math.inf)
        return next_ - time.monotonic()

    def make(self) -> None:
        """Make what is due now."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, number = heapq.heappop(self._due)
            fault = self._plan.faults[number]
            rank = self._ranks.living(fault.whom)
            if rank is None:
                nobody = f"no {fault.whom.role} {fault.whom.number if fault.whom.role == 'rank' else ''}".rstrip()
                self.done.append(Done(number, now, undone=f"{nobody} was alive"))
            elif fault.kind in OF_HOSTS and not rank.is_elsewhere:
                self.done.append(Done(number, now, undone=f"rank {rank.rank} is on no host of a lab"))
            else:
                self.done.append(self._made(number, fault, rank))
        self.end(now)

    def end(self, now: float = math.inf) -> None:
        """End what has lasted its time; without `now`, all."""
        over = [(fault, rank) for at, fault, rank in self._until if at <= now]
        self._until = [entry for entry in self._until if entry[0] > now]
        for fault, rank in over:
            if fault.kind == "stop":
                rank.signal(signal.SIGCONT)
            elif fault.kind == "full":
                _limit_files(rank.pid, full=False)
            else:
                self._set_links(rank.host)

    def _made(self, number: int, fault: Fault, rank: WatchedRank) -> Done:
        """Begin a fault."""
        now, host = time.monotonic(), rank.host if fault.kind in OF_HOSTS else ""
        if not fault.lasts:
            hit = self._ranks.beside(rank) if fault.kind == "host" else [rank]
            for each in hit:
                each.signal(signal.SIGKILL)
            return Done(number, now, rank.rank, rank.role, host, tuple(sorted(each.rank for each in hit)))
        entry, undone = (now + fault.seconds, fault, rank), ""
        self._until.append(entry)
        if fault.kind == "stop":
            rank.signal(signal.SIGSTOP)
        elif fault.kind == "full":
            _limit_files(rank.pid, full=True)
        elif undone := self._set_links(rank.host):
            self._until.remove(entry)
        return Done(number, now, rank.rank, rank.role, host, undone=undone)

    def _set_links(self, host: str) -> str:
        """Set the NICs of a host up, with a share of their rate, or down, as the faults that last now want them.

        Blocking, for the time that a command takes. Returns why that could not be, else "".
        """
        faults = [fault for _, fault, rank in self._until if rank.host == host]
        state = "down" if any(fault.kind == "cut" for fault in faults) else "up"
        share = min((fault.share for fault in faults), default=1.0)
        words = ["link", "--name", self._lab, "--share", str(share), host, "all", state]
        argv = [sys.executable, "-P", "-m", "mpips.launch.lab", *words]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LINK_SECONDS)
        except subprocess.TimeoutExpired:
            return f"`mpips lab {' '.join(words)}` took longer than {LINK_SECONDS:g} s"
        said = done.stderr.strip().splitlines() or [f"`mpips lab link` left with {done.returncode}"]
        return said[-1] if done.returncode else ""


def _limit_files(pid: int, full: bool) -> None:
    """Let no file that a process writes grow, or let them grow again."""
    with suppress(ProcessLookupError, PermissionError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if full else most, most))


MOST_BYTES = 4096  # of a message
SHARED = "/dev/shm/"


class WatchedRank:
    """A rank's line, and its process by a pidfd."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self.rank, self.role, self.host = line, -1, "", ""
        self.memory: set[Path] = set()
        self.pid = find_peer(line).pid
        try:
            self.process = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it has ended: what it told stands in its line
            self.process = -1

    def look(self) -> None:
        """See which shared memory with a name it has."""
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
        """Return whether it lives on a host that is not this machine itself."""
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
    """All ranks of a job that have been heard; `hear` waits for news."""

    def __init__(self, folder: Path) -> None:
        self.all: dict[int, WatchedRank] = {}
        self.parents: set[int] = set()
        """Who started them, such as an mpirun."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen(1024)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)

    def hear(self, seconds: float) -> list[Told]:
        """Return what has been told, after a wait of at most so many seconds."""
        news: list[Told] = []
        for descriptor, _ in self._poll.poll(max(0.0, 1000 * seconds)):
            if descriptor == self._listener.fileno():
                news += self._admit()
            else:
                news += self._read(descriptor)
        return news

    def living(self, whom: Whom) -> WatchedRank | None:
        """The process that is meant; None where there is none alive."""
        if whom.role == "rank":
            return next((rank for rank in self.all.values() if rank.rank == whom.number and rank.alive), None)
        fit = [rank for rank in self.all.values() if whom.role in ("any", rank.role) and rank.alive]
        return sorted(fit, key=lambda rank: rank.rank)[whom.number % len(fit)] if fit else None

    def beside(self, rank: WatchedRank) -> list[WatchedRank]:
        """Those alive on the host of a rank, itself among them."""
        return [other for other in self.all.values() if other.host == rank.host and other.alive]

    def close(self) -> None:
        for rank in self.all.values():
            rank.close()
        self._listener.close()

    def _admit(self) -> list[Told]:
        """Return what all that have come say at once; some have ended already."""
        news: list[Told] = []
        with suppress(BlockingIOError):  # nobody else has come
            while True:
                line, _ = self._listener.accept()
                line.setblocking(False)
                rank = self.all[line.fileno()] = WatchedRank(line)
                self._poll.register(line, select.POLLIN)
                with suppress(OSError):
                    self.parents.add(int(read_stat(rank.pid)[1]))
                news += self._read(line.fileno())
        return news

    def _read(self, descriptor: int) -> list[Told]:
        rank, news = self.all[descriptor], []
        try:
            while data := rank.line.recv(MOST_BYTES):
                news.append(msgspec.msgpack.decode(data, type=Told))
        except BlockingIOError:
            pass
        except OSError:
            self._poll.unregister(descriptor)
        else:
            self._poll.unregister(descriptor)
        for told in news:
            if isinstance(told, Here):
                rank.rank, rank.role, rank.host = told.rank, told.role, told.host
                rank.look()
        return news

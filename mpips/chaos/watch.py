"""Runs a command under a plan: hears its ranks, makes the faults, ends it at a time limit, and looks for leftovers."""

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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from mpips.chaos.injector import SHOW_STACK
from mpips.chaos.plan import Fault, Plan, Point, Whom, save
from mpips.chaos.told import CHAOS, PLAN, SOCKET, Here, Made, Reached, Told

GRACE = 2.0  # seconds for a job's last processes to leave once its command has ended
END_SECONDS = 8.0  # for a command that is asked to end, before it is killed
STACK_SECONDS = 1.0  # for stacks to be written
LOOK_SECONDS = 0.2
MOST_BYTES = 4096  # of a message
SHARED = "/dev/shm/"
SESSIONS = "ompi.", "prte."  # with the number of an mpirun behind
CREDENTIALS = 12  # bytes of SO_PEERCRED: pid, user, group


class Done(msgspec.Struct, frozen=True):
    """What was done: fault `fault` of the plan, at `time`, to a rank with a role; or why it was not."""

    fault: int
    time: float
    rank: int = -1
    role: str = ""
    undone: str = ""


class Run(msgspec.Struct):
    """One run of a command: what its ranks told, which faults were made, how it ended."""

    plan: Plan
    began: float = 0.0
    ended: float = 0.0
    code: int = 0
    hung: bool = False
    told: list[Told] = []
    done: list[Done] = []
    left: list[str] = []
    """Processes that outlived it, and what else it left behind."""


class Rank:
    """A rank's line, and its process by a pidfd."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self.rank, self.role = line, -1, ""
        self.memory: set[Path] = set()
        peer = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS)
        self.pid = int.from_bytes(peer[:4], sys.byteorder)
        self.process = os.pidfd_open(self.pid)

    def look(self) -> None:
        """See which shared memory with a name it has."""
        with suppress(OSError):
            lines = Path(f"/proc/{self.pid}/maps").read_text(errors="replace").splitlines()
            self.memory |= {Path(line[line.index(SHARED) :]) for line in lines if SHARED in line}

    @property
    def alive(self) -> bool:
        return not select.select([self.process], [], [], 0)[0]

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, number)

    def close(self) -> None:
        self.line.close()
        os.close(self.process)


class Ranks:
    """All ranks of a job that have been heard; `hear` waits for news."""

    def __init__(self, folder: Path) -> None:
        self.all: dict[int, Rank] = {}
        self.parents: set[int] = set()
        """Who started them, such as an mpirun."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen(1024)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)

    def hear(self, seconds: float) -> list[Told]:
        """What has been told, after a wait of at most so many seconds."""
        news: list[Told] = []
        for descriptor, _ in self._poll.poll(max(0.0, 1000 * seconds)):
            if descriptor == self._listener.fileno():
                self._admit()
            else:
                news += self._read(descriptor)
        return news

    def living(self, whom: Whom) -> Rank | None:
        """The process that is meant; None where there is none alive."""
        if whom.role == "rank":
            return next((rank for rank in self.all.values() if rank.rank == whom.number and rank.alive), None)
        fit = [rank for rank in self.all.values() if whom.role in ("any", rank.role) and rank.alive]
        return sorted(fit, key=lambda rank: rank.rank)[whom.number % len(fit)] if fit else None

    def close(self) -> None:
        for rank in self.all.values():
            rank.close()
        self._listener.close()

    def _admit(self) -> None:
        with suppress(OSError):  # it has ended already
            line, _ = self._listener.accept()
            line.setblocking(False)
            rank = self.all[line.fileno()] = Rank(line)
            self.parents.add(_parent(rank.pid))
            self._poll.register(line, select.POLLIN)

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
                rank.rank, rank.role = told.rank, told.role
                rank.look()
        return news


class Faults:
    """Makes the faults of a plan when they are due, and ends those that last some seconds."""

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self.done: list[Done] = []
        self._plan, self._ranks, self._timed = plan, ranks, False
        self._due: list[tuple[float, int]] = []
        self._until: list[tuple[float, int, Rank]] = []

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
                continue
            self.done.append(Done(number, time.monotonic(), rank.rank, rank.role))
            self._begin(number, fault, rank)
        self.end(now)

    def end(self, now: float = math.inf) -> None:
        """End what has lasted its time; without `now`, all."""
        for at, number, rank in self._until:
            if at <= now:
                if self._plan.faults[number].kind == "stop":
                    rank.signal(signal.SIGCONT)
                else:
                    _limit_files(rank.pid, full=False)
        self._until = [entry for entry in self._until if entry[0] > now]

    def _begin(self, number: int, fault: Fault, rank: Rank) -> None:
        if fault.kind == "kill":
            rank.signal(signal.SIGKILL)
            return
        if fault.kind == "stop":
            rank.signal(signal.SIGSTOP)
        else:
            _limit_files(rank.pid, full=True)
        self._until.append((time.monotonic() + fault.seconds, number, rank))


def watch(argv: Sequence[str], plan: Plan, limit: float = 600.0, output: IO[bytes] | None = None) -> Run:
    """Run `argv`, an MPI job of programs that make stores, under a plan; what came of it.

    After `limit` seconds it counts as hung: each rank writes its stacks, and all is ended. Its output goes to `output`,
    a file, or where ours goes. It is heard on this machine alone.
    """
    run = Run(plan, told=[], done=[], left=[])
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        save(plan, Path(name, PLAN))
        ranks = Ranks(Path(name))
        faults = Faults(plan, ranks)
        run.began = time.monotonic()
        errors = subprocess.STDOUT if output else None
        job = subprocess.Popen(
            argv, env={**os.environ, CHAOS: name}, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )
        try:
            _until_it_ends(run, job, ranks, faults, limit)
        finally:
            faults.end()
            if job.poll() is None:
                _end(job)
            run.code, run.ended, run.done = job.returncode, time.monotonic(), faults.done
            run.told += ranks.hear(0)
            run.left += _processes(name) + _files(ranks)
            ranks.close()
    return run


def _until_it_ends(run: Run, job: subprocess.Popen[bytes], ranks: Ranks, faults: Faults, limit: float) -> None:
    while job.poll() is None:
        for told in ranks.hear(min(LOOK_SECONDS, faults.wait())):
            run.told.append(told)
            faults.hear(told)
        faults.make()
        if time.monotonic() > run.began + limit:
            run.hung = True
            for rank in ranks.all.values():
                rank.signal(SHOW_STACK) if rank.rank >= 0 else None
            time.sleep(STACK_SECONDS)
            return


def _end(job: subprocess.Popen[bytes]) -> None:
    job.terminate()
    try:
        job.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def _processes(folder: str) -> list[str]:
    """Processes of the job that have not left in time, each as a sentence; they are killed."""
    deadline = time.monotonic() + GRACE
    while (found := _carriers(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"process {pid} ({words})" for pid, words in found.items()]


def _files(ranks: Ranks) -> list[str]:
    """Shared memory that its ranks had and session folders of its mpirun, which are there still."""
    memory = {path for rank in ranks.all.values() for path in rank.memory}
    ends = tuple(f".{pid}" for pid in ranks.parents)
    sessions = [path for path in Path(tempfile.gettempdir()).glob("*.[0-9]*") if path.name.startswith(SESSIONS)]
    return [str(path) for path in sorted(memory) + sessions if path in memory or path.name.endswith(ends)
            if path.exists()]  # fmt: skip


def _carriers(folder: str) -> dict[int, str]:
    """Processes that have this folder in their environment, as all of a watched job have, and their words."""
    mark, found = f"{CHAOS}={folder}".encode(), {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (place / "environ").read_bytes().split(b"\0"):
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(place.name)] = words.strip()[:120]
    return found


def _parent(pid: int) -> int:
    """The parent of a process; 0 where it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()[1])
    return 0


def _limit_files(pid: int, full: bool) -> None:
    """Let no file that a process writes grow, or let them grow again."""
    with suppress(ProcessLookupError, PermissionError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if full else most, most))

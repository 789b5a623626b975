"""Makes the faults of a plan in the ranks of a watched job and in the lab's hosts, and ends those that last."""

from __future__ import annotations

import heapq
import math
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress

import msgspec

from mpips.chaos.plan import OF_HOSTS, Fault, Plan, Point
from mpips.chaos.ranks import Rank, Ranks
from mpips.chaos.told import Made, Reached, Told

LINK_SECONDS = 20.0  # for links to be set


class Done(msgspec.Struct, frozen=True):
    """What was done: fault `fault` of the plan, at `time`, to a rank with a role, or to its host; or why it was not.
    `killed`: all ranks that it ended."""

    fault: int
    time: float
    rank: int = -1
    role: str = ""
    host: str = ""
    killed: tuple[int, ...] = ()
    undone: str = ""


class Faults:
    """Makes the faults of a plan when they are due, and ends those that last some seconds."""

    def __init__(self, plan: Plan, ranks: Ranks, lab: str) -> None:
        self.done: list[Done] = []
        self._plan, self._ranks, self._lab, self._timed = plan, ranks, lab, False
        self._due: list[tuple[float, int]] = []
        self._until: list[tuple[float, Fault, Rank]] = []

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

    def _made(self, number: int, fault: Fault, rank: Rank) -> Done:
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
        """Set the links of a host as the faults that last now want them; why that could not be, else ""."""
        faults = [fault for _, fault, rank in self._until if rank.host == host]
        up = all(fault.kind != "cut" for fault in faults)
        return _set_links(self._lab, host, up, min((fault.share for fault in faults), default=1.0))


def _set_links(lab: str, host: str, up: bool, share: float) -> str:
    """Set all NICs of a host up, with this share of their rate, or down; why that could not be, else "". Blocking, for
    the time that a command takes."""
    words = ["link", "--name", lab, "--share", str(share), host, "all", "up" if up else "down"]
    argv = [sys.executable, "-P", "-m", "launch.lab", *words]
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

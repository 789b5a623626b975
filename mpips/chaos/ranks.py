"""The ranks of a watched job, by a line and a pidfd each: heard, found by what is meant, and sent signals."""

from __future__ import annotations

import os
import select
import signal
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from collectives.machine import find_peer
from mpips.chaos.plan import Whom
from mpips.chaos.told import SOCKET, Here, Told

MOST_BYTES = 4096  # of a message
SHARED = "/dev/shm/"


class Rank:
    """A rank's line, and its process by a pidfd."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self.rank, self.role, self.host = line, -1, "", ""
        self.memory: set[Path] = set()
        self.pid = find_peer(line).pid
        self.process = os.pidfd_open(self.pid)

    def look(self) -> None:
        """See which shared memory with a name it has."""
        with suppress(OSError):
            lines = Path(f"/proc/{self.pid}/maps").read_text(errors="replace").splitlines()
            self.memory |= {Path(line[line.index(SHARED) :]) for line in lines if SHARED in line}

    @property
    def alive(self) -> bool:
        ended = select.poll()
        ended.register(self.process, select.POLLIN)
        return not ended.poll(0)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it lives on a host that is not this machine itself."""
        with suppress(OSError):
            return os.readlink(f"/proc/{self.pid}/ns/net") != os.readlink("/proc/self/ns/net")
        return False

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

    def beside(self, rank: Rank) -> list[Rank]:
        """Those alive on the host of a rank, itself among them."""
        return [other for other in self.all.values() if other.host == rank.host and other.alive]

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
                rank.rank, rank.role, rank.host = told.rank, told.role, told.host
                rank.look()
        return news


def _parent(pid: int) -> int:
    """The parent of a process; 0 where it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()[1])
    return 0

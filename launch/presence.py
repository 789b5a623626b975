"""Which ranks of a job are alive, and which died: each one on this machine tells the command that started it.

A rank that `python -m mpips` runs connects to a socket without a name in any folder, says its number, and a word
before it ends well. What ends without that word has died. Ranks on other hosts cannot be heard.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

from mpips import world

CREDENTIALS = 12  # bytes of SO_PEERCRED: pid, user, group


class Rank(NamedTuple):
    """A rank that has told its number; `descriptor` (a pidfd) is readable once its process has ended."""

    number: int
    pid: int
    descriptor: int
    line: socket.socket
    said: bytes


class Death(NamedTuple):
    """The end of a rank that said no goodbye; `signal` is what ended it, 0 where that is not known."""

    rank: int
    signal: int


class Presence:
    """The ranks of one job, of which `here` are sure to start on this machine. Closed by `close`.

    `death` is the first one, None before. `failed`: a rank has said that it is about to end the job.
    """

    def __init__(self, here: int) -> None:
        self.death: Death | None = None
        self.failed = False
        self._here, self._left = here, 0
        self._name = f"mpips-ranks-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(4096)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._unnamed: dict[int, socket.socket] = {}
        self._ranks: dict[int, Rank] = {}

    def environment(self) -> dict[str, str]:
        """What ranks need to be heard."""
        return {world.PRESENCE: self._name}

    def fileno(self) -> int:
        return self._poll.fileno()

    def look(self) -> None:
        """Hear what has come. The kernel lists processes in the order in which they ended."""
        while news := self._poll.poll(0):
            for descriptor, _ in news:
                if descriptor == self._listener.fileno():
                    self._admit()
                elif descriptor in self._unnamed:
                    self._enter(descriptor)
                else:
                    self._bury(descriptor)

    def everyone_left_well(self) -> bool:
        """Have all ranks that are sure to be here said goodbye, and none died?"""
        self.look()
        return self.death is None and not self._ranks and self._left >= self._here

    def pids(self) -> list[int]:
        """The processes of the ranks that live, where all that are sure to be here have been heard; else none."""
        heard = len(self._ranks) + self._left
        return [rank.pid for rank in self._ranks.values()] if heard == self._here else []

    def close(self) -> None:
        for rank in self._ranks.values():
            os.close(rank.descriptor)
            rank.line.close()
        for line in self._unnamed.values():
            line.close()
        self._listener.close()
        self._poll.close()

    def _admit(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError:  # this process may have no more files open: the job goes on unheard
            self._poll.unregister(self._listener)
            return
        line.setblocking(False)
        self._unnamed[line.fileno()] = line
        self._poll.register(line, select.EPOLLIN)

    def _enter(self, descriptor: int) -> None:
        line = self._unnamed.pop(descriptor)
        self._poll.unregister(line)
        number, _, said = _received(line).partition(b"\n")
        if not number.isdigit():
            line.close()
            return
        pid = int.from_bytes(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS)[:4], sys.byteorder)
        try:
            rank = Rank(int(number), pid, os.pidfd_open(pid), line, said)
        except ProcessLookupError:  # it has ended since
            self._count(int(number), said + _received(line), None)
            line.close()
            return
        except OSError:  # as above
            line.close()
            return
        self._ranks[rank.descriptor] = rank
        self._poll.register(rank.descriptor, select.EPOLLIN)

    def _bury(self, descriptor: int) -> None:
        rank = self._ranks.pop(descriptor)
        self._count(rank.number, rank.said + _received(rank.line), _status(rank.pid))
        self._poll.unregister(descriptor)
        os.close(descriptor)
        rank.line.close()

    def _count(self, number: int, said: bytes, status: int | None) -> None:
        self.failed = self.failed or world.FAILING in said
        if world.GOODBYE in said or status == 0:
            self._left += 1
        elif self.death is None:
            self.death = Death(number, os.WTERMSIG(status or 0))


def _received(line: socket.socket) -> bytes:
    try:
        return line.recv(64)
    except OSError:  # nothing has come, or the other end has gone
        return b""


def _status(pid: int) -> int | None:
    """How a process has ended, as wait(2) tells it; None once its parent has heard."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    return int(words[-1]) if words[0] == b"Z" else None

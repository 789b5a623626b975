"""Ranks of a job that are alive, and those that died: each one on this machine tells the command that started it.

A rank that `python -m mpips` runs connects to a socket without a name in any folder. It says its number, then that it
fails, and with which exit code, or, when it has ended well, goodbye. In between it says that MPI has started, and a
spare says its role when it gets one. A rank that ends without a word has died. The socket is open to all users of the
machine: only processes of our own user are heard, each rank once, and a word that is none is nothing.

Ranks on other hosts cannot be heard. What their mpirun prints is passed on as it is, and listened to: Open MPI's ends a
job whose host is lost with exit code 0. That it was lost it says in one of two sentences. Whether the others had ended
well by then says one of them (`mpips.ending.process`).
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import select
import socket
import struct
import threading
import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from mpips.collectives.machine import find_peer, find_readable, read_stat
from mpips.store import world

LOST_SENTENCES = (b"has lost communication with a remote daemon", b"A daemon failed to report back after being spawned")
OF_SSH = re.compile(rb"^(ssh: [^\r\n]+)[\r\n]", re.MULTILINE)
SENTENCES = (*LOST_SENTENCES, world.WELL_WITHOUT)
LONGEST_SENTENCE = max(map(len, SENTENCES))
MOST_PIPED = 1 << 16
SPARE_FILES = 64  # that this process may yet need to open
MOST_BYTES = 4096  # of words at once; they are few
MOST_DIGITS, LARGEST_CODE = 9, 255
PIDFD_INFO = struct.Struct("Q52xi")  # what is asked for and what is told, and last the status
PIDFD_INFO_EXIT, PIDFD_GET_INFO = 8, 3 << 30 | PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class Death(NamedTuple):
    """The end of a rank that said no goodbye. `status` is as wait(2) tells it, None where its parent heard it first and
    the kernel, older than 6.15, does not keep it. `role`: the one that it has said to have got."""

    rank: int
    status: int | None
    role: str = ""

    @property
    def code(self) -> int | None:
        """The exit code with which it left; None where a signal ended it, or that is not known."""
        return os.WEXITSTATUS(self.status) if self.status is not None and os.WIFEXITED(self.status) else None

    @property
    def signal(self) -> int:
        """The signal that is known to have ended it, or 0."""
        return os.WTERMSIG(self.status) if self.status is not None else 0


class Taken(NamedTuple):
    """The place of a rank that has died, taken by a spare: its rank, its role, the step it goes on from (or -1)."""

    rank: int
    role: str
    step: int


class Rank:
    """The connection of a rank, and, once it has said its `number`, a `descriptor` (pidfd) of its process.

    It has `gone` once its end of the line is closed.
    """

    def __init__(self, line: socket.socket, pid: int) -> None:
        self.line = line
        self.number, self.pid, self.descriptor = -1, pid, -1
        self.role, self.step = "", -1
        self.well = self.gone = self.fails = False

    def close(self) -> None:
        self.line.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)


class Presence:
    """The ranks of one job, of which `here` are sure to start on this machine. Closed by `close`.

    `deaths` and places `taken` by spares are in their order. `code` is the exit code with which the first rank failed;
    None where none did, or, but for `survives`, where others had died before. `failed`: that rank has ended. `well`:
    how many have said goodbye and have ended. `started`: whether one has said that MPI has, which needs all. `heard`:
    the ranks that have said that they are there, also those that have ended since. `remark`: what rank 0 has said of a
    job that ends well. Rank 0 gets the file `hands_over`
    as its standard input; -1: it is left what it has.
    """

    def __init__(self, here: int, survives: bool = False, hands_over: int = -1) -> None:
        self.here, self.hands_over = here, hands_over
        self.deaths: list[Death] = []
        self.taken: list[Taken] = []
        self.code: int | None = None
        self.remark = ""
        self.well = 0
        self.failed = self.started = False
        self.heard = set[int]()
        self._survives, self._gone = survives, set[int]()
        self._name = f"mpips-ranks-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(MOST_BYTES)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._lines: dict[int, Rank] = {}
        self._alive: dict[int, Rank] = {}

    def environment(self) -> dict[str, str]:
        """Return what ranks need to be heard."""
        return {world.PRESENCE: self._name, **({world.INPUT: "1"} if self.hands_over >= 0 else {})}

    def fileno(self) -> int:
        return self._poll.fileno()

    def look(self) -> None:
        """Hear what has come. The kernel lists processes in the order in which they ended."""
        while news := self._poll.poll(0):
            for descriptor, _ in news:
                if descriptor == self._listener.fileno():
                    self._admit()
                elif descriptor in self._lines:
                    self._listen(self._lines[descriptor])
                elif descriptor in self._alive:
                    self._bury(self._alive.pop(descriptor))

    def everyone_left_well(self) -> bool:
        """Return whether all ranks that are sure to be here have said goodbye, and none has died."""
        self.look()
        return not self.deaths and not self._alive and self.well >= self.here

    def is_idle(self, working: Iterable[int]) -> bool:
        """Return whether all of these ranks have ended or said goodbye, and no spare has got a role."""
        over = self._gone | {rank.number for rank in self._alive.values() if rank.well}
        return all(number in over for number in working) and all(
            rank.well or not rank.role for rank in self._alive.values()
        )

    def pids(self) -> list[int]:
        """Return the processes of the ranks that live, where all that are sure to be here have been heard; else
        none."""
        heard = len(self._alive) + self.well + len(self.deaths) * self._survives
        return [rank.pid for rank in self._alive.values()] if heard == self.here else []

    def close(self) -> None:
        for rank in {*self._lines.values(), *self._alive.values()}:
            rank.close()
        self._listener.close()
        self._poll.close()

    def _admit(self) -> None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 2 * len(self._lines) + SPARE_FILES > most:  # the job goes on unheard
            self._poll.unregister(self._listener)
            return
        line, _ = self._listener.accept()
        who = find_peer(line)
        if not who.ours:
            line.close()
            return
        line.setblocking(False)
        self._lines[line.fileno()] = Rank(line, who.pid)
        self._poll.register(line, select.EPOLLIN)

    def _listen(self, rank: Rank) -> None:
        self._take(rank)
        if rank.gone:
            self._poll.unregister(rank.line)
            del self._lines[rank.line.fileno()]
            if rank.descriptor < 0:  # it had ended before it could be watched
                self._leave(rank, None)

    def _take(self, rank: Rank) -> None:
        """Hear what a rank has said since."""
        try:
            said = rank.line.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        rank.gone = not said
        for line in said.split(b"\n")[:-1]:
            word, _, more = line.partition(b" ")
            if word == world.PRESENT:
                self._enter(rank, _number(more))
            elif rank.number < 0:  # who has no number is no rank
                continue
            elif word == world.STARTED:
                self.started = True
            elif word == world.STEP:
                rank.step = _number(more)
            elif word == world.ROLE:
                rank.role = more.decode(errors="replace")
                self.taken.append(Taken(rank.number, rank.role, rank.step))
            elif word == world.REMARK:
                self.remark = more.decode(errors="replace")
            elif word == world.GOODBYE:
                rank.well = True
            elif word == world.FAILING:
                code = _number(more)
                if 0 < code <= LARGEST_CODE and self.code is None and (self._survives or not self.deaths):
                    self.code, rank.fails = code, True

    def _enter(self, rank: Rank, number: int) -> None:
        """Watch the process of a rank that says its number, unless one has said the same."""
        if number < 0 or number in self.heard or rank.number >= 0:
            return
        rank.number = number
        self.heard.add(number)
        if number == 0 and self.hands_over >= 0:
            with suppress(OSError):
                socket.send_fds(rank.line, [b"i"], [self.hands_over])
        try:
            rank.descriptor = os.pidfd_open(rank.pid)
        except OSError:  # it has ended already, or is out of sight
            return
        self._alive[rank.descriptor] = rank
        self._poll.register(rank.descriptor, select.EPOLLIN)

    def _bury(self, rank: Rank) -> None:
        status = status_of(rank.pid, rank.descriptor)
        self._take(rank)
        self._lines.pop(rank.line.fileno(), None)
        self._leave(rank, status)

    def _leave(self, rank: Rank, status: int | None) -> None:
        if rank.well or status == 0:
            self.well += 1
        elif rank.number >= 0:
            self.deaths.append(Death(rank.number, status, rank.role))
        self._gone.add(rank.number)
        self.failed = self.failed or rank.fails
        rank.close()  # closed files leave the poll by themselves


def _number(word: bytes) -> int:
    """Return the number that a word is; -1 where it is none."""
    return int(word) if word.isdigit() and len(word) <= MOST_DIGITS else -1


def status_of(pid: int, descriptor: int) -> int | None:
    """Return how a process, which has ended, did so, as wait(2) tells it; None where the kernel does not keep it."""
    with suppress(OSError):  # its parent has heard
        words = read_stat(pid)
        if words[0] == b"Z":
            return int(words[-1])
    answer = bytearray(PIDFD_INFO.pack(PIDFD_INFO_EXIT, 0))
    try:
        fcntl.ioctl(descriptor, PIDFD_GET_INFO, answer)
    except OSError:
        return None
    mask, status = PIDFD_INFO.unpack(answer)
    return status if mask & PIDFD_INFO_EXIT else None


class OutputListener:
    """Passes on, in a thread, what mpirun writes to `errors`, and, but for `errors_alone`, to `output`. `start` it once
    mpirun has them.

    prterun ends its last message with a byte 0, for which `grep` would call a file of the job's output binary.
    """

    def __init__(self, errors_alone: bool = False) -> None:
        self.output: int | None = None
        self._to: dict[int, int] = {}
        if not errors_alone:
            end, self.output = os.pipe()
            self._to[end] = 1
        end, self.errors = os.pipe()
        self._to[end] = 2
        self._tails = dict.fromkeys(self._to, b"")
        self._stopped, self._stop = os.pipe()
        self._found: set[bytes] = set()
        self.cause = ""  # why ssh has not reached a host; mpirun itself guesses at many other reasons
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def start(self) -> None:
        if self.output is not None:
            os.close(self.output)
        os.close(self.errors)
        self._thread.start()

    def finish(self) -> None:
        """mpirun has ended: nothing more will come."""
        os.close(self._stop)

    def has_finished(self, seconds: float) -> bool:
        """Return whether all has been passed on. Blocking for at most so long."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def lost(self) -> bool:
        """Return whether mpirun has lost a host."""
        return not self._found.isdisjoint(LOST_SENTENCES)

    @property
    def well(self) -> bool:
        """Return whether those that were left have ended well."""
        return world.WELL_WITHOUT in self._found

    def _pass_on(self) -> None:
        """Pass on all that comes, until both streams have ended, or mpirun has, and nothing more is there."""
        ready: list[int] = []
        while self._to and ready != [self._stopped]:
            ready = find_readable([*self._to, self._stopped])
            for stream in [stream for stream in ready if stream in self._to]:
                data = os.read(stream, MOST_PIPED)
                before, to = self._tails[stream], self._to[stream]
                text = before + data
                if to == 2:
                    text = text.replace(b"\n\0", b"\n")
                self._found.update(sentence for sentence in SENTENCES if sentence in text)
                if not self.cause and (line := OF_SSH.search(text)):
                    self.cause = line[1].decode(errors="replace")
                self._tails[stream] = text[-LONGEST_SENTENCE:]
                if not data or not _write_all(to, text[len(before) :]):
                    del self._to[stream]
                    os.close(stream)
        for descriptor in (*self._to, self._stopped):
            os.close(descriptor)


def _write_all(file: int, data: bytes) -> bool:
    """Write all of it, waiting for who reads; False where nobody does, as mpirun is to see, too. What a full disk does
    not take is lost."""
    while data:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:
            room = select.poll()
            room.register(file, select.POLLOUT)
            room.poll()
        except BrokenPipeError:
            return False
        except OSError:
            return True
    return True

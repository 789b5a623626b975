"""Ranks of a job that are alive, and those that died: each one on this machine tells the command that started it.

A rank that `python -m mpips` runs connects to an abstract Unix socket, which is not in any folder. First it sends its
number. Then it sends a line when MPI has started, and a spare sends its role when it gets one. At its end it sends
goodbye if it has ended well, or else its exit code. A rank that ends without either has died. All users of the machine
can connect to the socket. So connections of other users are closed, each rank number is accepted once, and unknown
lines are ignored.

Ranks on other hosts do not connect. If there may be any, the output of mpirun is passed on unchanged and searched for
sentences, because Open MPI's mpirun ends with exit code 0 when it loses a host. It prints one of two sentences then. If
the other ranks end well nevertheless, one of them prints a sentence that says so (see `mpips.ending.process`).
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

# what Open MPI's mpirun prints when it loses a host
LOST_SENTENCES = (b"has lost communication with a remote daemon", b"A daemon failed to report back after being spawned")
OF_SSH = re.compile(rb"^(ssh: [^\r\n]+)[\r\n]", re.MULTILINE)
SENTENCES = (*LOST_SENTENCES, world.WELL_WITHOUT)
LONGEST_SENTENCE = max(map(len, SENTENCES))
# bytes of mpirun's output to read at a time
MOST_PIPED = 1 << 16
# descriptors to leave free for other files of this process
SPARE_FILES = 64
# bytes to read from a rank at a time; ranks send short lines
MOST_BYTES = 4096
MOST_DIGITS = 9
LARGEST_CODE = 255
# ioctl(2) on a pidfd, since Linux 6.15: the start of struct pidfd_info (the mask, and after other fields the exit
# status), the bit of the mask for the status, and the number of the request
PIDFD_INFO = struct.Struct("Q52xi")
PIDFD_INFO_EXIT = 8
PIDFD_GET_INFO = 3 << 30 | PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class Death(NamedTuple):
    """The end of a rank that did not say goodbye."""

    rank: int
    # The status as of wait(2). None: it is not known, because the parent has collected it and the kernel is older than
    # 6.15, which would keep it.
    status: int | None
    # the role of a spare that has got one; "" for other ranks
    role: str = ""

    @property
    def code(self) -> int | None:
        """The exit code of the rank. None if a signal ended it, or if the status is not known."""
        return os.WEXITSTATUS(self.status) if self.status is not None and os.WIFEXITED(self.status) else None

    @property
    def signal(self) -> int:
        """The signal that ended the rank. 0 if it exited, or if the status is not known."""
        return os.WTERMSIG(self.status) if self.status is not None else 0


class Taken(NamedTuple):
    """A spare that has taken the place of a dead rank."""

    # the rank of the spare
    rank: int
    role: str
    # the step from which it goes on, or -1
    step: int


class Rank:
    """The connection of a rank, and what the rank has said on it."""

    def __init__(self, line: socket.socket, pid: int) -> None:
        self.line = line
        # its rank in the job; -1 until it has said it
        self.number = -1
        self.pid = pid
        # a pidfd of its process, from when it has said its number
        self.descriptor = -1
        # of a spare: the role that it has got, and the step from which it goes on
        self.role = ""
        self.step = -1
        # it has said goodbye
        self.well = False
        # it has closed its end of the connection
        self.gone = False
        # it was the first rank to fail; `Presence.code` is its exit code
        self.fails = False

    def close(self) -> None:
        self.line.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)


class Presence:
    """The ranks of one job on this machine, as far as they have connected. Call `close` at the end.

    Args:
        here: The number of ranks that are certain to start on this machine.
        survives: The other ranks go on when one dies.
        hands_over: A descriptor that rank 0 gets as its standard input; -1: it keeps the one it has.
    """

    def __init__(self, here: int, survives: bool = False, hands_over: int = -1) -> None:
        self.here = here
        self.hands_over = hands_over
        # both in the order in which they happened
        self.deaths: list[Death] = []
        self.taken: list[Taken] = []
        # The exit code of the first rank that said it fails. Without `survives`, a failure after a death does not
        # count, because it follows from the death.
        self.code: int | None = None
        # what rank 0 has to say about a job that ends well
        self.remark = ""
        # number of ranks that have ended well
        self.well = 0
        # the rank that failed first has ended
        self.failed = False
        # A rank has said that MPI has started. MPI starts only once all ranks are there.
        self.started = False
        # ranks that have connected, also those that have ended since
        self.heard = set[int]()
        self._survives = survives
        # ranks that have ended
        self._gone = set[int]()
        self._name = f"mpips-ranks-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(MOST_BYTES)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        # descriptor of the connection -> its rank
        self._lines: dict[int, Rank] = {}
        # pidfd -> the rank whose process it is
        self._alive: dict[int, Rank] = {}

    def environment(self) -> dict[str, str]:
        """Return the variables that ranks need to connect."""
        return {world.PRESENCE: self._name, **({world.INPUT: "1"} if self.hands_over >= 0 else {})}

    def fileno(self) -> int:
        return self._poll.fileno()

    def look(self) -> None:
        """Read what ranks have said, and notice those that have ended. Does not block.

        The kernel lists processes in the order in which they ended, so `deaths` is in that order.
        """
        while news := self._poll.poll(0):
            for descriptor, _ in news:
                if descriptor == self._listener.fileno():
                    self._admit()
                elif descriptor in self._lines:
                    self._listen(self._lines[descriptor])
                elif descriptor in self._alive:
                    self._bury(self._alive.pop(descriptor))

    def everyone_left_well(self) -> bool:
        """True if all ranks that are certain to be on this machine have ended well, and none has died."""
        self.look()
        return not self.deaths and not self._alive and self.well >= self.here

    def is_idle(self, working: Iterable[int]) -> bool:
        """True if all the ranks in `working` have ended or said goodbye, and no spare with a role is still working."""
        over = self._gone | {rank.number for rank in self._alive.values() if rank.well}
        return all(number in over for number in working) and all(
            rank.well or not rank.role for rank in self._alive.values()
        )

    def pids(self) -> list[int]:
        """Return the pids of the ranks that are alive, or an empty list as long as some rank has not connected."""
        heard = len(self._alive) + self.well + len(self.deaths) * self._survives
        return [rank.pid for rank in self._alive.values()] if heard == self.here else []

    def close(self) -> None:
        for rank in {*self._lines.values(), *self._alive.values()}:
            rank.close()
        self._listener.close()
        self._poll.close()

    def _admit(self) -> None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Each rank takes two descriptors. When there are no more, stop listening: the job goes on, and the other ranks
        # are not heard.
        if 2 * len(self._lines) + SPARE_FILES > most:
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
            # It had ended before its process could be watched.
            if rank.descriptor < 0:
                self._leave(rank, None)

    def _take(self, rank: Rank) -> None:
        """Read and handle the lines that a rank has sent since the last call."""
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
            # Not a rank, or a process that claims a number which is taken.
            elif rank.number < 0:
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
        """Accept the number that a rank has sent, unless another has sent the same, and watch its process."""
        if number < 0 or number in self.heard or rank.number >= 0:
            return
        rank.number = number
        self.heard.add(number)
        if number == 0 and self.hands_over >= 0:
            with suppress(OSError):
                socket.send_fds(rank.line, [b"i"], [self.hands_over])
        try:
            rank.descriptor = os.pidfd_open(rank.pid)
        except OSError:
            # The process has ended already, or it is in another PID namespace.
            return
        self._alive[rank.descriptor] = rank
        self._poll.register(rank.descriptor, select.EPOLLIN)

    def _bury(self, rank: Rank) -> None:
        status = status_of(rank.pid, rank.descriptor)
        # It may have said goodbye just before it ended.
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
        # Closed descriptors leave the epoll by themselves.
        rank.close()


def _number(word: bytes) -> int:
    """Return the number that `word` spells, or -1 if it is not a number of at most `MOST_DIGITS` digits."""
    return int(word) if word.isdigit() and len(word) <= MOST_DIGITS else -1


def status_of(pid: int, descriptor: int) -> int | None:
    """Return the exit status of a process that has ended, as of wait(2); None if the kernel no longer has it.

    `descriptor` is a pidfd of the process.
    """
    # As long as the parent has not collected the status, the process is a zombie, and /proc shows the status. It is not
    # in /proc any more once the parent has collected it.
    with suppress(OSError):
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
    """Passes on what mpirun writes, in a thread, and searches it for the sentences about lost hosts.

    Give mpirun `errors` as its standard error and `output` as its standard output, then call `start`. With
    `errors_alone` the standard output is not passed through here, and `output` is None.
    """

    def __init__(self, errors_alone: bool = False) -> None:
        self.output: int | None = None
        # end of a pipe from mpirun -> the descriptor to which its data is passed on
        self._to: dict[int, int] = {}
        if not errors_alone:
            end, self.output = os.pipe()
            self._to[end] = 1
        end, self.errors = os.pipe()
        self._to[end] = 2
        # the last bytes of each stream, because a sentence may be cut by the end of a read
        self._tails = dict.fromkeys(self._to, b"")
        self._stopped, self._stop = os.pipe()
        # the sentences that were found
        self._found: set[bytes] = set()
        # why ssh could not reach a host, in ssh's words. mpirun's own message only guesses at possible reasons.
        self.cause = ""
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def start(self) -> None:
        """Begin. mpirun must have been started: this closes our copies of its ends of the pipes."""
        if self.output is not None:
            os.close(self.output)
        os.close(self.errors)
        self._thread.start()

    def finish(self) -> None:
        """Stop once all that is in the pipes has been passed on. Call it when mpirun has ended.

        The pipes may stay open longer than mpirun lives, because its children have them too.
        """
        os.close(self._stop)

    def has_finished(self, seconds: float) -> bool:
        """True if all output has been passed on. Waits for that for at most `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def lost(self) -> bool:
        """True if mpirun has said that it has lost a host."""
        return not self._found.isdisjoint(LOST_SENTENCES)

    @property
    def well(self) -> bool:
        """True if a rank has said that the job has ended well without the lost ones."""
        return world.WELL_WITHOUT in self._found

    def _pass_on(self) -> None:
        """Pass on output until the streams have ended, or until `finish` was called and the pipes are empty."""
        ready: list[int] = []
        while self._to and ready != [self._stopped]:
            ready = find_readable([*self._to, self._stopped])
            for stream in [stream for stream in ready if stream in self._to]:
                data = os.read(stream, MOST_PIPED)
                before, to = self._tails[stream], self._to[stream]
                text = before + data
                # prterun ends its last message with a NUL byte. grep would take a file with it for a binary file.
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
    """Write all of `data`, and wait while a pipe is full. False if nobody reads from the pipe any more.

    The caller then closes the pipe from mpirun, so that mpirun, too, sees that nobody reads.
    """
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
            # The disk may be full. Then the data is lost, and the job goes on.
            return True
    return True

"""Know which ranks of a job are alive and which have died. Each rank on this machine connects to `mpips run`.

A rank that `python -m mpips` runs connects to an abstract Unix socket, which is not in any folder. The rank sends its
number, and later a line when MPI has started. A spare, a rank that waits to replace a dead rank, also sends its new
role when it gets one. Before a rank ends, it sends "goodbye" if all is well, and otherwise its exit code. A rank that
ends without sending either has died. All users of the machine can connect to the socket. So connections of other users
are closed, each rank number is accepted only once, and unknown lines are ignored.

Ranks on other hosts do not connect. If a job may have such ranks, `OutputListener` passes on the output of mpirun
unchanged and searches it. The search is needed because Open MPI's mpirun ends with exit code 0 even if it loses a host.
The only sign of the loss is one of the `LOST_SENTENCES` in mpirun's output. If the remaining ranks end well in spite of
the loss, one of them prints `world.WELL_WITHOUT` (see `mpips.ending.process`).
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

# Open MPI's mpirun prints one of these messages when it loses a host.
LOST_SENTENCES = (b"has lost communication with a remote daemon", b"A daemon failed to report back after being spawned")
SSH_ERROR = re.compile(rb"^(ssh: [^\r\n]+)[\r\n]", re.MULTILINE)
SENTENCES = (*LOST_SENTENCES, world.WELL_WITHOUT)
LONGEST_SENTENCE = max(map(len, SENTENCES))
# bytes of mpirun's output to read at a time
MOST_PIPED = 1 << 16
# the number of file descriptors that are kept free, while ranks connect, for the rest of this process
SPARE_FILES = 64
# the bytes to read from a rank at a time, and also the number of connections that may wait to be accepted
MOST_BYTES = 4096
MOST_DIGITS = 9
LARGEST_CODE = 255
# For ioctl(2) on a pidfd, since Linux 6.15: the beginning of struct pidfd_info (a mask, other fields, the exit status),
# the bit of the mask that asks for the exit status, and the number of the request.
PIDFD_INFO = struct.Struct("Q52xi")
PIDFD_INFO_EXIT = 8
PIDFD_GET_INFO = 3 << 30 | PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class Death(NamedTuple):
    """The end of a rank that had not sent the line "goodbye" before it ended."""

    rank: int
    # The exit status, encoded as by wait(2). None if the status is unknown: kernels before 6.15 forget the status as
    # soon as the parent process has collected it.
    status: int | None
    # if the rank was a spare, the role that it had taken over; otherwise ""
    role: str = ""

    @property
    def code(self) -> int | None:
        """The exit code of the rank. None if a signal ended the rank, or if the status is not known."""
        return os.WEXITSTATUS(self.status) if self.status is not None and os.WIFEXITED(self.status) else None

    @property
    def signal(self) -> int:
        """The signal that ended the rank. 0 if the rank exited by itself, or if the status is not known."""
        return os.WTERMSIG(self.status) if self.status is not None else 0


class Replacement(NamedTuple):
    """A spare that has taken the place of a dead rank."""

    # the rank of the spare
    rank: int
    role: str
    # the training step from which the spare continues, or -1 if the program counts no steps
    step: int


class RankConnection:
    """The connection of a rank to `mpips run`, and what the rank has sent so far."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.socket = connection
        # the rank's number in the job; -1 until the rank has sent it
        self.number = -1
        self.pid = pid
        # a pidfd of the rank's process; -1 until the rank has sent its number
        self.pidfd = -1
        # For a spare that has taken over: its role, and the step from which it continues. Otherwise "" and -1.
        self.role = ""
        self.step = -1
        self.said_goodbye = False
        # True once the rank has closed its end of the connection
        self.closed = False
        # True if this was the first rank to report a failure; `Presence.code` is then its exit code
        self.failed_first = False

    def close(self) -> None:
        self.socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


class Presence:
    """The ranks of one job that have connected to this process. Call `close` at the end.

    Args:
        ranks_here: The number of ranks that are certain to start on this machine.
        survives: True if the remaining ranks continue when a rank dies.
        input_of_rank_0: A file descriptor that rank 0 gets as its standard input. -1: rank 0 keeps its own input.
    """

    def __init__(self, ranks_here: int, survives: bool = False, input_of_rank_0: int = -1) -> None:
        self.ranks_here = ranks_here
        self.input_of_rank_0 = input_of_rank_0
        # the deaths of ranks, in the order in which the ranks died
        self.deaths: list[Death] = []
        # the replacements, in the order in which the spares took over
        self.replacements: list[Replacement] = []
        # The exit code of the first rank that reported a failure. None if no rank has reported one. Without `survives`,
        # a failure after a death does not count, because the failure follows from the death.
        self.code: int | None = None
        # a text that rank 0 has sent, to be printed if the job ends well
        self.remark = ""
        # how many ranks have ended after they sent "goodbye", or with exit code 0
        self.ended_well = 0
        # True once the process of the rank that failed first has ended
        self.failed = False
        # True once a rank has reported that MPI has started. MPI starts only after all ranks have begun.
        self.started = False
        # numbers of all ranks that have ever connected
        self.connected = set[int]()
        self._survives = survives
        # numbers of ranks whose processes have ended
        self._ended = set[int]()
        self._name = f"mpips-ranks-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(MOST_BYTES)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        # file descriptor of a connection -> the connection of the rank
        self._connections: dict[int, RankConnection] = {}
        # pidfd of a process that has not ended -> the connection of the rank that runs in the process
        self._alive: dict[int, RankConnection] = {}

    def environment(self) -> dict[str, str]:
        """Return the environment variables that ranks need to connect."""
        return {world.PRESENCE: self._name, **({world.INPUT: "1"} if self.input_of_rank_0 >= 0 else {})}

    def fileno(self) -> int:
        return self._poll.fileno()

    def look(self) -> None:
        """Read what ranks have sent, and record the ranks that have ended. Does not block.

        The kernel reports processes in the order in which they end, so `deaths` is in this order.
        """
        while events := self._poll.poll(0):
            for descriptor, _ in events:
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor in self._connections:
                    self._read(self._connections[descriptor])
                elif descriptor in self._alive:
                    self._handle_end(self._alive.pop(descriptor))

    def have_all_ended_well(self) -> bool:
        """True if all `ranks_here` ranks have ended well."""
        self.look()
        return not self.deaths and not self._alive and self.ended_well >= self.ranks_here

    def is_idle(self, working: Iterable[int]) -> bool:
        """True if every rank in `working` and every spare with a role has ended or sent "goodbye"."""
        finished = self._ended | {rank.number for rank in self._alive.values() if rank.said_goodbye}
        return all(number in finished for number in working) and all(
            rank.said_goodbye or not rank.role for rank in self._alive.values()
        )

    def pids(self) -> list[int]:
        """Return the pids of the ranks that are alive, or an empty list as long as some rank has not connected."""
        known = len(self._alive) + self.ended_well + len(self.deaths) * self._survives
        return [rank.pid for rank in self._alive.values()] if known == self.ranks_here else []

    def close(self) -> None:
        for rank in {*self._connections.values(), *self._alive.values()}:
            rank.close()
        self._listener.close()
        self._poll.close()

    def _accept(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Each rank takes two file descriptors, a socket and a pidfd. When they run out, accept no further rank. The job
        # continues, but unaccepted ranks are not watched.
        if 2 * len(self._connections) + SPARE_FILES > limit:
            self._poll.unregister(self._listener)
            return
        connection, _ = self._listener.accept()
        peer = find_peer(connection)
        if not peer.ours:
            connection.close()
            return
        connection.setblocking(False)
        self._connections[connection.fileno()] = RankConnection(connection, peer.pid)
        self._poll.register(connection, select.EPOLLIN)

    def _read(self, rank: RankConnection) -> None:
        self._read_lines(rank)
        if rank.closed:
            self._poll.unregister(rank.socket)
            del self._connections[rank.socket.fileno()]
            # The process had already ended when the rank's number arrived, so no pidfd reports its end.
            if rank.pidfd < 0:
                self._record_end(rank, None)

    def _read_lines(self, rank: RankConnection) -> None:
        """Read and handle the lines that a rank has sent since the last call."""
        try:
            data = rank.socket.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        rank.closed = not data
        for line in data.split(b"\n")[:-1]:
            word, _, value = line.partition(b" ")
            if word == world.PRESENT:
                self._accept_number(rank, _parse_number(value))
            # Ignore the line: its sender is not a rank, or has sent the number of another rank.
            elif rank.number < 0:
                continue
            elif word == world.STARTED:
                self.started = True
            elif word == world.STEP:
                rank.step = _parse_number(value)
            elif word == world.ROLE:
                rank.role = value.decode(errors="replace")
                self.replacements.append(Replacement(rank.number, rank.role, rank.step))
            elif word == world.REMARK:
                self.remark = value.decode(errors="replace")
            elif word == world.GOODBYE:
                rank.said_goodbye = True
            elif word == world.FAILING:
                code = _parse_number(value)
                if 0 < code <= LARGEST_CODE and self.code is None and (self._survives or not self.deaths):
                    self.code, rank.failed_first = code, True

    def _accept_number(self, rank: RankConnection, number: int) -> None:
        """Accept the number that a rank has sent, and watch the rank's process.

        Ignore the number if another rank has already sent it.
        """
        if number < 0 or number in self.connected or rank.number >= 0:
            return
        rank.number = number
        self.connected.add(number)
        if number == 0 and self.input_of_rank_0 >= 0:
            with suppress(OSError):
                socket.send_fds(rank.socket, [b"i"], [self.input_of_rank_0])
        try:
            rank.pidfd = os.pidfd_open(rank.pid)
        except OSError:
            # The process has already ended, or it is in another PID namespace.
            return
        self._alive[rank.pidfd] = rank
        self._poll.register(rank.pidfd, select.EPOLLIN)

    def _handle_end(self, rank: RankConnection) -> None:
        status = read_status(rank.pid, rank.pidfd)
        # The rank may have sent "goodbye" just before it ended.
        self._read_lines(rank)
        self._connections.pop(rank.socket.fileno(), None)
        self._record_end(rank, status)

    def _record_end(self, rank: RankConnection, status: int | None) -> None:
        if rank.said_goodbye or status == 0:
            self.ended_well += 1
        elif rank.number >= 0:
            self.deaths.append(Death(rank.number, status, rank.role))
        self._ended.add(rank.number)
        self.failed = self.failed or rank.failed_first
        # The kernel removes closed file descriptors from the epoll.
        rank.close()


def _parse_number(word: bytes) -> int:
    """Return the number that `word` spells, or -1 if it is not a number of at most `MOST_DIGITS` digits."""
    return int(word) if word.isdigit() and len(word) <= MOST_DIGITS else -1


def read_status(pid: int, pidfd: int) -> int | None:
    """Return the exit status of an ended process, encoded as by wait(2). None if the kernel has forgotten it."""
    # Until the parent has collected the status, the process is a zombie, and /proc shows the status. Afterwards the
    # process is no longer in /proc, and only the pidfd can tell the status.
    with suppress(OSError):
        fields = read_stat(pid)
        if fields[0] == b"Z":
            return int(fields[-1])
    answer = bytearray(PIDFD_INFO.pack(PIDFD_INFO_EXIT, 0))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, answer)
    except OSError:
        return None
    mask, status = PIDFD_INFO.unpack(answer)
    return status if mask & PIDFD_INFO_EXIT else None


class OutputListener:
    """A thread that passes on what mpirun writes, and searches it for `SENTENCES`.

    Give mpirun the pipes `errors` and `output` as its standard error and standard output, and then call `start`. With
    `errors_only`, mpirun uses this process's standard output directly, and `output` is None.
    """

    def __init__(self, errors_only: bool = False) -> None:
        self.output: int | None = None
        # pipe from mpirun -> the file descriptor to which the pipe's data is passed on
        self._to: dict[int, int] = {}
        if not errors_only:
            end, self.output = os.pipe()
            self._to[end] = 1
        end, self.errors = os.pipe()
        self._to[end] = 2
        # The last bytes of each stream. They are searched again together with the next data, because these may bring
        # the rest of a sentence.
        self._tails = dict.fromkeys(self._to, b"")
        self._stopped, self._stop = os.pipe()
        # the members of SENTENCES that mpirun has printed
        self._printed: set[bytes] = set()
        # The message of ssh about a host that it could not reach, or "". mpirun's own message only lists possible
        # reasons.
        self.cause = ""
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def start(self) -> None:
        """Start the thread. Call this after mpirun has started, because it closes our copies of mpirun's pipe ends."""
        if self.output is not None:
            os.close(self.output)
        os.close(self.errors)
        self._thread.start()

    def finish(self) -> None:
        """Make the thread stop once the pipes are empty. Call this when mpirun has ended. Does not block.

        Without this call the thread might run on for long, because children of mpirun that still run keep the pipes
        open.
        """
        os.close(self._stop)

    def has_finished(self, seconds: float) -> bool:
        """Wait for at most `seconds` until all output is passed on. Return True if all of it is."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def lost_host(self) -> bool:
        """True if mpirun has printed that it has lost a host."""
        return not self._printed.isdisjoint(LOST_SENTENCES)

    @property
    def survivors_ended_well(self) -> bool:
        """True if a rank has printed that the job has ended well without the lost ranks."""
        return world.WELL_WITHOUT in self._printed

    def _pass_on(self) -> None:
        """Pass on output until the streams have ended, or until `finish` was called and the pipes are empty."""
        ready: list[int] = []
        while self._to and ready != [self._stopped]:
            ready = find_readable([*self._to, self._stopped])
            for stream in [stream for stream in ready if stream in self._to]:
                data = os.read(stream, MOST_PIPED)
                tail, target = self._tails[stream], self._to[stream]
                text = tail + data
                # prterun ends its last message with a NUL byte, which would make a log file look binary to grep.
                if target == 2:
                    text = text.replace(b"\n\0", b"\n")
                self._printed.update(sentence for sentence in SENTENCES if sentence in text)
                if not self.cause and (line := SSH_ERROR.search(text)):
                    self.cause = line[1].decode(errors="replace")
                self._tails[stream] = text[-LONGEST_SENTENCE:]
                if not data or not _write_all(target, text[len(tail) :]):
                    del self._to[stream]
                    os.close(stream)
        for descriptor in (*self._to, self._stopped):
            os.close(descriptor)


def _write_all(file: int, data: bytes) -> bool:
    """Write all of `data`. Block while `file` is a full pipe. Return False if the reader of the pipe has closed it.

    After False the caller closes its pipe from mpirun, so that mpirun gets the same error.
    """
    while data:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:
            writable = select.poll()
            writable.register(file, select.POLLOUT)
            writable.poll()
        except BrokenPipeError:
            return False
        except OSError:
            # The disk may be full. In that case the data is lost, but the job continues.
            return True
    return True

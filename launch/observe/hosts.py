"""Take samples of the ranks of a job on all its hosts. Other hosts are reached through ssh.

`mpips run` writes a file `hosts.json` into the job's folder, which also holds the *pages* of the ranks: files in which
the ranks write what they do. `hosts.json` names the hosts and the *agent*: ssh, or the replacement of ssh that mpirun
has used to start the ranks. On each other host the agent runs a module of mpips, such as this module. Each line that
the module gets is a question. The module reads the pages on its host, and answers with a line of JSON. It listens on no
port, and ends when the connection is closed. The clocks of hosts differ, so the answers contain durations and not
points in time.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import msgspec

from mpips.collectives.machine import find_readable
from mpips.collectives.recorder import folders
from mpips.launch.observe.gather import Rank, add_pushes, gather, join

# Seconds that another host has to answer, in addition to the time between the two samples. With this value `mpips why`
# takes 2 s at most.
WITHIN_SECONDS = 1.3
MODULE = "mpips.launch.observe.hosts"
READ_BYTES = 1 << 16
T = TypeVar("T")


class JobView(NamedTuple):
    """The ranks of a job on all its hosts."""

    ranks: list[Rank]
    # the hosts that did not answer: host -> why
    unreached: Mapping[str, str]


class JobWatch:
    """Takes samples of the ranks of a job on all hosts. A context manager that keeps a connection to each other host.

    Args:
        folder: The folder of the job on this host.
        within: Seconds that another host has to answer, in addition to the time between the two samples.
    """

    def __init__(self, folder: Path, within: float = WITHIN_SECONDS) -> None:
        self._folder = folder
        self._within = within
        # the number of the last question
        self._number = 0
        # host -> the connection to this host
        self._connections: dict[str, HostConnection[list[Rank]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def look(self, seconds: float = 0.5, stacks: bool = True) -> JobView:
        """Take two samples of all ranks, `seconds` apart. Blocks for `seconds`, plus up to `within` seconds.

        If `stacks` is True, also ask the ranks for their stacks.
        """
        self._number += 1
        # If no other hosts are known, look for the file of hosts again. `mpips run` may have written it since the last
        # call.
        if not self._connections:
            self._connections = connect(self._folder, MODULE, list[Rank])
        until = time.monotonic() + seconds + self._within
        for connection in self._connections.values():
            connection.ask(self._number, f"{seconds!r} {stacks:d}")
        ranks = gather(self._folder, seconds, stacks)
        wait(self._connections.values(), until, self._within)
        for connection in self._connections.values():
            ranks += connection.answer or ()
        return JobView(
            add_pushes(join(ranks)), {name: each.failed for name, each in self._connections.items() if each.failed}
        )

    def close(self) -> None:
        """Close the connections to other hosts."""
        for connection in self._connections.values():
            connection.close()


def connect(folder: Path, module: str, kind: type[T]) -> dict[str, HostConnection[T]]:
    """Return a connection for each other host of a job, as a dict: host -> connection.

    A connection starts the agent only at its first question.

    Args:
        folder: The folder of the job on this host.
        module: The module of mpips to run on the other hosts.
        kind: The type of the module's answers.
    """
    record = folders.read_hosts(folder)
    own = socket.gethostname()
    others = [name for name in record.get("names", ()) if name not in (own, own.partition(".")[0], "localhost")]
    return {
        name: HostConnection([*record["agent"], name, *_build_command(record, module, folder.name)], kind)
        for name in others
    }


def wait(connections: Iterable[HostConnection[T]], until: float, within: float) -> None:
    """Wait for the answers on all connections. Connections without an answer in time are closed as failed.

    Args:
        connections: The connections. A question was sent on each of them.
        until: The time at which to stop waiting, by `time.monotonic()`.
        within: The number of seconds to name in the reason for a failure.
    """
    waiting = {connection.output: connection for connection in connections if not connection.failed}
    while waiting and (left := until - time.monotonic()) > 0:
        for output in find_readable(waiting, left):
            if waiting[output].receive():
                del waiting[output]
    for connection in waiting.values():
        connection.give_up(f"no answer within {within:g} s")


class HostConnection(Generic[T]):
    """The connection to one host.

    The connection is a process of the agent (ssh or its replacement). It passes lines between this process and the
    module that runs on the host.
    """

    def __init__(self, argv: Sequence[str], kind: type[T]) -> None:
        self._argv = argv
        # the type of a line from the module: (number of the question, answer)
        self._form = tuple[int, kind]  # type: ignore[valid-type]
        self._process: subprocess.Popen[bytes] | None = None
        # the received part of a line that is not complete
        self._received = bytearray()
        # the number of the last question
        self._number = 0
        # the answer to the last question; None if it has not arrived
        self.answer: T | None = None
        # why there is no answer, or ""
        self.failed = ""

    @property
    def output(self) -> int:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def ask(self, number: int, words: str) -> None:
        """Send a question without waiting for the answer. Starts the agent if it does not run yet.

        Args:
            number: A number that no earlier question had. The answer contains this number, so that late answers to
                earlier questions are recognized and ignored.
            words: The question.
        """
        self.failed = ""
        self.answer = None
        self._number = number
        try:
            if self._process is None:
                self._errors = tempfile.TemporaryFile()  # noqa: SIM115
                self._process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            self._process.stdin.write(b"%d %s\n" % (number, words.encode()))
            self._process.stdin.flush()
        except OSError as error:
            self.give_up(f"{self._argv[0]}: {error.strerror}")

    def receive(self) -> bool:
        """Read what has arrived. Return True if the last question is answered, or if the connection has failed."""
        data = os.read(self.output, READ_BYTES)
        self._received += data
        if b"\n" in data:
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                # Ignore lines that are not answers, because a login shell may print lines of its own.
                with suppress(ValueError, msgspec.ValidationError):
                    number, answer = msgspec.convert(json.loads(line), self._form)
                    if number == self._number:
                        self.answer = answer
                        return True
        if not data:
            self.give_up(self._last_error() or f"{self._argv[0]} has ended without a message")
        return not data

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:200] if lines else ""

    def give_up(self, why: str) -> None:
        """Close the connection as failed. `why` is the reason."""
        self.close()
        self.failed = why

    def close(self) -> None:
        """Kill the agent's process on this host. The module on the other host then ends as well."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for file in (self._process.stdin, self._process.stdout, self._errors):
                with suppress(OSError):
                    if file is not None:
                        file.close()
            self._process.wait()
        self._process = None
        self._received = bytearray()


def _build_command(record: Mapping[str, Any], module: str, job: str) -> list[str]:
    """Return the arguments that make the agent run a module on another host. `record` is the content of `hosts.json`.

    For ssh the command must be a single argument, which a shell on the other host parses. srun starts programs without
    a shell, so its arguments stay separate.
    """
    path = ["env", f"PYTHONPATH={record['path']}"] if record["path"] else []
    argv = [*path, record["python"], "-P", "-m", module, job]
    return argv if record["agent"][0] == "srun" else [shlex.join(argv)]


def main(job: str) -> None:
    """Answer questions about a job's ranks on this host. Each line of standard input is a question.

    Ends when standard input ends.
    """
    folder = folders.jobs_folder() / job
    for line in sys.stdin:
        number, seconds, stacks = line.split()
        ranks = gather(folder, float(seconds), bool(int(stacks))) if folders.is_ours(folder) else []
        sys.stdout.write(json.dumps([int(number), ranks]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

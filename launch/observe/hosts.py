"""Look at the ranks of a job on all its hosts: here, and elsewhere by the agent that has started them there.

`mpips run` writes which hosts a job has, and how they are reached, beside the pages (`hosts.json`). On each other host
the agent, which is ssh or what takes its place, starts a module as a program, such as this one. That one looks at the
pages there, when it is asked by a line, and answers by a line of JSON. It ends with the connection, and listens on no
port. Clocks of hosts differ, so only lengths of time travel.
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

WITHIN_SECONDS = 1.3
"""Beyond the two looks, for another host to answer: the answer of `mpips why` comes within 2 s."""
MODULE = "mpips.launch.observe.hosts"
READ_BYTES = 1 << 16
T = TypeVar("T")


class Found(NamedTuple):
    """Hold the ranks of a job, and why which hosts have not answered."""

    ranks: list[Rank]
    unreached: Mapping[str, str]


class Watch:
    """Look at a job again and again, by one connection to each of its other hosts. Closed by `close`, or as a block.

    `within`: seconds for another host to answer, beyond those between the two looks.
    """

    def __init__(self, folder: Path, within: float = WITHIN_SECONDS) -> None:
        self._folder, self._within, self._asked = folder, within, 0
        self._lines: dict[str, Connection[list[Rank]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def look(self, seconds: float = 0.5, stacks: bool = True) -> Found:
        """Return all ranks, from two looks so far apart. Blocking, for `within` more at most where a host is mute."""
        self._asked += 1
        if not self._lines:  # `mpips run` may have written the hosts just now
            self._lines = connect(self._folder, MODULE, list[Rank])
        until = time.monotonic() + seconds + self._within
        for line in self._lines.values():
            line.ask(self._asked, f"{seconds!r} {stacks:d}")
        ranks = gather(self._folder, seconds, stacks)
        wait(self._lines.values(), until, self._within)
        for line in self._lines.values():
            ranks += line.answer or ()
        return Found(add_pushes(join(ranks)), {name: line.failed for name, line in self._lines.items() if line.failed})

    def close(self) -> None:
        """End the connections."""
        for line in self._lines.values():
            line.close()


def connect(folder: Path, module: str, kind: type[T]) -> dict[str, Connection[T]]:
    """Return a line to each other host of a job, on which a module answers by what is of that kind. Sends nothing."""
    known = folders.read_hosts(folder)
    here = socket.gethostname()
    others = [name for name in known.get("names", ()) if name not in (here, here.partition(".")[0], "localhost")]
    return {name: Connection([*known["agent"], name, *_command(known, module, folder.name)], kind) for name in others}


def wait(lines: Iterable[Connection[T]], until: float, within: float) -> None:
    """Wait for the answers of all, but not longer than until then; `within` is what to say of those without one."""
    open_ = {line.output: line for line in lines if not line.failed}
    while open_ and (left := until - time.monotonic()) > 0:
        for output in find_readable(open_, left):
            if open_[output].hear():
                del open_[output]
    for line in open_.values():
        line.give_up(f"no answer within {within:g} s")


class Connection(Generic[T]):
    """The connection to one host. `answer`: the last one; `failed`: why there is none."""

    def __init__(self, argv: Sequence[str], kind: type[T]) -> None:
        self._argv, self._form = argv, tuple[int, kind]  # type: ignore[valid-type]
        self._process: subprocess.Popen[bytes] | None = None
        self._said, self._asked = bytearray(), 0
        self.answer: T | None = None
        self.failed = ""

    @property
    def output(self) -> int:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def ask(self, number: int, words: str) -> None:
        """Send a question, where need be by a new connection. `number`: it has not been asked by before."""
        self.failed, self.answer, self._asked = "", None, number
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

    def hear(self) -> bool:
        """Read what has come; return whether no more is to come for the last question."""
        data = os.read(self.output, READ_BYTES)
        self._said += data
        if b"\n" in data:
            *lines, self._said = self._said.split(b"\n")
            for line in lines:
                with suppress(ValueError, msgspec.ValidationError):  # what a login shell prints is no answer
                    asked, answer = msgspec.convert(json.loads(line), self._form)
                    if asked == self._asked:
                        self.answer = answer
                        return True
        if not data:
            self.give_up(self._last_word() or f"{self._argv[0]} has ended without a word")
        return not data

    def _last_word(self) -> str:
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines()
        return words[-1].strip()[:200] if words else ""

    def give_up(self, why: str) -> None:
        """End the connection: it has failed, for that reason."""
        self.close()
        self.failed = why

    def close(self) -> None:
        """End the connection."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for file in (self._process.stdin, self._process.stdout, self._errors):
                with suppress(OSError):
                    if file is not None:
                        file.close()
            self._process.wait()
        self._process, self._said = None, bytearray()


def _command(known: Mapping[str, Any], module: str, job: str) -> list[str]:
    """Return what the agent is to start on another host: a word for a shell there, but for srun, which has none."""
    path = ["env", f"PYTHONPATH={known['path']}"] if known["path"] else []
    words = [*path, known["python"], "-P", "-m", module, job]
    return words if known["agent"][0] == "srun" else [shlex.join(words)]


def main(job: str) -> None:
    """Answer questions about a job's ranks on this host, a line each, until there are no more."""
    folder = folders.of_jobs() / job
    for line in sys.stdin:
        number, seconds, stacks = line.split()
        ranks = gather(folder, float(seconds), bool(int(stacks))) if folders.is_ours(folder) else []
        sys.stdout.write(json.dumps([int(number), ranks]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

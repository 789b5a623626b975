"""Look at the ranks of a job on all its hosts: on other hosts through the agent (ssh) that has started them there.

`mpips run` writes the file `hosts.json` beside the pages: the hosts of the job, and the agent that reaches them, which
is ssh or its replacement. On each other host the agent starts a module as a program, such as this one. The program
looks at the pages there whenever it gets a line, and answers with a line of JSON. It ends when the connection ends, and
listens on no port. The clocks of hosts differ, so waits and steps are sent as durations.
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

# Time for another host to answer, in addition to the time between the two looks. So `mpips why` takes at most 2 s.
WITHIN_SECONDS = 1.3
MODULE = "mpips.launch.observe.hosts"
READ_BYTES = 1 << 16
T = TypeVar("T")


class Found(NamedTuple):
    """The ranks of a job on all its hosts."""

    ranks: list[Rank]
    # host that did not answer -> why
    unreached: Mapping[str, str]


class Watch:
    """Looks at the ranks of a job again and again, over one connection to each other host. A context manager.

    Args:
        folder: The folder of the job on this host.
        within: Seconds for another host to answer, in addition to the time between the two looks.
    """

    def __init__(self, folder: Path, within: float = WITHIN_SECONDS) -> None:
        self._folder = folder
        self._within = within
        # the number of the last question
        self._asked = 0
        # host -> the connection to it
        self._lines: dict[str, Connection[list[Rank]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def look(self, seconds: float = 0.5, stacks: bool = True) -> Found:
        """Look at all ranks twice, `seconds` apart. Blocks for that long, and for up to `within` more seconds.

        With `stacks`, ranks are also asked for their stacks.
        """
        self._asked += 1
        # If there are none yet, `mpips run` may have written the hosts since the last look.
        if not self._lines:
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
        """Close the connections to other hosts."""
        for line in self._lines.values():
            line.close()


def connect(folder: Path, module: str, kind: type[T]) -> dict[str, Connection[T]]:
    """Return host -> connection, for each other host of a job. Nothing is started before the first question.

    Args:
        folder: The folder of the job on this host.
        module: The module that answers there.
        kind: The type of its answers.
    """
    known = folders.read_hosts(folder)
    here = socket.gethostname()
    others = [name for name in known.get("names", ()) if name not in (here, here.partition(".")[0], "localhost")]
    return {name: Connection([*known["agent"], name, *_command(known, module, folder.name)], kind) for name in others}


def wait(lines: Iterable[Connection[T]], until: float, within: float) -> None:
    """Wait for the answers on all connections, until `time.monotonic()` is `until`.

    A connection without an answer then fails, with "no answer within `within` s" as the reason.
    """
    open_ = {line.output: line for line in lines if not line.failed}
    while open_ and (left := until - time.monotonic()) > 0:
        for output in find_readable(open_, left):
            if open_[output].hear():
                del open_[output]
    for line in open_.values():
        line.give_up(f"no answer within {within:g} s")


class Connection(Generic[T]):
    """The connection to one host: a process of the agent, which passes lines to the module on that host and back."""

    def __init__(self, argv: Sequence[str], kind: type[T]) -> None:
        self._argv = argv
        # an answer is a line of JSON: [number of the question, answer]
        self._form = tuple[int, kind]  # type: ignore[valid-type]
        self._process: subprocess.Popen[bytes] | None = None
        # what has come of a line that is not complete
        self._said = bytearray()
        # the number of the last question
        self._asked = 0
        # the answer to the last question; None if it has not come
        self.answer: T | None = None
        # why there is no answer, or ""
        self.failed = ""

    @property
    def output(self) -> int:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def ask(self, number: int, words: str) -> None:
        """Send a question without waiting for the answer. Makes the connection if there is none.

        `number` must be new: it tells the answer from late answers to earlier questions.
        """
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
        """Read what has come. True if the last question is settled: it is answered, or the connection has failed."""
        data = os.read(self.output, READ_BYTES)
        self._said += data
        if b"\n" in data:
            *lines, self._said = self._said.split(b"\n")
            for line in lines:
                # A login shell may print lines of its own. Ignore all that are not answers.
                with suppress(ValueError, msgspec.ValidationError):
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
        """Close the connection as failed. `why` is the reason."""
        self.close()
        self.failed = why

    def close(self) -> None:
        """Kill the agent's process on this host, which ends the module on the other host."""
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
    """Return the command for the agent to run on another host.

    It is a single word for the shell there, except with srun, which starts programs without a shell.
    """
    path = ["env", f"PYTHONPATH={known['path']}"] if known["path"] else []
    words = [*path, known["python"], "-P", "-m", module, job]
    return words if known["agent"][0] == "srun" else [shlex.join(words)]


def main(job: str) -> None:
    """Answer questions about a job's ranks on this host, a line each, until standard input ends."""
    folder = folders.jobs_folder() / job
    for line in sys.stdin:
        number, seconds, stacks = line.split()
        ranks = gather(folder, float(seconds), bool(int(stacks))) if folders.is_ours(folder) else []
        sys.stdout.write(json.dumps([int(number), ranks]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

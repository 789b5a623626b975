"""Run a command with a time limit. Its output is passed on at once, and no process of it stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO
from uuid import uuid4

from collectives.machine import find_processes_with

# the environment variable that marks every process that a run starts
TOKEN = "TESTS_RUN_TOKEN"
# seconds that a process may take to end after SIGTERM, and again after SIGKILL
PATIENCE = 10
# seconds that processes may take to disappear after mpirun has ended
GRACE = 2
# Bytes that are left out of the log. Open MPI prints NUL bytes, and with these a log would not be a text file.
UNPRINTABLE = bytes({*range(32), 127} - {*b"\n\t"})
LAUNCHER_VARIABLES = re.compile(r"MPIPS_(?!KERNELS)|OMPI_|PMIX_|PRTE_|PMI_|HYDRA_|MPI_LOCAL")
ROOT = Path(__file__).resolve().parent.parent
_screen = threading.Lock()
_running: set[subprocess.Popen[bytes]] = set()
_stopped = threading.Event()


def outside() -> dict[str, str]:
    """Return an environment for starting jobs: without variables of launchers, and with this project on the path."""
    clean = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    return {**clean, "PYTHONPATH": str(ROOT)}


def run(argv: list[str], limit: float, folder: Path, out: IO[bytes] | None = None) -> int:
    """Run a command in a folder, and return its exit code. Blocks until the command has ended.

    The output goes to `out`, or to standard output. If the command takes longer than `limit` seconds, it is ended, and
    the exit code is 1. Processes and temporary files that it leaves are removed. Otherwise the session folder of a
    killed mpirun would keep a later mpirun with the same pid from starting.
    """
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as temporary:
        return _run(argv, limit, folder, temporary, out or sys.stdout.buffer)


def _run(argv: list[str], limit: float, folder: Path, temporary: str, out: IO[bytes]) -> int:
    token = f"{TOKEN}={uuid4().hex}"
    environment = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    environment |= {TOKEN: token.partition("=")[2], "TMPDIR": temporary}
    sys.stdout.flush()
    if _stopped.is_set():
        return 1
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    _running.add(process)
    relay = threading.Thread(target=_relay, args=(process.stdout, out), daemon=True)
    relay.start()
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        show(f"\n-- not done after {limit:.0f} s, ended: {' '.join(argv)}\n".encode(), out)
        return 1
    finally:
        _end(process)
        _running.discard(process)
        for pid in remaining(token):
            show(f"-- left behind, ended: process {pid}, {_words(pid)}\n".encode(), out)
            _kill(pid)
        relay.join(PATIENCE)


def stop() -> None:
    """End all running commands. Later calls of `run` start nothing and return 1."""
    _stopped.set()
    for process in tuple(_running):
        _end(process)


def _relay(pipe: IO[bytes], out: IO[bytes]) -> None:
    while text := os.read(pipe.fileno(), 1 << 16):
        show(text, out)


def show(text: bytes, out: IO[bytes] | None = None) -> None:
    """Write `text`, without unprintable bytes, to `out` or to standard output."""
    out = out or sys.stdout.buffer
    with _screen:
        out.write(text.translate(None, UNPRINTABLE))
        out.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to mpirun and its process group. Send SIGKILL if they have not ended after `PATIENCE` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            continue


def wait_for(path: Path, job: subprocess.Popen[str], seconds: float = 60) -> None:
    """Wait until a running job has made a file. Raises AssertionError if the job ends before, or after `seconds`."""
    limit = time.monotonic() + seconds
    while not path.exists():
        assert job.poll() is None and time.monotonic() < limit
        time.sleep(0.05)


def remaining(token: str) -> list[int]:
    """Return the pids of processes that have `token`, a variable with its value, in their environment.

    Waits up to `GRACE` seconds for them to end, because some are still ending when mpirun has ended.
    """
    deadline = time.monotonic() + GRACE
    while (pids := list(find_processes_with(token))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pids


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return

"""A command with a time limit: its output comes through clean and at once, and nothing of it stays behind."""

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

TOKEN = "TESTS_RUN_TOKEN"  # in the environment of everything that a run starts
PATIENCE = 10  # seconds to end when asked, and again when killed
GRACE = 2  # seconds that a killed process may take to give its memory back
UNPRINTABLE = bytes({*range(32), 127} - {*b"\n\t"})  # a log is text: a NUL in it, which Open MPI prints, breaks readers
LAUNCHER_VARIABLES = re.compile(r"MPIPS_(?!KERNELS)|OMPI_|PMIX_|PRTE_|PMI_|HYDRA_|MPI_LOCAL")
ROOT = Path(__file__).resolve().parent.parent
_screen = threading.Lock()
_running: set[subprocess.Popen[bytes]] = set()
_stopped = threading.Event()


def outside() -> dict[str, str]:
    """Return the environment of a shell that has this project, and no launcher's variables: jobs start from it."""
    clean = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    return {**clean, "PYTHONPATH": str(ROOT)}


def run(argv: list[str], limit: float, folder: Path, out: IO[bytes] | None = None) -> int:
    """Exit code of `argv`, run in `folder`. Past `limit` seconds it is ended, says so, and the code is 1.

    What it prints goes to `out`, or to standard output as it comes. Processes and temporary files that it leaves behind
    are removed: a folder of a killed mpirun is in the way of the next one with its process number.
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
    """Ends all that runs, and starts nothing more."""
    _stopped.set()
    for process in tuple(_running):
        _end(process)


def _relay(pipe: IO[bytes], out: IO[bytes]) -> None:
    while text := os.read(pipe.fileno(), 1 << 16):
        show(text, out)


def show(text: bytes, out: IO[bytes] | None = None) -> None:
    """Writes `text`, without what is no text in it, to `out` or standard output."""
    out = out or sys.stdout.buffer
    with _screen:
        out.write(text.translate(None, UNPRINTABLE))
        out.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks mpirun to end its ranks, then ends whatever is left of its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            continue


def wait_for(path: Path, job: subprocess.Popen[str], seconds: float = 60) -> None:
    """Wait for a file that a running job makes. AssertionError where the job ends before, or it takes so long."""
    limit = time.monotonic() + seconds
    while not path.exists():
        assert job.poll() is None and time.monotonic() < limit
        time.sleep(0.05)


def remaining(token: str) -> list[int]:
    """The same, once those that were ending when mpirun ended have had time for it."""
    deadline = time.monotonic() + GRACE
    while (found := list(find_processes_with(token))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


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

"""Let ranks of a job die or stop at chosen moments, and let workers wait for these deaths before the job ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from mpi4py import MPI

from collectives.fabric.failure import dead_ranks
from collectives.machine import read_stat

LOOK_SECONDS = 5e-4


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_later(begun: Path, seconds: float) -> None:
    """Kill this process `seconds` after the file `begun` has appeared. Does not block."""

    def wait() -> None:
        while not begun.exists():
            time.sleep(LOOK_SECONDS)
        time.sleep(seconds)
        die()

    threading.Thread(target=wait, daemon=True).start()


def stop_here() -> None:
    """Stop this process until another one wakes it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def wake_when_stopped(pid: int) -> None:
    """Block until a process is stopped, and let it go on."""
    while read_stat(pid)[0] != b"T":
        time.sleep(LOOK_SECONDS)
    os.kill(pid, signal.SIGCONT)


def wait_until_dead(ranks: Iterable[int]) -> None:
    """Block until MPI has reported the deaths of these ranks. One of these ranks itself blocks until it dies."""
    while not {*ranks} <= {*dead_ranks(MPI.COMM_WORLD)}:
        # MPI notices deaths only within its calls.
        MPI.COMM_SELF.Iprobe()
        time.sleep(LOOK_SECONDS)


def wait_for_earlier(kills: Iterable[tuple[int, int, float]], step: int, last: int) -> None:
    """Block until all deaths of earlier steps have happened: in the last step, and in the step before a death.

    Args:
        kills: For each death: the rank, the step at whose beginning it happens, and a third number that is not used.
        step: The step that begins now.
        last: The last step.
    """
    if step == last or any(at == step + 1 for _, at, _ in kills):
        wait_until_dead(rank for rank, at, _ in kills if at < step)

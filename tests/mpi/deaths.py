"""Ranks of a job that die at a moment of it, and workers that wait until they have, so that no job ends before."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from mpi4py import MPI

from collectives.fabric.failure import dead_ranks

LOOK_SECONDS = 5e-4


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_later(begun: Path, seconds: float) -> None:
    """Let this process die so long after a file is there, whatever it does then. Does not block."""

    def wait() -> None:
        while not begun.exists():
            time.sleep(LOOK_SECONDS)
        time.sleep(seconds)
        die()

    threading.Thread(target=wait, daemon=True).start()


def wait_until_dead(ranks: Iterable[int]) -> None:
    """Block until MPI has told this rank that these ranks of the job have died; a rank of them waits for its end."""
    while not {*ranks} <= {*dead_ranks(MPI.COMM_WORLD)}:
        MPI.COMM_SELF.Iprobe()  # it hears of nothing but within calls
        time.sleep(LOOK_SECONDS)


def wait_for_earlier(kills: Iterable[tuple[int, int, float]], step: int, last: int) -> None:
    """Block before the last step, and before a step that the next death follows, until all earlier deaths have been.

    Args:
        kills: of each death the rank, the step that worker 0 or the rank itself begins with it, and more.
        step: the one that begins now.
        last: the last one.
    """
    if step == last or any(at == step + 1 for _, at, _ in kills):
        wait_until_dead(rank for rank, at, _ in kills if at < step)

"""What measuring programs of a lab share: their request and answer, moments at which all hosts start and end, latency.

Such a program is started by `lab.ask` on every host, with a REQUEST and an ANSWER as its words: two files of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

SOON = 0.02  # seconds ahead at which all ranks start: hosts of a lab share one clock


def request() -> dict[str, Any]:
    """What the program is asked."""
    asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return asked


def answer(content: dict[str, Any]) -> None:
    """Gives the program's answer; one rank calls it."""
    Path(sys.argv[2]).write_text(json.dumps(content))


def together(comm: MPI.Comm) -> float:
    """A moment at which all ranks go on, on the clock of `time.perf_counter`. Collective."""
    comm.Barrier()
    start: float = comm.bcast(time.perf_counter() + SOON)
    time.sleep(max(0.0, start - time.perf_counter()))
    return start


def asleep(comm: MPI.Comm) -> None:
    """Wait for all ranks asleep: who is done must leave the cores, which hosts share, to those that are not."""
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(1e-3)


def alpha(comm: MPI.Comm) -> float:
    """Seconds of a small message between ranks 0 and 1: half a round trip, the median of 100. Collective."""
    word, times = np.zeros(1), []
    for _ in range(100):
        start = time.perf_counter()
        if comm.rank < 2:
            comm.Sendrecv(word, 1 - comm.rank, recvbuf=word.copy(), source=1 - comm.rank)
        times.append(time.perf_counter() - start)
        comm.Barrier()
    return float(comm.bcast(np.median(times)))

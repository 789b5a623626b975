"""Shared by the measuring programs of a lab: request and answer, a common start and end, and latency.

`lab.ask` starts such a program on every host. Its arguments are a REQUEST and an ANSWER, two files of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

# all ranks start at a moment this many seconds ahead; the hosts of a lab have the same clock
SOON = 0.02


def request() -> dict[str, Any]:
    """Read the request."""
    asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return asked


def answer(content: dict[str, Any]) -> None:
    """Write the answer. One rank calls it."""
    Path(sys.argv[2]).write_text(json.dumps(content))


def together(comm: MPI.Comm) -> float:
    """Let all ranks continue at the same moment, and return that moment (`time.perf_counter`). Collective."""
    comm.Barrier()
    start: float = comm.bcast(time.perf_counter() + SOON)
    time.sleep(max(0.0, start - time.perf_counter()))
    return start


def asleep(comm: MPI.Comm) -> None:
    """Wait for all ranks by sleeping. Hosts share the cores, so a rank that is done must not spin. Collective."""
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(1e-3)


def alpha(comm: MPI.Comm) -> float:
    """Return the seconds of a small message between ranks 0 and 1: the median of 100 exchanges. Collective."""
    word, times = np.zeros(1), []
    for _ in range(100):
        start = time.perf_counter()
        if comm.rank < 2:
            comm.Sendrecv(word, 1 - comm.rank, recvbuf=word.copy(), source=1 - comm.rank)
        times.append(time.perf_counter() - start)
        comm.Barrier()
    return float(comm.bcast(np.median(times)))

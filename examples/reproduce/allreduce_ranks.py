"""What each host runs for `examples.reproduce.bml`: allreduces, timed, with bytes through every NIC.

python -m examples.reproduce.allreduce_ranks REQUEST ANSWER
REQUEST holds {"cases": [{"algorithm", "nbytes", "compute"}]}: each case once, after "compute" seconds of sleep. The
algorithm `NATIVE` is the MPI's own blocking call.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import collectives
from examples.reproduce.cores import processor
from examples.reproduce.native import NATIVE

HEADERS = 66  # Ethernet 14, IP 20, TCP with timestamps 32: what a counter holds of every frame besides payload
SOON = 0.02  # seconds ahead at which all ranks start: hosts of a lab share one clock


def payload() -> dict[str, list[int]]:
    """Payload bytes (sent, received) of every data NIC of this host since it came up."""
    found = {}
    for nic in sorted(Path("/sys/class/net").glob("d[0-9]*")):
        count = {name: int((nic / "statistics" / name).read_text()) for name in COUNTERS}
        found[nic.name] = [count[f"{way}_bytes"] - HEADERS * count[f"{way}_packets"] for way in ("tx", "rx")]
    return found


COUNTERS = [f"{way}_{what}" for way in ("tx", "rx") for what in ("bytes", "packets")]


def together(comm: MPI.Comm) -> float:
    """A moment at which all ranks go on."""
    comm.Barrier()
    start = comm.bcast(time.perf_counter() + SOON)
    time.sleep(max(0.0, start - time.perf_counter()))
    return start


def asleep(comm: MPI.Comm) -> None:
    """Wait for all ranks asleep: who is done must leave the cores, which hosts share, to those that are not."""
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(1e-3)


def case(comm: MPI.Comm, algorithm: str, nbytes: int, compute: float) -> dict[str, Any]:
    """One timed allreduce after one that warms up; the result is checked exactly."""
    x = np.full(nbytes // 4, comm.rank + 1, np.float32)
    plan = None if algorithm == NATIVE else collectives.plan("allreduce", x, comm, algorithm=algorithm)
    run = plan or partial(comm.Allreduce, MPI.IN_PLACE, x)
    run()
    x[:] = comm.rank + 1
    comm.Barrier()
    before, idle = payload(), processor()
    start = together(comm)
    time.sleep(compute)
    run()
    seconds = time.perf_counter() - start
    asleep(comm)
    seconds = comm.allreduce(seconds, MPI.MAX)
    ticks = processor()
    right = bool((x == comm.size * (comm.size + 1) / 2).all())
    after = payload()
    moved = {nic: [b - a for a, b in zip(before[nic], after[nic])] for nic in after}
    nics, all_right = comm.gather(moved), comm.allreduce(right, MPI.LAND)
    if plan is not None:
        plan.free()
    if not all_right:
        raise ArithmeticError(f"{algorithm} of {nbytes} bytes gave a wrong sum")
    share = (ticks[0] - idle[0]) / max(1, ticks[1] - idle[1])
    return {"seconds": seconds, "idle": share, "nics": nics}


def alpha(comm: MPI.Comm) -> float:
    """Seconds of a small message between ranks 0 and 1: half a round trip, the median of 100."""
    word, times = np.zeros(1), []
    for _ in range(100):
        start = time.perf_counter()
        if comm.rank < 2:
            comm.Sendrecv(word, 1 - comm.rank, recvbuf=word.copy(), source=1 - comm.rank)
        times.append(time.perf_counter() - start)
        comm.Barrier()
    return float(comm.bcast(np.median(times)))


def main() -> None:
    comm = MPI.COMM_WORLD
    request = json.loads(Path(sys.argv[1]).read_text())
    answer = {"alpha": alpha(comm), "cases": [case(comm, **one) for one in request["cases"]]}
    if comm.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()

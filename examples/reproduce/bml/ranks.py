"""The program of each host for `examples.reproduce.bml`: times allreduces and counts bytes through every NIC.

python -m examples.reproduce.bml.ranks REQUEST ANSWER
REQUEST holds {"cases": [{"algorithm", "nbytes", "compute"}]}. Each case is timed once, from before "compute" seconds of
sleep. The algorithm `NATIVE` is the MPI library's own blocking call.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import collectives
from examples.reproduce import rank
from examples.reproduce.cores import idle_share, processor
from examples.reproduce.native import NATIVE

# bytes of a frame that the counters include besides payload: Ethernet 14, IP 20, TCP with timestamps 32
HEADERS = 66


def payload() -> dict[str, list[int]]:
    """Return data NIC -> payload bytes (sent, received) since this host was made."""
    found = {}
    for nic in sorted(Path("/sys/class/net").glob("d[0-9]*")):
        count = {name: int((nic / "statistics" / name).read_text()) for name in COUNTERS}
        found[nic.name] = [count[f"{way}_bytes"] - HEADERS * count[f"{way}_packets"] for way in ("tx", "rx")]
    return found


COUNTERS = [f"{way}_{what}" for way in ("tx", "rx") for what in ("bytes", "packets")]


def case(comm: MPI.Comm, algorithm: str, nbytes: int, compute: float) -> dict[str, Any]:
    """Time one allreduce, after one that warms up. Its result is checked exactly. Collective."""
    x = np.full(nbytes // 4, comm.rank + 1, np.float32)
    plan = None if algorithm == NATIVE else collectives.plan("allreduce", x, comm, algorithm=algorithm)
    run = plan or partial(comm.Allreduce, MPI.IN_PLACE, x)
    run()
    x[:] = comm.rank + 1
    comm.Barrier()
    before, idle = payload(), processor()
    start = rank.together(comm)
    time.sleep(compute)
    run()
    seconds = time.perf_counter() - start
    rank.asleep(comm)
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
    return {"seconds": seconds, "idle": idle_share(idle, ticks), "nics": nics}


def main() -> None:
    comm = MPI.COMM_WORLD
    found = {"alpha": rank.alpha(comm), "cases": [case(comm, **one) for one in rank.request()["cases"]]}
    if comm.rank == 0:
        rank.answer(found)


if __name__ == "__main__":
    main()

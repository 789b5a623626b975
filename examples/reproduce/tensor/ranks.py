"""The program of each host for `examples.reproduce.tensor`: times allreduces of a tensor, and memory operations.

python -m examples.reproduce.tensor.ranks REQUEST ANSWER
REQUEST holds {"vectors", "cases": [{"algorithm", "nbytes", "repeats"}]}. Algorithms are those of `collectives.tensor`
and the paper's rivals (`rivals`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

import collectives
from examples.reproduce import rank
from examples.reproduce.cores import idle_share, processor
from examples.reproduce.tensor.model import BLOCKING
from examples.reproduce.tensor.rivals import Blocking, Reg, VectorRing, reduce, spread

# bytes on which memory operations are timed
SAMPLE = 4 << 20


def seconds_a_byte(comm: MPI.Comm, work: Callable[[], object]) -> float:
    """Return the seconds a byte of `work`, which handles SAMPLE bytes, on the slowest host. Collective."""
    times = []
    for _ in range(5):
        start = rank.together(comm)
        work()
        times.append(time.perf_counter() - start)
        rank.asleep(comm)
    return float(comm.allreduce(median(times), MPI.MAX)) / SAMPLE


def memory(comm: MPI.Comm, vectors: int) -> list[float]:
    """Measure the fields of `model.Memory`. Collective."""
    parts = [np.ones(SAMPLE // 4, np.float32) for _ in range(vectors)]
    host = np.ones_like(parts[0])
    add = seconds_a_byte(comm, lambda: np.add(host, parts[0], out=host))
    return [seconds_a_byte(comm, lambda: reduce(parts, host)), seconds_a_byte(comm, lambda: spread(parts, host)), add]


RIVALS = {BLOCKING: Blocking, "reg": Reg, "vector_ring": VectorRing}


def case(comm: MPI.Comm, algorithm: str, nbytes: int, repeats: int, vectors: int) -> dict[str, Any]:
    """Time an algorithm `repeats` times. Every result is checked exactly. Collective.

    Return {"seconds": those of the slowest rank in each repeat, "idle": the share of the cores that was idle}.
    """
    x = [np.empty(nbytes // 4, np.float32) for _ in range(vectors)]
    rival = RIVALS.get(algorithm)
    run: Any = rival(comm, x) if rival else collectives.plan("allreduce", x, comm, algorithm=algorithm)
    total = vectors * comm.size * (comm.size + 1) / 2
    seconds, idle = [], []
    for _ in range(repeats):
        for vector in x:
            vector[:] = comm.rank + 1
        start, before = rank.together(comm), processor()
        run()
        took = time.perf_counter() - start
        after = processor()
        rank.asleep(comm)
        seconds.append(comm.allreduce(took, MPI.MAX))
        idle.append(idle_share(before, after))
        if not comm.allreduce(all(bool((vector == total).all()) for vector in x), MPI.LAND):
            raise ArithmeticError(f"{algorithm} of {nbytes} bytes gave a wrong sum")
    if not rival:
        run.free()
    return {"seconds": seconds, "idle": median(idle)}


def main() -> None:
    comm = MPI.COMM_WORLD
    asked = rank.request()
    vectors = asked["vectors"]
    found: dict[str, Any] = {"alpha": rank.alpha(comm), "memory": memory(comm, vectors)}
    # The first case makes the connections, and does not count.
    case(comm, "multi_ring", 1 << 20, 1, vectors)
    found["cases"] = [case(comm, **one, vectors=vectors) for one in asked["cases"]]
    if comm.rank == 0:
        rank.answer(found)


if __name__ == "__main__":
    main()

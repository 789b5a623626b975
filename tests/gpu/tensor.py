"""Allreduce of a tensor in each of its ways: `mpirun -n P python -m tests.gpu.tensor rows.json [--arrays numpy]`.

Every rank has two vectors, on one card where there is one. All ways take turns in one run, beside what a user would do
by hand: add the vectors, copy the sum to the host, call the MPI's allreduce, copy the result back to each vector.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import collectives
from collectives.benchmark.case import contribution, count_wrong, expected
from collectives.benchmark.harness import measure
from collectives.terminal import parse_sizes
from tests.gpu.arrays import numbers, placed, write

WAYS = ("shared_memory", "native", "host_ring", "multi_ring")
BY_HAND = "by hand"
VECTORS = 2
DTYPE = np.dtype(np.float32)


def by_hand(comm: MPI.Comm, xp: Any, vectors: list[Any]) -> Callable[[], None]:
    """Return the allreduce that needs nothing of this project."""
    total, host = xp.zeros_like(vectors[0]), np.zeros(vectors[0].size, DTYPE)

    def run() -> None:
        xp.add(vectors[0], vectors[1], out=total)
        np.copyto(host, numbers(total))
        comm.Allreduce(MPI.IN_PLACE, host)
        for vector in vectors:
            write(xp, vector, host)

    return run


def case(comm: MPI.Comm, xp: Any, nbytes: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each way to sum vectors of so many bytes. Collective."""
    n, members = nbytes // DTYPE.itemsize, VECTORS * comm.size
    wanted = expected("allreduce", "sum", 0, members, n, DTYPE, [0] * (members + 1))
    vectors = placed(xp, [np.zeros(n, DTYPE) for _ in range(VECTORS)])
    plans = {way: collectives.plan("allreduce", vectors, comm, algorithm=way) for way in WAYS}
    calls: dict[str, Callable[[], object]] = {BY_HAND: by_hand(comm, xp, vectors), **plans}
    wrong = {}
    for way, call in calls.items():
        for number, vector in enumerate(vectors):
            write(xp, vector, contribution("sum", VECTORS * comm.rank + number, n, DTYPE, members))
        call()
        wrong[way] = comm.allreduce(sum(count_wrong(numbers(vector), wanted) for vector in vectors))
    for vector in vectors:  # or sums grow beyond all bounds while they are timed
        write(xp, vector, np.zeros(n, DTYPE))
    timings = measure(comm, list(calls.values()), seconds)
    for plan in plans.values():
        plan.free()
    hand = timings[0].median
    return [
        {
            "ranks": comm.size,
            "bytes": nbytes,
            "way": way,
            "ms": 1e3 * timing.median,
            "GB/s": nbytes / timing.median / 1e9,
            "times by hand": hand / timing.median,
            "wrong": wrong[way],
            "ok": not wrong[way],
        }
        for way, timing in zip(calls, timings)
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Time the allreduce of a tensor in each of its ways.")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--arrays", choices=("cupy", "numpy"), default="cupy")
    parser.add_argument("--sizes", default="4MiB,16MiB,64MiB")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size")
    asked, comm = parser.parse_args(), MPI.COMM_WORLD
    xp = importlib.import_module(asked.arrays)
    rows = [row for nbytes in parse_sizes(asked.sizes) for row in case(comm, xp, nbytes, asked.seconds)]
    if comm.rank == 0:
        asked.rows.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

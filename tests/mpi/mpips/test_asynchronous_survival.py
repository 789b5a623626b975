"""Asynchronous stores whose processes die: each push counts once, so the total is known to the last unit."""

from pathlib import Path

import pytest

from tests.choice import first
from tests.mpi.jobs import job
from tests.mpi.mpips.killed import pytestmark  # noqa: F401  (jobs, where they survive deaths)

STEPS = 12
PROGRAM = """
import os, time
import numpy as np
import mpips

kv = mpips.create({kind!r}, **{options!r})
step, begun, victim = kv.resumed, kv.resumed == 0, int(os.environ["OMPI_COMM_WORLD_RANK"]) == {victim}
one, total = np.ones(5), np.zeros(5)
while True:
    try:
        kv.init("w", np.zeros(5))
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.pull("w", total)
        while step < {steps}:
            if victim and begun and step == {dies_at}:
                os.kill(os.getpid(), 9)
            kv.pushpull("w", -one, total)
            step += 1
            time.sleep(0.002 * kv.rank)
        kv.barrier()
        kv.pull("w", total)
        rank = kv.rank
        kv.close()
        break
    except mpips.StoreError:
        step = kv.recover().step
if rank == 0:
    print("total", total.tolist(), flush=True)
"""


@pytest.mark.core(1)
@first(
    2,
    **{
        "kind, roles, spares, options, dies_at, total": [
            ("dist_async", "-w 3 -s 1", 1, {"staleness": 0}, 5, 3 * STEPS),
            ("mpi_async", "-w 4 -s 2 -c 2", 1, {"masters": "all"}, 5, 4 * STEPS),
            ("dist_async", "-w 3 -s 1", 0, {"staleness": 1}, 4, 2 * STEPS + 4),
            ("dist_async", "-w 3 -s 1", 1, {}, 0, 3 * STEPS),
            ("mpi_async", "-w 4 -s 1 -c 2", 1, {"staleness": 0}, 5, 4 * STEPS),
        ]
    },
)
def test_each_push_of_all_workers_counts_once(
    tmp_path: Path, kind: str, roles: str, spares: int, options: dict[str, object], dies_at: int, total: int
) -> None:
    program = PROGRAM.format(kind=kind, options=options, victim=1, steps=STEPS, dies_at=dies_at)
    done = job(tmp_path, program, f"{roles} --spares {spares}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"total {[float(total)] * 5}"


JOINS = """
import os
import numpy as np
import mpips

kv = mpips.create("dist_async", staleness={staleness})
one, total, ids = np.ones(5), np.zeros(5), np.arange(3)
counts, joined = {{"w": 0, "t": 0}}, bool(kv.resumed)
while True:
    try:
        table = kv.table("t", 1, np.float64, init=mpips.uniform(0), learning_rate=1.0)
        kv.init("w", np.zeros(5))
        kv.set_optimizer("sgd", learning_rate=1.0)
        while counts["t"] < 20 and not joined:
            if kv.rank == 1 and counts["t"] == 5:
                os.kill(os.getpid(), 9)
            if counts["w"] == counts["t"]:
                kv.pushpull("w", -one, total)
                counts["w"] += 1
            table.push(ids, -np.ones((3, 1)))
            table.pull(ids)
            counts["t"] += 1
        if {barrier}:
            kv.barrier()
            kv.pull("w", total)
            rows = table.pull(ids)[:, 0]
            kv.barrier()
        rank = kv.rank
        kv.close()
        break
    except mpips.StoreError:
        counts = dict(kv.recover())
if rank == 1:
    print(joined, flush=True)
    if {barrier}:
        print(*total, *rows, flush=True)
"""


@pytest.mark.slow
@first(1, **{"staleness, barrier": [(1, True), (0, False), (0, True)]})
def test_a_spare_that_pushes_no_more_holds_nobody_back(tmp_path: Path, staleness: int, barrier: bool) -> None:
    done = job(tmp_path, JOINS.format(staleness=staleness, barrier=barrier), "-w 3 -s 1 --spares 1")
    assert done.returncode == 0, done.stderr
    expected = ["True", *["45.0"] * (8 * barrier)]
    assert done.stdout.split() == expected

"""A worker closes the store while others have steps before them, and one of them is killed: it is needed again."""

from pathlib import Path

import pytest

from tests.choice import first
from tests.mpi.jobs import job
from tests.mpi.mpips.killed import pytestmark  # noqa: F401  (jobs, where they survive deaths)

PROGRAM = """
import os, time
import numpy as np
import mpips

kv = mpips.create(KIND)
w = np.zeros(100, np.float32)
step, first = kv.resumed, not kv.resumed
while True:
    try:
        kv.init("w", np.zeros(100, np.float32))
        kv.init("never pushed", w)
        while step < STEPS:
            kv.pull("w", w)
            if first and kv.generation == 0 and kv.rank == 1 and step == STEPS - 1:
                time.sleep(0.5)  # the others are closing
                os.kill(os.getpid(), 9)
            kv.push("w", w + 1)
            step += 1
        if kv.rank == 0:
            kv.pull("w", w)
        rank = kv.rank
        kv.close()
        break
    except mpips.StoreError:
        step = kv.recover().step
if rank == 0:
    print("at last", w[0], flush=True)
"""


@first(1, **{"kind, steps": [("mpi_sync", 5), ("dist_sync", 1), ("dist_sync", 5)]})
def test_who_closes_makes_an_undone_step_again(tmp_path: Path, kind: str, steps: int) -> None:
    program = PROGRAM.replace("KIND", repr(kind)).replace("STEPS", str(steps))
    done = job(tmp_path, program, "-w 3 -s 1 --spares 1")
    assert done.returncode == 0, done.stderr
    value = 0.0
    for _ in range(steps):
        value = 3 * (value + 1)
    assert done.stdout.split() == ["at", "last", str(value)]


LEAVES = """
import sys
import numpy as np
import mpips

kv = mpips.create({kind!r}, **{options!r})
kv.init("w", np.zeros(9))
kv.set_optimizer("sgd", learning_rate=1.0)
out, step = np.zeros(9), 0
while step < 6:
    try:
        if kv.rank == 1 and step == 3:
            sys.exit(0)
        kv.pushpull("w", np.ones(9), out)
        step += 1
    except mpips.StoreError:
        step = kv.recover().step
"""


@pytest.mark.slow
@first(
    1,
    **{
        "kind, options, code": [
            ("dist_sync", {}, 1),
            ("mpi_sync", {"masters": "all"}, 1),
            ("dist_async", {"staleness": 1}, 0),
        ]
    },
)
def test_nobody_waits_for_a_worker_that_has_closed(
    tmp_path: Path, kind: str, options: dict[str, object], code: int
) -> None:
    """In an asynchronous store it holds nobody back any more."""
    done = job(tmp_path, LEAVES.format(kind=kind, options=options), "-w 3 -s 1 --spares 0")
    assert done.returncode == code, done.stderr
    assert ("rank 1 has closed the store: the store cannot be recovered" in done.stderr) == bool(code), done.stderr

"""A worker closes the store while others have steps before them, and one of them is killed: it is needed again."""

import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from launch import find, survival
from tests.choice import first
from tests.mpi.sizes import JOB_LIMIT

HINDRANCE = survival.hindrance(find()) if MPI.COMM_WORLD.size == 1 else "starts jobs of its own; once is enough"
pytestmark = pytest.mark.skipif(bool(HINDRANCE), reason=HINDRANCE)

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
            if first and kv.epoch == 0 and kv.rank == 1 and step == STEPS - 1:
                time.sleep(0.5)  # the others are closing
                os.kill(os.getpid(), 9)
            kv.push("w", w + 1)
            step += 1
        if kv.rank == 0:
            kv.pull("w", w)
        rank = kv.rank
        kv.close()
        break
    except mpips.EpochError:
        step = kv.recover().step
if rank == 0:
    print("at last", w[0], flush=True)
"""


@first(1, **{"kind, steps": [("mpi_sync", 5), ("dist_sync", 1), ("dist_sync", 5)]})
def test_who_closes_makes_an_undone_step_again(tmp_path: Path, kind: str, steps: int) -> None:
    program = tmp_path / "closes.py"
    program.write_text(PROGRAM.replace("KIND", repr(kind)).replace("STEPS", str(steps)))
    words = [sys.executable, "-m", "launch.cli", "run", "-w", "3", "-s", "1", "--spares", "1", str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=JOB_LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    value = 0.0
    for _ in range(steps):
        value = 3 * (value + 1)
    assert done.stdout.replace("\0", "").split() == ["at", "last", str(value)]

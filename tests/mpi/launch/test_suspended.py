"""A job that was suspended for longer than its limit on waits goes on; a rank that was stopped alone is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from mpi4py import MPI

from collectives.machine import read_stat
from tests.child import outside, wait_for
from tests.mpi.sizes import JOB_LIMIT

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")

LIMIT = 4  # seconds of a wait
PROGRAM = """
import os, sys, time
import numpy as np
import collectives, mpips

kv = mpips.create("dist_sync")
x, out = np.ones(100, np.float32), np.zeros(100, np.float32)
kv.init("w", x)
comm = kv.layout.workers

def call(phase):
    if phase == "store":
        kv.pushpull("w", x, out=out)
    else:
        collectives.allreduce(x, comm)

for phase in ("store", "collectives", "alone"):
    for step in range(10 if phase != "alone" else 10_000):
        if kv.rank == 1:  # rank 0 waits for it, nearly all the time
            time.sleep(0.3)
            if step == 1:
                open("part", "w").write(str(os.getpid()))
                os.rename("part", phase)
        call(phase)
"""


def find_processes(job: int) -> list[int]:
    """The process and all that stem from it."""
    parents = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(place.name)] = int(read_stat(int(place.name))[1])
    found = [job]
    for each in found:  # it grows
        found += [pid for pid, parent in parents.items() if parent == each]
    return found


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_job_that_was_suspended_goes_on_and_a_rank_that_was_stopped_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    argv = [sys.executable, "-m", "launch.cli", "run", "-w", "2", "-s", "1", "program.py"]
    environment = outside() | {"MPIPS_STALL_SECONDS": "2", "MPIPS_TIMEOUT_SECONDS": str(LIMIT)}
    job = subprocess.Popen(
        argv, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        for phase in ("store", "collectives"):
            wait_for(tmp_path / phase, job)
            with stopped(find_processes(job.pid)):
                time.sleep(1.5 * LIMIT)
        wait_for(tmp_path / "alone", job)
        with stopped([int((tmp_path / "alone").read_text())]):
            said = ""
            while "StallError" not in said and (line := job.stdout.readline()):
                said += line
        rest, _ = job.communicate(timeout=JOB_LIMIT)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(60)
    assert job.returncode, said + rest
    assert re.search(rf"StallError: .* has waited for {LIMIT} s: rank 1 has not come", said), said

"""`mpips run --checkpoint`: the last step is saved, and the step is said from which a job goes on, or can go on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi4py import MPI

from tests.child import outside
from tests.choice import first
from tests.mpi.sizes import JOB_LIMIT

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")

TRAIN = """
import os, sys, time
import numpy as np
import mpips
from mpi4py import MPI

kind, steps, pause, last = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
kv = mpips.create(kind)
w = np.zeros(2_000_000 if last == "compressed" else 10, np.float32)
kv.init("v" if last == "another key" else "w", w)
if last == "compressed":
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
rest = 20  # steps after the folder has gone
for step in range(kv.resumed, steps):
    kv.pushpull("w", np.ones(w.size, np.float32), out=w)
    time.sleep(pause)
    rest -= last == "gone" and MPI.COMM_WORLD.allreduce(os.path.exists(last)) > 0
    if not rest:
        break
if kv.rank == 1 and last == "one more":
    kv.pushpull("w", w, out=w)
if last in ("exit", "compressed"):
    sys.exit(0)
if kv.rank == 0:
    print("at last", kv.resumed, w[0], flush=True)
kv.close()
"""
SERVERS = {"mpi_sync": 0, "dist_sync": 1, "dist_async": 1}


def start(folder: Path, kind: str, steps: int, pause: float = 0.0, last: str = "") -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(TRAIN)
    words = ["-w", "2", "-s", str(SERVERS[kind]), "--checkpoint", "saved", "--every", "5", str(script)]
    argv = [sys.executable, "-m", "launch.cli", "run", *words, kind, str(steps), str(pause), last]
    return subprocess.Popen(
        argv,
        env=outside(),
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def done(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code, what was printed, and what was said."""
    try:
        out, said = job.communicate(timeout=JOB_LIMIT)
    finally:
        if job.poll() is None:
            job.kill()
    return job.returncode, out.replace("\0", ""), said.replace("\0", "")


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saved").iterdir())


@first(1, kind=["dist_sync", "mpi_sync"])
def test_what_compression_kept_back_is_saved_at_exit_too(tmp_path: Path, kind: str) -> None:
    """Worker 0 writes it, and hears it from the others while they end."""
    code, _, said = done(start(tmp_path, kind, 7, last="compressed"))
    assert code == 0, said
    assert saved(tmp_path) == ["store-00000005.safetensors", "store-00000007.safetensors"]


@pytest.mark.slow
@first(1, kind=["dist_sync", "mpi_sync", "dist_async"])
def test_the_last_step_is_saved_and_the_next_job_says_that_it_goes_on_from_it(tmp_path: Path, kind: str) -> None:
    code, _, said = done(start(tmp_path, kind, 7, last="exit"))
    assert code == 0 and "goes on" not in said, said
    assert saved(tmp_path) == ["store-00000005.safetensors", "store-00000007.safetensors"]
    code, again, said = done(start(tmp_path, kind, 9))
    assert code == 0, said
    assert said.count(f"mpips: the store goes on from step 7, saved in {tmp_path / 'saved'}\n") == 1
    assert saved(tmp_path) == ["store-00000007.safetensors", "store-00000009.safetensors"]
    code, _, said = done(start(tmp_path, kind, 9, last="another key"))
    assert code == 1
    assert re.search(
        r"ValueError: init: key 'v' is not in .*/saved/store-\d+\.safetensors, which has 'w', so it "
        r"was saved by another training: give another folder",
        said,
    )
    if kind != "dist_async":
        shutil.rmtree(tmp_path / "saved")
        code, straight, _ = done(start(tmp_path, kind, 9))
        assert straight.split()[3] == again.split()[3] and (straight.split()[2], again.split()[2]) == ("0", "7")


@first(1, kind=["mpi_sync", "dist_sync"])
def test_a_worker_that_closes_while_another_pushes_is_named_at_once(tmp_path: Path, kind: str) -> None:
    began = time.monotonic()
    code, _, said = done(start(tmp_path, kind, 7, last="one more"))
    assert code == 1 and time.monotonic() - began < 60
    assert re.search(r"StoreError: .*: rank 0 has closed the store after 7 pushes of key 'w', and this needs", said)


@pytest.mark.slow
@first(1, **{"number, code": [(signal.SIGTERM, 143), (signal.SIGINT, 130)]})
def test_an_interrupted_job_says_from_where_the_next_goes_on(tmp_path: Path, number: int, code: int) -> None:
    job = start(tmp_path, "mpi_sync", 10**6, pause=0.01)
    for _ in range(int(JOB_LIMIT / 0.1)):
        if list(tmp_path.glob("saved/store-*.safetensors")) or job.poll() is not None:
            break
        time.sleep(0.1)
    os.kill(job.pid, number)
    left, _, said = done(job)
    assert left == code, said
    told = re.search(r"mpips: step (\d+) is saved in .*/saved: the same command goes on from there\n", said)
    assert told, said
    code, out, said = done(start(tmp_path, "mpi_sync", int(told[1]) + 1))
    assert code == 0 and out.split()[2] == told[1], said


@pytest.mark.slow
def test_a_folder_that_vanishes_is_told_and_the_training_goes_on(tmp_path: Path) -> None:
    job = start(tmp_path, "mpi_sync", 10**6, pause=0.01, last="gone")
    while not list(tmp_path.glob("saved/store-*.safetensors")) and job.poll() is None:
        time.sleep(0.1)
    (tmp_path / "saved").rename(tmp_path / "gone")
    code, out, said = done(job)
    assert code == 0 and out.startswith("at last 0"), said
    assert re.search(r"cannot be written: there is no folder .*/saved: make it first", said), said

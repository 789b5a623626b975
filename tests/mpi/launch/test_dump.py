"""Dumps of jobs of three ranks: as JSON, read again by `mpips why`, and as PyTorch's analyzer reads them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from launch.observe.gather import gather, jobs
from tests.child import outside

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")
PROGRAM = """
import sys, time
import numpy as np
import collectives
from mpi4py import MPI

rank, x, long = MPI.COMM_WORLD.rank, np.ones(10, np.float32), np.ones(4 << 20, np.float32)
for step in range(5):
    collectives.allreduce(x)
    collectives.allreduce(long)
if sys.argv[1] == "other":
    collectives.broadcast(x) if rank == 1 else collectives.allreduce(x)
if rank != 1:
    open(f"there{rank}", "w").close()
    collectives.allreduce(x)
time.sleep(99)
"""
STORE = """
import time
import numpy as np
import mpips

kv = mpips.create("mpi_sync")
kv.init("w", np.ones(1000, np.float32))
kv.pushpull("w", np.ones(1000, np.float32))
open(f"there{kv.rank}", "w").close()
if kv.rank == 1:
    time.sleep(99)
kv.pushpull("w", np.ones(1000, np.float32))
"""


def start(folder: Path, what: str, program: str = PROGRAM, **variables: str) -> subprocess.Popen[bytes]:
    (folder / "program.py").write_text(program)
    words = [sys.executable, "-m", "launch.cli", "run", "-w", "3", "program.py", what]
    with open(folder / "said", "wb") as said:
        return subprocess.Popen(
            words, cwd=folder, env={**outside(), **variables}, stdout=subprocess.DEVNULL, stderr=said
        )


def why(*words: str) -> str:
    command = [sys.executable, "-m", "launch.cli", "why", *words]
    done = subprocess.run(command, env=outside(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_until_it_stands(folder: Path, job: subprocess.Popen[bytes]) -> None:
    """Block until the ranks that have come wait for the one that has not."""
    await_files(folder, "there0", "there2")
    limit, found = time.monotonic() + 60, dict[str, Any]()
    while sum(bool(one["waits"]) for one in found.get("ranks", ())) < 2 or found["kind"] != "stands":
        assert time.monotonic() < limit, found
        found = json.loads(why(str(job.pid), "--json"))


def stop(job: subprocess.Popen[bytes]) -> None:
    job.terminate()
    try:
        job.wait(20)
    finally:
        job.kill()


def await_files(folder: Path, *names: str) -> None:
    limit = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < limit, list(folder.iterdir())
        time.sleep(0.05)


def verdict(folder: Path) -> str:
    """What PyTorch's analyzer says of the dumps there."""
    pytest.importorskip("torch")
    analyzer = "from torch.distributed.flight_recorder.fr_trace import main; main()"
    words = [sys.executable, "-c", analyzer, str(folder), "-p", "rank_"]
    done = subprocess.run(words, env=outside(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_pytorchs_analyzer_names_the_rank_that_made_another_call(tmp_path: Path) -> None:
    job = start(tmp_path, "other")
    job.wait(60)
    why(str(job.pid), "--dump", str(tmp_path / "dump"), "--format", "pytorch")
    said = verdict(tmp_path / "dump")
    assert "COLLECTIVE_TYPE_MISMATCH" in said and "rank 1" in said.lower() and "broadcast" in said, said


@pytest.mark.slow
def test_pytorchs_analyzer_names_the_rank_that_has_not_come(tmp_path: Path) -> None:
    job = start(tmp_path, "absent")
    try:
        wait_until_it_stands(tmp_path, job)
        why(str(job.pid), "--dump", str(tmp_path / "dump"), "--format", "pytorch")
    finally:
        stop(job)
    said = verdict(tmp_path / "dump")
    assert "missing" in said.lower() and "{1}" in said, said


@pytest.mark.slow
def test_a_job_without_collectives_is_dumped_for_pytorch_too(tmp_path: Path) -> None:
    job = start(tmp_path, "", STORE)
    try:
        await_files(tmp_path, "there0", "there2")
        why(str(job.pid), "--dump", str(tmp_path / "dump"), "--format", "pytorch")
    finally:
        stop(job)
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["rank_0", "rank_1", "rank_2"]
    verdict(tmp_path / "dump")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"a"'])
def test_what_is_no_dump_says_so(content: str, tmp_path: Path) -> None:
    (tmp_path / "why.json").write_text(content)
    command = [sys.executable, "-m", "launch.cli", "why", str(tmp_path)]
    done = subprocess.run(command, env=outside(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "/why.json is not a dump, or is damaged" in done.stderr, done.stderr


def test_a_dump_is_read_again_when_all_is_over(tmp_path: Path) -> None:
    job = start(tmp_path, "absent")
    try:
        wait_until_it_stands(tmp_path, job)
        now = why(str(job.pid), "--dump", str(tmp_path / "dump"))
    finally:
        stop(job)
    assert why(str(tmp_path / "dump")).split(" since ")[0] == now.split(" since ")[0]
    assert json.loads(why(str(tmp_path / "dump"), "--json"))["culprits"] == [1]
    ranks = [json.loads((tmp_path / "dump" / f"rank-{rank}.json").read_text()) for rank in range(3)]
    for rank in ranks:
        long = [one for one in rank["records"] if one["operation"] == "allreduce"]
        assert len(long) == 5 and {one["state"] for one in long} == {"completed"}
        assert all(one["nbytes"] == 16 << 20 and one["line"] == "program.py:10" for one in long)
        assert [one["number"] for one in long] == sorted({one["number"] for one in long})
    assert ranks[0]["waits"] and not ranks[1]["waits"]


@pytest.mark.slow
def test_ranks_dump_when_a_call_fails(tmp_path: Path) -> None:
    job = start(tmp_path, "other", MPIPS_DUMP_DIR=str(tmp_path / "dumps"))
    job.wait(60)
    for rank in range(3):
        found = json.loads((tmp_path / "dumps" / str(job.pid) / f"rank-{rank}.json").read_text())
        assert found["rank"] == rank and "broadcast" in found["end"]["failed"]


@pytest.mark.slow
def test_a_signal_dumps_a_rank_that_goes_on(tmp_path: Path) -> None:
    job = start(tmp_path, "absent", MPIPS_DUMP_DIR=str(tmp_path / "dumps"))
    try:
        wait_until_it_stands(tmp_path, job)
        (folder,) = [path for path in jobs() if path.name == str(job.pid)]
        pid = next(one.pid for one in gather(folder, 0.0, stacks=False) if one.rank == 0)
        os.kill(pid, signal.SIGUSR2)
        await_files(tmp_path / "dumps", f"{job.pid}/rank-0.json")
        assert json.loads((tmp_path / "dumps" / str(job.pid) / "rank-0.json").read_text())["waits"]
        assert job.poll() is None
    finally:
        stop(job)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"MPIPS_RECORDER": "0"}])
def test_a_signal_for_which_no_folder_is_named_ends_no_rank(variables: dict[str, str], tmp_path: Path) -> None:
    job = start(tmp_path, "absent", **variables)
    try:
        await_files(tmp_path, "there0", "there2")
        job.send_signal(signal.SIGUSR2)
        limit = time.monotonic() + 20
        while (said := (tmp_path / "said").read_text()).count("MPIPS_DUMP_DIR is not set") < 3:
            assert time.monotonic() < limit, said
            time.sleep(0.1)
        assert job.poll() is None
    finally:
        stop(job)

"""`mpips why` of jobs that stand, are slow, or have died, each in another way: it names rank, line and call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from launch.observe.gather import has_living, jobs
from tests.child import outside

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")
PROGRAM = """
import os, signal, sys, time
import numpy as np
import mpips

def batch():
    if step == 9 and kv.rank == 1:
        open("there", "w").close()
        {does}

kv = mpips.create("{kind}")
gradient = np.ones(1000, np.float32)
kv.init("w", gradient)
for step in range(100_000):
    batch()
    {beside}
    kv.pushpull("w", gradient)
"""
WAYS = {
    "loop": ("while True: pass", "", "outside mpips (program.py:"),
    "sleep": ("time.sleep(99)", "", "time.sleep(99)"),
    "pipe": ("os.read(os.pipe()[0], 1)", "", "os.read(os.pipe()[0], 1)"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "", "is stopped by a signal: `kill -CONT"),
    "barrier": ("time.sleep(99)", "if step == 9: kv.barrier()", "wait in barrier (program.py:"),
}


@contextmanager
def running(folder: Path, does: str, beside: str = "", kind: str = "dist_sync", servers: int = 1) -> Iterator[str]:
    """A job of three workers, from where worker 1 does what it does; its name."""
    (folder / "program.py").write_text(PROGRAM.format(does=does, beside=beside or "pass", kind=kind))
    words = [sys.executable, "-m", "launch.cli", "run", "-w", "3", "-s", str(servers), "program.py"]
    job = subprocess.Popen(words, cwd=folder, env=outside(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 60
        while not (folder / "there").exists():
            assert job.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        yield str(job.pid)
    finally:
        job.terminate()
        try:
            job.wait(20)
        finally:
            job.kill()


def why(name: str) -> dict[str, Any]:
    begun = time.monotonic()
    words = [sys.executable, "-m", "launch.cli", "why", name, "--json"]
    done = subprocess.run(words, env=outside(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    found["took"] = time.monotonic() - begun
    return found


@pytest.mark.parametrize(("way", "servers"), [(way, number % 2) for number, way in enumerate(WAYS)])
def test_the_rank_that_all_wait_for_is_named(way: str, servers: int, tmp_path: Path) -> None:
    does, beside, words = WAYS[way]
    with running(tmp_path, does, beside, servers=servers) as name:
        time.sleep(1.5)
        found = why(name)
    assert found["kind"] == "stands" and found["culprits"] == [1], found["sentence"]
    assert words in found["sentence"] and "ranks 0, 2 wait in" in found["sentence"]
    assert found["took"] < 5  # two, on cores of its own


def test_a_slow_rank_is_named_while_the_job_goes_on(tmp_path: Path) -> None:
    beside = "time.sleep(0.05 if kv.rank == 1 else 0.02)"
    with running(tmp_path, "pass", beside) as name:
        time.sleep(1)
        found = why(name)
    assert (found["kind"], found["culprits"]) == ("slow", [1]), found["sentence"]


def test_two_stores_called_in_another_order_are_a_deadlock(tmp_path: Path) -> None:
    beside = "kv, other = (kv, other) if kv.rank == 1 or step < 9 else (other, kv)"
    second = "other = mpips.create('{kind}')\nother.init('w', np.ones(1000, np.float32))\n"
    program = PROGRAM.replace("gradient = ", f"{second}gradient = ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "PROGRAM", program)
        with running(tmp_path, "pass", beside, servers=0) as name:
            time.sleep(2)
            found = why(name)
    assert found["kind"] in ("stands", "ended"), found["sentence"]
    assert "different" in found["sentence"] or "same order" in found["sentence"]


@pytest.mark.parametrize("victim", [1, 3])
def test_the_last_call_of_a_killed_rank_is_known_when_all_is_over(victim: int, tmp_path: Path) -> None:
    with running(tmp_path, "pass") as name:
        (folder,) = [path for path in jobs() if path.name == name]
        pids = {one["rank"]: one["pid"] for one in why(name)["ranks"]}
        os.kill(pids[victim], signal.SIGKILL)
        limit = time.monotonic() + 30
        while has_living(folder) and time.monotonic() < limit:
            time.sleep(0.1)
        found = why(name)
    assert found["kind"] == "ended" and victim in found["culprits"], found["sentence"]
    last = {one["rank"]: one["last_call"] for one in found["ranks"]}
    assert victim == 3 or last[victim] == "pushpull of key 'w'"
    assert "ended without a word, as by SIGKILL" in found["sentence"]


@pytest.mark.parametrize(("end", "said"), [
    ("raise ValueError('bad batch 7')", "Rank 1 said: ValueError: bad batch 7 (program.py:9)"),
    ("sys.exit(3)", "Rank 1 said: exit code 3"),
])  # fmt: skip
def test_what_a_program_has_raised_is_known_when_all_is_over(end: str, said: str, tmp_path: Path) -> None:
    with running(tmp_path, end) as name:
        (folder,) = [path for path in jobs() if path.name == name]
        limit = time.monotonic() + 30
        while has_living(folder) and time.monotonic() < limit:
            time.sleep(0.1)
        found = why(name)
    assert (found["kind"], found["culprits"]) == ("ended", [1]) and said in found["sentence"], found["sentence"]


def test_a_job_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import mpips\nmpips.create('dist_sync').close()\n")
    words = [sys.executable, "-m", "launch.cli", "run", "-w", "2", "program.py"]
    job = subprocess.Popen(words, cwd=tmp_path, env=outside())
    assert job.wait(60) == 0
    assert str(job.pid) not in [path.name for path in jobs()]
    done = subprocess.run([sys.executable, "-m", "launch.cli", "why", str(job.pid)], env=outside(), capture_output=True,
                          text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 2 and f"there is no job '{job.pid}' of yours on this machine" in done.stderr

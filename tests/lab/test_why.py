"""`mpips why` of a job on two lab hosts, asked where no rank is: each host is asked by the lab's agent."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch import find
from launch.lab import client
from launch.lab.job import launcher_options
from tests.lab.support import command

pytestmark = pytest.mark.lab
PROGRAM = """
import os, signal, socket, sys, time
import numpy as np
import mpips

kv = mpips.create("dist_sync")
gradient = np.ones(1000, np.float32)
kv.init("w", gradient)
for step in range(100_000):
    if step == 9 and kv.rank == 1:
        open("there", "w").close()
        {does}
    {beside}
    kv.pushpull("w", gradient)
"""
LINES = {
    "loop": ("while True: pass", "", "for rank 1 on h1, which is in Python code outside mpips (program.py:12: `while"),
    "input": ("os.dup2(os.open('fifo', os.O_RDWR), 0); input()", "", "(program.py:12: `os.dup2"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "", "for rank 1 on h1, which is stopped by a signal: `kill -C"),
    "fifo": ("open('fifo').read()", "", "(program.py:12: `open('fifo').read()`), not stopped, 0 % CPU"),
    "barrier": ("time.sleep(99)", "if step == 9: kv.barrier()", "rank 0 waits in barrier (program.py:13), for rank 1"),
}


@contextmanager
def running(lab: str, folder: Path, does: str, beside: str) -> Iterator[None]:
    """A job of two workers and a server, from where worker 1, on the second host, does what it does."""
    (folder / "program.py").write_text(PROGRAM.format(does=does, beside=beside or "pass"))
    (folder / "hosts").write_text("h0 slots=1\nh1 slots=2\n")
    subprocess.run(["mkfifo", folder / "fifo"], check=True)
    launcher = find()
    interface = ["--interface", "vip0"] if launcher.flavour == "openmpi" else []
    words = ["-w", "2", "-s", "1", "--hostfile", "hosts", *interface]
    words += [f"--mpi-arg={word}" for word in launcher_options(launcher.flavour)]
    job = subprocess.Popen(
        command(lab, "launcher", "run", *words, "program.py", folder=folder),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        limit = time.monotonic() + 60
        while not (folder / "there").exists():
            assert job.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        time.sleep(1.5)
        yield
    finally:
        job.terminate()
        try:
            job.wait(20)
        finally:
            job.kill()


def why(lab: str, host: str, folder: Path) -> dict[str, Any]:
    """Return what `mpips why` says; other hosts have longer than usual, as all share a machine's cores with tests."""
    argv = command(lab, host, "why", "--json", "--within", "8", folder=folder)
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("way", ["loop", "stopped", "fifo", "barrier", pytest.param("input", marks=pytest.mark.full)])
def test_a_late_rank_on_another_host_is_named(way: str, make: Callable[[str], str], tmp_path: Path) -> None:
    lab = make("star:2")
    does, beside, said = LINES[way]
    with running(lab, tmp_path, does, beside):
        found = why(lab, "launcher" if way != "stopped" else "h0", tmp_path)
    assert found["kind"] == "stands" and found["culprits"] == [1] and not found["unreached"], found["sentence"]
    assert said in found["sentence"]
    assert {one["rank"]: one["host"] for one in found["ranks"]} == {0: "h0", 1: "h1", 2: "h1"}


def test_a_cut_network_is_named(make: Callable[[str], str], tmp_path: Path) -> None:
    lab = make("star:2")
    with running(lab, tmp_path, "pass", ""):
        client.ask(lab, {"do": "link", "host": "h1", "nic": "all", "up": False, "share": 1.0})
        time.sleep(2)
        found = why(lab, "launcher", tmp_path)
    assert found["kind"] == "stands" and "the network between their hosts is cut or slow" in found["sentence"], found

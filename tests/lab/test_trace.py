"""`mpips run --trace` and `mpips trace` of a job on three lab hosts whose clocks differ by hours."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import find
from launch.lab.job import AGENT, launcher_options
from tests.child import wait_for
from tests.lab.support import command
from tests.perfetto import check_in_perfetto, why_not
from tests.timeline import WAYS, read_flows

pytestmark = pytest.mark.lab
PROGRAM = """
import sys
import numpy as np
import mpips

kv = mpips.create("dist_sync")
gradient, out = np.ones(10_000, np.float32), np.zeros(10_000, np.float32)
kv.init(["w", "b"], [gradient, gradient])
for step in range(int(sys.argv[1])):
    kv.push("w", gradient)
    kv.pull("w", out)
    kv.pushpull("b", gradient, out)
    mpips.note(step=step)
    if step == 9 and kv.rank == 0:
        open("there", "w").close()
"""
SHIFTS = {"h0": 3_600, "h1": -20, "h2": 100_000}
SHIFTING_AGENT = """#!{python}
import os, shlex, sys
shifts = {shifts}
at = next(at for at, word in enumerate(sys.argv) if word in shifts)  # before it may be options of ssh
command = shlex.quote(" ".join(sys.argv[at + 1 :]))
shifted = f"unshare --time --monotonic={{shifts[sys.argv[at]]}} sh -c {{command}}"
os.execv({agent!r}, [{agent!r}, sys.argv[at], shifted])
"""


def start(lab: str, folder: Path, steps: int, *words: str) -> subprocess.Popen[str]:
    """Start a job of 4 workers and 2 servers on three hosts, to which an agent gives clocks of their own."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "hosts").write_text("h0 slots=2\nh1 slots=2\nh2 slots=2\n")
    agent = folder / "agent"
    agent.write_text(SHIFTING_AGENT.format(python=sys.executable, shifts=SHIFTS, agent=AGENT))
    agent.chmod(0o755)
    launcher = find()
    interface = ["--interface", "vip0"] if launcher.flavour == "openmpi" else []
    settings = [str(agent) if word == AGENT else word for word in launcher_options(launcher.flavour)]
    options = ["-w", "4", "-s", "2", "--hostfile", "hosts", *interface, *(f"--mpi-arg={word}" for word in settings)]
    argv = command(lab, "launcher", "run", *options, *words, "program.py", str(steps), folder=folder)
    return subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def see(trace: dict[str, Any]) -> list[list[str]]:
    """See that all ranks are there, on hosts whose clocks were found; return what arrows join."""
    about = trace["otherData"]
    assert not about["left_out"]
    assert [(one["rank"], one["host"]) for one in about["ranks"]] == [(rank, f"h{rank // 2}") for rank in range(6)]
    assert 0 < about["clock_error_ns"] < 2e8
    assert about["seconds"] < 60, "clocks differ by more than a day"
    return read_flows(trace)


def test_clocks_of_hosts_are_aligned(make: Callable[[str], str], tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--time", "--monotonic=9", "true"], capture_output=True).returncode:
        pytest.skip("hosts cannot have clocks of their own here: `unshare --time` is refused")
    lab = make("star:3")
    job = start(lab, tmp_path, 50, "--trace", "t.json")
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 0, said
    assert "clocks agree to " in said
    trace = json.loads((tmp_path / "t.json").read_text())
    joined = see(trace)
    shards = sum(event["ph"] == "X" and event["cat"] == "sum" for event in trace["traceEvents"]) // 50
    assert shards >= 2
    assert len(joined) == shards * 4 * 50
    assert all(kinds in WAYS for kinds in joined)
    if not why_not():
        check_in_perfetto(tmp_path / "t.json", trace)


def test_a_running_job_is_traced_on_all_hosts(make: Callable[[str], str], tmp_path: Path) -> None:
    lab = make("star:3")
    job = start(lab, tmp_path, 1_000_000)
    try:
        wait_for(tmp_path / "there", job)
        argv = command(lab, "launcher", "trace", "--seconds", "2", "-o", "t.json", folder=tmp_path)
        subprocess.run(argv, cwd=tmp_path, check=True, timeout=90)
        assert len(see(json.loads((tmp_path / "t.json").read_text()))) > 50
    finally:
        job.terminate()
        try:
            job.communicate(timeout=20)
        finally:
            job.kill()

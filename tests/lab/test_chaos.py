"""Faults of hosts in a lab: its links are slow or cut for a while, or all its ranks die; the bits stay."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import find
from launch.lab import client
from launch.mpirun import find_obstacle_to_survival
from mpips import chaos
from mpips.chaos import Fault, FaultPlan, Point, ProgramNote, StoreCreated, WatchedRun, Whom
from tests.choice import first
from tests.lab.conftest import ROOT
from tests.lab.conftest import Run as JobRun
from tests.lab.support import SEND
from tests.mpi.chaos.job import MODULE, wrong_curve

pytestmark = pytest.mark.lab
LIMIT = 60.0  # seconds of a job
Watch = Callable[..., WatchedRun]


@pytest.fixture
def watch(make: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watches a job of 3 workers and 2 servers, which are on two of three hosts and mirror one another."""
    if why := find_obstacle_to_survival(find()):
        pytest.skip(why)
    for name, value in {"SERVERS": "2", "SPARES": "0", "MIRRORS": "1"}.items():
        monkeypatch.setenv(f"MPIPS_{name}", value)
    monkeypatch.chdir(ROOT)

    def watched(*faults: Fault) -> WatchedRun:
        name = make("star:3")
        program = [sys.executable, "-m", "mpips", "-m", MODULE, "dist_sync", str(tmp_path / "stored.safetensors")]
        argv = client.job_command(name, 5, program, per_host=2, extra=["--with-ft", "ulfm"])
        with tempfile.TemporaryFile() as said:
            run = chaos.watch(argv, FaultPlan(0, faults), LIMIT, said, lab=name)
            said.seek(0)
            assert run.code == 0 and not run.hung and not run.left, (run.attempts, said.read().decode(errors="replace"))
        nics = [nic for host in client.ask(name, {"do": "status"})["hosts"] for nic in host["nics"]]
        assert all(nic["up"] for nic in nics)
        return run

    return watched


def test_a_hosts_ranks_are_killed_and_the_others_go_on(watch: Watch) -> None:
    run = watch(Fault("host", Whom("rank", 3), Point(0, "pushpull", 12)))
    (done,) = run.attempts
    assert (done.rank, done.role, done.host, done.killed, done.undone) == (3, "server", "h1", (2, 3), "")
    assert {message.workers for message in run.messages if isinstance(message, StoreCreated)} == {3}
    assert wrong_curve(run) == ""


@first(
    1,
    fault=[
        Fault("cut", Whom("server", 0), Point(0, "pushpull", 12), 2.0),
        Fault("slow", Whom("server", 0), Point(0, "pushpull", 12), 1.0, 0.05),
    ],
)
def test_a_link_that_is_slow_or_cut_for_a_while_changes_no_bits(watch: Watch, fault: Fault) -> None:
    run = watch(fault)
    (done,) = run.attempts
    assert (done.rank, done.host, done.killed, done.undone) == (3, "h1", (), "")
    assert wrong_curve(run) == "" and chaos.judge(run).repeated == 0
    last = max(message.time for message in run.messages if isinstance(message, ProgramNote))
    assert last > done.time and (fault.kind != "cut" or last > done.time + fault.seconds)


@pytest.mark.full
def test_a_job_outside_of_the_lab_loses_no_host(watch: Watch, make: Callable[..., str], tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, mpips, time\nkv = mpips.create('dist_sync', spares=-1, servers=0, mirrors=0)\n"
        "kv.barrier()\ntime.sleep(0.3)\n"
    )
    plan = FaultPlan(0, (Fault("host", Whom("rank", 0), Point(0, "barrier")),))
    argv = [sys.executable, "-m", "launch.cli", "run", "-w", "1", str(script)]
    run = chaos.watch(argv, plan, LIMIT, lab=f"test-{os.getpid()}")
    assert run.code == 0 and [done.undone for done in run.attempts] == ["rank 0 is on no host of a lab"]


def test_a_link_holds_a_part_of_its_rate_until_it_is_set_back(make: Callable[..., str], run: JobRun) -> None:
    name = make("star:2", 20e6)
    code = SEND.format(source=0, target=1) + "import time; start = time.perf_counter()\n"
    code += SEND.format(source=0, target=1) + "if c.rank == 0: print(time.perf_counter() - start)\n"
    client.ask(name, {"do": "link", "host": "h1", "nic": "all", "up": True, "share": 0.05})
    assert float(run(name, 2, code).stdout) > 0.9 * (1 << 20) / 1e6
    client.ask(name, {"do": "link", "host": "h1", "nic": "all", "up": True})
    assert float(run(name, 2, code).stdout) < 0.9 * (1 << 20) / 1e6

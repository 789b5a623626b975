"""Jobs that are watched: programs without MPI, which tell of themselves as ranks do."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpips.chaos import (
    Fault,
    FaultPlan,
    Point,
    ProgramNote,
    StoreCreated,
    StoreRecovered,
    WatchedRun,
    Whom,
    judge,
    watch,
)
from mpips.chaos.injector import watched

LIMIT = 30.0
RANKS = """
import os, subprocess, sys, time
SIZE = 3
if "OMPI_COMM_WORLD_RANK" not in os.environ:
    here = {**os.environ, "OMPI_COMM_WORLD_SIZE": str(SIZE), "MPIPS_SERVERS": "1"}
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**here, "OMPI_COMM_WORLD_RANK": str(rank)})
             for rank in range(SIZE)]
    sys.exit(max(rank.wait() not in ALLOWED for rank in ranks))

from mpips.chaos import note
from mpips.chaos.injector import watched

class Store:
    rank, num_workers = int(os.environ["OMPI_COMM_WORLD_RANK"]), SIZE
    def push(self): pass
    def recover(self): return {}

kv = watched(lambda: Store())()
"""


def job(
    tmp_path: Path,
    body: str,
    *faults: Fault,
    allowed: tuple[int, ...] = (0,),
    limit: float = LIMIT,
    look: Callable[[WatchedRun], None] | None = None,
) -> WatchedRun:
    script = tmp_path / "job.py"
    script.write_text(RANKS.replace("ALLOWED", repr(allowed)) + textwrap.dedent(body))
    with open(tmp_path / "said", "wb") as said:
        return watch([sys.executable, str(script)], FaultPlan(1, faults), limit, said, look=look)


def said(tmp_path: Path) -> str:
    return (tmp_path / "said").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("busy", [0.0, 2.0])
def test_ranks_are_heard_though_they_end_before_anybody_looks(tmp_path: Path, busy: float) -> None:
    run = job(tmp_path, "note(3, 0.5)\nkv.recover()\nnote(4, b'abc')", look=lambda run: time.sleep(busy))
    assert run.code == 0 and not run.hung and not run.left
    assert sorted(message.rank for message in run.messages if isinstance(message, StoreCreated)) == [0, 1, 2]
    notes = [message for message in run.messages if isinstance(message, ProgramNote)]
    assert {(one.step, one.value) for one in notes} == {(3, 0.5), (4, None)} and len(notes) == 6
    assert sum(isinstance(message, StoreRecovered) for message in run.messages) == 3


@pytest.mark.slow
def test_a_rank_is_killed_at_its_call(tmp_path: Path) -> None:
    body = "for step in range(9):\n    note(step, step)\n    kv.push()"
    fault = Fault("kill", Whom("rank", 1), Point(1, "push", 4))
    run = job(tmp_path, body, fault, allowed=(0, -9))
    assert run.code == 0 and [(done.rank, done.role) for done in run.attempts] == [(1, "worker")]
    assert max(message.step for message in run.messages if isinstance(message, ProgramNote) and message.rank == 1) == 3


@pytest.mark.slow
def test_a_role_is_hit_some_time_after_the_store_was_made(tmp_path: Path) -> None:
    wait = "if Store.rank == 2: time.sleep(60)"
    run = job(tmp_path, wait, Fault("kill", Whom("worker", 5), 0.3), allowed=(0, -9))
    assert run.code == 0 and [(done.rank, done.role) for done in run.attempts] == [(2, "worker")]


@pytest.mark.slow
def test_a_stopped_rank_goes_on(tmp_path: Path) -> None:
    body = """
    last, gap = time.monotonic(), 0
    kv.push()
    end = time.monotonic() + (0.5 if Store.rank else 5)
    while time.monotonic() < end and gap < 0.3:
        now = time.monotonic()
        gap, last = max(gap, now - last), now
    print("rank", Store.rank, "gap", gap > 0.3, flush=True)
    """
    run = job(tmp_path, body, Fault("stop", Whom("rank", 0), Point(0, "push", 1, 0.1), 0.5))
    assert run.code == 0 and "rank 0 gap True" in said(tmp_path)


@pytest.mark.slow
def test_a_full_disk_is_felt_and_passes(tmp_path: Path) -> None:
    body = f"""
    kv.push()
    end = time.monotonic() + 10
    found = []
    while len(found) < 2 and time.monotonic() < end:
        try:
            with open({str(tmp_path / "file")!r}, "ab") as file:
                file.write(b"x")
        except OSError as error:
            found = found or [error]
        else:
            found = found and [*found, "again"]
    if Store.rank == 0:
        print("found", found, flush=True)
    """
    run = job(
        tmp_path,
        "if Store.rank:\n    sys.exit()\n" + textwrap.dedent(body),
        Fault("full", Whom("rank", 0), Point(0, "push", 1, 0.1), 0.4),
    )
    assert run.code == 0 and "File too large" in said(tmp_path) and "again" in said(tmp_path)


@pytest.mark.slow
def test_who_is_dead_cannot_be_hit(tmp_path: Path) -> None:
    there = str(tmp_path / "there")
    body = f"""
    if Store.rank == 1:
        open({there!r}, "w").close()
        kv.push()
    while not os.path.exists({there!r}): time.sleep(0.01)
    time.sleep(2)
    """
    late, first = (Fault("kill", Whom("rank", 1), Point(1, "push", 1, delay)) for delay in (0.5, 0.0))
    run = job(tmp_path, body, late, first, allowed=(0, -9))
    assert [done.undone for done in run.attempts] == ["", "no rank 1 was alive"]


@pytest.mark.slow
def test_a_job_that_hangs_is_ended_and_shows_its_stacks(tmp_path: Path) -> None:
    began = time.monotonic()
    run = job(tmp_path, "def stuck_here():\n    time.sleep(60)\nstuck_here()", limit=2.0)
    assert run.hung and time.monotonic() - began < LIMIT
    assert "stuck_here" in said(tmp_path)
    assert not judge(run).good


@pytest.mark.slow
def test_what_outlives_a_job_is_told_and_ended(tmp_path: Path) -> None:
    body = "if Store.rank == 0: print(subprocess.Popen(['sleep', '77']).pid, flush=True)"
    run = job(tmp_path, body)
    assert run.code == 0 and len(run.left) == 1 and "sleep 77" in run.left[0]
    pid = int(said(tmp_path).split()[0])
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}/cmdline") and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_a_watched_job_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("_MPIPS_CHAOS", raising=False)
    assert watched(job) is job
    monkeypatch.setenv("_MPIPS_CHAOS", "/nowhere")  # who watched has left
    assert watched(job) is job
    code = "from mpips.chaos import note; note(1, 2.0); note(1, [1, 2])"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

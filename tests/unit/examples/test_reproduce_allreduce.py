"""The comparison of allreduce: how each MPI is found and started, and what the rows of its jobs come to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from examples.reproduce.allreduce import __main__ as allreduce
from examples.reproduce.allreduce.__main__ import Environment, command, keep, summary, table, variables
from examples.reproduce.store import beside_mxnet
from launch import Launcher

OPEN_MPI = Environment("o/bin/python", Launcher("o/bin/mpirun", "openmpi", "5.0"))
INTEL = Environment("/i/bin/python", Launcher("/i/bin/mpirun", "intel", "2021.18"))
WORDS = ["--sizes", "8"]


def test_a_bare_mpirun_gets_the_words_it_needs_and_no_more() -> None:
    assert command(OPEN_MPI, "mpirun", 2, WORDS, cores=2, root=False) == [
        "o/bin/mpirun",
        "-n",
        "2",
        "o/bin/python",
        "-m",
        "collectives.benchmark",
        "allreduce",
        "--sizes",
        "8",
    ]
    assert command(OPEN_MPI, "mpirun", 4, WORDS, cores=2, root=True)[1:4] == [
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
    ]
    assert command(INTEL, "mpirun", 4, WORDS, cores=2, root=True)[:3] == ["/i/bin/mpirun", "-n", "4"]


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


def rows(mpi: float, ours: float) -> list[dict[str, object]]:
    cases = (("MPI", "ordinary", mpi), ("auto", "ordinary", ours), ("auto", "empty", ours / 2))
    cases += (("one_shot", "ordinary", ours + 1),)
    return [
        {"ranks": 2, "bytes": 1 << 20, "algorithm": name, "array": array, "p50_us": time, "floor_us": 5.0}
        for name, array, time in cases
    ]


def test_ours_is_held_against_the_best_mpi_of_the_same_start() -> None:
    samples = allreduce.defaultdict(list)
    for time in (10.0, 30.0, 20.0):
        keep(samples, "mpirun", "a", rows(time, 8.0))
        keep(samples, "mpirun", "b", rows(time / 2, 1.0))
        keep(samples, "mpips run", "a", rows(time / 10, 4.0))
        keep(samples, "mpips run", "b", rows(time, 1.0))
    gloo = {"ranks": 2, "bytes": 1 << 20, "algorithm": "gloo", "array": "ordinary", "p50_us": 80.0, "floor_us": 5.0}
    keep(samples, "mpips run", "torch", [gloo])
    run, bare = summary(samples, {"a": "Open MPI", "b": "Intel MPI"})
    assert (bare["start"], bare["native"], bare["native_us"], bare["ordinary_us"]) == ("mpirun", "Intel MPI", 10.0, 8.0)
    assert (run["start"], run["native"], run["native_us"], run["ordinary_us"]) == ("mpips run", "Open MPI", 2.0, 4.0)
    assert (bare["empty_vs_native"], bare["ordinary_vs_gloo"], bare["one_shot_us"]) == (2.5, 10.0, 9.0)
    assert "| 2 | mpirun | 1,048,576 | 10.0 | Intel MPI | 8.0 | 1.25 | 10.0 |" in table([bare, run])


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

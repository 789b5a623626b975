"""An environment that a reproduction needs, and that is not there, is told before anything is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from examples.reproduce.allreduce import __main__ as allreduce


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

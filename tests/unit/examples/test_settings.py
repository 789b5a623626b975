"""What the examples refuse of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from collectives.terminal import RANK_VARIABLES

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import task


@pytest.mark.parametrize("words, said", [
    ("--epochs -1", "argument --epochs: '-1' is no whole number of at least 1"), ("--batch-size 0", "at least 1"),
    ("--hidden 1.5", "'1.5' is no whole number"), ("--interval 0", "at least 1"), ("--seed -1", "at least 0"),
    ("--learning-rate nan", "'nan' is no number"), ("--sample-seconds -1", "at least 0"), ("--dtype int8", "float32"),
])  # fmt: skip
def test_numbers_that_cannot_be_are_refused_with_a_sentence(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example", *words.split()])
    with pytest.raises(SystemExit) as end:
        task.settings()
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("word, code", [("--epochs=-1", 2), ("--help", 0)])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_speaks(word, code, rank, monkeypatch, capsys):
    for name in RANK_VARIABLES:
        monkeypatch.setenv(name, str(rank))
    monkeypatch.setattr(sys, "argv", ["example", word])
    with pytest.raises(SystemExit) as end:
        task.settings()
    assert end.value.code == code
    assert any(capsys.readouterr()) == (rank == 0)


def test_settings_come_from_the_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["example", "--batch-size", "32", "--alpha", "0.25", "--dtype", "float64"])
    assert task.settings() == task.Settings(batch_size=32, alpha=0.25, dtype="float64")


def test_an_example_takes_the_kinds_that_it_is_for(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example"])
    assert task.settings("mpi_sync", "dist_sync").kind == "mpi_sync"
    monkeypatch.setattr(sys, "argv", ["example", "--kind", "dist_sync"])
    assert task.settings("mpi_sync", "dist_sync").kind == "dist_sync"
    with pytest.raises(SystemExit):
        task.settings("mpi_async", "dist_async")
    assert "'dist_sync'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        task.settings()
    assert "--kind" in capsys.readouterr().err


@pytest.mark.parametrize("option, file, said", [
    ("--trace", "none/x.json", "cannot be written: there is no folder"),
    ("--profile", "x/", "cannot be written: that names a folder"),
])  # fmt: skip
def test_files_that_cannot_be_written_are_refused_before_training(option, file, said, tmp_path):
    example = [sys.executable, str(Path(task.__file__).with_name("overlap.py")), "--kind", "local"]
    command = [*example, option, f"{tmp_path}/{file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 2, done.stderr
    assert f"error: {option} {tmp_path}/{file} {said}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""

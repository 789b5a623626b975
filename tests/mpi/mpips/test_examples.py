"""The example loops, as they stand, learn the digits."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from tests.mpi.sizes import core_on, either_mpi, only_on

if importlib.util.find_spec("sklearn") is None:
    pytest.skip("the digits come with scikit-learn", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import task

WORLD = MPI.COMM_WORLD
pytestmark = [only_on(1, 3, 4), core_on(4)]


def worst_accuracy(run):
    """The least of what `run` gives on the workers, on every rank."""
    accuracy, worst = np.full(1, np.inf), np.empty(1)
    with contextlib.suppress(SystemExit):  # a server, and its workers have left
        accuracy[0] = run()
    WORLD.Allreduce(accuracy, worst, MPI.MIN)
    return worst[0]


@either_mpi
@pytest.mark.parametrize(
    "example, kind",
    [
        ("sgd", "dist_sync"),
        ("asgd", "dist_async"),
        ("esgd", "dist_async"),
        ("sgd", "mpi_sync"),
        ("asgd", "mpi_async"),
        ("esgd", "mpi_async"),
        ("pure_mpi", ""),
    ],
)
def test_an_example_learns_the_digits(example, kind, monkeypatch, capsys):
    servers, clients = (0, 1) if example == "pure_mpi" else (1, 2 if kind.startswith("mpi") else 1)
    if WORLD.size < servers + clients:
        pytest.skip(f"{example} needs {servers + clients} ranks")
    monkeypatch.setenv("MPIPS_SERVERS", str(servers))
    monkeypatch.setenv("MPIPS_CLIENTS", str(clients))
    monkeypatch.setenv("MPIPS_STALENESS", "4")  # on busy cores a worker could fall behind by most of so short a run

    def run():
        done = importlib.import_module(example).main(task.Settings(epochs=6, interval=8, kind=kind))
        return done.model.accuracy(done.test_x, done.test_y)

    assert worst_accuracy(run) > 0.75
    assert ("test accuracy" in capsys.readouterr().out) == (WORLD.rank == 0)


@either_mpi
@pytest.mark.parametrize("kind, servers", [("mpi_sync", 0), ("dist_sync", 1)])
@pytest.mark.mpi(min_size=2)
def test_the_example_of_overlap_learns_reports_and_profiles(kind, servers, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MPIPS_SERVERS", str(servers))
    files = str(tmp_path / "job.json"), str(tmp_path / "trace.json")
    assert worst_accuracy(lambda: importlib.import_module("overlap").main(kind, "auto", 6, *files)) > 0.75
    said = capsys.readouterr().out
    assert ("of the communication hidden" in said) == (WORLD.rank == 0)
    assert [Path(file).exists() for file in files] == [WORLD.rank == 0] * 2


@either_mpi
@pytest.mark.parametrize("kind, elastic", [("mpi_sync", False), ("mpi_async", True)])
@pytest.mark.mpi(min_size=3)
def test_the_trainer_example_learns_too(kind, elastic, monkeypatch, capsys):
    monkeypatch.setenv("MPIPS_SERVERS", "1")
    monkeypatch.setenv("MPIPS_CLIENTS", "2")
    monkeypatch.setenv("MPIPS_STALENESS", "4")
    assert worst_accuracy(lambda: importlib.import_module("with_trainer").main(kind, elastic, 6)) > 0.75
    assert ("test accuracy" in capsys.readouterr().out) == (WORLD.rank == 0)


@either_mpi
@pytest.mark.mpi(min_size=3)
def test_an_actor_reads_what_learners_write(monkeypatch, capsys):
    monkeypatch.setenv("MPIPS_SERVERS", "1")
    assert worst_accuracy(lambda: last_accuracy(importlib.import_module("actors").main(task.Settings(epochs=6)))) > 0.75
    assert ("actor  version" in capsys.readouterr().out) == (WORLD.rank == WORLD.size - 2)


def last_accuracy(done):
    return done.model.accuracy(done.test_x, done.test_y)

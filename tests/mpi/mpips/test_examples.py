"""The example loops, as they stand, learn the digits."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

if importlib.util.find_spec("sklearn") is None:
    pytest.skip("the digits come with scikit-learn", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import task

WORLD = MPI.COMM_WORLD


@pytest.mark.parametrize(
    "example", ["dist_sgd", "dist_asgd", "dist_esgd", "mpi_sgd", "mpi_asgd", "mpi_esgd", "pure_mpi"]
)
def test_an_example_learns_the_digits(example, monkeypatch, capsys):
    servers, clients = (0, 1) if example == "pure_mpi" else (1, 2 if example.startswith("mpi") else 1)
    if WORLD.size < servers + clients:
        pytest.skip(f"{example} needs {servers + clients} ranks")
    monkeypatch.setenv("MPIPS_SERVERS", str(servers))
    monkeypatch.setenv("MPIPS_CLIENTS", str(clients))
    accuracy = np.full(1, np.inf)
    try:
        done = importlib.import_module(example).main(task.Settings(epochs=6, interval=8))
        accuracy[0] = done.model.accuracy(done.test_x, done.test_y)
    except SystemExit:  # a server, and its workers have left
        pass
    worst, printed = np.empty(1), capsys.readouterr().out
    WORLD.Allreduce(accuracy, worst, MPI.MIN)
    assert worst[0] > 0.75
    assert ("test accuracy" in printed) == (WORLD.rank == 0)

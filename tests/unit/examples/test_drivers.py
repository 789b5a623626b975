"""What drives a reproduction is no rank: it starts no MPI, as its mpirun may not be the one that would be found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DRIVERS = ["allreduce", "bml", "mlp", "mlp.grids", "mlp.lab", "mxnet_mpi", "overlap", "settings", "tensor"]
CODE = """
import importlib, sys
found = importlib.import_module("examples.reproduce." + sys.argv[1])
if hasattr(found, "__path__"):
    importlib.import_module(found.__name__ + ".__main__")
MPI = sys.modules.get("mpi4py.MPI")
print(MPI is not None, MPI is not None and MPI.Is_initialized())
"""


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_starts_no_mpi(driver: str) -> None:
    command = [sys.executable, "-c", CODE, driver]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(driver == "mlp"), "False"], done.stderr

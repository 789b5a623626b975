"""Where a network computes: NumPy on the host, or CuPy on a GPU of the node."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
from mpi4py import MPI

from mpips.mlp.agreement import agree

DEVICES = ("cpu", "gpu")
CUPY = "pip install cupy-cuda12x[ctk]"


def missing(device: str) -> str | None:
    """What of this machine's Python `device` needs and has not, with a cure. Looks, imports nothing."""
    if device == "cpu" or importlib.util.find_spec("cupy") is not None:
        return None
    return f"device {device} needs CuPy, which is not installed: {CUPY}"


def array_module(device: str, comm: MPI.Comm) -> Any:
    """NumPy for "cpu"; CuPy for "gpu", on a GPU that this rank shares with as few others of its node as can be.

    Collective; TrainingError on every rank where one of them has no CuPy or no GPU.
    """
    if device == "cpu":
        return np
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = node.rank
    node.Free()
    module, problem = None, None
    try:
        module = importlib.import_module("cupy")
        module.cuda.Device(place % module.cuda.runtime.getDeviceCount()).use()
    except ImportError:
        problem = f"rank {comm.rank}: device gpu needs CuPy, which is not installed: {CUPY}"
    except RuntimeError as error:
        problem = f"rank {comm.rank}: device gpu finds no GPU: {error}"
    agree(comm, problem)
    return module

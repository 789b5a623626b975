"""Whether MPI has joined all processes that a launcher started: torchrun tells MPI nothing."""

from __future__ import annotations

import os

from mpi4py import MPI

from collectives.errors import of_caller
from mpips import world

TORCHRUN, PROCESSES = "TORCHELASTIC_RUN_ID", "WORLD_SIZE"


def see_joined() -> None:
    """RuntimeError where a launcher started more processes than MPI has ranks: each would train a model of its own."""
    ranks = MPI.COMM_WORLD.size
    cause = world.lost(os.environ, MPI.Get_library_version(), ranks)
    asked = os.environ.get(PROCESSES, "") if TORCHRUN in os.environ else ""
    if cause is None and asked.isdigit() and int(asked) > ranks:
        cause = (f"torchrun started {asked} processes ({PROCESSES}), and MPI has {ranks} rank{'s' * (ranks > 1)}: "
                 f"start with `mpips run -w {asked}` or `mpirun -n {asked}` instead of torchrun")  # fmt: skip
    if cause is not None:
        raise of_caller(RuntimeError(cause))

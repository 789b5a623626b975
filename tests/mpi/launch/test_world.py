"""The world that the launcher made."""

from __future__ import annotations

import os

from mpi4py import MPI


def test_every_rank_is_in_one_world() -> None:
    promised = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or "1"
    assert int(promised) == MPI.COMM_WORLD.size
    assert sorted(MPI.COMM_WORLD.allgather(MPI.COMM_WORLD.rank)) == list(range(MPI.COMM_WORLD.size))

"""A spoilt table of measurements stops no program: the first rank warns, and all go on."""

from __future__ import annotations

import warnings

import numpy as np
from mpi4py import MPI

import collectives
from collectives.tuner import table

WORLD = MPI.COMM_WORLD


def test_a_spoilt_table_is_warned_of_and_the_shipped_one_serves(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table.path().parent.mkdir(parents=True, exist_ok=True)
    table.path().write_text("{")
    comm, x = WORLD.Dup(), np.ones(1000, np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collectives.allreduce(x, comm)
    assert (x == WORLD.size).all()
    said = [str(warning.message) for warning in caught if "collectives.json" in str(warning.message)]
    assert len(said) == (WORLD.rank == 0), said
    assert all("mpips tune" in sentence for sentence in said)
    comm.Free()

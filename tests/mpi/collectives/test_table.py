"""The table in a job: a spoilt one stops no program, a forced one sends calls its way, `tune` measures another."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.tuner import table
from collectives.tuner import tune as command
from collectives.tuner.table import EVERYTHING, TuningTable
from tests.mpi.collectives.support import KINDS, share_nothing
from tests.mpi.sizes import only_on

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


@pytest.mark.slow
@only_on(2, 3)
def test_tune_on_one_node(monkeypatch):
    monkeypatch.setattr(command, "CROSS_SIZES", (1 << 20, 1 << 18))
    monkeypatch.setattr(command, "LINE_SIZES", (1 << 18, 1 << 20))
    home, parts = command.dup_with_table(WORLD, TuningTable()), []
    found = command.measure_table(home, TuningTable(), 1e-3, parts.append)
    home.Free()
    assert parts == ["slots", "cross memory", "lines through the times", "messages"]
    assert found.slots[WORLD.size].always <= found.slots[WORLD.size].ordinary <= command.SLOT_SIZES[-1]
    assert found.cross_memory[WORLD.size] in (EVERYTHING, *command.CROSS_SIZES)
    assert all(found.memory[f"{way} {WORLD.size}"].beta >= 0 for way in ("stages", "cross_memory", "direct"))
    assert not found.between


@pytest.mark.slow
@only_on(2, 3)
def test_tune_between_nodes(monkeypatch):
    share_nothing(monkeypatch)
    monkeypatch.setattr(command, "BETWEEN_SIZES", (1 << 6, 1 << 15))
    home = command.dup_with_table(WORLD, TuningTable())
    found = command.measure_table(home, TuningTable(), 1e-3)
    home.Free()
    assert set(found.between) == {f"{kind} {WORLD.size}x{WORLD.size}" for kind in KINDS}
    assert all(entries[-1].most == EVERYTHING for entries in found.between.values())
    assert not found.slots and not found.cross_memory

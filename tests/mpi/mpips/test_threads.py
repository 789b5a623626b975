"""Stores under the lower levels of threads that MPI may offer: one thread at a time calls MPI (fault 6)."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.choice import once
from tests.mpi.collectives.fault_table import Place
from tests.mpi.mpips.cells import KINDS
from tests.mpi.sizes import only_on

LEVELS = ["single", "serialized"]
MODULE = "tests.mpi.mpips.test_threads"
ROUNDS, LIMIT = 100, 120


def program(level: str, kind: str) -> None:
    """One rank: blocking calls while others are under way, and meetings in between."""
    import mpi4py

    mpi4py.rc.thread_level = level
    import mpips

    name, options = KINDS[kind]
    kv = mpips.create(name, **options)
    keys = ["a", "b", "c"]
    kv.init(keys, [np.zeros(5000, np.float32)] * 3)
    outs = [np.empty(5000, np.float32) for _ in keys]
    for round_ in range(ROUNDS):
        values = [np.full(5000, round_ + place, np.float32) for place in range(3)]
        handles = [kv.ipushpull(key, value, out) for key, value, out in zip(keys[:2], values, outs)]
        kv.pushpull("c", values[2], out=outs[2])
        if round_ % 10 == 0:
            kv.barrier()
        for handle in handles:
            handle.wait()
        wanted = [kv.num_workers * (round_ + place) for place in range(3)]
        assert [set(out.tolist()) for out in outs] == [{float(value)} for value in wanted], (round_, wanted)
    kv.close()


@pytest.mark.core(1)
@only_on(1)
@once(level=LEVELS, kind=["dist_sync", "mpi_sync-2", "mpi_sync-0"])
def test_calls_under_way_and_blocking_ones_share_mpi(kind: str, level: str) -> None:
    code, said = Place(sys.executable, "", MODULE, (3, 4)).run([level, kind], LIMIT)
    assert code == 0, said[-2000:]


if __name__ == "__main__":
    program(*sys.argv[1:])

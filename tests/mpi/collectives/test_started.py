"""What has been started, and forgotten."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.api import begin

N = 1 << 20


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("one_shot", [False, True])
def test_a_started_call_that_nobody_waits_for_keeps_its_arrays(one_shot):
    """Rank 0 forgets it before the others come to it; it goes on in rank 0's next call."""
    comm = MPI.COMM_WORLD.Dup()
    collectives.allreduce(np.ones(3), comm)

    def start():
        x = np.ones(N)
        if one_shot:
            begin("allreduce", x, comm)
        else:
            collectives.plan("allreduce", x, comm).start()

    if comm.rank == 0:
        start()
        gc.collect()
        comm.Barrier()
    else:
        x = np.ones(N)
        if one_shot:
            comm.Barrier()
            collectives.allreduce(x, comm)
        else:
            plan = collectives.plan("allreduce", x, comm)
            comm.Barrier()
            plan()
        assert (x == comm.size).all()
    few = np.ones(3)
    collectives.allreduce(few, comm)
    assert (few == comm.size).all()
    comm.Free()

"""A communicator that is given back takes with it what was sent on it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

from collectives.fabric.requests import part
from tests.mpi.sizes import only_on

WORLD = MPI.COMM_WORLD


@pytest.mark.parametrize("size", [1, 300_000])
@only_on(2, 3, 5)
def test_a_message_that_nobody_received_does_not_reach_a_later_communicator(size):
    data = np.full(size, WORLD.rank, np.uint8)
    for late in range(WORLD.size):
        old = WORLD.Dup()
        if WORLD.rank == late:
            time.sleep(0.05)
        sends = [old.Isend(data, to, tag) for to in range(WORLD.size) if to != WORLD.rank for tag in (1, 2)]
        part(old)
        MPI.Request.Waitall(sends)
        new = WORLD.Dup()
        new.Barrier()
        time.sleep(0.02)
        stale = np.array([new.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)])
        new.Allreduce(MPI.IN_PLACE, stale, MPI.LOR)
        new.Free()
        assert not stale[0]


@only_on(3)
def test_ranks_that_share_a_new_communicator_hear_one_another():
    """Where messages are counted, one that came late would hold up all after it."""
    for _ in range(20):
        old = WORLD.Dup()
        sends = [old.Isend(bytearray(8), to, 1) for to in range(WORLD.size) if to != WORLD.rank]
        part(old)
        MPI.Request.Waitall(sends)
        new = WORLD.Dup()
        sums = np.array([WORLD.rank])
        new.Allreduce(MPI.IN_PLACE, sums)
        part(new)
        assert sums[0] == WORLD.size * (WORLD.size - 1) // 2

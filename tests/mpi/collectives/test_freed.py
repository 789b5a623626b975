"""Communicators that are given back: what was made on them says so, and they take with them what was sent on them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.fabric.requests import close_collectively
from tests.mpi.collectives.support import RANK, WORLD, P, sentence, still_works
from tests.mpi.sizes import only_on


@pytest.mark.parametrize("algorithm", ["auto", "native", "ring"])
def test_what_was_made_on_a_freed_communicator_is_refused(algorithm):
    comm = WORLD.Dup()
    x = np.ones(5000)
    plan, started = (collectives.plan("allreduce", array, comm, algorithm=algorithm) for array in (x, np.ones(5000)))
    plan()
    comm.Free()
    calls = (lambda: collectives.plan("allreduce", x, comm), lambda: collectives.allreduce(x, comm))
    for use in (plan, plan.start, *calls):
        assert "freed" in sentence(use)
    plan.free()
    started.free()
    still_works(WORLD)


@pytest.mark.mpi(min_size=2)
def test_a_started_plan_on_a_freed_communicator():
    comm = WORLD.Dup()
    plan = collectives.plan("allreduce", np.ones(3), comm)
    plan()
    WORLD.Barrier()
    if RANK == 0:
        plan.start()
    comm.Free()
    assert "freed" in sentence(plan.wait if RANK == 0 else plan)
    still_works(WORLD)


@pytest.mark.mpi(min_size=2)
def test_a_communicator_freed_while_another_rank_is_still_in_the_call():
    """What stands on the memory of a rank that has left stays until all have read it."""
    wrong = 0
    for turn in range(30):
        comm = WORLD.Dup()
        x = np.full(1000, RANK + 1.0)
        collectives.allreduce(x, comm)
        comm.Free()
        if turn % P == RANK:
            kept = [collectives.empty(1 << 20, np.uint8) for _ in range(2)]  # may lie where the memory lay
            for one in kept:
                one[:] = 255
        wrong += int((x != P * (P + 1) // 2).sum())
    assert not wrong


@only_on(2, 3)
@pytest.mark.parametrize("failed", [False, True])
def test_a_communicator_is_freed_without_waiting_for_the_others(failed):
    """The others may have freed it long ago, or free another one first; failed ones too."""
    comms = [WORLD.Dup() for _ in range(2)]
    for comm in comms:
        assert (collectives.allreduce(np.ones(10), comm) == P).all()
        if failed:
            sentence(lambda comm=comm: collectives.allreduce(np.ones(1 + RANK), comm))
    for comm in comms if RANK else reversed(comms):
        comm.Free()
    still_works(WORLD)


@only_on(2, 3)
def test_a_communicator_is_freed_though_a_message_is_yet_to_be_received():
    comm = WORLD.Dup()
    collectives.allreduce(np.ones(10), comm)
    word = np.zeros(1)
    request = comm.Irecv(word, 0, 5) if RANK == P - 1 else None
    if RANK == 0:
        comm.Send(np.ones(1), P - 1, 5)
    comm.Free()
    if request is not None:
        request.Wait()
        assert word[0] == 1


@pytest.mark.parametrize("size", [1, 300_000])
@only_on(2, 3, 5)
def test_a_message_that_nobody_received_does_not_reach_a_later_communicator(size):
    data = np.full(size, WORLD.rank, np.uint8)
    for late in range(WORLD.size):
        old = WORLD.Dup()
        if WORLD.rank == late:
            time.sleep(0.05)
        sends = [old.Isend(data, to, tag) for to in range(WORLD.size) if to != WORLD.rank for tag in (1, 2)]
        close_collectively(old)
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
        close_collectively(old)
        MPI.Request.Waitall(sends)
        new = WORLD.Dup()
        sums = np.array([WORLD.rank])
        new.Allreduce(MPI.IN_PLACE, sums)
        close_collectively(new)
        assert sums[0] == WORLD.size * (WORLD.size - 1) // 2

"""Communicators that the user frees: at once, and what was made on them says so."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest
from collectives.transport import desks, eager
from mpi4py import MPI

import collectives
from collectives.errors import MismatchError
from tests.mpi.collectives.support import RANK, TAG, WORLD, P, sentence, still_works
from tests.mpi.sizes import only_on


@pytest.mark.mpi
def test_freed_communicator():
    comm = WORLD.Dup()
    x = np.ones(3)
    collectives.allreduce(x, comm)
    comm.Free()
    assert "freed" in sentence(lambda: collectives.allreduce(x, comm))
    still_works(WORLD)


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["auto", "native", "ring"])
def test_a_plan_on_a_freed_communicator(algorithm):
    comm = WORLD.Dup()
    x = np.ones(5000)
    plan, started = (collectives.plan("allreduce", array, comm, algorithm=algorithm) for array in (x, np.ones(5000)))
    plan()
    comm.Free()
    for use in (plan, plan.start, lambda: collectives.plan("allreduce", x, comm)):
        assert "freed" in sentence(use)
    plan.free()
    started.free()
    still_works(WORLD)


@pytest.mark.mpi
@only_on(1, 2, 3)
@pytest.mark.parametrize("freed", [False, True])
@pytest.mark.parametrize("algorithm", ["auto", "native", "ring"])
@pytest.mark.parametrize("n", [10, 100_000 * P])
def test_a_plan_that_nobody_keeps_is_gone_at_once(n, algorithm, freed):
    comm = WORLD.Dup()
    plan = collectives.plan("allreduce", np.ones(n), comm, algorithm=algorithm)
    for _ in range(3):
        plan()
    kept = weakref.ref(plan), weakref.ref(plan._runner)
    if freed:
        plan.free()
    gc.disable()
    try:
        del plan
        gone = [one() is None for one in kept]
    finally:
        gc.enable()
    comm.Free()
    assert gone == [True, True]


@pytest.mark.mpi
def test_a_started_plan_on_a_freed_communicator():
    comm = WORLD.Dup()
    x = np.ones(3)
    plan = collectives.plan("allreduce", x, comm)
    plan()
    WORLD.Barrier()
    if RANK == 0:
        plan.start()
    comm.Free()
    said = ""
    try:
        if RANK == 0:
            plan.wait()
        else:
            plan()
    except MismatchError as error:
        said = str(error)
    assert all("freed" in words for words in WORLD.allgather(said)) or P == 1
    still_works(WORLD)


@pytest.mark.mpi(min_size=2)
def test_a_communicator_freed_while_another_rank_still_reads(monkeypatch):
    """What stands on the desk of the rank that has left must stay until all have read it."""
    comm = WORLD.Dup()
    x, takes, waited = np.empty(1000), eager.takes, []

    def wait():
        until = time.monotonic() + 5  # should freeing ever wait for the others
        while armed and not WORLD.Iprobe(0, TAG) and time.monotonic() < until:
            time.sleep(0.01)
        waited.append(armed)

    monkeypatch.setattr(eager, "takes", lambda *arguments: ((wait, ()), *takes(*arguments)))
    armed = False
    collectives.allreduce(x, comm)
    x[:] = RANK + 1
    armed = RANK == 1
    collectives.allreduce(x, comm)
    comm.Free()
    kept = []
    if RANK == 0:
        collectives.allreduce(np.ones(3), MPI.COMM_SELF)  # of the session nothing is kept
        gc.collect()
        for _ in range(4):
            kept.append(collectives.empty(desks.desk_bytes(1), np.uint8))
            kept[-1][:] = 255
        WORLD.Send(b"1", 1, TAG)
    elif RANK == 1:
        WORLD.Recv(bytearray(1), 0, TAG)
    right = waited[:2] == [False, armed] and bool((x == P * (P + 1) // 2).all())
    assert WORLD.allreduce(right, MPI.LAND)


@only_on(2, 3)
def test_a_communicator_is_freed_without_waiting_for_the_others():
    """The others may have freed it long ago, or free another one first, or be in an error of their own."""
    comms = [WORLD.Dup() for _ in range(2)]
    for comm in comms:
        assert (collectives.allreduce(np.ones(10), comm) == WORLD.size).all()
    for comm in comms if WORLD.rank else reversed(comms):
        comm.Free()


@only_on(2, 3)
def test_a_communicator_is_freed_though_a_message_is_yet_to_be_received():
    comm = WORLD.Dup()
    collectives.allreduce(np.ones(10), comm)
    word = np.zeros(1)
    other = WORLD.size - 1
    request = comm.Irecv(word, 0, 5) if WORLD.rank == other else None
    if WORLD.rank == 0:
        comm.Send(np.ones(1), other, 5)
    comm.Free()
    if request is not None:
        request.Wait()
        assert word[0] == 1

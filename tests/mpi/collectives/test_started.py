"""What has been started, and forgotten."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.api import begin
from tests.mpi.collectives.support import NODES, fresh, hear, polled

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


@pytest.mark.parametrize("n", [50, 100_000])
@pytest.mark.parametrize("nodes", NODES)
def test_plans_that_were_started_are_carried_out_in_turn(nodes, n):
    """Others are made, and run, meanwhile; then fast paths are taken again."""
    with fresh(nodes) as comm:
        few = np.ones(1)
        short = collectives.plan("allreduce", few, comm)
        short(), short()
        xs = [np.full(n, float(number + comm.rank)) for number in range(5)]
        plans = [collectives.plan("allreduce", x, comm) for x in xs]
        for plan in plans:
            plan.start()
        short()
        last = collectives.plan("allreduce", np.ones(n), comm)
        for plan in reversed(plans):
            plan.wait()
        short()
        assert (last() == comm.size).all() and few[0] == comm.size**4
        assert all((x == sum(number + rank for rank in range(comm.size))).all() for number, x in enumerate(xs))


@pytest.mark.mpi(min_size=2)
def test_what_was_started_beside_a_call_that_failed_hears_so_at_once():
    with fresh("one node") as comm:
        plans = [collectives.plan("allreduce", np.ones(1000), comm) for _ in range(2)]
        for plan in plans:
            plan.start()
        comm.Barrier()  # who still makes its plans would hear of it there
        bad = hear(lambda: collectives.allreduce(np.ones(4 + comm.rank), comm))
        heard = [hear(lambda plan=plan: polled(plan)) for plan in plans]
        assert {one.sentence for one in heard if one.error} <= {bad.sentence}
        assert all(one.ended - one.begun < 5 for one in heard)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("nodes", NODES)
def test_a_plan_of_messages_that_was_started_is_neither_run_nor_freed_meanwhile(nodes):
    with fresh(nodes) as comm:
        x = np.ones(1000)
        plan = collectives.plan("allreduce", x, comm, algorithm="ring")
        plan.start()
        if nodes == "a node for each rank":
            with pytest.raises(collectives.CollectiveError, match="was started"):
                plan()
        plan.free()
        plan.wait()
        assert (x == comm.size).all()
        with pytest.raises(collectives.CollectiveError, match="has been freed"):
            plan()
        y = np.ones(3)
        collectives.allreduce(y, comm)
        assert (y == comm.size).all()


@pytest.mark.mpi(min_size=2)
def test_whatever_an_argument_raises_is_this_ranks_alone():
    class Refusing:
        def __dlpack__(self, **given):
            raise BufferError("not to be had")

        def __dlpack_device__(self):
            return 1, 0

    with fresh("one node") as comm:
        if comm.rank == 0:
            for bad in (Refusing(), np.float64(3.0), [np.float64(3.0)], "x"):
                with pytest.raises((BufferError, TypeError, ValueError)):
                    collectives.allreduce(bad, comm)
        x = np.ones(3)
        collectives.allreduce(x, comm)
        assert (x == comm.size).all()

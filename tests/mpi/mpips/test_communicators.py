"""Communicators are scarce (MPICH has 2,048 in a process), and none is left behind: by stores or by collectives that
end well, or fail."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from mpi4py import MPI

import collectives
import mpips
from collectives.fabric.requests import any_outstanding, collect_closed
from mpips.store.world import implementation
from tests.choice import once
from tests.mpi.collectives.support import NODES, patient
from tests.mpi.sizes import only_on

WORLD = MPI.COMM_WORLD
RANK, P = WORLD.rank, WORLD.size
FEW = 1 << 12
TIMES = 6
pytestmark = [
    only_on(3),
    pytest.mark.skipif(implementation(MPI.Get_library_version()) != "mpich", reason="others have too many to count"),
]
STORES = [
    ("dist_sync", {"servers": 0}),
    ("dist_sync", {"servers": 1}),
    ("mpi_sync", {"servers": 1}),
    ("dist_async", {"servers": 1}),
    ("mpi_sync", {"servers": 1, "shared_memory": False}),
]


def left():
    """How many communicators this process may still make. What other tests have broken may hold some for ever."""
    until = time.monotonic() + 1
    while (
        not collect_closed(0.1) or any_outstanding()
    ) and time.monotonic() < until:  # a request holds its communicator
        pass
    WORLD.Barrier()
    before = MPI.COMM_SELF.Get_errhandler()
    MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
    made = []
    with contextlib.suppress(MPI.Exception):
        while len(made) < FEW:
            made.append(MPI.COMM_SELF.Dup())
    for comm in made:
        comm.Free()
    MPI.COMM_SELF.Set_errhandler(before)
    WORLD.Barrier()
    return len(made)


def come_back(before):
    """Whether as many may be made as before, on all ranks, after a while."""
    until = time.monotonic() + 20
    while not WORLD.allreduce(left() >= before, MPI.LAND):
        if WORLD.allreduce(time.monotonic() > until, MPI.LOR):
            return False
    return True


def interrupted():
    """What a worker does that is interrupted."""
    raise KeyboardInterrupt
    yield


def store(kind, options, end):
    """One store's life."""
    try:
        kv = mpips.create(kind, timeout_seconds=30, **options)
    except SystemExit:
        return
    x = np.ones(100)
    kv.init("w", x)
    if kv.layout.asynchronous:
        kv.set_optimizer("sgd", learning_rate=0.1)
    if end != "closed":
        with contextlib.suppress(mpips.StoreError, KeyboardInterrupt):
            kv.barrier()
            if kv.rank == 0:
                kv.worker.run("a mistake", interrupted())
            while True:
                kv.pushpull("w", x, x)
    if end == "recovered":
        kv.recover()
        kv.pushpull("w", x, x)
    kv.close()


@once(**{"kind, options": STORES}, end=["closed", "recovered", "failed"])
def test_a_store_leaves_none_behind(kind, options, end):
    store(kind, options, end)
    before = left()
    for _ in range(TIMES):
        store(kind, options, end)
    assert come_back(before)


@once(end=["freed", "failed", "renewed"], nodes=["one node", "a node for each rank"], algorithm=["auto", "ring"])
def test_collectives_leave_none_behind(nodes, algorithm, end):
    def once():
        comm = NODES[nodes](WORLD.Dup())
        patient(comm, 30, 30)
        collectives.allreduce(np.ones(1000), comm)
        if end != "freed":
            with pytest.raises(collectives.MismatchError):
                collectives.allreduce(np.ones(100_000 + (RANK == 0)), comm, algorithm=algorithm)
        if end == "renewed":
            collectives.renew(comm)
            assert (collectives.allreduce(np.ones(10), comm) == P).all()
        comm.Free()

    once()
    before = left()
    for _ in range(TIMES):
        once()
    assert come_back(before)

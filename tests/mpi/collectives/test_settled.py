"""Calls whose ways have been tried: right too where arrays, or what is under way, change between one and the next."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext

import numpy as np
import pytest
from collectives.choice import TRIALS
from collectives.session import session
from collectives.transport import reach

import collectives
from collectives.errors import CollectiveError
from collectives.plan import TRY_BYTES
from tests.mpi.collectives.support import RANK, P
from tests.mpi.delays import put_off
from tests.mpi.sizes import only_on

TRIED = 3 * TRIALS + 4  # calls after which a way is kept


@pytest.fixture
def late():
    """The last rank is put off now and then, so that the others are ahead of it anywhere in an operation."""
    with put_off(0.004, 0.0061) if RANK == P - 1 else nullcontext():
        yield


@pytest.mark.mpi
@only_on(2, 3)
def test_arrays_of_two_sorts_by_turns_called_and_started(comm, late):
    """The last rank calls with an ordinary array and starts with a node-shared one; the others have one plan."""
    n = 60_000
    ordinary = np.empty(n, np.float32)
    shared = collectives.empty(n, np.float32) if RANK == P - 1 else ordinary
    called = collectives.plan("allreduce", ordinary, comm)
    second = collectives.plan("allreduce", shared, comm)
    begun, wrong = second if RANK == P - 1 else called, 0
    for turn in range(150):
        ordinary[:] = RANK + turn
        called()
        wrong += int((ordinary != P * (P - 1) // 2 + P * turn).sum())
        shared[:] = RANK - turn
        begun.start()
        begun.wait()
        wrong += int((shared != P * (P - 1) // 2 - P * turn).sum())
    assert wrong == 0


@pytest.mark.mpi
@only_on(2, 3)
def test_a_call_that_failed_while_ways_were_tried_can_be_made_when_one_is_kept(comm):
    x, y = (np.ones(TRY_BYTES // 4 * P, np.float32) for _ in range(2))
    failing, other = collectives.plan("allreduce", x, comm), collectives.plan("allreduce", y, comm)
    for _ in range(4):
        failing()
    with pytest.raises(CollectiveError, match="different collectives"):
        collectives.broadcast(np.ones(5, np.float32), comm) if RANK == 0 else failing()
    for _ in range(TRIED):
        y[:] = 1
        other()
    assert (y == P).all()
    x[:] = RANK
    failing()
    assert (x == P * (P - 1) // 2).all()


@pytest.mark.mpi
@only_on(2, 3)
def test_the_kernel_may_copy_less_than_it_is_asked_for(comm, monkeypatch):
    if not session(comm).room.pids:
        pytest.skip("the kernel does not copy between the memories of several ranks here")

    def a_page(call):
        def copies(pid, mine, count, others, other_count, flags):
            here, there = ((ctypes.c_size_t * 2).from_address(at) for at in (mine, others))
            nbytes = min(here[1], 4096)
            here, there = ((ctypes.c_size_t * 2)(at[0], nbytes) for at in (here, there))
            return call(pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, flags)

        return copies

    monkeypatch.setattr(reach, "_FETCH", a_page(reach._FETCH))
    monkeypatch.setattr(reach, "_DELIVER", a_page(reach._DELIVER))
    n = 1_500_000 * P  # a thousand pages and more in one copy
    x, out = np.empty(n, np.float32), np.empty(n, np.float32)
    plan = collectives.plan("alltoall", x, comm, out=out)
    for turn in range(3):  # by stages, by reach, by the MPI
        x[:] = np.arange(n) % 1000 + RANK + turn
        plan()
        blocks = [np.arange(n)[RANK * n // P : (RANK + 1) * n // P] % 1000 + rank + turn for rank in range(P)]
        assert (out == np.concatenate(blocks)).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["allreduce", "reduce", "broadcast"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_rank_brings_a_new_array_of_either_sort_by_chance(comm, kind, seed):
    n, chance, wrong = 100_000, np.random.default_rng([seed, RANK]), []
    base = np.arange(n, dtype=np.float64) % 997
    for turn in range(200):
        array = collectives.empty(n, np.float64) if chance.random() < 0.3 else np.empty(n)
        array[:] = base * (RANK + 1) + turn
        getattr(collectives, kind)(array, comm)
        wanted = base * (P * (P + 1) // 2) + P * turn if kind != "broadcast" else base + turn
        if (kind != "reduce" or RANK == 0) and not np.array_equal(array, wanted):
            wrong.append(turn)
        array[:] = -5
    assert not wrong

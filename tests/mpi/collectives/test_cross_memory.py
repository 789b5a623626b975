"""Ordinary arrays on one node by slots, by stages and by the kernel's copies: the same bits; and copies that fail."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import partial

import numpy as np
import pytest

import collectives
from collectives.communicator import communicator
from collectives.fabric import process_memory
from collectives.node import program
from collectives.tuner import tune as command
from tests.mpi.collectives.support import KINDS, RANK, WORLD, P, block, fresh, make, sentence, started, still_works
from tests.mpi.sizes import either_mpi, only_on

BLOCK = 1 << 10
ROOT = P // 2
OPS = {"sum": np.add, "max": np.maximum}


@pytest.fixture
def forced(monkeypatch):
    """forced(way): a communicator on which all ordinary arrays go that way, in blocks of 1 KiB."""
    monkeypatch.setattr(program, "BLOCK_BYTES", BLOCK)
    made = []

    def opened(way):
        made.append(command.dup_with_table(WORLD, command.forced_tables(P)[way]))
        if way == "cross_memory" and not communicator(made[-1]).board.memory.reachable:
            pytest.skip("the kernel does not copy between the memories of several ranks here")
        return made[-1]

    yield opened
    for comm in made:
        comm.Free()


def expected(kind, turn, n, dtype, op):
    """What this rank gets: sums in the order of the ranks."""
    mine = block(n)
    every = [values(rank, turn, n, dtype) for rank in range(P)]
    if kind in ("allreduce", "reduce", "reduce_scatter"):
        total = every[0]
        for other in every[1:]:
            total = OPS[op](total, other)
        return total[mine] if kind == "reduce_scatter" else total
    if kind == "broadcast":
        return every[ROOT]
    if kind == "allgather":
        return np.concatenate([every[r][block(n, r)] for r in range(P)])
    return np.concatenate([vector[mine] for vector in every])


def values(rank, turn, n, dtype):
    return (np.random.default_rng([rank, turn]).standard_normal(n) * 50).astype(dtype)


def wrong(comm, kind, n, in_place, array="ordinary", dtype="float32", op="sum"):
    """Whether this rank gets anything but the expected bits, in one of two turns."""
    mine = block(n)
    own = mine.stop - mine.start
    wide = n if in_place or kind != "allgather" else own
    x = make(array, wide, dtype)
    out = None if in_place else make(array, {"reduce_scatter": own, "alltoall": own * P}.get(kind, n), dtype)
    rooted, moving = kind in ("broadcast", "reduce"), kind in ("allgather", "alltoall")
    words = {"root": ROOT} if rooted else {} if moving else {"op": op}
    for turn in range(2):
        given = values(RANK, turn, n, dtype)
        x[:] = given if wide == n else given[mine]
        result = getattr(collectives, kind)(x, comm, out=out, **words)
        right = result.tobytes() == expected(kind, turn, n, dtype, op).tobytes()
        if not right and (kind != "reduce" or RANK == ROOT):
            return True
    return False


@either_mpi
@only_on(1, 2, 3, 5)
@pytest.mark.parametrize("way", ["slots", "stages", "cross_memory"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_the_sum_in_order(forced, kind, way):
    comm, found = forced(way), []
    for n in (0, 1, P - 1, P + 1, 5003, BLOCK // 2 * P + 7):
        for in_place in (False, True):
            for array in ("ordinary", "mixed"):
                if (kind != "alltoall" or not in_place or n % P == 0) and wrong(comm, kind, n, in_place, array):
                    found.append((n, in_place, array))
    assert not found


@either_mpi
@only_on(1, 2, 3)
@pytest.mark.parametrize("way", ["stages", "cross_memory"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "int64"])
def test_other_elements_and_operations(forced, dtype, way):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    comm = forced(way)
    for kind in ("allreduce", "reduce_scatter", "allgather"):
        assert not any(wrong(comm, kind, 3001, kind == "allreduce", dtype=dtype, op=op) for op in OPS)


def test_where_the_kernel_forbids_it_stages_serve(monkeypatch, forced):
    monkeypatch.setattr(process_memory, "_READ", None)
    with fresh() as comm:
        assert not communicator(comm).board.memory.reachable
        assert not [kind for kind in KINDS if wrong(comm, kind, 200_003, False)]


@only_on(2, 3)
def test_the_kernel_may_copy_less_than_it_is_asked_for(monkeypatch, forced):
    def a_page(call, pid, mine, count, others, other_count, flags):
        here, there = ((ctypes.c_size_t * 2).from_address(at) for at in (mine, others))
        nbytes = min(here[1], 4096)
        here, there = ((ctypes.c_size_t * 2)(at[0], nbytes) for at in (here, there))
        return call(pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, flags)

    comm = forced("cross_memory")
    for name in ("_READ", "_WRITE"):
        monkeypatch.setattr(process_memory, name, partial(a_page, getattr(process_memory, name)))
    assert not wrong(comm, "alltoall", 30_000 * P, False)
    assert not wrong(comm, "allreduce", 30_000 * P, True)


def test_some_ranks_exchange_in_place(forced):
    """Which nobody may reach into, while others call with out=."""
    comm = forced("cross_memory")
    for _ in range(3):
        assert not wrong(comm, "alltoall", 1001 * P, in_place=RANK == 0)


@only_on(2, 3)
@pytest.mark.parametrize("run", [collectives.Plan.__call__, started])
def test_a_copy_that_fails_is_heard_of_by_all(monkeypatch, forced, run):
    comm, move, armed = forced("cross_memory"), process_memory.KernelCopy.__call__, []

    def failing(self):
        if armed and RANK == 1 and self.pid != os.getpid():
            raise process_memory.OutOfReach(self.pid, errno.EPERM)
        move(self)

    monkeypatch.setattr(process_memory.KernelCopy, "__call__", failing)
    x = np.full(BLOCK * P, RANK + 1, np.float32)
    plan = collectives.plan("allreduce", x, comm)
    plan()
    armed.append(True)
    said = sentence(lambda: run(plan), collectives.CollectiveError)
    assert "rank 1 cannot reach the memory of rank" in said and "Operation not permitted" in said
    assert sentence(plan, collectives.CollectiveError) == said
    armed.clear()
    collectives.renew(comm)
    still_works(comm)

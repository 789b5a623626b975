"""Sums have the same bits, whichever ranks have compiled kernels."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.communicator import communicator
from collectives.kernels import engine, sums
from tests.choice import pairwise
from tests.mpi.collectives.support import NODES, P, block, fresh
from tests.mpi.sizes import either_mpi

pytestmark = pytest.mark.skipif(engine.status().engine != "numba", reason=engine.status().reason)
N = 300_001
"""Elements; ordinary vectors of them pass through stages."""
CROSSING = 2_200_001
"""Elements of 16 bits that the kernel copies between processes."""
SPECIAL = [0.0, -0.0, 6e-8, 1e-40, 65504.0, -65504.0, np.inf, -np.inf, np.nan]


@pytest.fixture(scope="module", params=NODES)
def comm(request: pytest.FixtureRequest) -> Iterator[MPI.Intracomm]:
    with fresh(request.param) as made:
        sums.prepare(np.add, np.dtype(np.float16), 2, 1 << 20)  # Numba is loaded, so that float32 is compiled, too
        yield made


def vector(rank: int, n: int, dtype: str, make: Callable[..., Any]) -> Any:
    """What a rank brings: a few numbers that differ in size, and special ones."""
    rng = np.random.default_rng(rank)
    x = make(n, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    with np.errstate(all="ignore"):
        x[:] = rng.normal(size=n) * 10.0 ** (rank % 3)
        x[rng.integers(n, size=500)] = rng.choice(SPECIAL, 500).astype(x.dtype)
    return x


def bits(x: Any) -> bytes:
    return np.where(np.isnan(x.astype(np.float64)), 1, x.view(f"u{x.itemsize}")).tobytes()


@either_mpi
@pairwise(
    dtype=["float16", "bfloat16", "float32"],
    op=["sum", "mean", "prod"],
    in_place=[True, False],
    make=[np.empty, collectives.empty],
    kind=["allreduce", "reduce_scatter", "reduce"],
    n=[20_000, N],
)
def test_bits_are_the_same_with_and_without_kernels(comm, kind, dtype, op, make, in_place, n):
    got = set()
    for serve in (False, True, comm.rank % 2 == 0):
        x = vector(comm.rank, n, dtype, make)
        out = None
        if not in_place:
            out = make(block(n, comm.rank).stop - block(n, comm.rank).start if kind == "reduce_scatter" else n, x.dtype)
        with contextlib.nullcontext() if serve else engine.numpy_only(), np.errstate(all="ignore"):
            result = getattr(collectives, kind)(x, comm, op=op, out=out)
        if kind != "reduce" or comm.rank == 0:
            got.add(bits(result))
        engine.load_all()
        if kind == "allreduce":
            assert len(set(comm.allgather(bits(result)))) == 1
    assert len(got) == (kind != "reduce" or comm.rank == 0)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_vectors_that_cross_memory_have_the_same_bits(op):
    with fresh() as comm:
        given = vector(comm.rank, CROSSING, "bfloat16", np.empty)
        x = given.copy()
        plan = collectives.plan("allreduce", x, comm, op=op)
        way = getattr(plan.runner, "runner", plan.runner).way  # behind one that records times
        assert way == "cross_memory" or not communicator(comm).board.memory.reachable
        engine.load_all()
        got = set()
        for serve in (False, True, comm.rank % 2 == 0):
            x[:] = given
            with contextlib.nullcontext() if serve else engine.numpy_only(), np.errstate(all="ignore"):
                plan()
            got.update(comm.allgather(zlib.crc32(bits(x))))
        plan.free()
    assert len(got) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_lists_have_the_same_bits(comm, dtype):
    got = set()
    for serve in (False, True, comm.rank % 2 == 0):
        x = [vector(comm.rank * 3 + i, N, dtype, np.empty) for i in range(3)]
        with contextlib.nullcontext() if serve else engine.numpy_only(), np.errstate(all="ignore"):
            collectives.allreduce(x, comm, op="mean")
        engine.load_all()
        got.add(bits(x[0]))
        assert len(set(comm.allgather(bits(x[2])))) == 1
    assert len(got) == 1


def test_large_vectors_of_16_bits_ask_for_a_kernel_when_planned():
    if P == 1:
        pytest.skip("one rank adds nothing")
    x = np.ones(N, np.float16)
    plan = collectives.plan("allreduce", x)
    engine.load_all()
    kernels = [kernel for kernel in engine._engine._kernels.values() if kernel.name == f"+ of {P} float16"]
    assert [kernel.failure for kernel in kernels] == [""]
    plan()
    assert (x == P).all()
    plan.free()

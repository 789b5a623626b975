"""Cutting a vector into calls changes no bit: on one node, between nodes, and between nodes of several ranks."""

import itertools

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from tests.choice import pairwise
from tests.mpi.collectives.support import Alone, Pairs
from tests.mpi.sizes import either_mpi

N = 70_001
CUTS = (0, 1, 3, 10, 300, 2_500, 12_000, 40_000, N)


@pytest.fixture(scope="module", params=[MPI.Intracomm, Alone, Pairs])
def comm(request):
    made = request.param(MPI.COMM_WORLD.Dup())
    yield made
    made.Free()


def values(comm, shared, dtype="float32"):
    x = collectives.empty((N,), dtype) if shared else np.empty(N, dtype)
    x[:] = np.random.default_rng(comm.rank).normal(size=N) * 10.0 ** (comm.rank % 3)
    return x


@either_mpi
@pairwise(in_place=[True, False], shared=[False, True], algorithm=["reproducible", "halving_doubling", "direct"])
def test_pieces_have_the_bits_of_the_whole(comm, algorithm, shared, in_place):
    whole = collectives.allreduce(values(comm, shared), comm, algorithm=algorithm)
    x = values(comm, shared)
    out = x if in_place else np.empty_like(x)
    for start, stop in itertools.pairwise(CUTS):
        there = None if in_place else out[start:stop]
        collectives.allreduce(x[start:stop], comm, algorithm=algorithm, out=there)
    assert out.tobytes() == whole.tobytes()


def test_memory_adds_in_the_order_of_the_ranks():
    comm = MPI.COMM_WORLD
    everybody = [np.random.default_rng(rank).normal(size=N).astype(np.float32) for rank in range(comm.size)]
    expected = np.cumsum(everybody, axis=0, dtype=np.float32)[-1]
    for make in (np.empty, collectives.empty):
        for n in (10, 3_000, N):
            x = make(n, np.float32)
            x[:] = everybody[comm.rank][:n]
            assert collectives.allreduce(x, comm).tobytes() == expected[:n].tobytes()

"""`hierarchical` over nodes: shared memory inside, messages between. The nodes are pretended: pairs of ranks."""

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from tests.choice import once
from tests.mpi.collectives.support import Pairs
from tests.mpi.sizes import either_mpi


@pytest.fixture(scope="module")
def comm():
    pairs = Pairs(MPI.COMM_WORLD.Dup())
    yield pairs
    pairs.Free()


EVEN = pytest.mark.skipif(MPI.COMM_WORLD.size % 2 or MPI.COMM_WORLD.size < 4, reason="needs 4, 6, ... ranks")


def vector(n, dtype, shared, rank):
    x = collectives.empty((n,), dtype) if shared else np.empty(n, dtype)
    x[:] = np.arange(n) % 13 + rank
    return x


@either_mpi
@EVEN
@once(
    algorithm=["hierarchical", "hierarchical(between=halving_doubling)"],
    shared=[False, True],
    n=[0, 1, 5, 1000, 700_001],
)
def test_the_sum_comes_out_in_place_and_beside(comm, algorithm, shared, n):
    p, x = comm.size, vector(n, np.float32, shared, comm.rank)
    total = np.arange(n) % 13 * p + p * (p - 1) // 2
    out = vector(n, np.float32, shared, 0)
    before = x.copy()
    collectives.allreduce(x, comm, algorithm=algorithm, out=out)
    np.testing.assert_array_equal(out, total)
    np.testing.assert_array_equal(x, before)
    assert collectives.allreduce(x, comm, algorithm=algorithm) is x
    np.testing.assert_array_equal(x, total)


@EVEN
@pytest.mark.parametrize("op", ["mean", "max", "prod"])
def test_other_operations(comm, op):
    p, x = comm.size, vector(1000, np.float64, False, comm.rank)
    base = np.arange(1000) % 13
    expected = {"mean": base + (p - 1) / 2, "max": base + p - 1, "prod": np.prod([base + r for r in range(p)], axis=0)}
    np.testing.assert_allclose(collectives.allreduce(x, comm, op=op, algorithm="hierarchical"), expected[op])


@EVEN
def test_a_plan_runs_again_and_beside_compute(comm):
    x = vector(600_000, np.float32, False, 0)
    plan = collectives.plan("allreduce", x, comm, algorithm="hierarchical")
    for _ in range(3):
        x[:] = comm.rank
        plan.start()
        while not plan.test():
            pass
        assert plan.wait() is x
        assert (x == comm.size * (comm.size - 1) / 2).all()
    plan.free()


@EVEN
def test_all_ranks_get_the_same_bits(comm):
    x = np.random.default_rng(comm.rank).standard_normal(300_000).astype(np.float32)
    collectives.allreduce(x, comm, algorithm="hierarchical")
    everybody = np.empty((comm.size, x.size), np.float32)
    comm.Allgather(x, everybody)
    assert (everybody.view(np.int32) == x.view(np.int32)).all()


@pytest.mark.skipif(MPI.COMM_WORLD.size != 3, reason="needs 3 ranks")
def test_nodes_of_unlike_size_are_refused_on_all_ranks(comm):
    with pytest.raises(ValueError, match="equal numbers of ranks"):
        collectives.allreduce(np.ones(5, np.float32), comm, algorithm="hierarchical")


def test_on_one_node_the_ranks_are_found_too():
    world = MPI.COMM_WORLD
    for algorithm in ("hierarchical", "hierarchical(between=halving_doubling)"):
        x = vector(1000, np.float32, False, world.rank)
        collectives.allreduce(x, algorithm=algorithm)
        np.testing.assert_array_equal(x, np.arange(1000) % 13 * world.size + world.size * (world.size - 1) // 2)
    x = [vector(1000, np.float32, False, world.rank)] * 2
    collectives.allreduce(x, algorithm="hierarchical", out=[np.empty(1000, np.float32)] * 2)

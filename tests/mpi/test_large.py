"""Counts and bytes beyond 2^31, which a C int cannot hold. Slow, so only `make test-huge` runs these tests."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import collectives
import mpips
from tests.mpi.collectives.support import block
from tests.mpi.mpips.support import run
from tests.mpi.sizes import only_on

COMM = MPI.COMM_WORLD
BEYOND = 2**31 + 3
BLOCK = 1 << 24

pytestmark = [pytest.mark.huge, pytest.mark.timeout(280), only_on(2)]


def all_are(x: np.ndarray, value: int) -> bool:
    """True if every element of `x` is `value` on all ranks. Compares blocks, to make no array as large as `x`."""
    equal = all((x[first : first + BLOCK] == value).all() for first in range(0, x.size, BLOCK))
    return bool(COMM.allreduce(equal, MPI.LAND))


@pytest.mark.parametrize("make", [np.empty, collectives.empty])
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_an_allreduce_of_more_elements_than_an_int_counts(algorithm, make):
    x = make(BEYOND, np.int8)
    x[:] = COMM.rank + 1
    collectives.allreduce(x, COMM, algorithm=algorithm)
    assert all_are(x, 3)


@pytest.mark.parametrize("kind", ["broadcast", "allgather"])
def test_other_collectives_of_as_many(kind):
    x = np.zeros(BEYOND, np.int8)
    if kind == "broadcast":
        x[:] = 7 * COMM.rank
        collectives.broadcast(x, COMM, root=1)
    else:
        x[block(BEYOND)] = 7
        collectives.allgather(x, COMM)
    assert all_are(x, 7)


@pytest.mark.parametrize("make", [np.empty, collectives.empty])
def test_a_broadcast_of_more_bytes_than_an_int_counts(make):
    """2 GiB of float64: the number of elements fits into an int, the number of bytes does not."""
    x = make(2**28 + 3, np.float64)
    x[:] = 7 * COMM.rank
    collectives.broadcast(x, COMM, root=1)
    assert all_are(x, 7)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_key_of_more_bytes_than_an_int_counts(shared_memory):
    n = 2**29 + 3

    def body(kv):
        kv.init("w", np.zeros(n, np.float32))
        kv.set_optimizer("sgd", learning_rate=1.0)
        gradient = mpips.empty(n, np.float32)
        gradient[:] = -2
        kv.pushpull("w", gradient, gradient)
        return all((gradient[first : first + BLOCK] == 2).all() for first in range(0, n, BLOCK))

    right = run("dist_sync", body, servers=1, shared_memory=shared_memory)
    assert COMM.allreduce(right in (None, True), MPI.LAND)

"""The allreduces of tensors that a paper compares its own with sum exactly."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from examples.reproduce.tensor.rivals import Blocking, Reg, VectorRing
from tests.mpi.sizes import either_mpi

COMM = MPI.COMM_WORLD


@either_mpi
@pytest.mark.parametrize("n", [1, 700_001])
@pytest.mark.parametrize("rival", [Blocking, Reg, VectorRing])
def test_a_rival_sums_exactly(rival, n):
    vectors = [np.empty(n, np.float32) for _ in range(2)]
    run = rival(COMM, vectors)
    for turn in range(2):
        for which, vector in enumerate(vectors):
            vector[:] = np.arange(n) % 7 + COMM.rank + which + turn
        run()
        total = sum(np.arange(n) % 7 + rank + which + turn for rank in range(COMM.size) for which in range(2))
        assert all((vector == total).all() for vector in vectors)

"""The benchmark's check sees a candidate that does nothing, whatever the one before it has left."""

import numpy as np
import pytest

from collectives.benchmark.case import IN_PLACE, BenchmarkCase
from tests.mpi.collectives.support import KINDS


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_candidate_that_does_nothing_is_seen(comm, kind):
    case = BenchmarkCase(kind, "sum", np.dtype(np.float64), 1000, comm)
    good = case.plan("auto", "ordinary")
    source, result = case.arrays("ordinary")
    assert (source is result) == (kind in IN_PLACE)
    assert good.check() == 0
    assert case.check(lambda: None, source, result)() > 0
    assert good.check() == 0
    good.close()

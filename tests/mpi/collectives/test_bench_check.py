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


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_of_mpi_itself_is_checked(comm, kind):
    for n in (1000, 100 * comm.size):
        case = BenchmarkCase(kind, "sum", np.dtype(np.float32), n, comm)
        assert [candidate.check() for candidate in case.mpi()] == [0] * len(case.mpi())


@pytest.mark.mpi(min_size=2)
def test_all_sources_get_new_values_whose_sum_is_nothing(comm):
    case = BenchmarkCase("allreduce", "sum", np.dtype(np.float32), 10, comm)
    sources = [case.arrays(kind)[0] for kind in ("ordinary", "empty")]
    fine = []
    for _ in range(2):
        before = [source.copy() for source in sources]
        comm.Barrier()
        case.renew()
        fine += [bool((new != old).all()) for new, old in zip(sources, before)]
        fine += [not comm.allreduce(source.copy()).any() for source in sources]
    assert all(comm.allgather(all(fine)))

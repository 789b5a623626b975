"""Which worlds a test runs in, where not all are worth their time."""

from __future__ import annotations

import pytest
from mpi4py import MPI

JOB_LIMIT = 180  # seconds for a job that a test starts, while other jobs may have the cores, too


def only_on(*sizes: int) -> pytest.MarkDecorator:
    """For tests that sleep, start jobs of their own, or ask what more ranks do not change: these worlds are enough."""
    size, wanted = MPI.COMM_WORLD.size, " or ".join(map(str, sizes))
    return pytest.mark.skipif(size not in sizes, reason=f"{wanted} ranks are enough")

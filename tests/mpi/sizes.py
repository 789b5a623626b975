"""Which worlds a test runs in, where not all are worth their time."""

from __future__ import annotations

import os

import pytest
from mpi4py import MPI

from tests.run import OTHER_MPI

JOB_LIMIT = 180  # seconds for a job that a test starts, while other jobs may have the cores, too


def only_on(*sizes: int) -> pytest.MarkDecorator:
    """For tests that sleep, start jobs of their own, or ask what more ranks do not change: these worlds are enough."""
    size, wanted = MPI.COMM_WORLD.size, " or ".join(map(str, sizes))
    return pytest.mark.skipif(size not in sizes, reason=f"{wanted} ranks are enough")


either_mpi = pytest.mark.skipif(OTHER_MPI in os.environ, reason="as many ranks of the other MPI are enough")
"""For tests of what comes out where all goes well, which no MPI changes: where several are tested, on many ranks only
one has them (`tests.run`). Not for tests of closing, failing and giving up: there each MPI has its own ways to hang."""


def core_on(*sizes: int) -> pytest.MarkDecorator:
    """For tests that find little more in other worlds: `make test` has them in these, `make test-all` in all."""
    return pytest.mark.skipif(False, reason="") if MPI.COMM_WORLD.size in sizes else pytest.mark.full

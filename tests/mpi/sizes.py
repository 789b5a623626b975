"""Decorators that choose the numbers of ranks on which a test runs."""

from __future__ import annotations

import os

import pytest
from mpi4py import MPI

from tests.run import OTHER_MPI

# seconds that a job of a test may take, also while other jobs use the cores
JOB_LIMIT = 180


def only_on(*sizes: int) -> pytest.MarkDecorator:
    """Run a test only on these numbers of ranks.

    It is for tests that sleep or start jobs, and for those whose result does not depend on the number of ranks.
    """
    size, text = MPI.COMM_WORLD.size, " or ".join(map(str, sizes))
    return pytest.mark.skipif(size not in sizes, reason=f"{text} ranks are enough")


# For tests of results that do not depend on the MPI. If several MPIs are tested, only one runs them on many ranks (see
# `tests.run`). Not for tests of closing, failing and giving up, in which each MPI has its own ways to hang.
either_mpi = pytest.mark.skipif(OTHER_MPI in os.environ, reason="as many ranks of the other MPI are enough")


def core_on(*sizes: int) -> pytest.MarkDecorator:
    """Run a test on these numbers of ranks in `make test`, and on all numbers in `make test-all`.

    It is for tests that find few further faults on other numbers of ranks.
    """
    return pytest.mark.skipif(False, reason="") if MPI.COMM_WORLD.size in sizes else pytest.mark.full

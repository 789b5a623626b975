"""Which worlds a test runs in, where not all are worth their time."""

from __future__ import annotations

import pytest
from mpi4py import MPI


def only_on(*sizes: int) -> pytest.MarkDecorator:
    """For tests that sleep, or start jobs of their own: worlds of these sizes are enough."""
    size, wanted = MPI.COMM_WORLD.size, " or ".join(map(str, sizes))
    return pytest.mark.skipif(size not in sizes, reason=f"takes its time; {wanted} ranks are enough")

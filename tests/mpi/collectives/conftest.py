"""What tests of several collectives are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mpi4py import MPI

from tests.mpi.collectives.support import fresh


@pytest.fixture(scope="module", params=["one node", "a node for each rank"])
def comm(request: pytest.FixtureRequest) -> Iterator[MPI.Intracomm]:
    """A communicator whose ranks share memory, and one whose ranks do not."""
    with fresh(request.param) as made:
        yield made

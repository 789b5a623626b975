"""A mesh of all ranks, for tests that need no other."""

import pytest

from mpips.mlp import Mesh

from .support import COMM


@pytest.fixture
def mesh():
    made = Mesh(COMM.size, 1)
    yield made
    made.free()

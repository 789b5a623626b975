"""What tests of several collectives need."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

import collectives
from collectives.errors import MismatchError
from collectives.transport.room import Room

WORLD = MPI.COMM_WORLD
RANK, P = WORLD.rank, WORLD.size
TAG = 77  # of what tests say to each other


def sentence(function, error=MismatchError):
    """What the call raises here, having checked that all ranks raise it."""
    said = ""
    try:
        function()
    except error as caught:
        said = str(caught)
    everybody = WORLD.allgather(said)
    assert all(everybody), f"no {error.__name__}: {everybody}"
    assert len(set(everybody)) == 1, everybody
    return said


def share_nothing(monkeypatch):
    """From now on ranks share no memory, as on a node for each."""
    opened = Room.open
    monkeypatch.setattr(Room, "open", lambda node, names: opened(node, names) if node.size == 1 else None)


def still_works(comm):
    for n in (3, 100_000):
        x, y = np.ones(n), np.ones(n)
        collectives.allreduce(x, comm)
        collectives.plan("allreduce", y, comm, algorithm="ring(over=messages)")()
        assert WORLD.allreduce(bool((x == P).all() and (y == P).all()), MPI.LAND)

"""What tests of several collectives need."""

from __future__ import annotations

import time

import numpy as np
from collectives.transport.room import Room
from mpi4py import MPI

import collectives
from collectives.errors import CollectiveError, MismatchError

WORLD = MPI.COMM_WORLD
RANK, P = WORLD.rank, WORLD.size
TAG = 77  # of what tests say to each other
PATIENCE = 20.0  # seconds, longer than any wait of theirs


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
        collectives.plan("allreduce", y, comm, algorithm="ring")()
        assert WORLD.allreduce(bool((x == P).all() and (y == P).all()), MPI.LAND)


def outcome(function):
    """What the function raises, as a word and a sentence; or "done"."""
    try:
        function()
    except (KeyboardInterrupt, CollectiveError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def others_come_now():
    """Rank 0 lets the others go on, which wait here."""
    if RANK:
        WORLD.recv(source=0, tag=TAG)
    else:
        for other in range(1, P):
            WORLD.send(None, other, tag=TAG)


def soon(function):
    """`outcome`, where this rank must not have waited until its patience ends."""
    start = time.monotonic()
    said = outcome(function)
    return said if time.monotonic() - start < PATIENCE / 2 else f"late: {said}"


def started(plan):
    plan.start()
    plan.wait()

"""A generation of a store where programs seldom come: two ranks end it at once, one is late, or has lost its keys."""

from __future__ import annotations

import time
from contextlib import contextmanager

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import CollectiveError
from collectives.fabric.requests import collect_closed
from collectives.fabric.wait import Limits
from mpips import Options, StoreError, StoreStallError
from mpips.store import roles as layouts
from mpips.store.recovery.recover import renew
from mpips.store.runtime import generation as generations
from mpips.store.runtime.errors import LostError
from mpips.store.runtime.generation import Generation
from tests.choice import first
from tests.mpi.collectives.support import NODES
from tests.mpi.sizes import core_on, only_on

WORLD = MPI.COMM_WORLD
RANK, P = WORLD.rank, WORLD.size
FIRST = 0  # the rank that ends generations
pytestmark = pytest.mark.mpi(min_size=2)


@contextmanager
def store(nodes="one node", servers=1, kind="mpi_sync", clients=1, **options):
    """The layout of a store, and its generation."""
    chosen = Options(servers=servers, clients=clients, **{"timeout_seconds": 30, **options})
    comm = NODES[nodes](WORLD.Dup())
    layout = layouts.create(comm, kind, chosen)
    yield layout, Generation(layout)
    comm.Free()


@only_on(2, 3)
def test_who_waits_too_long_for_others_to_recover_is_told_so_and_may_come_again():
    with store(timeout_seconds=0.5) as (layout, generation):
        raise_or_hear(generation)
        if RANK != FIRST and not layout.is_server:
            late = rf"recover has waited for 0\.5 s: rank{'s' if P > 2 else ''} 0"
            with pytest.raises(StoreStallError, match=late), generation.failing("recover"):
                renew(generation, lambda: True)
        WORLD.Barrier()
        generation.limits = Limits(60, 30)
        assert renew(generation, lambda: True)
        assert generation.meet(b"", "barrier", everybody=True) == [b""] * P
        generation.close()


@core_on(2, 3)
def test_nothing_is_left_of_generations_that_were_closed_soon_after_a_meeting():
    begun = time.monotonic()
    for number in range(60):
        with store() as (_, generation):
            generation.meet(b"*" * 40 * number, "barrier", everybody=True)
            generation.close()
    seconds = time.monotonic() - begun
    gone = collect_closed(10)
    assert all(WORLD.allgather(gone))
    # each close waits so long at most for what others must give back, too
    assert seconds < 30 * generations.FREEING_SECONDS


def raise_or_hear(generation):
    """All ranks are at the end of the generation."""
    with pytest.raises(StoreError):
        raise generation.end("a push", CollectiveError("it is over"))


@pytest.mark.slow
@only_on(2, 3)
def test_closing_a_generation_that_is_over_waits_for_nobody_for_long(monkeypatch):
    monkeypatch.setattr(generations, "CLOSING_SECONDS", 0.3)
    with store() as (_, generation):
        raise_or_hear(generation)
        if RANK == FIRST:
            WORLD.Barrier()
        begun = time.monotonic()
        generation.close()
        assert time.monotonic() - begun < 10
        if RANK != FIRST:
            WORLD.Barrier()


@pytest.mark.mpi(min_size=5)
@first(1, nodes=["one node", "a node for each rank"])
def test_ranks_of_a_client_are_named_as_in_the_store(nodes):
    with store(nodes, clients=2, timeout_seconds=2) as (layout, generation):
        if layout.is_server or layout.client_number == 0:
            pass
        else:
            members = range(*layout.clients[1])
            generation.within(layout.client, members)
            if layout.rank != members[-1]:
                with pytest.raises(StoreError) as told, generation.failing("push of key 'w'"):
                    collectives.allreduce(np.ones(3), layout.client, label="push of key 'w'")
                assert f"rank {members[-1]} has not come" in str(told.value)
        WORLD.Barrier()
        raise_or_hear(generation)
        generation.close()


def test_all_raise_the_same_where_two_end_it_at_once():
    with store() as (_, generation):
        WORLD.Barrier()
        raised = generation.end("a push", CollectiveError(f"rank {RANK} has made a mistake"))
        assert len(set(WORLD.allgather(str(raised)))) == 1
        assert renew(generation, lambda: True)
        generation.close()


def test_who_has_lost_too_much_to_go_on_raises_that_and_the_others_end():
    with store() as (_, generation):
        WORLD.Barrier()
        lost = LostError("recover: nobody has key 'w'") if RANK == FIRST else CollectiveError("late")
        raised = generation.end("recover", lost)
        assert isinstance(raised, LostError if RANK == FIRST else StoreError)
        generation.close()

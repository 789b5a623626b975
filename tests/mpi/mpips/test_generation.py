"""A generation of a store: it ends for all ranks with one sentence within a second, and the next one begins."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import CollectiveError, MismatchError, StallError
from collectives.fabric.requests import sweep
from collectives.fabric.wait import Limits
from mpips import Options, StoreError, StoreMismatchError, StoreStallError
from mpips.store import roles as layouts
from mpips.store.recovery.recover import renew
from mpips.store.runtime import generation as generations
from mpips.store.runtime import rendezvous
from mpips.store.runtime.errors import LostError
from mpips.store.runtime.generation import Generation
from tests.choice import first, pairwise
from tests.mpi.collectives.support import NODES
from tests.mpi.sizes import core_on, only_on

WORLD = MPI.COMM_WORLD
RANK, P = WORLD.rank, WORLD.size
FIRST = 0  # the rank that ends generations
SOON = 4.0 if P < 4 else 8.0  # four times what is promised: other processes may have the cores
HOW = ["one node", "a node for each rank"]
pytestmark = pytest.mark.mpi(min_size=2)


@contextmanager
def store(nodes="one node", servers=1, kind="mpi_sync", clients=1, **options):
    """The layout of a store, and its generation."""
    chosen = Options(servers=servers, clients=clients, **{"timeout_seconds": 30, **options})
    comm = NODES[nodes](WORLD.Dup())
    layout = layouts.create(comm, kind, chosen)
    yield layout, Generation(layout)
    comm.Free()


def group(layout):
    """The communicator of this rank's role."""
    return layout.workers if layout.workers is not None else layout.servers


def waits(layout, generation, way):
    """Wait in vain for the first rank."""
    if way == "collective" and not layout.is_server:
        collectives.allreduce(np.ones(3), layout.workers, label="push of key 'w'")
    elif way == "rendezvous":
        generation.meet(b"", "barrier", everybody=True)
    else:
        generation.wait(lambda: False, "a push")


def works(layout, generation):
    """Ranks meet, and sum."""
    generation.check()
    generation.look()
    x, comm = np.full(5, 1.0), group(layout)
    generation.within(comm)
    collectives.allreduce(x, comm)
    assert (x == comm.size).all()
    said = generation.meet(b"%d" % RANK, "barrier", everybody=True)
    assert said == [b"%d" % rank for rank in range(P)]
    if not layout.is_server:
        assert len(rendezvous.agree(generation, "init", [("w", "float32")])) == layout.num_workers


ERRORS = [
    (KeyboardInterrupt(), StoreError, "rank 0 has given up push of key 'w': KeyboardInterrupt"),
    (KeyError("why"), StoreError, "rank 0 has given up push of key 'w': KeyError: 'why'"),
    (MismatchError("unlike"), StoreMismatchError, "push of key 'w': unlike"),
    (StallError("push of key 'w' has waited"), StoreStallError, "push of key 'w' has waited"),
]


@pytest.mark.core(5)
@core_on(2, 3)
@pairwise(nodes=HOW, way=["collective", "rendezvous", "wait"], **{"error, kind, sentence": ERRORS})
def test_all_ranks_hear_of_the_end_within_a_second_and_the_next_generation_works(nodes, way, error, kind, sentence):
    with store(nodes) as (layout, generation):
        works(layout, generation)
        WORLD.Barrier()
        raised = None
        begun = time.monotonic()
        try:
            with generation.failing("push of key 'w'"):
                if RANK == FIRST:
                    time.sleep(0.1)
                    raise error
                waits(layout, generation, way)
        except BaseException as caught:
            raised = caught
        seconds = time.monotonic() - begun
        own = RANK == FIRST and not isinstance(error, CollectiveError)
        assert type(raised) is (type(error) if own else kind)
        assert own or str(raised) == sentence
        assert seconds < 0.1 + SOON, seconds
        for late in (generation.check, generation.look, lambda: generation.meet(b"", "barrier", True)):
            with pytest.raises(kind) as told:
                late()
            assert str(told.value) == sentence
        assert generation.over is not None and generation.flag[0]
        assert renew(generation, lambda: True) and generation.number == 1 and generation.over is None
        works(layout, generation)
        generation.close()


@core_on(2, 3)
@pytest.mark.parametrize("nodes", HOW)
def test_what_was_sent_in_one_generation_is_not_heard_in_the_next(nodes):
    with store(nodes) as (layout, generation):
        for number in range(1, 4):
            if RANK != FIRST:  # it has come to a meeting, and left another message
                layout.world.Isend(bytearray(8), FIRST, 1)
                with pytest.raises(StoreError), generation.failing("barrier"):
                    generation.meet(b"old", "barrier", everybody=True)
            else:
                time.sleep(0.05)
                generation.end("a push", CollectiveError("it is over"))
            assert renew(generation, lambda: True) and generation.number == number
            works(layout, generation)
            assert not layout.world.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
            WORLD.Barrier()
        generation.close()


def test_functions_of_the_end_run_once_on_each_rank_and_in_each_generation():
    with store() as (_, generation):
        ran = []
        generation.on_end.append(lambda: ran.append(generation.over is not None))
        for number in range(1, 3):
            for _ in range(2):
                with pytest.raises(StoreError):
                    raise generation.end("a push", CollectiveError("it is over"))
            assert ran == [True] * number
            renew(generation, lambda: True)
        generation.close()


def test_a_rank_that_recovers_though_nothing_has_failed_ends_the_generation():
    with store() as (layout, generation):
        if RANK != FIRST:
            with pytest.raises(StoreError, match="rank 0 calls recover"), generation.failing("barrier"):
                generation.meet(b"", "barrier", everybody=True)
        assert renew(generation, lambda: True)
        works(layout, generation)
        generation.close()


@pytest.mark.parametrize("nodes", HOW)
def test_who_recovers_while_another_closes_is_told_so_and_a_server_leaves(nodes):
    with store(nodes) as (layout, generation):
        raise_or_hear(generation)
        if RANK == FIRST:
            generation.close()
        elif layout.is_server:
            assert renew(generation, lambda: True) is None
            generation.close()
        else:
            with pytest.raises(StoreError, match=r"rank 0 .*closed .*cannot be recovered"):
                renew(generation, lambda: True)
            generation.close()


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
        works(layout, generation)
        generation.close()


@core_on(2, 3)
def test_nothing_is_left_of_generations_that_were_closed_soon_after_a_meeting():
    begun = time.monotonic()
    for number in range(60):
        with store() as (_, generation):
            generation.meet(b"*" * 40 * number, "barrier", everybody=True)
            generation.close()
    seconds = time.monotonic() - begun
    gone = sweep(10)
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


def test_a_rank_that_has_closed_is_missed_at_once():
    with store() as (_, generation):
        if RANK == FIRST:
            generation.close()
        else:
            begun = time.monotonic()
            sentence = "barrier: rank 0 is needed, and it has closed its store"
            with pytest.raises(StoreError, match=sentence), generation.failing("barrier"):
                generation.meet(b"", "barrier", everybody=True)
            assert time.monotonic() - begun < SOON + 1
            generation.close()


@pytest.mark.slow
@only_on(2, 3)
@pytest.mark.parametrize("nodes", HOW)
def test_limits_are_said_as_they_were_given_and_who_is_late_is_named(nodes):
    with store(nodes, timeout_seconds=0.5) as (_, generation):
        assert generation.limits == (60, 0.5)
        if RANK != FIRST:
            with pytest.raises(StoreStallError) as told, generation.failing("barrier"):
                generation.meet(b"", "barrier", everybody=True)
            assert "barrier has waited for 0.5 s: rank 0 has not come; for longer" in str(told.value)
        WORLD.Barrier()
        with pytest.raises(StoreStallError, match=r"barrier has waited for 0\.5 s"):
            hear(generation)
        raise_or_hear(generation)
        generation.close()


def hear(generation):
    """Look for the end of the generation."""
    while True:
        generation.look()
        time.sleep(0.01)


@pytest.mark.mpi(min_size=5)
@first(1, nodes=HOW)
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


def test_ranks_that_ask_for_unlike_things_all_raise_and_the_generation_lives_on():
    with store(servers=0) as (layout, generation):
        with pytest.raises(ValueError, match=r"init: key 'w' is 0 on rank 0 and 1 on rank 1"):
            rendezvous.agree(generation, "init", [("w", str(min(RANK, 1)))])
        refusal = TypeError("no array") if RANK == P - 1 else None
        with pytest.raises(TypeError, match=f"rank {P - 1}: no array"):
            rendezvous.agree(generation, "init", [("w", "x")], refusal)
        works(layout, generation)
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


def test_a_wait_that_is_over_at_once_asks_nothing():
    with store() as (_, generation):
        generation.wait(lambda: True, "nothing")
        assert generation.number == 0 and generation.limits.timeout_seconds == 30
        assert not math.isnan(generation.limits.stall_seconds)
        generation.close()

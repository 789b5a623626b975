"""Plans of one-shot calls: found again, holding no array, bounded. `collectives.plan`, and calls of one rank."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import CollectiveError
from collectives.communicator import communicator
from collectives.plan import MOST_BYTES, MOST_IDENTITIES, MOST_PLANS, PlanCache


class Made:
    """A plan, as far as the cache knows it."""

    made = 0

    def __init__(self, nbytes=0):
        Made.made += 1
        self.held_bytes, self.freed = nbytes, 0

    def free(self):
        self.freed += 1


@pytest.fixture
def cache():
    Made.made = 0
    return PlanCache({})


@pytest.fixture
def comm():
    made = MPI.COMM_SELF.Dup()
    yield made
    if made != MPI.COMM_NULL:
        made.Free()


CALL = ("allreduce", "sum", "auto", 0)


def test_an_array_finds_its_plan_and_so_does_what_lies_at_its_place(cache):
    x = np.zeros(3)
    first = cache.find(CALL, x, None, Made)
    assert cache.find(CALL, x, None, Made) is first
    assert cache.find(CALL, x[:], None, Made) is first
    assert cache.find(("reduce", *CALL[1:]), x, None, Made) is not first
    assert cache.find(CALL, x[:2], None, Made) is not first
    assert cache.find(CALL, x.view(np.int64), None, Made) is not first
    assert cache.find(CALL, x, np.zeros(3), Made) is not first
    assert Made.made == 5


def test_what_has_become_read_only_is_another_array(cache):
    x = np.zeros(3)
    first = cache.find(CALL, x, None, Made)
    x.flags.writeable = False
    assert cache.find(CALL, x, None, Made) is not first


def test_a_list_finds_the_plan_of_arrays_at_the_same_places(cache):
    xs = [np.zeros(3), np.zeros(4)]
    first = cache.find(CALL, xs, None, Made)
    assert cache.find(CALL, [x[:] for x in xs], None, Made) is first
    assert cache.find(CALL, tuple(xs), None, Made) is first
    assert cache.find(CALL, xs[::-1], None, Made) is not first


def test_plans_are_bounded_and_those_used_last_stay(cache):
    xs = [np.zeros(1) for _ in range(MOST_PLANS + 10)]
    plans = []
    for x in xs:
        plans.append(cache.find(CALL, x, None, Made))
        cache.find(CALL, xs[0], None, Made)
    assert [plan.freed for plan in plans] == [0] + [1] * 10 + [0] * (MOST_PLANS - 1)
    assert cache.find(CALL, xs[0], None, Made) is plans[0]
    assert cache.find(CALL, xs[1], None, Made) is not plans[1]


def test_a_plan_that_is_gone_is_not_found_by_identity(cache):
    x = np.zeros(1)
    gone = cache.find(CALL, x, None, Made)
    for other in (others := [np.zeros(1) for _ in range(MOST_PLANS)]):
        cache.find(CALL, other, None, Made)
    assert others and gone.freed == 1
    assert all(entry.plan is not gone for entry in cache.by_identity.values())


def test_bytes_are_bounded(cache):
    xs = [np.zeros(1) for _ in range(3)]
    plans = [cache.find(CALL, x, None, lambda: Made(MOST_BYTES // 2)) for x in xs]
    assert [plan.freed for plan in plans] == [1, 0, 0]
    last = cache.find(CALL, np.zeros(1), None, lambda: Made(2 * MOST_BYTES))
    assert [plan.freed for plan in plans] == [1, 1, 1] and not last.freed


def test_identities_are_bounded(cache):
    x = np.zeros(1)
    views = [x[:] for _ in range(MOST_IDENTITIES + 5)]
    for view in views:
        cache.find(CALL, view, None, Made)
    assert Made.made == 1 and 0 < len(cache.by_identity) <= MOST_IDENTITIES


def test_freeing_gives_all_back(cache):
    plans = [cache.find(CALL, x, None, lambda: Made(5)) for x in [np.zeros(1), np.zeros(1)]]
    cache.free()
    assert [plan.freed for plan in plans] == [1, 1] and not cache.by_identity


@pytest.mark.slow
def test_fresh_lists_do_not_add_up(comm):
    kept = []
    for turn in range(3 * MOST_PLANS):
        arrays = [np.full(200, turn), np.full(3, turn, np.float32)]
        kept.append(arrays)  # so that each lies elsewhere
        collectives.grouped_allreduce(arrays, comm)
        assert arrays[0][0] == turn and arrays[1][2] == turn
    home = communicator(comm)
    assert len(home.cache._by_place) <= MOST_PLANS and len(home.plans) <= MOST_IDENTITIES


def test_a_plan_that_is_freed_is_refused_and_nothing_else_is(comm):
    x = np.ones(4)
    plan = collectives.plan("allreduce", x, comm)
    assert plan() is x
    held = weakref.ref(x)
    plan.free()
    del x
    gc.collect()
    assert held() is None
    for _ in range(2):
        with pytest.raises(CollectiveError, match="has been freed: make a new plan"):
            plan()
        with pytest.raises(CollectiveError, match="has been freed: make a new plan"):
            plan.start()
    assert collectives.allreduce(np.ones(2), comm)[0] == 1


def test_a_list_of_the_same_arrays_is_known_without_a_look_at_where_they_lie(comm, monkeypatch):
    arrays, outs = [np.ones(5), np.ones(3, np.float32)], [np.zeros(5), np.zeros(3, np.float32)]
    collectives.grouped_allreduce(arrays, comm, out=outs)
    monkeypatch.setattr(sys.modules["mpips.collectives.plan"], "place", lambda x: pytest.fail("it looks"))
    arrays[0][:] = 7
    assert collectives.grouped_allreduce(arrays, comm, out=outs)[0] is outs[0] and outs[0][4] == 7
    arrays[0].dtype = np.int64
    with pytest.raises(BaseException, match="it looks"):
        collectives.grouped_allreduce(arrays, comm, out=outs)

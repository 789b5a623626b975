"""Plans of one-shot calls are bounded, and found again without a look: `collectives.plan`, and calls of one rank."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from mpi4py import MPI

import collectives
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


def test_what_has_become_read_only_is_another_array(cache):
    x = np.zeros(3)
    first = cache.find(CALL, x, None, Made)
    x.flags.writeable = False
    assert cache.find(CALL, x, None, Made) is not first


def test_plans_are_bounded_and_those_used_last_stay(cache):
    xs = [np.zeros(1) for _ in range(MOST_PLANS + 10)]
    plans = []
    for x in xs:
        plans.append(cache.find(CALL, x, None, Made))
        cache.find(CALL, xs[0], None, Made)
    assert [plan.freed for plan in plans] == [0] + [1] * 10 + [0] * (MOST_PLANS - 1)
    assert cache.find(CALL, xs[0], None, Made) is plans[0]
    assert cache.find(CALL, xs[1], None, Made) is not plans[1]


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


@pytest.mark.slow
def test_fresh_lists_do_not_add_up(comm):
    kept = []
    for turn in range(3 * MOST_PLANS):
        arrays = [np.full(200, turn), np.full(3, turn, np.float32)]
        kept.append(arrays)  # so that each lies elsewhere
        collectives.grouped_allreduce(arrays, comm)
        assert arrays[0][0] == turn and arrays[1][2] == turn
    home = communicator(comm)
    assert len(home.cache._by_address) <= MOST_PLANS and len(home.plans) <= MOST_IDENTITIES


def test_a_list_of_the_same_arrays_is_known_without_a_look_at_where_they_lie(comm, monkeypatch):
    arrays, outs = [np.ones(5), np.ones(3, np.float32)], [np.zeros(5), np.zeros(3, np.float32)]
    collectives.grouped_allreduce(arrays, comm, out=outs)
    monkeypatch.setattr(sys.modules["mpips.collectives.plan"], "place_key", lambda x: pytest.fail("it looks"))
    arrays[0][:] = 7
    assert collectives.grouped_allreduce(arrays, comm, out=outs)[0] is outs[0] and outs[0][4] == 7
    arrays[0].dtype = np.int64
    with pytest.raises(BaseException, match="it looks"):
        collectives.grouped_allreduce(arrays, comm, out=outs)

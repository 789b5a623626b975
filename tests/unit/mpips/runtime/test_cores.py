"""Which core each process of a crowded node gets."""

import os
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.machine import Quota
from mpips.store.roles import CorePinning, crowded, spread

MANY = len(os.sched_getaffinity(0)) + 2


class Nodes(NamedTuple):
    """Ranks in nodes of so many."""

    size: int
    rank: int = 1
    num_workers: int = MANY - 1
    num_servers: int = 1

    def same_node(self, a, b):
        return a // self.size == b // self.size


class Generation:
    """All ranks are of this machine, and bring what this one does."""

    def meet(self, payload, what, everybody):
        return [payload] * MANY


@given(st.sets(st.integers(0, 200), min_size=2, max_size=8), st.integers(1, 30))
def test_every_core_gets_as_many_processes_as_another_or_one_more(cores, extra):
    got = spread([frozenset(cores)] * (len(cores) + extra))
    assert set(got) == cores
    counts = Counter(got).values()
    assert max(counts) - min(counts) <= 1


def test_the_last_ranks_which_serve_get_different_cores():
    assert spread([frozenset({2, 5})] * 6) == [2, 5, 2, 5, 2, 5]


@pytest.mark.parametrize(
    "allowed",
    [
        pytest.param([{0, 1}, {0, 1}], id="enough for all"),
        pytest.param([{0}, {0}, {0}], id="only one"),
        pytest.param([{0}, {1}, {0}], id="bound by a launcher"),
        pytest.param([{0, 1}, {0, 1}, {0}], id="one is bound"),
    ],
)
def test_others_stay_where_they_are(allowed):
    assert spread([frozenset(cores) for cores in allowed]) is None


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        pytest.param([{0, 1}, {0, 1}], False, id="a core for each"),
        pytest.param([{0, 1}] * 3, True, id="fewer"),
        pytest.param([{0}, {1}, {2}], False, id="each bound to one of its own"),
        pytest.param([{0}, {1}, {0}], True, id="two bound to one"),
        pytest.param([{0, 1}, {1, 2}, {2, 3}], False, id="sets that overlap"),
    ],
)
def test_a_node_is_crowded_where_processes_are_more_than_their_cores(allowed, expected):
    assert crowded([frozenset(cores) for cores in allowed]) is expected


def test_a_node_is_crowded_where_processes_are_more_than_their_quota():
    cores = [frozenset({0, 1, 2, 3})] * 3
    assert crowded(cores, [Quota(2, 5)] * 3) is True
    assert crowded(cores, [Quota(3, 5)] * 3) is False
    assert crowded(cores, [Quota(1, 5), Quota(1, 6), Quota(1, 7)]) is False


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("size, bound", [(MANY, True), (1, False)])
def test_only_a_node_that_has_the_machine_for_itself_binds_its_processes(size, bound):
    before = os.sched_getaffinity(0)
    seat = CorePinning(Nodes(size), Generation())
    try:
        assert seat.shared
        assert os.sched_getaffinity(0) == (set(seat.own) if bound else before)
        assert (len(seat.own) == 1) is bound
    finally:
        seat.leave()
    assert os.sched_getaffinity(0) == before

"""Who takes which place after deaths: all small stores, and all sets of the dead."""

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.store.keys.sharding import Interval, split
from mpips.store.recovery.membership import Roles, map_ranks, mirror_of, refusal, refuse_mirrors

SIZES = [(w, s, p, c) for w in (1, 2, 3) for s in (0, 1, 2) for p in (0, 1, 2) for c in (1, 2) if c <= w]


def subsets(ranks):
    return chain.from_iterable(combinations(ranks, size) for size in range(len(ranks) + 1))


def roles(workers, servers, spares, clients):
    return Roles(workers, servers, spares, tuple(split(Interval(0, workers), clients)))


def role(roles, rank):
    """The role of a rank, by name."""
    ends = {"worker": roles.num_workers, "server": roles.num_workers + roles.num_servers, "spare": roles.size}
    return next(name for name, end in ends.items() if rank < end)


@pytest.mark.parametrize("workers, servers, spares, clients", SIZES)
def test_every_rank_that_lives_keeps_its_role_and_spares_fill_servers_first(workers, servers, spares, clients):
    old = roles(workers, servers, spares, clients)
    for lost in subsets(range(old.size)):
        new = map_ranks(old, lost, [0] * old.size)
        assert sorted(new.origin) == [rank for rank in range(old.size) if rank not in lost]
        assert new.roles.size == len(new.origin)
        for rank, origin in enumerate(new.origin):
            assert role(old, origin) in (role(new.roles, rank), "spare")
        dead = [role(old, rank) for rank in lost]
        there = spares - dead.count("spare")
        to_servers = min(there, int(0 < servers == dead.count("server")))
        to_workers = min(there - to_servers, int(workers == dead.count("worker")))  # so that there is one of each
        to_servers += min(there - to_servers - to_workers, dead.count("server") - to_servers)
        to_workers += min(there - to_servers - to_workers, dead.count("worker") - to_workers)
        assert new.roles.num_servers == servers - dead.count("server") + to_servers
        assert new.roles.num_workers == workers - dead.count("worker") + to_workers
        assert new.roles.spares == there - to_servers - to_workers


@pytest.mark.parametrize("workers, servers, spares, clients", SIZES)
def test_clients_keep_their_members_in_order_and_empty_ones_vanish(workers, servers, spares, clients):
    old = roles(workers, servers, spares, clients)
    for lost in subsets(range(old.size)):
        new = map_ranks(old, lost, [0] * old.size)
        left = [[rank for rank in range(*client) if rank not in lost] for client in old.clients]
        members = [[new.origin[rank] for rank in range(*client)] for client in new.roles.clients]
        assert all(members)
        assert [rank for client in members for rank in client if rank < workers] == [*chain(*left)]
        if spares == 0:
            assert members == [client for client in left if client]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("workers, servers, spares, clients", SIZES)
def test_a_store_that_grows_has_no_spare_left_and_all_others_where_they_are(workers, servers, spares, clients, alone):
    old = roles(workers, servers, spares, workers if alone else clients)
    for lost in subsets(range(old.size)):
        same, new = (map_ranks(old, lost, [0] * old.size, grow, alone) for grow in (False, True))
        joined = same.origin[same.roles.num_workers + same.roles.num_servers :]
        more = same.roles.spares
        assert new.roles.spares == 0 and new.roles.num_servers == same.roles.num_servers
        assert sorted(new.origin) == sorted(same.origin) and new.roles.num_workers == same.roles.num_workers + more
        assert [rank for rank in new.origin if rank not in joined] == [*same.origin[: len(same.origin) - more]]
        sizes = [stop - start for start, stop in new.roles.clients]
        assert sum(sizes) == new.roles.num_workers and all(sizes)
        before = [stop - start for start, stop in same.roles.clients]
        assert len(sizes) == len(before) + more * alone
        assert all(now == then or now - 1 <= min(sizes) for now, then in zip(sizes, before))


def test_the_smallest_client_grows_and_of_several_the_last():
    old = Roles(5, 1, 3, ((0, 2), (2, 3), (3, 5)))
    new = map_ranks(old, [], [0] * old.size, grow=True)
    assert new.roles == Roles(8, 1, 0, ((0, 2), (2, 5), (5, 8)))
    assert new.origin == (0, 1, 2, 6, 8, 3, 4, 7, 5)


def test_workers_that_are_clients_alone_are_joined_by_others():
    old = roles(2, 1, 2, 2)
    assert map_ranks(old, [0], [0] * 5, grow=True, alone=True).origin == (3, 1, 4, 2)


def test_a_spare_of_the_node_is_preferred():
    old = roles(2, 0, 3, 1)
    assert map_ranks(old, [1], [0, 1, 0, 1, 1]).origin == (0, 3, 2, 4)
    assert map_ranks(old, [1], [0, 1, 0, 0, 0]).origin == (0, 2, 3, 4)


@pytest.mark.parametrize(
    ("old", "lost", "sentence"),
    [
        pytest.param(roles(3, 1, 0, 1), [0, 1, 2], "all 3 workers have died, and no spare is left", id="no worker"),
        pytest.param(roles(3, 2, 0, 1), [3, 4], "all 2 servers have died, and no spare is left", id="no server"),
        pytest.param(roles(2, 0, 2, 1), [0, 1], "all 2 workers have died, which alone held the values", id="no value"),
        pytest.param(roles(2, 1, 1, 1), [0, 1], "", id="a spare is the worker"),
        pytest.param(roles(2, 1, 1, 1), [2], "", id="a spare is the server"),
        pytest.param(roles(3, 0, 0, 1), [0, 2], "", id="one is left"),
    ],
)
def test_where_what_is_left_does_not_suffice_a_sentence_says_so(old, lost, sentence):
    said = refusal(old, map_ranks(old, lost, [0] * old.size))
    assert said.startswith(sentence) and bool(said) == bool(sentence)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_a_mirror_is_on_another_node_if_there_is_one(nodes):
    for server, node in enumerate(nodes):
        mirror = mirror_of(server, nodes)
        if mirror is None:
            assert len(set(nodes)) == 1
        else:
            assert nodes[mirror] != node


def test_servers_on_nodes_of_their_own_are_a_ring():
    assert [mirror_of(server, [0, 1, 2, 3]) for server in range(4)] == [1, 2, 3, 0]
    assert [mirror_of(server, [0, 0, 0, 7, 7]) for server in range(5)] == [3, 3, 3, 0, 0]


def test_what_is_refused():
    assert refuse_mirrors(0, -1, [3]) == refuse_mirrors(1, 0, [3, 4, 4]) == ""
    assert "all 3 share one" in refuse_mirrors(1, 2, [4, 4, 4])
    assert "there is one server" in refuse_mirrors(1, 2, [4])
    assert "has no servers" in refuse_mirrors(1, 2, [])
    assert "ask for spares=0 or more" in refuse_mirrors(1, -1, [3, 4])

"""Who mirrors whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpips.store.recovery.mirrors.ring import mirror_of, refusal


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
    assert refusal(0, -1, [3]) == refusal(1, 0, [3, 4, 4]) == ""
    assert "all 3 share one" in refusal(1, 2, [4, 4, 4])
    assert "there is one server" in refusal(1, 2, [4])
    assert "has no servers" in refusal(1, 2, [])
    assert "ask for spares=0 or more" in refusal(1, -1, [3, 4])

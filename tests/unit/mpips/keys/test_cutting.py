"""How keys are cut: every worker cuts alike, every element has one place and the right contributors."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from mpips import Options
from mpips.store.keys.cutting import Cutting
from mpips.store.keys.key import Key
from mpips.store.keys.sharding import Interval, owners, split


def cutting(kind="dist_sync", workers=4, servers=2, clients=2, rank=0, one_node=True, **options):
    """A worker's, and what stands for its lines."""
    chosen = Options(servers=servers, **options)
    parts = tuple(split(Interval(0, workers), workers if kind.startswith("dist_") else clients))
    number = next(n for n, part in enumerate(parts) if rank < part.stop)
    layout = SimpleNamespace(
        kind=kind,
        options=chosen,
        rank=rank,
        num_workers=workers,
        num_servers=servers,
        clients=parts,
        client_number=number,
        groups=lambda: owners(parts, kind, chosen.masters),
    )
    return Cutting(layout, one_node, True), [SimpleNamespace(local=one_node)] * servers


def cut(made, shape, name="w", dtype=np.float32):
    cutter, lines = made
    key, cards = Key(name, shape, np.dtype(dtype)), {server: [] for server in range(len(lines))}
    cutter.cut(key, lines, cards)
    return key, cards


KINDS = [("dist_sync", "one"), ("mpi_sync", "one"), ("mpi_sync", "all")]


@pytest.mark.parametrize("shape", [(), (0,), (7,), (300, 5), (1 << 12, 1 << 9)])
@pytest.mark.parametrize("one_node", [True, False])
@pytest.mark.parametrize(("kind", "masters"), KINDS)
def test_every_element_has_one_shard_and_is_pushed_once_by_each_client(kind, masters, one_node, shape):
    keys = [
        cut(cutting(kind, rank=rank, one_node=one_node, masters=masters, big_array=1000), shape)[0] for rank in range(4)
    ]
    first = keys[0]
    ends = sorted((shard.start, shard.stop) for shard in first.shards)
    assert ends[0][0] == 0
    assert ends[-1][1] == first.size
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    clients = 4 if kind == "dist_sync" else 2
    for index, shard in enumerate(first.shards):
        assert len(shard.contributors) == clients
        same = [key.shards[index] for key in keys]
        assert len({(one.number, one.server, one.start, one.stop, one.blocks) for one in same}) == 1
        assert [rank for rank in range(4) if keys[rank].shards[index] in keys[rank].pushes] == list(shard.contributors)
        assert all(same[rank].mine == 1 + place for place, rank in enumerate(shard.contributors))


@pytest.mark.parametrize(("kind", "masters"), KINDS)
def test_cards_tell_servers_what_workers_know(kind, masters):
    key, cards = cut(cutting(kind, masters=masters, big_array=1000), (1 << 12, 8))
    told = {card.number: card for new in cards.values() for card in new}
    for shard in key.shards:
        card = told[shard.number]
        assert (card.start, card.stop, card.contributors) == (shard.start, shard.stop, shard.contributors)
        assert card in cards[shard.server]
        assert (card.block_elements, card.row_elements, card.key) == (shard.block_elements, 8, "w")
    assert {server for server, new in cards.items() if new} == {0, 1}


def test_what_is_tried_with_a_copy_changes_nothing():
    made = cutting(big_array=1000)
    cut((made[0].copy(), made[1]), (500,))
    again, _ = cut(made, (500,))
    fresh, _ = cut(cutting(big_array=1000), (500,))
    assert [shard.number for shard in again.shards] == [shard.number for shard in fresh.shards]
    assert [shard.server for shard in again.shards] == [shard.server for shard in fresh.shards]


def test_keys_that_stay_where_they_were_count_as_if_they_had_been_placed_there():
    (cutter, lines), cards = cutting(big_array=1000), {0: [], 1: []}
    key = Key("kept", (200,), np.dtype(np.float32))
    cutter.cut(key, lines, cards, [(1, Interval(0, 200))])
    assert [shard.server for shard in key.shards] == [1] and not cards[0]
    after, _ = cut((cutter, lines), (200,), "new")
    assert after.shards[0].server == 0  # which holds less


def test_memory_that_is_given_back_is_taken_again():
    made = cutting(big_array=1000)
    first, _ = cut(made, (900,), "first")
    cut(made, (100,), "second")
    made[0].free([first])
    again, _ = cut(made, (500,), "third")
    assert again.shards[0].server == first.shards[0].server

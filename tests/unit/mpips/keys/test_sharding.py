"""Placement covers every element once, balances bytes, and gives every group one owner of each unit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.store.keys.key import Shard
from mpips.store.keys.sharding import (
    SHORT,
    Interval,
    Placement,
    block_bytes,
    grain_of,
    owners,
    pulled_at_once,
    split,
    units,
)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 9), st.integers(1, 50))
def test_a_split_covers_evenly_on_grains(start, size, parts, grain):
    whole = Interval(start, start + size)
    pieces = split(whole, parts, grain)
    assert len(pieces) == parts
    assert pieces[0].start == start and pieces[-1].stop == whole.stop
    assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
    assert all(cut.start % grain == 0 or cut.start in whole for cut in pieces[1:])
    if grain == 1:
        sizes = [piece.size for piece in pieces]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(st.integers(0, 10**8), st.integers(4096, 10**7))
def test_a_server_has_a_next_block_to_wait_for_unless_the_unit_is_short_or_cores_are_shared(nbytes, most):
    assert block_bytes(nbytes, most, side_by_side=False) == most
    block = block_bytes(nbytes, most, side_by_side=True)
    assert most // SHORT <= block <= most
    assert block < nbytes or nbytes <= most // SHORT
    assert nbytes <= 2 * block or block == most


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.integers(1, 5))
def test_small_arrays_balance_and_big_ones_are_split(sizes, servers):
    placement = Placement(servers, big_array=1000)
    for size in sizes:
        before = list(placement.loads)
        pieces = placement.place((size,), 4)
        assert sum(part.size for _, part in pieces) == size
        mean = sum(placement.loads) / servers
        fits = size < 250 or min(before) + 4 * size <= 5 / 4 * mean
        if (size < 1000 and fits) or servers == 1:
            assert len(pieces) == 1 and before[pieces[0][0]] == min(before)
        else:
            assert len(pieces) == servers
    assert sum(placement.loads) == 4 * sum(sizes)
    assert max(placement.loads) - min(placement.loads) <= 4 * 1000 + 4 * len(sizes)


@pytest.mark.parametrize(("servers", "split_first"), [(1, 0), (2, 3), (3, 7), (4, 11)])
def test_arrays_a_little_too_small_to_be_split_are_split_as_long_as_they_are_few(servers, split_first):
    placement = Placement(servers, big_array=1000)
    places = [placement.place((600,), 4) for _ in range(100)]
    assert [len(pieces) for pieces in places] == [servers] * split_first + [1] * (100 - split_first)
    assert [len(Placement(servers, 1000).place((size,), 4)) for size in (249, 250)] == [1, servers]


def test_matrices_are_cut_between_rows_where_there_are_enough():
    assert grain_of((1200, 300), 3) == 300
    assert grain_of((10, 300), 3) == 1
    assert grain_of((300,), 3) == 1
    assert all(part.start % 300 == 0 for _, part in Placement(3, 1000).place((1200, 300), 4))


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(["one", "all"]),
    st.sampled_from(["dist_sync", "mpi_sync"]),
    st.integers(0, 200),
)
def test_every_group_contributes_every_element_once(workers, clients, masters, kind, size):
    groups = owners(split(Interval(0, workers), min(clients, workers)), kind, masters)
    cut = units(0, 0, Interval(10, 10 + size), groups)
    assert sum(unit.size for unit in cut) == size
    assert all(a.stop == b.start for a, b in itertools.pairwise(cut))
    for unit in cut:
        assert len(unit.contributors) == len(groups)
        assert all(owner in group for owner, group in zip(unit.contributors, groups))
    if kind == "dist_sync" or masters == "one":
        assert len(cut) == 1


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 9000))
def test_a_pull_copies_all_of_a_unit_and_long_ones_by_copies_that_go_past_the_caches(blocks, block, past_caches):
    least = pulled_at_once(blocks * block, block, past_caches)
    part = Shard(0, 0, 0, blocks * block, None, (0,), block, blocks, least)
    steps = [0]
    while steps[-1] < blocks:
        steps.append(part.enough(steps[-1]))
    assert steps[-1] == blocks
    longer = [(b - a) * block >= past_caches for a, b in itertools.pairwise(steps)]
    assert all(longer) if blocks * block >= past_caches else len(steps) == blocks + 1

"""Slices, splits and minibatches: everything is held exactly once, whatever the counts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.mlp.data.loading import deal, epoch_order
from mpips.mlp.network import Network, Specification, interval, splits
from mpips.mlp.prediction import MuteExchange

SIZES = st.lists(st.integers(1, 12), min_size=2, max_size=6)


@given(st.integers(0, 100), st.integers(1, 20))
def test_intervals_cover_everything_once_and_evenly(count, parts):
    found = [interval(count, parts, part) for part in range(parts)]
    assert [item for start, stop in found for item in range(start, stop)] == list(range(count))
    lengths = [stop - start for start, stop in found]
    assert max(lengths) - min(lengths) <= 1


@given(SIZES, st.integers(1, 7), st.sampled_from(["pairs", "columns"]))
def test_every_weight_is_held_and_only_whole_layers_are_held_twice(sizes, parts, mode):
    per_rank = [splits(sizes, parts, part, mode) for part in range(parts)]
    for layer in range(len(sizes) - 1):
        held = np.zeros((sizes[layer + 1], sizes[layer]), int)
        for each in per_rank:
            held[slice(*each[layer].outputs), slice(*each[layer].inputs)] += 1
        expected = parts if per_rank[0][layer].kind == "whole" else 1
        assert (held == expected).all()


@given(SIZES, st.integers(2, 7))
def test_rows_follow_columns_and_start_where_those_ended(sizes, parts):
    for part in range(parts):
        mine = splits(sizes, parts, part, "pairs")
        for before, after in pairwise(mine):
            if after.kind == "rows":
                assert before.kind == "columns"
                assert not before.gathered
                assert before.outputs == after.inputs


def test_an_unknown_mode_names_the_known_ones():
    with pytest.raises(ValueError, match="pairs, columns"):
        splits([2, 3, 1], 2, 0, "rows")


@given(SIZES, st.integers(2, 5), st.sampled_from(["pairs", "columns"]), st.integers(0, 3))
def test_slices_of_a_network_are_slices_of_the_same_matrices(sizes, parts, mode, seed):
    specification = Specification(tuple(sizes), "relu", "l2", "float64", seed)
    whole = Network(specification)
    for part in range(parts):
        exchange = MuteExchange(parts)
        exchange.part = part
        mine = Network(specification, exchange, mode)
        for layer, split in enumerate(mine.splits):
            expected = whole.parameters[2 * layer][slice(*split.outputs), slice(*split.inputs)]
            np.testing.assert_array_equal(mine.parameters[2 * layer], expected)


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 7), st.integers(0, 3), st.data())
def test_minibatches_are_the_same_however_many_parts_they_are_cut_in(rows, batch, parts, seed, data):
    test_rows = data.draw(st.integers(0, rows - 1))
    whole = deal(rows, test_rows, batch, 1, 0, seed)
    dealt = [deal(rows, test_rows, batch, parts, index, seed) for index in range(parts)]
    for k in range(len(whole.samples)):
        expected = whole.train[whole.bounds[k] : whole.bounds[k + 1]]
        found = np.concatenate([each.train[each.bounds[k] : each.bounds[k + 1]] for each in dealt])
        np.testing.assert_array_equal(found, expected)
        assert len(expected) == whole.samples[k] == dealt[0].samples[k]
    np.testing.assert_array_equal(np.concatenate([each.test for each in dealt]), whole.test)
    assert sorted(np.concatenate([whole.train, whole.test])) == list(range(rows))


def test_every_epoch_visits_every_minibatch_in_another_order():
    first, second = epoch_order(20, 0, 1), epoch_order(20, 1, 1)
    assert sorted(first) == sorted(second) == list(range(20))
    assert list(first) != list(second)
    np.testing.assert_array_equal(first, epoch_order(20, 0, 1))

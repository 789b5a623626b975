"""RowSparse arrays behave as the dense arrays they stand for."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips import RowSparse, optimizers
from mpips.store.keys import row_sparse


@st.composite
def sparse(draw, shape=None, most=12):
    """Random, repeated, unsorted or no rows; whole numbers, so that sums are exact."""
    shape = shape or (draw(st.integers(1, 9)), *draw(st.lists(st.integers(1, 3), max_size=2)))
    rows = draw(st.lists(st.integers(0, shape[0] - 1), max_size=most))
    seed = draw(st.integers(0, 10**6))
    values = np.random.default_rng(seed).integers(-9, 10, (len(rows), *shape[1:])).astype(np.float32)
    return RowSparse(np.array(rows), values, shape)


def dense(array):
    out = np.zeros(array.shape, array.dtype)
    for row, value in zip(array.rows, array.values):
        out[row] += value
    return out


@given(array=sparse())
def test_to_dense_adds_repeated_rows(array):
    np.testing.assert_array_equal(array.to_dense(), dense(array))


@given(array=sparse())
def test_merged_has_each_row_once_in_order(array):
    merged = array.merged()
    assert list(merged.rows) == sorted(set(array.rows.tolist()))
    np.testing.assert_array_equal(merged.to_dense(), dense(array))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@given(st.integers(0, 60), st.integers(1, 12), st.sampled_from([(), (1,), (3,), (2, 9)]), st.integers(0, 999))
def test_values_of_one_row_are_added_in_their_order(dtype, count, table, shape, seed):
    rng, dtype = np.random.default_rng(seed), np.dtype(getattr(ml_dtypes, dtype, dtype))
    rows = np.minimum(rng.integers(table, size=count), rng.integers(table, size=count))
    array = RowSparse(rows, rng.normal(size=(count, *shape)).astype(dtype), (table, *shape))
    merged, seen = array.merged(), {}
    for row, value in zip(rows.tolist(), array.values):
        seen[row] = seen[row] + value if row in seen else value
    assert merged.rows.tolist() == sorted(seen)
    assert all((value == seen[row]).all() for row, value in zip(merged.rows.tolist(), merged.values))


@given(parts=st.lists(sparse(shape=(6, 2)), min_size=1, max_size=5))
def test_add_is_the_sum_of_the_dense(parts):
    total = row_sparse.add(parts)
    np.testing.assert_array_equal(total.to_dense(), sum(dense(part) for part in parts))
    assert len(set(total.rows.tolist())) == len(total.rows)


@given(array=sparse(shape=(8, 2)), cut=st.integers(0, 8))
def test_between_gives_shards_that_make_the_whole(array, cut):
    shards = [part.to_dense() for part in (array.merged().between(0, cut), array.merged().between(cut, 8))]
    np.testing.assert_array_equal(np.concatenate(shards), dense(array))


@pytest.mark.slow
@given(array=sparse(shape=(7, 3)), other=sparse(shape=(7, 3)))
def test_an_update_of_rows_is_the_dense_update_on_those_rows(array, other):
    opt = optimizers.SGD(learning_rate=0.5, momentum=0.5)
    start = np.arange(21.0, dtype=np.float32).reshape(7, 3)
    weights, state = start.copy(), opt.init(start.reshape(-1))
    full, full_state = start.copy(), opt.init(start.reshape(-1))
    row_sparse.update_rows(opt, weights, array.merged(), state, 1)
    opt.update(full.reshape(-1), dense(array).reshape(-1), full_state, 1)
    np.testing.assert_array_equal(weights, full)
    before = weights.copy()
    row_sparse.update_rows(opt, weights, other.merged(), state, 2)
    untouched = np.setdiff1d(np.arange(7), other.rows)
    np.testing.assert_array_equal(weights[untouched], before[untouched])


def test_rows_that_lie_apart_in_memory_are_packed():
    array = RowSparse(np.arange(6)[::2], np.arange(12.0).reshape(6, 2)[::2], (6, 2))
    again = row_sparse.unpacked(row_sparse.packed(array), array.shape, array.dtype)
    np.testing.assert_array_equal(again.to_dense(), dense(array))


def test_lists_are_taken_and_no_rows_are_fine():
    array = RowSparse([], np.zeros((0, 4)), (5, 4))
    np.testing.assert_array_equal(array.to_dense(), np.zeros((5, 4)))
    np.testing.assert_array_equal(RowSparse([1, 1], [[1.0], [2.0]], (2, 1)).to_dense(), [[0], [3]])


@pytest.mark.parametrize(
    "rows, values, shape, words",
    [
        ([0, 5], np.zeros((2, 2)), (5, 2), ["[0, 5)", "0..5"]),
        ([-1], np.zeros((1, 2)), (5, 2), ["-1"]),
        ([0.5], np.zeros((1, 2)), (5, 2), ["integer", "float64"]),
        ([[0]], np.zeros((1, 2)), (5, 2), ["1-D"]),
        ([0, 1], np.zeros((1, 2)), (5, 2), ["(2, 2)", "(1, 2)"]),
        ([0], np.zeros((1, 3)), (5, 2), ["(1, 2)", "(1, 3)"]),
        ([], np.zeros((0,)), (), ["dimension"]),
    ],
)
def test_what_does_not_fit_is_named(rows, values, shape, words):
    with pytest.raises(ValueError) as caught:
        RowSparse(rows, values, shape)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("dtype", ["float16", "int8", "int32", "float64"])
def test_adding_repeated_rows_keeps_the_dtype(dtype):
    merged = RowSparse([2, 0, 2], np.array([[1, 2], [3, 4], [5, 6]], dtype), (3, 2)).merged()
    assert merged.values.dtype == dtype
    assert merged.values.tolist() == [[3, 4], [6, 8]]


def test_different_arrays_do_not_add():
    one = RowSparse([0], np.ones((1, 2)), (3, 2))
    with pytest.raises(ValueError, match="cannot be added"):
        one.add_to(np.zeros((4, 2)))
    with pytest.raises(ValueError, match="differ"):
        row_sparse.update_rows(optimizers.SGD(), np.zeros((4, 2)), one, (), 1)

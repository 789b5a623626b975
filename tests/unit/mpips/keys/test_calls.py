"""What a caller of `row_sparse_pull` may hand over, and what is said of anything else."""

from __future__ import annotations

import numpy as np
import pytest

from mpips.keys import calls
from mpips.keys.key import Key

KNOWN = {name: Key(name, (10, 3), np.dtype(np.float32)) for name in "cd"}


def outs(*rows):
    return [np.zeros((count, 3), np.float32) for count in rows]


@pytest.mark.parametrize("as_one", [list, tuple, np.array])
@pytest.mark.parametrize("as_all", [list, tuple])
def test_row_numbers_of_several_keys_are_lists_or_arrays(as_one, as_all):
    found = calls.rows(KNOWN, ["c", "d"], outs(2, 1), as_all([as_one([0, 1]), as_one([5])]))
    assert [(key.name, ids.tolist()) for key, _, ids in found] == [("c", [0, 1]), ("d", [5])]


def test_a_key_with_several_outs_takes_one_list_or_one_for_each():
    for row_ids in ([[1, 2]], [[[1, 2], [3, 4]]], [[np.array([1, 2]), (3, 4)]]):
        found = calls.rows(KNOWN, ["c"], [outs(2, 2)], row_ids)
        assert [ids.tolist() for _, _, ids in found] in ([[1, 2]] * 2, [[1, 2], [3, 4]])
    assert calls.rows(KNOWN, ["c"], outs(0), [[]])[0][2].size == 0


@pytest.mark.parametrize("row_ids, rows, error, words", [
    ([0, 10], 2, ValueError, r"key 'c' has rows 0\.\.9, not \[ 0 10\]"),
    ([0.0, 1.0], 2, TypeError, r"row_ids of key 'c' are float64: pass integers 0\.\.9"),
    (["x"], 1, TypeError, "row_ids of key 'c' are str"),
    ([0, 1], 3, ValueError, r"2 rows of key 'c' are float32\(2, 3\), but this array is float32\(3, 3\): pass"),
])  # fmt: skip
def test_bad_rows_are_told(row_ids, rows, error, words):
    with pytest.raises(error, match=words):
        calls.rows(KNOWN, "c", outs(rows)[0], row_ids)


def test_numpy_integers_are_keys():
    numbered = {3: Key(3, (2,), np.dtype(np.float32))}
    (call,) = calls.check(numbered, "push", np.int64(3), np.ones(2, np.float32))
    assert call.key.name == 3
    assert type(call.key.name) is int


def test_a_list_of_arrays_is_summed_and_the_result_goes_to_all():
    values = [np.full((10, 3), value, np.float32) for value in (1, 2)]
    (call,) = calls.check(KNOWN, "pushpull", "c", values)
    assert (call.payload == 3).all()
    assert [target is value for target, value in zip(call.targets, values)] == [True, True]


@pytest.mark.parametrize("what, value, out, words", [
    ("push", "no", None, "push: key 'c' needs an array, not str"),
    ("pull", None, [1, 2], "pull: key 'c' needs an array, not int"),
    ("pushpull", np.zeros((10, 3), np.float32), "no", "pushpull: key 'c' needs an array, not str"),
])  # fmt: skip
def test_bad_arrays_are_told_before_anything_is_sent(what, value, out, words):
    with pytest.raises(TypeError, match=words):
        calls.check(KNOWN, what, "c", value, out)

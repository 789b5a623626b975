"""What a caller may hand to a store, and what is said of anything else: on a store of one process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import mpips
from mpips import RowSparse

A = np.zeros((2, 3), np.float32)
SWAPPED = np.dtype("f4").newbyteorder()


@pytest.fixture
def kv() -> Iterator[mpips.KVStore]:
    """A store with the keys "a" and "b" of shape (2, 3), and "c" and "d" of ten rows of three."""
    made = mpips.create("local")
    made.init(["a", "b"], [A, A])
    made.init(["c", "d"], [np.arange(30, dtype=np.float32).reshape(10, 3)] * 2)
    yield made
    made.close()


@pytest.fixture
def numbered() -> Iterator[mpips.KVStore]:
    made = mpips.create("local")
    made.init([1, 2], [A, A])
    yield made
    made.close()


def ones(value: float = 1.0) -> np.ndarray:
    return np.full((2, 3), value, np.float32)


def test_one_key_or_lists(kv: mpips.KVStore, numbered: mpips.KVStore) -> None:
    for store, key, value, total in ((kv, "a", ones(), 1), (kv, "a", [ones(), ones(2)], 3)):
        store.push(key, value)
        store.pull(key, out := ones(0))
        assert (out == total).all()
    numbered.push([1, np.int64(2)], [ones(), [ones(2), ones(3)]])
    outs = [ones(0), ones(0)]
    numbered.pull([1, 2], outs)
    assert [out[0, 0] for out in outs] == [1, 5]


@pytest.mark.parametrize(
    "key, value, error, words",
    [
        ([1, "a"], [A, A], TypeError, "not mixed"),
        ([1, 2], [A], ValueError, "a list of 2 keys needs a list of 2 as value, not a list of 1"),
        ([1], [A, A], ValueError, "a list of 1 key needs a list of 1 as value, not a list of 2"),
        ([1, 2], A, ValueError, "not one ndarray"),
        ([1, 1], [A, A], ValueError, "key 1 comes twice .*name each once"),
        (["a", "b", 7], [A, A, A], TypeError, "not mixed, as 'a' and 7 are"),
        (1.5, A, TypeError, "an int or a str, not 1.5"),
        (True, A, TypeError, "an int or a str"),
        (1, [], ValueError, "1 has an empty list of arrays; pass at least one"),
        ([], [], ValueError, "an empty list of keys"),
    ],
)
def test_bad_lists_are_told(numbered: mpips.KVStore, key, value, error, words) -> None:
    with pytest.raises(error, match=words):
        numbered.push(key, value)


def test_an_unknown_key_is_told_what_kind_of_keys_there_are(kv: mpips.KVStore) -> None:
    with pytest.raises(ValueError, match=r"^pull: key 'x' was not initialised; call init first$"):
        kv.pull("x", ones())
    with pytest.raises(ValueError, match=r"key 0 was not .* init first \(keys of this store are str, such as 'a'\)"):
        kv.pull(0, ones())


@pytest.mark.parametrize(
    "what, value, error, words",
    [
        ("push", A.T, ValueError, "'a' is not contiguous"),
        ("push", "no", TypeError, "push: key 'a' needs an array, not str"),
        ("pull", [1, 2], TypeError, "pull: key 'a' needs an array, not int"),
        (
            "push",
            A.astype(float),
            ValueError,
            r"as float32\(2, 3\), but this array is float64\(2, 3\): pass one of dtype float32",
        ),
        (
            "push",
            np.zeros((3, 2), np.float32),
            ValueError,
            r"this array is float32\(3, 2\): pass one of shape \(2, 3\)",
        ),
        ("push", np.zeros((2, 3), SWAPPED), TypeError, f"'a' has elements of dtype {SWAPPED.str}; pass float16"),
        (
            "push",
            RowSparse(np.array([1]), np.zeros((1, 3), SWAPPED), (2, 3)),
            ValueError,
            r"but this array is [<>]f4\(2, 3\)",
        ),
    ],
)
def test_bad_arrays_are_told_and_change_nothing(kv: mpips.KVStore, what, value, error, words) -> None:
    with pytest.raises(error, match=words):
        getattr(kv, what)("a", value)
    kv.pull("a", out := ones())
    assert (out == 0).all()


def test_what_is_only_read_may_be_read_only(kv: mpips.KVStore) -> None:
    locked = ones()
    locked.flags.writeable = False
    kv.push("a", locked)
    with pytest.raises(ValueError, match="pull: the array of key 'a' is read-only"):
        kv.pull("a", locked)


@pytest.mark.parametrize(
    "dtype, called",
    [
        (np.dtype("i8").newbyteorder(), "pass float16"),
        (object, "dtype object"),
        ("S5", "dtype bytes40"),
        (bool, "dtype bool"),
        (complex, "dtype complex128"),
        ("M8[s]", "dtype datetime64"),
        ([("x", "f4")], "dtype void32"),
    ],
)
def test_what_servers_cannot_sum_is_told(kv: mpips.KVStore, dtype, called) -> None:
    with pytest.raises(TypeError, match=called):
        kv.init("new", np.zeros(3, dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint64", "bfloat16"])
def test_numbers_may_be_of_any_size(kv: mpips.KVStore, dtype) -> None:
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    kv.init("new", np.zeros(3, dtype))
    kv.pushpull("new", np.full(3, 2, dtype), out := np.zeros(3, dtype))
    assert (out.astype(int) == 2).all()


def test_a_keys_arrays_are_summed_and_the_result_goes_to_all(kv: mpips.KVStore) -> None:
    parts = [ones(value) for value in (1, 2, 4)]
    kv.push("a", parts)
    assert [part[0, 0] for part in parts] == [1, 2, 4]
    kv.pushpull("a", parts)
    assert all((part == 7).all() for part in parts)


@pytest.mark.parametrize("as_one", [list, tuple, np.array])
@pytest.mark.parametrize("as_all", [list, tuple])
def test_row_numbers_of_several_keys_are_lists_or_arrays(kv: mpips.KVStore, as_one, as_all) -> None:
    outs = [np.zeros((count, 3), np.float32) for count in (2, 1)]
    kv.row_sparse_pull(["c", "d"], outs, row_ids=as_all([as_one([0, 1]), as_one([5])]))
    assert [out[:, 0].tolist() for out in outs] == [[0, 3], [15]]


@pytest.mark.parametrize(
    "row_ids, found",
    [
        ([[1, 2]], [[3, 6]] * 2),
        ([[[1, 2], [3, 4]]], [[3, 6], [9, 12]]),
        ([[np.array([1, 2]), (3, 4)]], [[3, 6], [9, 12]]),
    ],
)
def test_a_key_with_several_outs_takes_one_list_or_one_for_each(kv: mpips.KVStore, row_ids, found) -> None:
    outs = [np.zeros((2, 3), np.float32) for _ in range(2)]
    kv.row_sparse_pull(["c"], [outs], row_ids=row_ids)
    assert [out[:, 0].tolist() for out in outs] == found


@pytest.mark.parametrize(
    "row_ids, rows, error, words",
    [
        ([0, 10], 2, ValueError, r"key 'c' has rows 0\.\.9, not \[ 0 10\]"),
        ([0.0, 1.0], 2, TypeError, r"row_ids of key 'c' are float64: pass integers 0\.\.9"),
        (["x"], 1, TypeError, "row_ids of key 'c' are str"),
        ([0, 1], 3, ValueError, r"2 rows of key 'c' are float32\(2, 3\), but this array is float32\(3, 3\): pass"),
    ],
)
def test_bad_rows_are_told(kv: mpips.KVStore, row_ids, rows, error, words) -> None:
    with pytest.raises(error, match=words):
        kv.row_sparse_pull("c", np.zeros((rows, 3), np.float32), row_ids=row_ids)

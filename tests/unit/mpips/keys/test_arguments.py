"""What a caller hands over becomes pairs of a key and its arrays, or a sentence."""

from __future__ import annotations

import numpy as np
import pytest

from mpips import RowSparse
from mpips.keys import arguments

A = np.zeros((2, 3), np.float32)


def test_one_key_or_lists():
    assert arguments.pairs("a", A, "push") == [("a", [A])]
    assert arguments.pairs("a", [A, A], "push") == [("a", [A, A])]
    assert arguments.pairs([1, np.int64(2)], [A, [A, A]], "push") == [(1, [A]), (2, [A, A])]


@pytest.mark.parametrize("key, value, error, words", [
    ([1, "a"], [A, A], TypeError, "not mixed"),
    ([1, 2], [A], ValueError, "a list of 2 keys needs a list of 2 as value, not a list of 1"),
    ([1], [A, A], ValueError, "a list of 1 key needs a list of 1 as value, not a list of 2"),
    ([1, 2], A, ValueError, "not one ndarray"),
    ([1, 1], [A, A], ValueError, "key 1 comes twice .*name each once"),
    (["a", "b", 7], [A, A, A], TypeError, "not mixed, as 'a' and 7 are"),
    (1.5, A, TypeError, "an int or a str, not 1.5"),
    (True, A, TypeError, "an int or a str"),
    ("a", [], ValueError, "'a' has an empty list of arrays; pass at least one"),
    ([], [], ValueError, "an empty list of keys"),
])  # fmt: skip
def test_bad_lists_are_told(key, value, error, words):
    with pytest.raises(error, match=words):
        arguments.pairs(key, value, "push")


def test_an_unknown_key_is_told_what_kind_of_keys_there_are():
    assert arguments.known({"a": 1}, "a", "pull") == 1
    with pytest.raises(ValueError, match=r"^pull: key 'b' was not initialised; call init first$"):
        arguments.known({"a": 1}, "b", "pull")
    with pytest.raises(ValueError, match=r"key 0 was not .* init first \(keys of this store are str, such as 'a'\)"):
        arguments.known({"a": 1}, 0, "pull")


def test_arrays_must_be_readable_or_writable_as_they_lie():
    assert arguments.readable(A, "a", "push") is A
    locked = A.copy()
    locked.flags.writeable = False
    assert arguments.readable(locked, "a", "push") is locked
    with pytest.raises(ValueError, match="pull: the array of key 'a' is read-only"):
        arguments.writable(locked, "a", "pull")
    with pytest.raises(ValueError, match="'a' is not contiguous"):
        arguments.readable(A.T, "a", "push")
    with pytest.raises(TypeError, match="needs an array, not str"):
        arguments.readable("no", "a", "push")
    said = r"initialised as float64\(2, 3\), but this array is float32\(2, 3\): pass one of dtype float64"
    with pytest.raises(ValueError, match=said):
        arguments.fits(A, (2, 3), np.dtype(float), "a", "push")
    with pytest.raises(ValueError, match=r"this array is float32\(2, 3\): pass one of shape \(3, 2\)"):
        arguments.fits(A, (3, 2), np.dtype("f4"), "a", "push")


@pytest.mark.parametrize("dtype, called", [
    (np.dtype("f4").newbyteorder(), f"'a' has elements of dtype {np.dtype('f4').newbyteorder().str}; pass float16"),
    (np.dtype("i8").newbyteorder(), "pass float16"), (object, "dtype object"), ("S5", "dtype bytes40"),
    (bool, "dtype bool"), (complex, "dtype complex128"), ("M8[s]", "dtype datetime64"), ([("x", "f4")], "dtype void32"),
])  # fmt: skip
def test_what_servers_cannot_sum_is_told(dtype, called):
    with pytest.raises(TypeError, match=called):
        arguments.readable(np.zeros(3, dtype), "a", "push")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint64", "bfloat16"])
def test_numbers_may_be_of_any_size(dtype):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    assert arguments.readable(np.zeros(3, dtype), "a", "push").size == 3


def test_foreign_byte_order_is_told_from_a_keys_own():
    rows = RowSparse(np.array([1]), np.zeros((1, 3), np.dtype("f4").newbyteorder()), (2, 3))
    with pytest.raises(ValueError, match=r"but this array is [<>]f4\(2, 3\)"):
        arguments.fits(rows, (2, 3), np.dtype("f4"), "a", "push")


def test_a_keys_arrays_are_summed():
    parts = [np.full(2, value) for value in (1.0, 2.0, 4.0)]
    assert list(arguments.total(parts)) == [7, 7]
    assert list(parts[0]) == [1, 1]

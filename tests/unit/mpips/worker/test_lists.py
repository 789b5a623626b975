"""Keys of a call that go together: every call once, in vectors of one dtype that are not too long."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpips.store.keys.key import Key
from mpips.store.remote.client import MOST_BYTES, SMALL_BYTES, steps

DTYPES = [np.dtype(name) for name in ("f2", "f4", "f8", "i8")]
SIZES = st.one_of(st.integers(0, 40), st.integers(SMALL_BYTES[True] // 8 - 2, SMALL_BYTES[False] // 2 + 2))


def keys_of(*wanted, fast=False):
    """Keys of (elements, dtype), with a fast path or without."""
    return [Key(name, (size,), dtype, fast=object() if fast else None) for name, (size, dtype) in enumerate(wanted)]


@given(st.lists(st.tuples(SIZES, st.sampled_from(DTYPES)), max_size=120), st.booleans())
def test_every_key_is_there_once_with_others_of_its_dtype_and_small(wanted, fast):
    keys = keys_of(*wanted, fast=fast)
    found = steps(keys)
    assert sorted(place for step in found for place in step) == list(range(len(keys)))
    assert [step[0] for step in found] == sorted(step[0] for step in found)
    for step in (step for step in found if len(step) > 1):
        assert len({keys[place].dtype for place in step}) == 1
        assert all(0 < keys[place].nbytes <= SMALL_BYTES[fast] for place in step)
        assert step == sorted(step)
        assert sum(keys[place].nbytes for place in step) <= MOST_BYTES


def test_small_keys_of_a_dtype_fill_vectors():
    made = keys_of(*[(1000, DTYPES[1])] * 1000)
    assert len(steps(made)) == -(-1000 // (MOST_BYTES // 4000))
    mixed = keys_of(*[(10, DTYPES[name % 4]) for name in range(100)])
    assert [len(step) for step in steps(mixed)] == [25] * 4

"""Keys of a call that go together: every call once, in vectors of one dtype that are not too long."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips import fused
from mpips.calls import Call
from mpips.fused import MOST_BYTES, SMALL_BYTES, Vectors, steps
from mpips.keys import Key
from mpips.row_sparse import RowSparse

DTYPES = [np.dtype(name) for name in ("f2", "f4", "f8", "i8")]
SIZES = st.one_of(st.integers(0, 40), st.integers(SMALL_BYTES[True] // 8 - 2, SMALL_BYTES[False] // 2 + 2))
ROWS = RowSparse(np.array([1]), np.ones((1, 3), np.float32), (7, 3))


def pushing(name, size, dtype, short=False):
    """A call whose payload nobody looks at, of a key with a short way or without."""
    return Call(Key(name, (size,), dtype, short=object() if short else None), np.empty(0, dtype), [])


@given(st.lists(st.tuples(SIZES, st.sampled_from(DTYPES)), max_size=120), st.booleans())
def test_every_call_is_made_once_with_others_of_its_dtype_and_small(wanted, short):
    made = [pushing(name, *each, short) for name, each in enumerate(wanted)]
    found = steps(made)
    assert sorted(call.key.name for step in found for call in step) == list(range(len(made)))
    assert [step[0].key.name for step in found] == sorted(step[0].key.name for step in found)
    together = [step for step in found if len(step) > 1]
    for step in together:
        assert len({call.key.dtype for call in step}) == 1
        assert all(0 < call.key.nbytes <= SMALL_BYTES[short] for call in step)
        assert [call.key.name for call in step] == sorted(call.key.name for call in step)
        assert sum(call.key.nbytes for call in step) <= MOST_BYTES


def test_small_calls_of_a_dtype_fill_vectors():
    made = [pushing(name, 1000, DTYPES[1]) for name in range(1000)]
    assert len(steps(made)) == -(-1000 // (MOST_BYTES // 4000))
    mixed = [pushing(name, 10, DTYPES[name % 4]) for name in range(100)]
    assert [len(step) for step in steps(mixed)] == [25] * 4


def test_rows_go_alone_and_pulls_together():
    rows = Call(Key("r", (7, 3), DTYPES[1]), ROWS, [])
    pushes = [pushing(name, 4, DTYPES[1]) for name in "abc"]
    assert steps([pushes[0], rows, *pushes[1:]]) == [pushes, [rows]]
    pulls = [call._replace(payload=None) for call in pushes]
    assert steps(pulls) == [pulls]


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=9), min_size=1, max_size=5), st.booleans())
def test_vectors_hold_arrays_one_behind_the_other(calls, shared):
    vectors = Vectors(shared)
    for sizes in calls:
        values = [np.arange(size, dtype=np.float32) + 100 * index for index, size in enumerate(sizes)]
        vector, total, parts = vectors.lay(values)
        assert np.array_equal(vector, np.concatenate(values))
        total[:] = 2 * vector
        assert all(np.array_equal(part, 2 * value) for part, value in zip(parts, values, strict=True))
        assert not np.may_share_memory(vector, total)


@pytest.mark.parametrize("size", [3, 1000])
def test_memory_is_used_again(monkeypatch, size):
    monkeypatch.setattr(fused, "MOST_BYTES", 400)
    vectors = Vectors(False)
    values = [np.ones(size, np.float32)] * 2
    first, second = vectors.lay(values), vectors.lay(values)
    assert all(np.shares_memory(a, b) for a, b in zip(first[:2], second[:2]))
    assert not np.shares_memory(first[0], vectors.lay([np.ones(size)])[0])


def test_what_a_call_that_broke_off_may_still_send_is_not_used_again():
    vectors = Vectors(False)
    values = [np.ones(5, np.float32)] * 2
    sent = vectors.lay(values)
    vectors.leave()
    assert not any(np.may_share_memory(old, new) for old in sent[:2] for new in vectors.lay(values)[:2])

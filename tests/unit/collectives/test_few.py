"""Sums of a few numbers have the bits of NumPy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from collectives.call import Call
from collectives.operations import operation
from collectives.transport import few
from collectives.transport.program import combine


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data())
def test_a_few_numbers_are_added_as_numpy_adds_them(op, dtype, data):
    p, n = data.draw(st.integers(2, 9)), data.draw(st.integers(1, few.MOST))
    values = st.floats(width=8 * np.dtype(dtype).itemsize, allow_nan=False)
    parts = [data.draw(arrays(dtype, n, elements=values)) for _ in range(p)]
    call = Call("allreduce", n, np.dtype(dtype), operation(op, np.dtype(dtype)), 0, "auto", p)
    even, odd, theirs = np.empty(n, dtype), np.empty(n, dtype), np.empty(n, dtype)
    for parity, ours in enumerate((even, odd)):
        lines = few.takes(call, ours, [parts if each == parity else [theirs] * p for each in (0, 1)])
        exec(lines.text.format(p=parity), dict(lines.names))
    for function, arguments in combine(call, parts, theirs, theirs):
        function(*arguments)
    for ours in (even, odd):
        assert np.array_equal(ours, theirs, equal_nan=True)
        assert (np.signbit(ours) == np.signbit(theirs))[~np.isnan(ours)].all()


@pytest.mark.parametrize(
    ("op", "dtype", "n"),
    [("max", "f4", 1), ("sum", "f2", 1), ("sum", "i8", 1), ("sum", "f4", few.MOST + 1), ("sum", "f4", 0)],
)
def test_what_python_would_not_add_in_the_same_way_or_not_faster_is_left_to_numpy(op, dtype, n):
    call = Call("allreduce", n, np.dtype(dtype), operation(op, np.dtype(dtype)), 0, "auto", 2)
    total = np.zeros(n, dtype)
    assert few.takes(call, total, [[total, total]] * 2) is None


def test_numbers_that_lie_askew_are_put_as_bytes():
    """Memoryviews do not know them."""
    askew = np.zeros(9, np.uint8)[1:].view(np.float32)
    assert few.puts(askew, [np.zeros(2, np.float32)] * 2) is None
    assert few.puts(np.zeros(2, np.float32), [np.zeros(2, np.float32)] * 2) is not None

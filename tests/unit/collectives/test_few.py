"""Sums of a few numbers have the bits of NumPy's."""

import numpy as np
import pytest
from collectives.transport import few
from collectives.transport.program import combine
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from collectives.call import Call
from collectives.operations import operation


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


def test_only_what_is_added_up_and_memoryviews_know_is_put_as_numbers():
    def put(part, kind="allreduce", op="sum"):
        call = Call(kind, 2, np.dtype("f4"), op and operation(op, np.dtype("f4")), 0, "auto", 2)
        return few.puts(call, part, [np.zeros(2, "f4")] * 2)

    x = np.zeros(2, "f4")
    assert put(x) is not None
    assert put(np.zeros(9, np.uint8)[1:].view("f4")) is None
    assert put(x.view(">f4")) is None
    assert put(x, "broadcast", None) is None
    assert put(x, op="max") is None

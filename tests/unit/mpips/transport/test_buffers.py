"""What may lie at a server: buffers for blocks it asks for, and what a worker sends unasked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpips.store.remote.link import FRAME_COST, UnreadPayloads
from mpips.store.server.sources import Buffers


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.booleans())))
def test_buffers_fill_no_more_than_the_limit_and_one_block(steps):
    buffers, taken, largest = Buffers(), [], 0
    buffers.limit = 100
    for size, due, back in steps:
        if back and taken:
            buffers.give_back(*taken.pop(0))
            continue
        nothing_due = not any(other for _, other in taken)
        buffer = buffers.borrow(size, due)
        assert buffer is not None or not due or not nothing_due  # what is due gets room where no other is on its way
        if buffer is not None:
            taken.append((buffer, due))
            largest = max(largest, size)
        assert buffers.held == sum(buffer.size for buffer, _ in taken) <= 100 + largest


def test_early_blocks_leave_room_for_due_ones():
    buffers = Buffers()
    buffers.limit = 100
    early = [buffers.borrow(25, False) for _ in range(4)]
    assert [buffer is not None for buffer in early] == [True, True, False, False]
    assert buffers.borrow(25, True) is not None and buffers.borrow(25, True) is not None
    assert buffers.borrow(25, True) is None
    assert buffers.borrow(1000, True, sent=True) is not None
    assert Buffers().borrow(25, True) is not None  # there is no room, and nothing else on its way


def test_a_window_opens_when_the_server_has_read():
    window, read = UnreadPayloads(), [0]
    limit = 2 * (100 + FRAME_COST)
    for round_ in (1, 2):
        assert window.admits(100, limit)
        window.add("w", (round_, 0), lambda: read[0], 100)
    assert not window.admits(1, limit)
    read[0] = 1
    assert window.admits(100, limit) and not window.admits(101, limit)
    read[0] = 2
    assert window.admits(10**9, limit)  # one payload may always go


def test_a_slow_key_keeps_no_others_room():
    window, read = UnreadPayloads(), {"slow": 0, "w": 0}
    limit = 2 * (100 + FRAME_COST)
    for key in read:
        window.add(key, (1, 0), lambda key=key: read[key], 100)
    assert not window.admits(100, limit)
    read["w"] = 1
    assert window.admits(100, limit)


def test_a_window_knows_payloads_before_a_place():
    window, read = UnreadPayloads(), {"a": 0, "b": 0}
    for key, place in (("a", (1, 10)), ("b", (1, 0))):
        window.add(key, place, lambda key=key: read[key], 100)
    assert window.holds("a", (1, 11)) and window.holds("a", (2, 0))
    assert not window.holds("a", (1, 10)) and not window.holds("a", (1, 3)) and not window.holds("c", (9, 0))
    read["a"] = 1
    assert not window.holds("a", (2, 0)) and window.holds("b", (2, 0))

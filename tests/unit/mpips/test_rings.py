"""Frames arrive once, in order, and a full ring says so."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpips.lines import SharedLine
from mpips.messages import FRAME, Frame
from mpips.rings import SLOTS, Rings


def pair(workers=3, worker=1):
    rings = Rings.create(workers)
    server = SharedLine(rings.reply_ring(worker), rings.request_ring(worker))
    return rings, SharedLine(rings.request_ring(worker), rings.reply_ring(worker)), server


@given(st.lists(st.integers(0, 3 * SLOTS), max_size=6))
def test_nothing_is_lost_or_reordered(bursts):
    _, worker, server = pair()
    sent = received = 0
    for burst in bursts:
        for _ in range(burst):
            worker.post(1, round_=sent)
            sent += 1
        while server.waiting():
            for fields in server.read():
                assert Frame._make(fields).round == received
                received += 1
            worker.waiting()  # what found no room follows
    assert sent == received


def test_a_packed_frame_goes_again_with_its_round():
    _, worker, server = pair()
    frame = FRAME.pack(1, 7, 2, -4, 2**31 - 1, 5, 0, 11, 12, 2**63, 14, 15, -6)
    for round_ in range(2 * SLOTS):  # more than find room
        worker.again(frame, round_)
    received = []
    while server.waiting():
        received += [Frame._make(fields) for fields in server.read()]
        worker.waiting()
    assert received == [Frame._make(FRAME.unpack(frame))._replace(round=round_) for round_ in range(2 * SLOTS)]


def test_all_fields_and_bodies_arrive():
    rings, worker, server = pair()
    assert not rings.rung()
    worker.post(1, 7, 2**40, (11, 12, 2**63, 14, 15), 3, -4, 5, -6, 1)
    worker.post_body(b"a sentence", 2, 8)
    assert rings.rung() and not rings.rung()
    first, second = (Frame._make(fields) for fields in server.read())
    assert first == Frame(1, 1, 3, -4, 7, 5, 2**40, 11, 12, 2**63, 14, 15, -6)
    assert server.body(second) == b"a sentence" and second.unit == 8
    server.post(16)
    assert worker.waiting() and not server.waiting()


def test_workers_do_not_see_each_other():
    rings = Rings.create(2)
    rings.request_ring(0).post(*range(13))
    assert rings.request_ring(0).waiting() and not rings.request_ring(1).waiting()
    assert not rings.reply_ring(0).waiting()
    assert np.count_nonzero(rings.memory)

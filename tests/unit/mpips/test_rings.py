"""Frames arrive once, in order, and a full ring says so."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpips.lines import SharedLine
from mpips.messages import FRAME, Frame
from mpips.rings import SLOTS, Rings


def pair(workers=3, worker=1):
    rings = Rings.create(workers)
    server = SharedLine(rings.reply_ring(worker), rings.request_ring(worker), patient=False)
    return rings, SharedLine(rings.request_ring(worker), rings.reply_ring(worker), patient=True), server


@given(st.lists(st.integers(0, 3 * SLOTS), max_size=6))
def test_a_worker_hears_all_that_a_server_has_said(bursts):
    """Also what the server keeps for want of room: a word may already tell of what comes after it."""
    _, worker, server = pair()
    sent = received = 0
    with ThreadPoolExecutor(1) as pool:
        for burst in bursts:
            for _ in range(burst):
                server.post(1, round_=sent)
                sent += 1
            assert worker.waiting() == bool(burst)
            reading = pool.submit(lambda: [Frame.of(data).round for data in worker.read()])
            while not server.flush():
                time.sleep(0)
            assert reading.result() == list(range(received, sent))
            received = sent
    assert not worker.waiting()


def test_sentences_that_wait_for_room_keep_their_memory():
    _, worker, server = pair()
    said = [f"sentence {number}" for number in range(4 * SLOTS)]
    for sentence in said:
        server.post_body(sentence.encode(), 19)
    heard = []
    for data in worker.read():
        heard.append(worker.body(Frame.of(data)).decode())
        server.flush()
    assert heard == said


def test_a_worker_waits_until_the_server_has_room():
    _, worker, server = pair()
    frame = FRAME.pack(1, 7, 2, -4, 2**31 - 1, 5, 11, 12, 2**63, 14, 15, -6, 0)
    received = []

    def read():
        while len(received) < 2 * SLOTS:
            received.extend(Frame.of(data) for data in server.read())

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for round_ in range(2 * SLOTS):  # more than find room
            worker.again(frame, round_)
        reading.result()
    assert received == [Frame.of(frame)._replace(round=round_) for round_ in range(2 * SLOTS)]


def test_all_fields_and_bodies_arrive():
    rings, worker, server = pair()
    assert not rings.rung()
    worker.post(1, 7, 2**40, (11, 12, 2**63, 14, 15), 3, -4, 5, -6, 1)
    worker.post_body(b"a sentence", 2, 8)
    assert rings.rung() and not rings.rung()
    first, second = (Frame.of(data) for data in server.read())
    assert first == Frame(1, 1, 3, -4, 7, 5, 11, 12, 2**63, 14, 15, -6, 2**40)
    assert server.body(second) == b"a sentence" and second.unit == 8
    server.post(16)
    assert worker.waiting() and not server.waiting()


def test_workers_do_not_see_each_other():
    rings = Rings.create(2)
    rings.request_ring(0).post(*range(13))
    assert rings.request_ring(0).waiting() and not rings.request_ring(1).waiting()
    assert not rings.reply_ring(0).waiting()
    assert np.count_nonzero(rings.memory)

"""Frames arrive once, in order, and a full ring says so."""

from __future__ import annotations

import contextlib
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.store.transport.frames import FRAME, Frame
from mpips.store.transport.lines import SLOTS, Rings, SharedLine


def pair(workers=3, worker=1):
    rings = Rings.create(workers)
    server = SharedLine(rings.reply_ring(worker), rings.request_ring(worker))
    return rings, SharedLine(rings.request_ring(worker), rings.reply_ring(worker), wait), server


def wait(ready, what):
    while not ready():
        time.sleep(0)


@given(st.lists(st.integers(0, 3 * SLOTS), max_size=6))
def test_a_server_waits_for_no_worker_and_loses_nothing(bursts):
    """What finds no room goes when the worker has read, in order."""
    _, worker, server = pair()
    sent, received = 0, []
    for burst in bursts:
        for _ in range(burst):
            server.post(1, round_=sent)
            sent += 1
        received += [Frame.of(data).round for data in worker.read()]
    while not server.flush():
        received += [Frame.of(data).round for data in worker.read()]
    received += [Frame.of(data).round for data in worker.read()]
    assert received == list(range(sent))
    assert not worker.waiting()


def test_sentences_that_wait_for_room_keep_their_memory():
    _, worker, server = pair()
    said = [f"sentence {number}" for number in range(4 * SLOTS)]
    for sentence in said:
        server.post_body(sentence.encode(), 20)
    heard = []
    while len(heard) < len(said):
        heard += [worker.body(Frame.of(data)).decode() for data in worker.read()]
        server.flush()
    assert heard == said


def test_a_body_that_was_read_takes_no_memory():
    _, worker, server = pair()
    kept = []
    for _ in range(3):
        server.post_body(bytes(1 << 20), 21)
        kept.append(weakref.ref(server._bodies[-1][1]))
        assert len(worker.body(Frame.of(next(frames := worker.read())))) == 1 << 20
        server.flush()
        assert kept[-1]() is not None, "who reads it may still do"
        assert next(frames, None) is None
    server.flush()
    assert not any(array() is not None for array in kept)


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


def test_a_worker_sees_that_its_server_has_stopped():
    rings, worker, _ = pair()
    assert not worker.stopped()
    rings.stop()
    assert worker.stopped()


def test_who_has_ended_has_stopped():
    rings = Rings.create(1)
    assert SharedLine(rings.request_ring(0), rings.reply_ring(0), wait, lambda: True).stopped()


def test_a_worker_whose_server_reads_no_more_is_told_by_its_generation():
    """A full ring is waited for as everything else is: there the end of the generation is seen."""

    class Over(Exception):
        pass

    def ended(ready, what):
        assert "room" in what and not ready()
        raise Over

    rings = Rings.create(1)
    worker = SharedLine(rings.request_ring(0), rings.reply_ring(0), ended)
    for _ in range(SLOTS):
        worker.post(1)
    with pytest.raises(Over):
        worker.post(1)


def test_a_frame_whose_handler_fails_is_not_read_again():
    _, worker, server = pair()
    for round_ in range(3):
        worker.post(1, round_=round_)
    with contextlib.suppress(ZeroDivisionError):
        for data in server.read():
            raise ZeroDivisionError(data)
    assert [Frame.of(data).round for data in server.read()] == [1, 2]

"""Lines: frames arrive once and in order; rings only where the processor keeps the order of stores."""

from __future__ import annotations

import contextlib
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.store.options import Options
from mpips.store.transport import lines
from mpips.store.transport.frames import FRAME, Frame
from mpips.store.transport.lines import SLOTS, Rings, SharedLine


def wait(ready, what):
    while not ready():
        time.sleep(0)


def pair(workers=3, worker=1, wait=wait):
    rings = Rings.create(workers)
    server = SharedLine(rings.reply_ring(worker), rings.request_ring(worker))
    return rings, SharedLine(rings.request_ring(worker), rings.reply_ring(worker), wait), server


def rounds(line):
    return [Frame.of(data).round for data in line.read()]


@pytest.mark.slow
@given(st.lists(st.integers(0, 3 * SLOTS), max_size=6))
def test_a_server_waits_for_no_worker_and_loses_nothing(bursts):
    """What finds no room goes when the worker has read, in order."""
    _, worker, server = pair()
    sent, received = 0, []
    for burst in bursts:
        for _ in range(burst):
            server.post(1, round_=sent)
            sent += 1
        received += rounds(worker)
    while not server.flush():
        received += rounds(worker)
    received += rounds(worker)
    assert received == list(range(sent))
    assert not worker.waiting()


def test_bodies_that_wait_for_room_keep_their_memory():
    _, worker, server = pair()
    said = [f"sentence {number}" for number in range(4 * SLOTS)]
    for sentence in said:
        server.post_body(sentence.encode(), 20)
    heard = []
    while len(heard) < len(said):
        heard += [bytes(worker.body(Frame.of(data))).decode() for data in worker.read()]
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
            worker.repost(frame, round_)
        reading.result()
    assert received == [Frame.of(frame)._replace(round=round_) for round_ in range(2 * SLOTS)]


def test_all_fields_and_bodies_arrive():
    rings, worker, server = pair()
    assert not rings.any_written()
    worker.post(1, 7, 2**40, (11, 12, 2**63, 14, 15), 3, -4, 5, -6, 1)
    worker.post_body(b"a sentence", 2, 8)
    assert rings.any_written() and not rings.any_written()
    first, second = (Frame.of(data) for data in server.read())
    assert first == Frame(1, 1, 3, -4, 7, 5, 11, 12, 2**63, 14, 15, -6, 2**40)
    assert bytes(server.body(second)) == b"a sentence" and second.unit == 8
    server.post(16)
    assert worker.waiting() and not server.waiting()


def test_a_worker_sees_that_its_server_has_stopped():
    rings, worker, _ = pair()
    assert not worker.stopped()
    rings.stop()
    assert worker.stopped()
    rings = Rings.create(1)
    assert SharedLine(rings.request_ring(0), rings.reply_ring(0), wait, lambda: True).stopped()  # its process has ended


def test_a_full_ring_is_waited_for_by_the_generation():
    class Over(Exception):
        pass

    def ended(ready, what):
        assert "room" in what and not ready()
        raise Over

    _, worker, _ = pair(wait=ended)
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
    assert rounds(server) == [1, 2]


def connected(monkeypatch, ordered, rank=0, nodes=(0, 0)):
    """What a worker's `connect` gives where its server offers memory that can be mapped."""
    monkeypatch.setattr(lines, "ORDERED_STORES", ordered)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    layout = SimpleNamespace(
        rank=rank,
        nodes=nodes,
        num_workers=2,
        num_servers=1,
        is_server=False,
        is_worker=True,
        world=None,
        options=Options(),
        same_node=lambda a, b: nodes[a % 2] == nodes[b % 2],
    )
    memory = Rings.create(2).memory
    region = lines.msgspec.msgpack.encode(lines._Offer(tuple(lines.arena.locate(memory))))
    said = [[region] * 3, [bytes([1] * 3)] * 3]
    (line,) = lines.connect(layout, SimpleNamespace(meet=lambda *args: said.pop(0)), wait).lines
    assert memory.size  # it is there until now
    return line


@pytest.mark.parametrize("nodes, ordered, local", [((0, 0), True, True), ((0, 1), True, True), ((1, 0), False, False)])
def test_rings_need_one_node_and_ordered_stores(monkeypatch, recwarn, nodes, ordered, local):
    assert connected(monkeypatch, ordered, nodes=nodes).local is local
    assert not recwarn.list


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_warns_where_stores_may_be_reordered(monkeypatch, recwarn, rank):
    assert not connected(monkeypatch, False, rank).local
    assert len(recwarn.list) == (rank == 0)
    assert all("aarch64" in str(one.message) and "by messages" in str(one.message) for one in recwarn.list)

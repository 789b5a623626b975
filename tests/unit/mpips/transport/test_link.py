"""What a worker hears of servers, and what is left when the generation ends."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.fabric.tasks import goes_on
from mpips import Options
from mpips.store.keys.key import Key, Shard
from mpips.store.remote.link import Link
from mpips.store.transport import frames
from mpips.store.transport.frames import FRAME, Frame, Op
from mpips.store.transport.outbox import Outbox

SIZE, STEP, BLOCKS = 40, 8, 5


class Spoken:
    """A line on which the test speaks for the server."""

    local = True

    def __init__(self):
        self.frames, self.bodies, self.said, self.has_stopped = [], [], [], False

    def says(self, op, body=b"", **fields):
        self.frames.append(FRAME.pack(*Frame(**(dict.fromkeys(Frame._fields, 0) | {"op": op} | fields))))
        self.bodies.append(body)

    def waiting(self):
        return bool(self.frames)

    def read(self):
        while self.frames:
            yield self.frames.pop(0)
            self.bodies.pop(0)

    def body(self, frame):
        return self.bodies[0]

    def post_body(self, body, op, token):
        self.said.append((op, frames.decode_request(body), token))

    def post(self, op):
        self.said.append(op)

    def stopped(self):
        return self.has_stopped


@pytest.fixture
def store():
    line = Spoken()
    layout = SimpleNamespace(
        rank=0, num_servers=1, num_workers=1, groups=lambda: [[0]], world=None, options=Options(servers=1)
    )
    link = Link(layout, [line])
    words = [0, 0]
    shard = Shard(3, 0, 0, SIZE, line, (0,), STEP, BLOCKS, mine=1, words=words, stored=np.zeros(SIZE, np.float32))
    key = Key("w", (SIZE,), np.dtype(np.float32), shards=[shard], pushes=[shard])
    link.add(key)
    return SimpleNamespace(link=link, line=line, key=key, shard=shard, words=words)


def test_what_servers_say_of_a_unit_is_there_for_who_waits_for_it(store):
    shard = store.shard
    store.line.says(Op.CONSUMED, unit=3, round=2)
    store.line.says(Op.CREDIT, unit=3, aux=4)
    store.line.says(Op.CREDIT, unit=99, aux=5)  # of a unit that is forgotten
    store.link.listen()
    assert (shard.told, shard.credits, shard.granted) == (2, [4], False)
    store.line.says(Op.GRANT, unit=3)
    store.link.listen()
    assert shard.granted


def test_answers_belong_to_their_requests(store):
    link, line = store.link, store.line
    first, second = link.request(0, frames.Flush()), link.request(0, frames.Forget([3]))
    assert goes_on(first) and goes_on(second)
    (_, _, one), (op, asked, two) = line.said
    assert op == Op.CONTROL and asked == frames.Forget([3])
    line.says(Op.ANSWER, frames.encode(frames.StatePart(7, [], [])), token=two)
    line.says(Op.ANSWER, b"there is no such unit", token=one, flags=1)
    with pytest.raises(StopIteration) as ended:
        next(second)
    assert ended.value.value == frames.StatePart(7, [], [])
    with pytest.raises(ValueError, match="no such unit"):
        next(first)


def test_warnings_reach_the_user(store):
    store.line.says(Op.WARNING, b"key 'w' has waited", unit=3)
    with pytest.warns(RuntimeWarning, match="has waited"):
        store.link.listen()


def test_a_worker_says_goodbye(store):
    store.link.goodbye()
    assert store.line.said == [Op.BYE]


# ---- the end of the generation


def test_what_servers_count_on_is_filled(store):
    """An interrupt has come while a push was being copied."""
    outbox, values = Outbox(store.words, SIZE, BLOCKS, STEP, np.dtype(np.float32)), np.arange(SIZE, dtype=np.float32)
    outbox.begin(1)
    outbox.put(values)
    store.link.filling.append((outbox, values))
    store.link.quiesce()
    assert outbox.full and not store.link.filling
    assert outbox.slots.tolist() == values.tolist()


@pytest.mark.parametrize("how", ["read", "stopped"])
def test_a_failed_call_does_not_return_while_its_server_may_read_the_array(store, how):
    def server():
        time.sleep(0.1)
        array.append("server reads")
        if how == "read":
            store.words[1] = 1
        else:
            store.line.has_stopped = True

    array = []
    store.key.round = 1
    thread = threading.Thread(target=server)
    thread.start()
    store.link.quiesce()
    array.append("caller writes")
    thread.join()
    assert array == ["server reads", "caller writes"]


def test_what_was_read_is_not_waited_for(store):
    store.key.round = store.words[1] = 4
    start = time.monotonic()
    store.link.quiesce()
    assert time.monotonic() - start < 1


def test_after_a_recovery_nothing_is_under_way_and_there_are_no_keys(store):
    line = Spoken()
    store.link.renew([line])
    line.says(Op.GRANT, unit=3)
    store.link.listen()
    assert not store.shard.granted and store.link.lines == [line]

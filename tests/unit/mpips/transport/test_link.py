"""A worker whose generation ends gives no memory back that a server of its node may still read."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mpips import Options
from mpips.store.keys.key import Key, Shard
from mpips.store.remote.link import ServerLink
from mpips.store.transport.outbox import Outbox

SIZE, STEP, BLOCKS = 40, 8, 5


class Spoken:
    """A line whose server says nothing, and stops when the test says so."""

    local, has_stopped = True, False

    def stopped(self):
        return self.has_stopped


@pytest.fixture
def store():
    line = Spoken()
    layout = SimpleNamespace(
        rank=0, num_servers=1, num_workers=1, groups=lambda: [[0]], world=None, options=Options(servers=1)
    )
    link = ServerLink(layout, [line])
    words = [0, 0]
    shard = Shard(3, 0, 0, SIZE, line, (0,), STEP, BLOCKS, mine=1, words=words, stored=np.zeros(SIZE, np.float32))
    key = Key("w", (SIZE,), np.dtype(np.float32), shards=[shard], pushes=[shard])
    link.add(key)
    return SimpleNamespace(link=link, line=line, key=key, shard=shard, words=words)


def test_what_servers_count_on_is_filled(store):
    """An interrupt has come while a push was being copied."""
    outbox, values = Outbox(store.words, SIZE, BLOCKS, STEP, np.dtype(np.float32)), np.arange(SIZE, dtype=np.float32)
    outbox.begin(1)
    outbox.put_block(values)
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
    assert time.monotonic() - start < 10

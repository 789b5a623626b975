"""The fast route of a key against a server that the test plays: what it does at once, what it leaves, and when."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import mpips.store.remote.fast as fast
from collectives.fabric import arena
from mpips import Options
from mpips.store.keys.key import Key, Shard
from mpips.store.remote.link import Link
from mpips.store.remote.transfers import Pull, Push
from mpips.store.transport.frames import Coding, Frame

STEP = 8


class Heard:
    """A line whose other end is the test."""

    local = True

    def __init__(self):
        self.pushes = []

    def repost(self, frame, round_):
        self.pushes.append(Frame.of(frame)._replace(round=round_))

    def post(self, op, unit=0, round_=0, region=(0,) * 5, coding=0, priority=0, aux=0, token=0, flags=0):
        self.pushes.append(Frame(op, flags, coding, priority, unit, aux, *region, token, round_))

    def waiting(self):
        return False

    def stopped(self):
        return False


class Store:
    """One key of `size` elements on two servers, or one where it is of one block."""

    def __init__(self, size, asynchronous=False):
        self.lines, self.asynchronous = [Heard(), Heard()], asynchronous
        options = Options(servers=2, small_bytes=64)
        layout = SimpleNamespace(
            rank=0, num_servers=2, num_workers=1, groups=lambda: [[0]], world=None, options=options,
            asynchronous=asynchronous, kind="dist_async" if asynchronous else "dist_sync",
        )  # fmt: skip
        self.link = Link(layout, self.lines)
        self.flag = memoryview(bytearray(1))
        shards = []
        cuts = [(0, size)] if size <= STEP else [(0, size // 2), (size // 2, size)]
        for server, (start, stop) in enumerate(cuts):
            blocks = max(1, -(-(stop - start) // STEP))
            shard = Shard(server, server, start, stop, self.lines[server], (0,), STEP, blocks, mine=1)
            shard.words, shard.stored = memoryview(np.zeros(2, np.uint64)), np.zeros(stop - start)
            shards.append(shard)
        self.key = Key("w", (size,), np.dtype(float), shards=shards, pushes=list(shards))
        self.link.add(self.key)
        general = fast.General(self.flag, self.link, Push(layout, self.link), Pull(layout, self.link))
        kind = fast.Blocks if size > STEP else fast.AnyTime if asynchronous else fast.OneBlock
        self.fast = kind(general, self.key, options.small_bytes)

    def serve(self):
        """What servers do with the next round: replace what is stored by what was pushed."""
        for shard, line in zip(self.key.shards, self.lines):
            if line.pushes:
                push = line.pushes.pop(0)
                data = arena.attach(arena.Region(*push.region))
                if push.coding == Coding.GROWING:
                    box = shard.outbox
                    places = memoryview(data).cast("Q")[8 : 8 + shard.blocks]
                    for block, place in enumerate(places):
                        part = shard.stored[block * STEP : (block + 1) * STEP]
                        part[...] = box.slots[place * STEP : place * STEP + part.size]
                else:
                    shard.stored[...] = data.view(float)
                shard.words[0] = push.round * (2 if self.asynchronous else shard.blocks)
                shard.words[1] = push.round


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [STEP, 5 * STEP])
def test_a_push_and_a_pull_of_what_the_server_made_of_it(size, shared, asynchronous, monkeypatch):
    monkeypatch.setattr(fast, "YIELDS", 1)
    if asynchronous and size > STEP:
        return  # has none
    store = Store(size, asynchronous)
    x = (arena.empty if shared else np.empty)(size, float)
    out = np.empty(size)
    for round_ in range(1, 4):
        x[...] = np.arange(size) + round_
        assert store.fast.post(x, 0) is None
        store.serve()
        assert store.fast.read() is None
        assert store.fast.pull(out) is None
        assert np.array_equal(out, x)
        assert store.key.round == round_


@pytest.mark.parametrize("size", [STEP, 5 * STEP])
def test_what_is_not_there_yet_is_left_to_the_general_way(size, monkeypatch):
    monkeypatch.setattr(fast, "YIELDS", 1)
    store, x, out = Store(size), np.arange(size, dtype=float), np.empty(size)
    left = store.fast.pushpull(x, out, 0)
    assert next(left) is not None
    store.serve()
    assert list(left) == [] or np.array_equal(out, x)
    assert np.array_equal(out, x)


@pytest.mark.parametrize("size", [STEP, 5 * STEP])
def test_a_second_push_waits_until_the_first_has_been_read(size):
    store, x = Store(size), np.ones(size)
    assert store.fast.push(x, 0) is None
    second = store.fast.push(2 * x, 0)
    assert store.key.round == 1  # nothing has begun
    next(second)
    assert [len(line.pushes) for line in store.lines if line.pushes] == [1] * len(store.key.shards)
    store.serve()
    assert list(second) == []
    store.serve()
    assert np.array_equal(np.concatenate([shard.stored for shard in store.key.shards]), 2 * x)


@pytest.mark.parametrize("size", [STEP, 5 * STEP])
def test_nothing_is_done_once_the_generation_has_ended(size):
    store, x, out = Store(size), np.ones(size), np.empty(size)
    assert store.fast.push(x, 0) is None
    store.serve()
    store.flag[0] = 1
    assert store.fast.push(x, 0) is not None
    assert store.fast.pull(out) is not None  # who runs it looks at the generation first
    assert not any(line.pushes for line in store.lines)
    assert store.key.round == 1


def test_an_array_that_is_read_in_place_is_waited_for_unless_it_is_copied(monkeypatch):
    monkeypatch.setattr(fast, "YIELDS", 1)
    store = Store(5 * STEP)
    shared = arena.empty(5 * STEP, float)
    shared[...] = 1
    assert store.fast.push(shared, 0) is not None
    store.serve()
    assert store.fast.push(np.ones(5 * STEP), 0) is None

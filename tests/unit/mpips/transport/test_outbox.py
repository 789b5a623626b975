"""Blocks that a worker fills, as its server reads them: each is what was pushed until the server has summed it."""

import contextlib

import numpy as np

from collectives.fabric import arena
from mpips.store.server.sources import FillingOutbox
from mpips.store.transport import outbox
from mpips.store.transport.outbox import Outbox, fill

SIZE, STEP = 38, 4
BLOCKS = -(-SIZE // STEP)


class Worker:
    """Pushes rounds of a shard; `words[0]` is what the server says it has summed."""

    def __init__(self):
        self.words = [0]
        self.outbox = Outbox(self.words, SIZE, BLOCKS, STEP, np.dtype(np.float32))
        self.round = 0

    def begin(self):
        self.round += 1
        self.values = np.arange(SIZE, dtype=np.float32) + 100 * self.round
        self.outbox.begin(self.round)
        source = FillingOutbox(arena.attach(self.outbox.growing), BLOCKS, STEP, np.dtype(np.float32))
        source.begin(self.round)
        return source

    def put_block(self, block):
        assert self.outbox.filled == block and not self.outbox.full
        self.outbox.put_block(self.values)
        assert self.outbox.full == (block + 1 == BLOCKS)

    def reads(self, source, block):
        start, stop = block * STEP, min(SIZE, (block + 1) * STEP)
        halves = [source.part(block, *part) for part in ((start, start + 1), (start + 1, stop))]
        both = np.concatenate(halves).tolist()
        return both == source.part(block, start, stop).tolist() == self.values[start:stop].tolist()

    def slots(self, source):
        return {source._words[outbox.PLACES + block] for block in range(BLOCKS)}


def test_a_server_that_keeps_up_needs_few_slots():
    worker = Worker()
    source = worker.begin()
    for block in range(BLOCKS):
        worker.put_block(block)
        worker.words[0] = block  # all but the last
    assert len(worker.slots(source)) == 2


def test_nobody_waits_for_an_idle_server():
    worker = Worker()
    for stops in (0, 2):
        source = worker.begin()
        for block in range(BLOCKS):
            worker.put_block(block)
            worker.words[0] = (worker.round - 1) * BLOCKS + min(stops, block)
        assert len(worker.slots(source)) == BLOCKS - stops
        worker.words[0] = worker.round * BLOCKS


def test_a_slot_lost_to_an_interrupt_is_found():
    worker = Worker()
    for lost in range(3):
        source = worker.begin()
        for block in range(BLOCKS):
            if block <= lost:
                worker.outbox._slot()
            worker.put_block(block)
        assert all(worker.reads(source, block) for block in range(BLOCKS))
        worker.words[0] = worker.round * BLOCKS


def test_filling_goes_on_after_an_interrupt():
    class Interrupted(Outbox):
        def put_block(self, values):
            calls.append(self.filled)
            if len(calls) % 3:
                raise KeyboardInterrupt
            super().put_block(values)

    calls, words = [], [0]
    box = Interrupted(words, SIZE, BLOCKS, STEP, np.dtype(np.float32))
    values = np.arange(SIZE, dtype=np.float32)
    box.begin(1)
    while not box.full:
        with contextlib.suppress(KeyboardInterrupt):
            fill([(box, values)])
    source = FillingOutbox(arena.attach(box.growing), BLOCKS, STEP, np.dtype(np.float32))
    source.begin(1)
    read = [source.part(block, block * STEP, min(SIZE, (block + 1) * STEP)) for block in range(BLOCKS)]
    assert np.concatenate(read).tolist() == values.tolist()

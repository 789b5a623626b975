"""A server's state machine with one unit, payloads that come bit by bit, and short sums that threads share."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from mpips.store.server import reduce
from mpips.store.server.reduce import Reduce
from mpips.store.server.sources import Elements
from mpips.store.server.state import AsynchronousState, SynchronousState
from mpips.store.server.unit import Unit

WORKERS = 3


class Machine:
    """A server with one unit "w" of `size` elements, and what it has said."""

    def __init__(self, size=10, block=4, workers=WORKERS, asynchronous=False, optimizer=None, **options):
        reduce = Reduce(options.pop("threads", 1), None, options.pop("cores_shared", False))
        stored = np.zeros(size, options.pop("dtype", np.float32))
        self.state = (AsynchronousState if asynchronous else SynchronousState)(reduce=reduce, **options)
        self.unit = Unit(0, "w", stored, [0] * (1 + workers), range(workers), block, 1)
        self.state.create(self.unit)
        if optimizer is not None:
            self.state.set_optimizer(optimizer)
        self.said = []

    def push(self, worker, value, clock=0.0, unit=None):
        unit = unit or self.unit
        source = value if hasattr(value, "coded") else Elements(np.full(unit.stored.size, value, np.float32))
        self.state.pushed(unit, unit.position[worker], source, 0, clock)
        self.said += self.state.tick(clock)

    def work(self):
        while True:
            worked, replies = self.state.work()
            self.said += replies
            if not worked:
                return list(self.unit.stored)

    def pull(self, worker, round_, rows=None):
        self.said += self.state.pulled(0, worker, round_, rows)

    def end(self):
        """The generation is over, and the next one begins."""
        while self.state.finish():
            pass
        self.state.abandon()
        unit, asynchronous = self.unit, self.state.asynchronous
        unit.begin_at(unit.round, unit.done if asynchronous else None, unit.state, unit.step, unit.torn)
        return list(self.unit.stored)

    def heard(self, what):
        return [(reply.worker, reply.text) for reply in self.said if reply.what == what]


class Growing(Elements):
    """Blocks in memory of the node, there as far as `there` says."""

    def __init__(self, array, there):
        super().__init__(array)
        self.steady, self.there = None, there

    def ready(self, block):
        return block < self.there[0]


class Arriving(Growing):
    """Blocks that come as messages: each is there once, in order, as far as `there` says."""

    local = False

    def __init__(self, array, there):
        super().__init__(array, there)
        self.taken, self.dropped = 0, False

    def part(self, block, start, stop):
        assert block == self.taken, (block, self.taken)
        self.taken += 1
        return self.array[start:stop]

    def drop(self):
        self.dropped = True


@contextmanager
def long_from(bytes_):
    """Threads share sums of so many bytes already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce, "SHARED_BYTES", bytes_)
        patch.setattr(reduce, "PART_BYTES", bytes_)
        yield

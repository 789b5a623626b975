"""A server's state machine with one unit, and payloads that come bit by bit."""

from __future__ import annotations

import numpy as np

from mpips.server_state import ServerState
from mpips.sources import Elements
from mpips.unit import Unit

WORKERS = 3


class Machine:
    """A server with one unit "w" of `size` elements, and what it has said."""

    def __init__(self, size=10, block=4, workers=WORKERS, asynchronous=False, **options):
        self.state = ServerState(range(workers), asynchronous, **options)
        self.unit = Unit(0, "w", np.zeros(size, np.float32), [0] * (1 + workers), range(workers), block, 1)
        self.state.create(self.unit)
        self.said = []

    def push(self, worker, value, clock=0.0):
        source = value if hasattr(value, "coded") else Elements(np.full(self.unit.stored.size, value, np.float32))
        self.said += self.state.pushed(0, worker, source, 0, clock) or []

    def refuse(self, worker, sentence, round_=None):
        self.said += self.state.refused(0, worker, sentence, round_ or self.unit.round + 1, 0.0)

    def work(self, ahead=False):
        while True:
            worked, replies = self.state.work(ahead)
            self.said += replies
            if not worked:
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
    complete = False

    def __init__(self, array, there):
        super().__init__(array, there)
        self.taken, self.dropped = 0, False

    def part(self, block, start, stop):
        assert block == self.taken, (block, self.taken)
        self.taken += 1
        return self.array[start:stop]

    def drop(self):
        self.dropped = True

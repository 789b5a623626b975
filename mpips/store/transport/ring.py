"""Frames between a server and the workers of its node: one-way rings of slots in memory that both map.

A ring has one writer and one reader. The writer fills a slot, then raises its tail; the reader reads up to the tail,
then raises its head. Processors with total store order (x86) keep that order; on others (`usable`) frames travel as
messages. A server's tails lie side by side, so that one comparison tells whether any worker has written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.fabric import arena
from collectives.fabric.arena import Region
from collectives.fabric.layout import ORDERED_STORES
from mpips.store.transport.frames import FRAME, FRAME_BYTES, NOWHERE, ROUND, ROUND_AT, Frame

SLOTS = 256
WORDS = 4
"""Of a worker: request tail, request head, reply tail, reply head."""
Wait = Callable[[Callable[[], object], str], object]
"""Waits until it is so, as `Generation.wait`."""


def usable() -> bool:
    """Whether this processor keeps the order of stores, and of loads."""
    return ORDERED_STORES


class Rings:
    """The rings between one server and `workers` workers, in one region that the server makes and workers attach.

    In it lie the words of all rings, the word that says that the server has stopped, and the slots.
    """

    def __init__(self, workers: int, memory: NDArray[np.uint8]) -> None:
        self.workers = workers
        self.memory = memory
        self._stopped = WORDS * workers
        self.words = memoryview(memory[: 8 * (self._stopped + 1)].view(np.uint64))  # type: ignore[arg-type]
        self.slots = memoryview(memory[self.header(workers) :])  # type: ignore[arg-type]
        self._seen = bytes(8 * workers)

    @staticmethod
    def header(workers: int) -> int:
        """Bytes before the slots, in whole cache lines."""
        return -(-(WORDS * workers + 1) * 8 // 64) * 64

    @classmethod
    def nbytes(cls, workers: int) -> int:
        """Bytes in all."""
        return cls.header(workers) + 2 * workers * SLOTS * FRAME_BYTES

    @classmethod
    def create(cls, workers: int) -> Rings:
        """Empty rings in new memory of this process."""
        memory = arena.empty(cls.nbytes(workers), np.uint8)
        memory[...] = 0
        return cls(workers, memory)

    def rung(self) -> bool:
        """Whether any worker has written since the last call that said so; for the server."""
        tails = self.words[: self.workers].tobytes()
        if tails == self._seen:
            return False
        self._seen = tails
        return True

    def stop(self) -> None:
        """Say that the generation is over and the server reads no more of what workers have lent; for the server."""
        self.words[self._stopped] = 1

    def stopped(self) -> bool:
        """Whether the server has said so."""
        return bool(self.words[self._stopped])

    def request_ring(self, worker: int) -> Ring:
        """From the worker to the server."""
        return Ring(self, 0, worker)

    def reply_ring(self, worker: int) -> Ring:
        """From the server to the worker."""
        return Ring(self, 1, worker)


class Ring:
    """One direction of one worker; `post` and `again` for the writer, `waiting` and `read` for the reader."""

    __slots__ = ("_base", "_head", "_head_word", "_slots", "_tail", "_tail_word", "_words", "stopped")

    def __init__(self, rings: Rings, direction: int, worker: int) -> None:
        self._words, self._slots, self.stopped = rings.words, rings.slots, rings.stopped
        self._tail_word = 2 * direction * rings.workers + worker
        self._head_word = self._tail_word + rings.workers
        self._base = (direction * rings.workers + worker) * SLOTS * FRAME_BYTES
        self._tail, self._head = self._words[self._tail_word], self._words[self._head_word]

    def post(self, *fields: int) -> bool:
        """Write a frame; False where the ring is full."""
        tail = self._tail
        if tail - self._words[self._head_word] >= SLOTS:
            return False
        FRAME.pack_into(self._slots, self._base + (tail % SLOTS) * FRAME_BYTES, *fields)
        self._tail = self._words[self._tail_word] = tail + 1
        return True

    def again(self, frame: bytes, round_: int) -> bool:
        """Write a packed frame with another round; False where the ring is full."""
        tail = self._tail
        if tail - self._words[self._head_word] >= SLOTS:
            return False
        slot = self._base + (tail % SLOTS) * FRAME_BYTES
        self._slots[slot : slot + FRAME_BYTES] = frame
        ROUND.pack_into(self._slots, slot + ROUND_AT, round_)
        self._tail = self._words[self._tail_word] = tail + 1
        return True

    def waiting(self) -> bool:
        """Whether a frame is there."""
        return self._words[self._tail_word] != self._head

    def read(self) -> Iterator[bytes]:
        """The frames that are there; packed, in order. The writer learns of each when the next is asked for."""
        tail = self._words[self._tail_word]
        while self._head < tail:
            slot = self._base + (self._head % SLOTS) * FRAME_BYTES
            self._head += 1
            yield self._slots[slot : slot + FRAME_BYTES].tobytes()
            self._words[self._head_word] = self._head

    @property
    def written(self) -> int:
        """How many frames the writer has written."""
        return self._tail

    @property
    def passed(self) -> int:
        """How many frames the reader is through with."""
        return self._words[self._head_word]


class SharedLine:
    """A line of two rings. A body lies in memory of its sender until the other end is through with its frame.

    Where a ring is full, a worker waits by `wait`, as servers always read on. A server never waits for a worker: its
    line has none, and keeps what finds no room until `flush`, which each later frame calls too. `gone`: whether the
    process at the other end has ended.
    """

    local = True

    def __init__(
        self, outgoing: Ring, incoming: Ring, wait: Wait | None = None, gone: Callable[[], bool] = bool
    ) -> None:
        self._out, self._in, self._wait, self._gone = outgoing, incoming, wait, gone
        self._backlog: deque[tuple[tuple[int, ...], NDArray[Any] | None]] = deque()
        self._bodies: deque[tuple[int, NDArray[Any]]] = deque()
        """Those under way, each with the number of its frame."""

    def post(
        self, op: int, unit: int = 0, round_: int = 0, region: tuple[int, ...] = NOWHERE, coding: int = 0,
        priority: int = 0, aux: int = 0, token: int = 0, flags: int = 0,
    ) -> None:  # fmt: skip
        """Send a frame."""
        if self._backlog or not self._out.post(op, flags, coding, priority, unit, aux, *region, token, round_):
            self._late((op, flags, coding, priority, unit, aux, *region, token, round_), None)

    def again(self, frame: bytes, round_: int) -> None:
        """Send a packed frame with another round."""
        if self._backlog or not self._out.again(frame, round_):
            self._late(Frame.of(frame)._replace(round=round_), None)

    def post_body(self, body: bytes, op: int, unit: int = 0, round_: int = 0, token: int = 0, flags: int = 0) -> None:
        """Send a frame with a body."""
        memory = arena.empty(max(len(body), 1), np.uint8)
        memory[: len(body)] = np.frombuffer(body, np.uint8)
        region = arena.locate(memory[: len(body)])
        assert region is not None
        self._late((op, flags, 0, 0, unit, 0, *region, token, round_), memory)

    def _late(self, fields: tuple[int, ...], body: NDArray[Any] | None) -> None:
        self._backlog.append((fields, body))
        if not self.flush() and self._wait is not None:
            self._wait(self.flush, "a server's ring has no room")

    def flush(self) -> bool:
        """Send what found no room before; whether nothing is left of it. Lets go of bodies that were read."""
        while self._bodies and self._bodies[0][0] <= self._out.passed:
            self._bodies.popleft()
        while self._backlog:
            fields, body = self._backlog[0]
            if not self._out.post(*fields):
                return False
            self._backlog.popleft()
            if body is not None:
                self._bodies.append((self._out.written, body))
        return True

    def waiting(self) -> bool:
        """Whether a frame has come."""
        if self._backlog:
            self.flush()
        return self._in.waiting()

    def read(self) -> Iterator[bytes]:
        """The frames that have come, packed, in order."""
        return self._in.read()

    def body(self, frame: Frame) -> bytes:
        """The body of a frame that has been read."""
        return arena.attach(Region(*frame.region)).tobytes()

    def stopped(self) -> bool:
        """Whether the server at the other end reads no more of this worker's memory, as its generation is over."""
        return self._in.stopped() or self._gone()

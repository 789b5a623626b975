"""Frames between a server and the workers of its node: one-way rings of slots in memory that both map.

A ring has one writer and one reader. The writer fills a slot, then raises its tail; the reader reads up to the tail,
then raises its head. That order is kept by processors with total store order (x86), which is asked for in `usable`;
elsewhere frames travel as messages. A server's tails lie side by side, so that one comparison tells whether any worker
has written. A tail plus MORE tells the reader that the writer keeps frames for which there is no room yet.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from collectives.node import arena
from mpips.messages import FRAME, FRAME_BYTES, ROUND, ROUND_AT

SLOTS = 256
MORE = 1 << 62
MORE_SECONDS = 1e-4  # between two looks at what a server has kept
WORDS = 4  # of a worker: request tail, request head, reply tail, reply head


def usable() -> bool:
    """Whether this processor keeps the order of stores, and of loads."""
    return platform.machine() in ("x86_64", "AMD64", "i686")


class Rings:
    """The rings between one server and `workers` workers, in one region that the server makes and workers attach."""

    def __init__(self, workers: int, memory: NDArray[np.uint8]) -> None:
        self.workers = workers
        self.memory = memory
        self.words = memoryview(memory[: WORDS * workers * 8].view(np.uint64))  # type: ignore[arg-type]
        self.slots = memoryview(memory[self.header(workers) :])  # type: ignore[arg-type]
        self._seen = bytes(8 * workers)

    @staticmethod
    def header(workers: int) -> int:
        return -(-WORDS * workers * 8 // 64) * 64

    @classmethod
    def nbytes(cls, workers: int) -> int:
        return cls.header(workers) + 2 * workers * SLOTS * FRAME_BYTES

    @classmethod
    def create(cls, workers: int) -> Rings:
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

    def request_ring(self, worker: int) -> Ring:
        return Ring(self, 0, worker)

    def reply_ring(self, worker: int) -> Ring:
        return Ring(self, 1, worker)


class Ring:
    """One direction of one worker; `post` for the writer, `waiting` and `read` for the reader."""

    __slots__ = ("_base", "_head", "_head_word", "_slots", "_tail", "_tail_word", "_words")

    def __init__(self, rings: Rings, direction: int, worker: int) -> None:
        self._words, self._slots = rings.words, rings.slots
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

    def post_kept(self, *fields: int) -> bool:
        """`post` where more is kept, until `none_kept`."""
        posted = self._tail - self._words[self._head_word] < SLOTS
        if posted:
            FRAME.pack_into(self._slots, self._base + (self._tail % SLOTS) * FRAME_BYTES, *fields)
            self._tail += 1
        self._words[self._tail_word] = self._tail + MORE
        return posted

    def none_kept(self) -> None:
        self._words[self._tail_word] = self._tail

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
        return self._words[self._tail_word] != self._head

    def read(self) -> Iterator[bytes]:
        """The frames that are there, or kept for want of room; packed, in order."""
        tail = MORE
        while tail >= MORE:
            tail = self._words[self._tail_word]
            stop = tail % MORE
            if self._head == stop and tail != stop:
                time.sleep(MORE_SECONDS)
            while self._head < stop:
                slot = self._base + (self._head % SLOTS) * FRAME_BYTES
                frame = self._slots[slot : slot + FRAME_BYTES].tobytes()
                self._head += 1
                self._words[self._head_word] = self._head
                yield frame

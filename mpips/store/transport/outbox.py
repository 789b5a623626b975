"""Payloads on a node, on the worker's side: an array that lies in node-shared memory, or a worker's copy of one.

Servers read an array of `mpips.empty` where it lies (`InPlacePushes`). Any other is copied into an `Outbox`, and the
server sums it while it is still being filled. A copy of many blocks would leave the cache before it is written the next
time, and every line of it would be fetched only to be overwritten. So a block goes where one has lain that the server
has summed: a few slots serve, as long as all workers push side by side and the server keeps up. Where it does not, the
next block takes a slot more, and a push never waits for a worker that comes late.

In memory: word 0 counts blocks filled over all rounds, the words from `PLACES` on hold the slot of each block, and then
come the slots. Works where the processor keeps the order of stores (`lines.connect`).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import Region
from mpips.store.keys.key import Array, Shard
from mpips.store.transport.frames import FRAME, NOWHERE, Op

PUSH = int(Op.PUSH)
PLACES = 8
WARM = 3
"""Slots that are taken before a server is waited for: as many blocks are filled and summed at a time."""
PATIENCE = 8
PATIENCE_SECONDS = 1e-2
"""A server that sums is waited for so many times as long as it took to fill what is there, at most so long."""


def header_bytes(blocks: int) -> int:
    """Return the bytes of the words before the slots, in whole cache lines."""
    return -(-(PLACES + blocks) * 8 // 64) * 64


class Outbox:
    """One shard's, of `size` elements in `blocks` blocks of `block_elements`; `words[0]` is the server's progress."""

    def __init__(self, words: memoryview, size: int, blocks: int, block_elements: int, dtype: np.dtype) -> None:
        self._words, self._blocks, self._step = words, blocks, block_elements
        header = header_bytes(blocks)
        elements = size if blocks == 1 else blocks * block_elements
        memory = arena.empty(header + elements * dtype.itemsize, np.uint8)
        self._mine = memoryview(memory[:header].view(np.uint64))  # type: ignore[arg-type]
        self.slots: Array = memory[header:].view(dtype)
        """1-D; of a shard of one block: all of it."""
        self.growing: Region = arena.locate(memory) or NOWHERE
        self.plain: Region = arena.locate(self.slots) or NOWHERE
        self._before = self._used = self._summed = 0
        self._free: list[int] = []
        self._began = 0.0
        self._patient = False

    def begin(self, round_: int) -> None:
        """Begin a round; the server has read all that was there before."""
        self._before = self._mine[0] = (round_ - 1) * self._blocks
        self._used = self._summed = 0
        self._free.clear()
        self._began, self._patient = time.perf_counter(), True

    @property
    def filled(self) -> int:
        """Return how many blocks of the round are there."""
        return int(self._mine[0] - self._before)

    @property
    def full(self) -> bool:
        """Return whether all blocks of the round are there."""
        return self.filled >= self._blocks

    def put_block(self, values: Array) -> None:
        """Copy the next block of the shard's values in and count it."""
        mine, step = self._mine, self._step
        slot = self._free.pop() if self._free else self._slot()
        block = mine[0] - self._before
        block_values = values[block * step : (block + 1) * step]
        self.slots[slot * step : slot * step + block_values.size] = block_values
        mine[PLACES + block] = slot
        mine[0] += 1

    def _slot(self) -> int:
        """Return a slot that the server has summed, if it sums; else another."""
        if not self._look() and self._used >= WARM and self._summed and self._patient:
            self._patient = self._wait()
        if self._used == self._blocks and not self._free:  # an interrupt has lost one between here and `put_block`
            kept = {self._mine[PLACES + block] for block in range(self._summed, self.filled)}
            self._free = [slot for slot in range(self._blocks) if slot not in kept]
        if self._free:
            return self._free.pop()
        self._used += 1
        return self._used - 1

    def _look(self) -> bool:
        """Note what the server has summed; whether there is a free slot."""
        summed = min(self._words[0] - self._before, self.filled)  # of a round that has failed, all at once
        while self._summed < summed:
            slot = self._mine[PLACES + self._summed]
            self._summed += 1
            self._free.append(slot)
        return bool(self._free)

    def _wait(self) -> bool:
        """Wait for a slot a little; whether there is one."""
        now = time.perf_counter()
        until = now + min(PATIENCE * (now - self._began), PATIENCE_SECONDS)
        while not self._look():
            if time.perf_counter() > until:
                return False
            os.sched_yield()
        return True


Grows = list[tuple[Outbox, Array]]
"""Outboxes with what they are filled with."""


def fill(grows: Grows) -> None:
    """Copy what is not there yet into outboxes, block by block in turns over the servers.

    Workers that share a core take turns, too, so that a server finds every worker's block in the cache."""
    while left := [item for item in grows if not item[0].full]:
        for outbox, values in left:
            outbox.put_block(values)
            os.sched_yield()


class RepeatedPush:
    """The push of one region, round after round: its frame is packed once for a priority."""

    __slots__ = ("_coding", "_frame", "_priority", "_region", "_repost", "_unit")

    def __init__(self, repost: Callable[[bytes, int], None], unit: int, region: Region, coding: int = 0) -> None:
        """`repost`: that of the line to the unit's server."""
        self._repost, self._unit, self._region, self._coding = repost, unit, region, coding
        self._priority, self._frame = 0, b""

    def post(self, round_: int, priority: int) -> None:
        """Push the region to this round."""
        if priority != self._priority or not self._frame:
            frame = FRAME.pack(PUSH, 0, self._coding, priority, self._unit, 0, *self._region, 0, 0)
            self._frame, self._priority = frame, priority
        self._repost(self._frame, round_)


class InPlacePushes:
    """The pushes of one array to these shards; kept, as a training loop pushes the same again."""

    __slots__ = ("_last", "_pushes", "_shards")

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._last: Callable[[], Array | None] = lambda: None
        self._pushes: list[RepeatedPush] = []

    def of(self, array: Array) -> list[RepeatedPush]:
        """Return the push of every shard's part of the array; none where the array lies in other memory.

        It holds the whole key, C-contiguous."""
        if self._last() is not array:
            region = arena.locate(array)
            size = array.itemsize
            pushes = (
                []
                if region is None
                else [
                    RepeatedPush(
                        shard.line.repost,
                        shard.number,
                        region._replace(
                            offset=region.offset + shard.start * size, nbytes=(shard.stop - shard.start) * size
                        ),
                    )
                    for shard in self._shards
                ]
            )
            last = weakref.ref(array)
            self._last, self._pushes = last, pushes  # at once, whenever an interrupt comes
        return self._pushes

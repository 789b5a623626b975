"""Pass the values of a push to a server on the same node through shared memory.

An array made by `mpips.empty` is in memory that the node shares, and the server reads it there (`InPlacePushes`).
The worker copies any other array into an `Outbox`, which is in shared memory, and the server sums each block while the
worker copies the next one.

An outbox mostly uses only a small part of its memory, so that this part stays in the cache. If every block had a place
of its own, the cache lines of a block would be evicted before the next round, and fetched again only to be overwritten.
So blocks are written into slots, and a slot is reused once the server has summed its block. A few slots are enough as
long as all workers push at the same time and the server keeps up. If the server falls behind, the outbox takes another
slot, up to one slot for each block. So a push never has to wait for a late worker.

Layout of the memory: word 0 counts the blocks filled since the first round. The words from `PLACES` on hold the slot of
each block of the current round. The slots follow. This needs a processor that does not reorder writes to memory (see
`lines.connect`).
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
# index of the first word that names a slot
PLACES = 8
# The outbox takes this many slots before it waits for the server to free one. About as many blocks are copied or summed
# at the same time.
WARM = 3
# An outbox waits for a slot this many times as long as the round has taken so far, but at most PATIENCE_SECONDS.
PATIENCE = 8
PATIENCE_SECONDS = 1e-2


def header_bytes(blocks: int) -> int:
    """Return the number of bytes before the slots, rounded up to whole cache lines."""
    return -(-(PLACES + blocks) * 8 // 64) * 64


class Outbox:
    """The memory into which a worker copies its pushes of one shard, block by block.

    Args:
        words: The progress words of the shard. In `words[0]` the server counts the blocks that it has summed.
        size: Number of elements of the shard.
        blocks: Number of blocks of the shard.
        block_elements: Number of elements of a block. The last block may be shorter.
    """

    def __init__(self, words: memoryview, size: int, blocks: int, block_elements: int, dtype: np.dtype) -> None:
        self._words = words
        self._blocks = blocks
        self._step = block_elements
        header = header_bytes(blocks)
        elements = size if blocks == 1 else blocks * block_elements
        memory = arena.empty(header + elements * dtype.itemsize, np.uint8)
        self._mine = memoryview(memory[:header].view(np.uint64))  # type: ignore[arg-type]
        # All slots, 1-D. If the shard is one block, this is the memory for the whole shard.
        self.slots: Array = memory[header:].view(dtype)
        # the region of header and slots, for pushes that are filled block by block
        self.growing: Region = arena.locate(memory) or NOWHERE
        # the region of the slots alone, for shards of one block
        self.plain: Region = arena.locate(self.slots) or NOWHERE
        # number of blocks filled in all earlier rounds
        self._before = 0
        # number of slots taken in this round
        self._used = 0
        # number of blocks of this round that the server had summed when this worker looked last
        self._summed = 0
        self._free: list[int] = []
        self._began = 0.0
        # False once a wait for a slot has failed. The outbox then takes new slots without waiting until the round ends.
        self._patient = False

    def begin(self, round_: int) -> None:
        """Begin a round. The server must have read all blocks of the previous round."""
        self._before = self._mine[0] = (round_ - 1) * self._blocks
        self._used = self._summed = 0
        self._free.clear()
        self._began, self._patient = time.perf_counter(), True

    @property
    def filled(self) -> int:
        """Number of blocks of this round that the worker has copied into the outbox."""
        return int(self._mine[0] - self._before)

    @property
    def full(self) -> bool:
        """True once the worker has copied every block of this round into the outbox."""
        return self.filled >= self._blocks

    def put_block(self, values: Array) -> None:
        """Copy the next block of the shard's values into a slot, and show it to the server."""
        mine, step = self._mine, self._step
        slot = self._free.pop() if self._free else self._slot()
        block = mine[0] - self._before
        block_values = values[block * step : (block + 1) * step]
        self.slots[slot * step : slot * step + block_values.size] = block_values
        mine[PLACES + block] = slot
        mine[0] += 1

    def _slot(self) -> int:
        """Return a slot whose block the server has summed. If no slot becomes free soon, return a new slot."""
        if not self._look() and self._used >= WARM and self._summed and self._patient:
            self._patient = self._wait()
        # An interrupt after this function, but before put_block() has stored the slot number, loses a slot. So when no
        # slot is left, find the lost slots, which are those without a filled block.
        if self._used == self._blocks and not self._free:
            kept = {self._mine[PLACES + block] for block in range(self._summed, self.filled)}
            self._free = [slot for slot in range(self._blocks) if slot not in kept]
        if self._free:
            return self._free.pop()
        self._used += 1
        return self._used - 1

    def _look(self) -> bool:
        """Collect the slots of blocks that the server has summed. Return True if any slot is free."""
        # When a round has failed, the server counts all its blocks as summed, even blocks that are not filled yet.
        summed = min(self._words[0] - self._before, self.filled)
        while self._summed < summed:
            slot = self._mine[PLACES + self._summed]
            self._summed += 1
            self._free.append(slot)
        return bool(self._free)

    def _wait(self) -> bool:
        """Wait a little for the server to free a slot. Return True if it has."""
        now = time.perf_counter()
        until = now + min(PATIENCE * (now - self._began), PATIENCE_SECONDS)
        while not self._look():
            if time.perf_counter() > until:
                return False
            os.sched_yield()
        return True


# pairs of an outbox and the values to copy into it
Grows = list[tuple[Outbox, Array]]


def fill(grows: Grows) -> None:
    """Copy all remaining blocks into outboxes, one block into each outbox in turn.

    The worker yields its core after each block. So workers on one core advance together, and the server finds the
    blocks of all of them in the cache.
    """
    while left := [item for item in grows if not item[0].full]:
        for outbox, values in left:
            outbox.put_block(values)
            os.sched_yield()


class RepeatedPush:
    """Pushes the same region of memory in every round. Its frame is packed again only when the priority changes."""

    __slots__ = ("_coding", "_frame", "_priority", "_region", "_repost", "_unit")

    def __init__(self, repost: Callable[[bytes, int], None], unit: int, region: Region, coding: int = 0) -> None:
        """`repost` sends a packed frame, with its round replaced, to the server of the unit."""
        self._repost = repost
        self._unit = unit
        self._region = region
        self._coding = coding
        self._priority = 0
        self._frame = b""

    def post(self, round_: int, priority: int) -> None:
        """Push the region as this worker's contribution to a round."""
        if priority != self._priority or not self._frame:
            frame = FRAME.pack(PUSH, 0, self._coding, priority, self._unit, 0, *self._region, 0, 0)
            self._frame, self._priority = frame, priority
        self._repost(self._frame, round_)


class InPlacePushes:
    """Pushes of an array that servers read in its own memory, one push for each shard of a key.

    Remembers the pushes of the last array, because a training loop mostly pushes the same array at every step.
    """

    __slots__ = ("_last", "_pushes", "_shards")

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._last: Callable[[], Array | None] = lambda: None
        self._pushes: list[RepeatedPush] = []

    def of(self, array: Array) -> list[RepeatedPush]:
        """Return a push for each shard, or an empty list if the array is not in memory that the node shares.

        The array holds the whole key and is C-contiguous.
        """
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
            # Use one statement, because an interrupt between two would leave the new array with the old pushes.
            self._last, self._pushes = last, pushes
        return self._pushes

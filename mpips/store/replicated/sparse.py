"""Spread long values over the workers of a node, and exchange row-sparse pushes, in a store without servers.

Rows travel in two allgathers: how many bytes each worker brings, then the bytes, in blocks as long as the longest. All
workers add the rows in the order of the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.fabric import arena
from collectives.fabric.arena import Region
from collectives.fabric.tasks import Task
from collectives.schedule.model import cut
from mpips.store.keys.key import Key, label
from mpips.store.keys.rows import RowSparse, merge, packed, unpacked
from mpips.store.replicated.fast import Sums
from mpips.store.replicated.replica import Replica

Array = NDArray[Any]
LEAST_BYTES = 64 << 10
"""Of values that are longer, a list's sum leaves a worker its own block. Shorter ones are copied as fast."""
WORDS = 2 * len(Region._fields)


def long(key: Key) -> bool:
    """Return whether the value of a key may be spread."""
    return key.nbytes > LEAST_BYTES


def regions(replicas: Sequence[Replica]) -> Array:
    """Return where this worker's arrays of these keys lie, (keys, WORDS) numbers."""
    found = [[number for array in replica.arrays() for number in _region(array)] for replica in replicas]
    return np.array(found, np.int64).reshape(len(replicas), WORDS)


def share(replicas: Sequence[Replica], table: Array, rank: int) -> None:
    """Give the replicas of worker `rank` the other workers' blocks: `table` holds every worker's `regions`."""
    workers = len(table)
    for number, replica in enumerate(replicas):
        key, others = replica.key, []
        for worker in range(workers):
            if worker != rank:
                first, second = (
                    arena.attach(Region(*words)).view(key.dtype) for words in _halves(table[worker, number])
                )
                others.append((cut(key.size, workers, worker), cut(key.size, workers, worker + 1), (first, second)))
        replica.share(others)


def _region(array: Array) -> Region:
    region = arena.locate(array)
    assert region is not None
    return region


def _halves(words: Array) -> tuple[list[int], list[int]]:
    numbers = words.tolist()
    return numbers[: WORDS // 2], numbers[WORDS // 2 :]




class Sparse:
    """Sums of rows, of all workers."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._sizes = np.zeros(sums.size, np.int64)
        self._mine = np.zeros(1, np.int64)
        self._blocks = np.empty(0, np.uint8)

    def total(self, key: Key, rows: RowSparse, direct: bool) -> Task[RowSparse]:
        """The sum of all workers' rows of the key, merged. Collective; `direct`: it may block."""
        text = label("push of rows", [key.name])
        self._sums.begun, self._sums.text = self._sums.begun + 1, text
        mine = packed(rows.merged())
        self._mine[0] = mine.size
        yield from self._sums.gather(self._mine, self._sizes, text, direct)
        sizes = self._sizes.tolist()
        block = _round_up(max(sizes))
        blocks = self._room(block)
        rank = self._sums.rank
        blocks[rank * block : rank * block + mine.size] = mine
        yield from self._sums.gather(blocks, None, text, direct)
        pieces = [blocks[start * block : start * block + size] for start, size in enumerate(sizes)]
        everyone = [unpacked(piece, key.shape, key.dtype) for piece in pieces]
        return reduce(merge, everyone)

    def _room(self, block: int) -> Array:
        """A block for each worker; the same memory again, so that collectives know it."""
        size = block * len(self._sizes)
        if self._blocks.size < size:
            self._blocks = np.empty(size, np.uint8)
        return self._blocks[:size]


def _round_up(size: int) -> int:
    """Bytes of a block: of few lengths, so that there are few collectives to be prepared."""
    return max(64, 1 << (size - 1).bit_length())

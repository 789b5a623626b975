"""Row-sparse pushes of a store without servers: every worker hears of all rows that anybody pushes.

They travel in two allgathers: how many bytes each worker brings, then the bytes, in blocks as long as the longest. Rows
are added up in the order of the workers, on each of them alike.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.store.keys.key import Key, label
from mpips.store.keys.row_sparse import RowSparse, merge, packed, unpacked
from mpips.store.replicated.sums import Sums
from mpips.store.runtime.tasks import Task

Array = NDArray[Any]


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

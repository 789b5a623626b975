"""Read rows in the memory of a server of this node while it goes on; the journal tells torn reads. Kernels only.

A server opens a round in its journal, changes rows, and closes the round. A reader notes the last round, checks that
none is open, reads, and looks again: if no other round was opened meanwhile, it has read that round. In a synchronous
store no round can open while a worker reads, because the next round needs a push by that worker. The reader sees the
server's stores in the order in which they were made (x86).

Rows, slots and words stay mapped after the server has died. The journal's word HERE says that the rows are the table's.
The server clears it before rows go elsewhere (a load, the next generation), and memory that was given back holds zeros,
so HERE is 0 there too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.arena import Region, SparseFile
from mpips.store.keys.row_sums import Ids
from mpips.tables import index, kernels
from mpips.tables.journal import CLOSED, HERE, OPENED, REFUSALS, WORDS
from mpips.tables.messages import MakeTable, TablePlaces

Array = NDArray[Any]
NO_SLOTS = np.zeros(1, np.uint32)


class RowsInPlace:
    """The rows of a table on one server, seen by a worker of the same node.

    The constructor raises CollectiveError or OSError if the rows cannot be mapped: no address space is left, or the
    server is in another container.

    Args:
        at: Where the rows are.
        workers: Number of workers of the store.
        server: Number of the server, and number of servers.
    """

    def __init__(self, at: TablePlaces, card: MakeTable, workers: int, server: tuple[int, int]) -> None:
        self._file = file = SparseFile.opened(Region(*at.file))
        self._dim = card.dim
        places, capacity = at.places, at.capacity
        self._words: Any = memoryview(file.view(places["words"], (WORDS,), np.uint64))  # type: ignore[arg-type]
        self._done: Any = memoryview(file.view(places["done"], (2, workers), np.uint64))  # type: ignore[arg-type]
        self._index = file.view(places["index"], (index.WORDS,), np.uint64)
        self._ids = file.view(places["ids"], (capacity,), np.int64)
        self._values = file.view(places["values"], (capacity * card.dim,), np.dtype(card.dtype))
        self._numbers = np.array([card.key, *server], np.uint64)
        self._spread = np.array([2 * card.bound / (1 << 53), card.bound])
        # The contents of `_index` when the slots below were mapped.
        self._where: list[int] = []
        self._slots = NO_SLOTS
        self._growing = NO_SLOTS

    @property
    def valid(self) -> bool:
        """True as long as these are the table's rows."""
        return bool(self._words[HERE])

    @property
    def refusals(self) -> int:
        """The number of rounds refused."""
        return int(self._words[REFUSALS])

    def round_with(self, worker: int, pushes: int) -> int:
        """Return the last round, or -1 if it cannot be read now.

        That is so if it lacks some of this worker's `pushes` pushes, if a round is being written, or if these are no
        longer the table's rows.
        """
        words = self._words
        closed = words[CLOSED]
        there = words[OPENED] == closed and self._done[closed % 2, worker] >= pushes and words[HERE]
        return int(closed) if there else -1

    def read(self, round_: int, ids: Ids, out: Array) -> bool:
        """Write the rows of those ids that belong to this server, as of a round, into their places in `out`, (k, dim).

        Return False if the round is over or there is no kernel. The contents of `out` are then undefined.
        """
        where = self._index.tolist()
        # Only if the round is unchanged do the offsets and sizes belong together.
        if not self._unchanged(round_):
            return False
        if where != self._where:
            self._slots = self._view(where[index.SLOTS_AT], where[index.SLOTS])
            self._growing = self._view(where[index.GROWING_AT], where[index.GROWING])
            self._where = where
        rest = self._slots, self._growing, self._ids, self._numbers, self._spread, self._dim
        return bool(kernels.read_rows(out.reshape(-1), self._values, ids, *rest)) and self._unchanged(round_)

    def _unchanged(self, round_: int) -> bool:
        return self._words[OPENED] == round_ and self.valid

    def _view(self, at: int, slots: int) -> index.Slots:
        return self._file.view(at, (slots,), np.uint32) if slots else NO_SLOTS

"""Read a table's rows directly in the memory of a server on this node, while the server continues to work.

The server's journal shows whether rows have changed during a read. To change rows, the server opens a round in its
journal, writes the rows, and closes the round. A reader works as follows:

1. Note the last round, and check that no round is open.
2. Read the rows.
3. Check that no other round was opened meanwhile. Then the rows are those of the noted round.

In a synchronous store no round can open while a worker reads, because the next round needs a push by this worker. The
reader sees the server's writes to memory in the order in which the server made them (x86). Reading in place needs a
compiled loop.

The memory stays mapped after the server has died. The journal's word HERE is 1 as long as this memory has the table's
current rows. The server sets HERE to 0 before it puts the rows elsewhere (for a load or the next generation). Memory
that the server has freed contains zeros, so HERE is also 0 there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.arena import Region, SparseFile
from mpips.store.keys.row_sums import Ids
from mpips.tables import index, kernels
from mpips.tables.halves import is_half
from mpips.tables.initial import FirstValues
from mpips.tables.journal import CLOSED, HERE, OPENED, REFUSALS, WORDS
from mpips.tables.messages import MakeTable, TablePlaces

Array = NDArray[Any]
NO_SLOTS = np.zeros(1, np.uint32)


class RowsInPlace:
    """The rows of a table on one server, as a worker on the same node reads them.

    The constructor raises CollectiveError or OSError if the worker cannot map the rows, because no address space is
    left, or because the server is in another container.

    Args:
        at: The place of the rows in the server's memory.
        card: The description of the table.
        workers: Number of workers of the store.
        server: The number of the server, and the number of servers.
    """

    def __init__(self, at: TablePlaces, card: MakeTable, workers: int, server: tuple[int, int]) -> None:
        self._file = file = SparseFile.opened(Region(*at.file))
        self._dim = card.dim
        places, capacity = at.places, at.capacity
        self._words: Any = memoryview(file.view(places["words"], (WORDS,), np.uint64))  # type: ignore[arg-type]
        self._done: Any = memoryview(file.view(places["done"], (2, workers), np.uint64))  # type: ignore[arg-type]
        self._index = file.view(places["index"], (index.WORDS,), np.uint64)
        self._ids = file.view(places["ids"], (capacity,), np.int64)
        dtype = np.dtype(card.dtype)
        # Compiled loops read float16 and bfloat16 as uint16.
        kind = np.dtype(np.uint16) if is_half(dtype) else dtype
        self._values = file.view(places["values"], (capacity * card.dim,), kind)
        self._server = np.array(server, np.uint64)
        self._first_values = FirstValues(card)
        # the content of `_index` at the time when `_slots` and `_growing` were mapped
        self._where: list[int] = []
        self._slots = NO_SLOTS
        self._growing = NO_SLOTS

    @property
    def valid(self) -> bool:
        """True as long as the table's rows are in this memory."""
        return bool(self._words[HERE])

    @property
    def refusals(self) -> int:
        """The number of rounds that were refused."""
        return int(self._words[REFUSALS])

    def round_with(self, worker: int, pushes: int) -> int:
        """Return the last round, or -1 if it cannot be read now.

        The round cannot be read if it does not contain the first `pushes` pushes of this worker, if the server is
        writing a round, or if the table's rows are no longer in this memory.
        """
        words = self._words
        closed = words[CLOSED]
        there = words[OPENED] == closed and self._done[closed % 2, worker] >= pushes and words[HERE]
        return int(closed) if there else -1

    def read(self, round_: int, ids: Ids, out: Array) -> bool:
        """Write the rows of the ids that belong to this server into `out` (k, dim), at the indices of these ids.

        Return False if a round after `round_` has begun, or if the compiled loop is missing. Then the contents of `out`
        are undefined.
        """
        where = self._index.tolist()
        # The offsets and sizes in `where` fit together only if no round has begun.
        if not self._unchanged(round_):
            return False
        if where != self._where:
            self._slots = self._view(where[index.SLOTS_AT], where[index.SLOTS])
            self._growing = self._view(where[index.GROWING_AT], where[index.GROWING])
            self._where = where
        missing = np.empty(len(ids), np.int64)
        rest = self._slots, self._growing, self._ids, self._server, missing, self._dim
        found = kernels.read_rows(out.reshape(-1), self._values, ids, *rest)
        if not (found and self._unchanged(round_)):
            return False
        missing = missing[: found - 1]
        self._first_values.write(out, missing, ids[missing])
        return True

    def _unchanged(self, round_: int) -> bool:
        return self._words[OPENED] == round_ and self.valid

    def _view(self, at: int, slots: int) -> index.Slots:
        return self._file.view(at, (slots,), np.uint32) if slots else NO_SLOTS

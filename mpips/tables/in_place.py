"""Read rows in the memory of a server of this node while it goes on; the journal tells torn reads. Kernels only.

A server opens a round in its journal, changes rows, and closes it. Who reads notes the last round, which is closed, and
looks again when it is through: what it has read is that round if no other was opened meanwhile. In a synchronous store
none is, as the next round needs a push by the worker that reads. The server's stores are seen in their order (x86).

Rows, slots and words stay mapped when the server has died. A word of the journal says that it is the table's: it is
taken back before rows go elsewhere (a load, the next generation), and memory that was given back holds zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.arena import SparseFile
from mpips.tables import index, kernels
from mpips.tables.initial import Ids
from mpips.tables.journal import CLOSED, HERE, OPENED, REFUSALS, WORDS

Array = NDArray[Any]
NO_SLOTS = np.zeros(1, np.uint32)


class RowsInPlace:
    """Rows of a table on one server. `places`, `capacity`: of `TableRows`. `key`, `bound`: of first values. `server`:
    which it is, of how many."""

    def __init__(
        self,
        file: SparseFile,
        places: Mapping[str, int],
        capacity: int,
        workers: int,
        dim: int,
        dtype: np.dtype,
        key: int,
        bound: float,
        server: tuple[int, int],
    ) -> None:
        self._file, self._dim = file, dim
        self._words: Any = memoryview(file.view(places["words"], (WORDS,), np.uint64))  # type: ignore[arg-type]
        self._done: Any = memoryview(file.view(places["done"], (2, workers), np.uint64))  # type: ignore[arg-type]
        self._index = file.view(places["index"], (index.WORDS,), np.uint64)
        self._ids = file.view(places["ids"], (capacity,), np.int64)
        self._values = file.view(places["values"], (capacity * dim,), dtype)
        self._numbers = np.array([key, *server], np.uint64)
        self._spread = np.array([2 * bound / (1 << 53), bound])
        self._where: list[int] = []
        self._slots = self._growing = NO_SLOTS

    @property
    def valid(self) -> bool:
        """Return whether the table's rows are still these."""
        return bool(self._words[HERE])

    @property
    def refusals(self) -> int:
        """Return how many rounds were refused."""
        return int(self._words[REFUSALS])

    def round_with(self, worker: int, pushes: int) -> int:
        """Return the last round, where it has so many pushes of a worker and no other is being written; else -1."""
        words = self._words
        closed = words[CLOSED]
        there = words[OPENED] == closed and self._done[closed % 2, worker] >= pushes and words[HERE]
        return int(closed) if there else -1

    def read(self, round_: int, ids: Ids, out: Array) -> bool:
        """Write the rows of those ids that belong to this server into their places in `out`, (k, dim), as they are in
        this round. False: it is over, or no kernel is there, and what `out` holds means nothing."""
        where = self._index.tolist()
        if not self._unchanged(round_):  # offsets and sizes belong together
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

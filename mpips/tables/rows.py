"""Rows of one table on one server: made, updated by summed gradients, and dropped when old.

A row is made when it is first updated; until then a pull gives its first values.

Nothing stops for growth. Rows lie in a sparse file of the server's memory (`arena.SparseFile`), each array in addresses
that are reserved at once and take memory only as rows are written. They never move. Rows that nobody has named for long
may be dropped, and others take their positions (`places`).

Another process of the node reads rows where they lie (`in_place`), also when the server has ended: it opens the file by
its region while the server lives, and views arrays by their offsets in `TableRows.places`. Of `words` there,
`words[ROWS]` says how many positions were given out; it is written behind the rows. No row lies where `touched` is
`places.FREE`.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.arena import SparseFile
from mpips.collectives.kernels.quiet import quiet
from mpips.tables import index, kernels
from mpips.tables.index import MOST_ROWS, Positions
from mpips.tables.initial import Ids, first_rows
from mpips.tables.journal import HERE, KEPT, ROWS, WORDS, Journal, Standing, kept_arrays
from mpips.tables.places import FREE, Places
from mpips.tables.row_optimizers import RowOptimizer

Array = NDArray[Any]
BLOCK_BYTES = 1 << 18
"""Of rows with their state, which are updated at a time."""
FEW = 1 << 16
"""Ids of dropped rows that are kept though there are fewer rows."""
LAST = 1000
"""From so many exports and increments the next may go on."""


def arrays_of(dim: int, dtype: np.dtype, optimizer: RowOptimizer) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Return the arrays of a table by name: of each the dtype, and the shape of what it holds of one row."""
    state = {f"state{number}": (dtype, (width,)) for number, width in enumerate(optimizer.widths(dim))}
    counts = {"counts": (np.dtype(np.int32), ())} if optimizer.counts_rows else {}
    ages = {"touched": (np.dtype(np.int32), ())}
    return {"ids": (np.dtype(np.int64), ()), "values": (dtype, (dim,)), **state, **counts, **ages}


class TableRows:
    """Rows of `dim` values of a dtype. `key`, `bound`: of their first values. `evict`, `limit`: which rows are dropped
    (`places`); 0: none. `file`: where they lie; None: in one of their own. `survives`: the round before can be had
    (`journal`), which counts pushes of `workers`."""

    def __init__(
        self,
        dim: int,
        dtype: np.dtype,
        key: int,
        bound: float,
        optimizer: RowOptimizer,
        evict: int = 0,
        limit: int = 0,
        file: SparseFile | None = None,
        survives: bool = False,
        workers: int = 0,
    ) -> None:
        self._dim, self._dtype, self._key, self._bound, self.optimizer = dim, dtype, key, bound, optimizer
        self._file = SparseFile() if file is None else file
        self.places: dict[str, int] = {}
        """Offsets in the file: of each array, and of `words`."""
        arrays = arrays_of(dim, dtype, optimizer)
        self.row_bytes = sum(kind.itemsize * math.prod(shape) for kind, shape in arrays.values())
        """Bytes of a row with its id and state, without its share of the index: 8 to 16, 24 while that grows."""
        self._capacity = min(MOST_ROWS, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // self.row_bytes)
        self._arrays = {
            name: self._reserved(name, (self._capacity, *shape), dtype) for name, (dtype, shape) in arrays.items()
        }
        self._kept: dict[str, Array] = {}
        for name, (dtype_of_it, shape) in kept_arrays(arrays).items() if survives else ():
            self._kept[name] = self._reserved(KEPT + name, (self._capacity, *shape), dtype_of_it)
        self.journal = self._new_journal(workers)
        self._values = self._arrays["values"]
        self._state = [self._arrays[name] for name in arrays if name.startswith("state")]
        self._counts = self._arrays.get("counts")
        words = self._reserved("index", (index.WORDS,), np.dtype(np.uint64))
        ids, touched = self._arrays["ids"], self._arrays["touched"]
        self.positions = Places(ids, touched, self.row_bytes, self._file, words, evict, limit)
        self.evicted = 0
        """How many rows were dropped."""
        self.drops = Drops()
        self._put = False
        """Rows were put since the last update."""
        self._frozen: list[FrozenRows] = []
        self._step = 0
        """The update that was made last."""

    @property
    def capacity(self) -> int:
        """Return for how many rows there is room."""
        return self._capacity

    @property
    def count(self) -> int:
        """Return how many rows there are."""
        return self.positions.count

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows that there were at a time, their state and the index."""
        return self.positions.top * self.row_bytes + self.positions.nbytes

    def pull(self, ids: Ids, out: Array | None = None) -> Array:
        """Return the rows of these ids, each once, (k, dim), in `out` if given; of those that are not there the first
        values."""
        found = self.positions.find(ids)
        missing = np.flatnonzero(found < 0)
        found[missing] = 0
        rows = np.take(self._values, found, axis=0, out=out, mode="clip")  # NumPy would copy `out` to raise in time
        self._write_first_values(rows, missing, ids[missing])
        return rows

    def update(self, ids: Ids, gradients: Array, step: int) -> None:
        """Update the rows of these ids, each once, by gradients (k, dim); make those that are not there.

        `step`: the update of the table, counted from 1, for schedules and ages. MemoryError: nothing has changed."""
        self.change_rows(ids, gradients, step)
        self.drop_due_rows()

    def change_rows(self, ids: Ids, gradients: Array, step: int) -> None:
        """Do what `update` does before rows are dropped; `drop_due_rows` comes next."""
        if self._put:
            self.positions.see_touched()
            self._put = False
        self._step = step
        at = self._positions(ids)
        self._keep_old(at)
        counts = None
        if self._counts is not None:
            counts = self._counts[at] + 1
            self._counts[at] = counts
        if not self.optimizer.update_at(at, self._values, gradients, self._state, counts, step):
            self._update_blocks(at, gradients, counts, step)
        self.positions.touch(at, step)

    def drop_due_rows(self) -> None:
        """Drop the rows that are due after the last update."""
        due = self.positions.due(self._step)
        dropped = self._arrays["ids"][due]
        self._remove(due)
        self.evicted += len(due)
        self.drops.note(dropped, self._step, self.count)

    @quiet
    def _update_blocks(self, at: Positions, gradients: Array, counts: Array | None, step: int) -> None:
        """Update rows that lie at these positions, so few at a time that what is made on the way stays in the cache."""
        step_rows = max(1, BLOCK_BYTES // self.row_bytes)
        for start in range(0, len(at), step_rows):
            block = slice(start, start + step_rows)
            some = at[block]
            values, state = self._values[some], [array[some] for array in self._state]
            self.optimizer.update(values, gradients[block], state, None if counts is None else counts[block], step)
            self._values[some] = values
            for array, new in zip(self._state, state, strict=True):
                array[some] = new

    def remove(self, ids: Ids) -> None:
        """Drop the rows of these ids, each once, which are there."""
        self._remove(self.positions.find(ids))

    def _remove(self, at: Positions) -> None:
        self._keep_old(at[self._arrays["touched"][at] != self._step])  # what this update has named is kept already
        self.positions.remove(at)

    def freeze(self, since: int = FREE, export: int = -1) -> FrozenRows:
        """Return the rows that an update after `since` has named, as they are now, whatever is updated later.

        Until `thaw`, rows that change are copied. `export`: of so many updates, with ids dropped after `since`.
        """
        top = self.positions.top
        dropped = self.drops.after(since, export) if export >= 0 else np.zeros(0, np.int64)
        self._frozen.append(FrozenRows(self._arrays, since, top, dropped, self._file))
        return self._frozen[-1]

    def thaw(self, frozen: FrozenRows) -> None:
        """Let what was frozen go."""
        self._frozen = [one for one in self._frozen if one is not frozen]

    def _keep_old(self, at: Positions) -> None:
        """Keep what lies at positions and is about to change, for those who need it as it is."""
        self.journal.keep_old(at)
        self._keep_frozen(at)

    def _keep_frozen(self, at: Positions) -> None:
        for frozen in self._frozen:
            frozen.keep_old(at)

    def go_to(self, journal: Journal, round_: int) -> None:
        """Put back what is beyond a round that can be had, by the journal of the generation that is over."""
        self.journal = journal
        changed = self.journal.put_back()
        if self.journal.standings()[0][0] > round_:
            changed = self.journal.go_back()
        if changed:
            self.positions.restore(int(self.journal.words[ROWS]))

    def begin(self, standing: Standing, done: Sequence[int], torn: bool) -> None:
        """Begin a generation at a round. What the last one has written of rounds stays until this one has begun."""
        self.evicted = standing[2]
        self._frozen, self.drops = [], Drops()
        self.journal.words[HERE] = 0
        self.journal = self._new_journal(len(done))
        self.journal.begin(self.positions.top, standing, done, torn)

    def _new_journal(self, workers: int) -> Journal:
        words = self._reserved("words", (WORDS,), np.dtype(np.uint64))
        done = self._reserved("done", (2, workers), np.dtype(np.uint64))
        return Journal(self._arrays, words, done, self._kept)

    def put_rows(self, arrays: Mapping[str, Array]) -> None:
        """Set rows, of all arrays by name; ids are each there once."""
        self._put = True
        at = self._positions(arrays["ids"])
        self._keep_frozen(at)
        for name, values in arrays.items():
            self._arrays[name][at] = values

    def _positions(self, ids: Ids) -> Positions:
        """Return where rows lie; those that are not there are made."""
        found = self.positions.find(ids)
        missing = np.flatnonzero(found < 0)
        if len(missing):
            self.positions.see_room(len(missing))
            found[missing] = self._add(ids[missing])
        return found

    def _add(self, ids: Ids) -> Positions:
        """Make rows that are not there; where they lie."""
        positions, again = self.positions.add(ids)
        for array in self._state if self._counts is None else (*self._state, self._counts):
            array[again] = 0
        self._write_first_values(self._values, positions, ids)
        self.journal.words[ROWS] = self.positions.top
        return positions

    def _write_first_values(self, rows: Array, at: Positions, ids: Ids) -> None:
        """Write the first values of these ids' rows into some rows."""
        spread = np.array([2 * self._bound / (1 << 53), self._bound])
        if not len(ids) or kernels.first_values(
            rows.reshape(-1), ids, at, np.array([self._key], np.uint64), spread, self._dim
        ):
            return
        for piece, values in first_rows(self._key, self._bound, ids, self._dim, self._dtype):
            rows[at[piece]] = values

    def _reserved(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return zeros in the file, which take memory where they are written."""
        array, self.places[name] = self._file.zeros(shape, dtype)
        return array


class FrozenRows:
    """Rows of a table as they were at one moment: those before position `top` that an update after `since` had named.

    `arrays`: the table's. `dropped`: ids that an export names."""

    def __init__(self, arrays: Mapping[str, Array], since: int, top: int, dropped: Ids, file: SparseFile) -> None:
        self.count, self.top, self.dropped = int(np.count_nonzero(arrays["touched"][:top] > since)), top, dropped
        self._arrays, self._since = arrays, since
        self._copies = {name: file.zeros((top, *array.shape[1:]), array.dtype)[0] for name, array in arrays.items()}
        self._copied = np.zeros(top, bool)
        self._read = 0

    def keep_old(self, at: Positions) -> None:
        """Copy what lies at positions and is about to change, unless it was copied or read."""
        at = at[(at >= self._read) & (at < self.top)]
        at = at[~self._copied[at]]
        for name, copy in self._copies.items():
            copy[at] = self._arrays[name][at]
        self._copied[at] = True

    @property
    def names(self) -> list[str]:
        """The arrays that rows have."""
        return list(self._arrays)

    def read(self, start: int, stop: int, names: Sequence[str] = ()) -> dict[str, Array]:
        """Return rows that lay at positions [start, stop), of these arrays or of all; later reads begin at `stop`."""
        stop = min(stop, self.top)
        copied, found = np.flatnonzero(self._copied[start:stop]), {}
        for name in {"touched", *(names or self._arrays)}:
            found[name] = self._arrays[name][start:stop].copy()
            found[name][copied] = self._copies[name][start:stop][copied]
        self._read = stop
        chosen = found["touched"] > self._since
        return {name: found[name][chosen] for name in names or self._arrays}


class Drops:
    """Ids of rows that were dropped since files of the table: no more of them than there are rows, or `FEW`."""

    def __init__(self) -> None:
        self.exports: list[int] = []
        """The exports and increments from which the next may go on, by the updates of the table that they have
        written."""
        self._count = 0
        self._ids: deque[tuple[int, Ids]] = deque()
        """By the update."""

    def note(self, ids: Ids, update: int, rows: int) -> None:
        """Note the ids that an update has dropped."""
        if not self.exports or not len(ids):
            return
        self._ids.append((update, ids))
        self._count += len(ids)
        while self._count > max(FEW, rows):
            lost, gone = self._ids.popleft()
            self._count -= len(gone)
            self.exports = [one for one in self.exports if one >= lost]

    def after(self, since: int, updates: int) -> Ids:
        """Return the ids that updates after `since` have dropped, for a file of rows; the next may go on from it."""
        self.exports = [*(one for one in self.exports if one < updates), updates][-LAST:]
        while self._ids and self._ids[0][0] <= self.exports[0]:
            self._count -= len(self._ids.popleft()[1])
        return np.concatenate([np.zeros(0, np.int64), *(ids for update, ids in self._ids if update > since)])

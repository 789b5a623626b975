"""The rows of one table on one server: make them, update them with summed gradients, and drop old ones.

A row is made when it is first updated. Until then a pull returns its first values.

A table can grow without ever copying its rows. They are in a sparse file of the server's memory (`arena.SparseFile`).
The addresses for each array are reserved once, and take memory only as rows are written. Rows never move. Rows that no
update has named for a long time may be dropped, and new rows get their positions (see `places`).

Another process of the node can read rows in place (`in_place`), even after the server has died. It must open the file
while the server is alive. Then it views arrays at the offsets in `TableRows.places`. The journal's `words[ROWS]` is the
number of positions in use. It is set after the rows are written. A position whose `touched` is `places.FREE` has no
row.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import SparseFile
from mpips.collectives.kernels.quiet import quiet
from mpips.optimizers.base import working_dtype
from mpips.store.keys.row_sums import Ids, update_in_blocks
from mpips.tables import halves, index, row_optimizers
from mpips.tables.eviction import AGE, COUNT
from mpips.tables.index import MOST_ROWS, Positions
from mpips.tables.initial import FirstValues
from mpips.tables.journal import HERE, KEPT, ROWS, WORDS, Journal, RowsRound, kept_arrays
from mpips.tables.messages import MakeTable
from mpips.tables.places import FREE, Places

Array = NDArray[Any]
# Rows are updated in blocks of this many bytes, state included.
BLOCK_BYTES = 1 << 18
# The ids of up to this many dropped rows are kept, even if the table has fewer rows.
FEW = 1 << 16
# The server remembers at most this many exports and increments. A later file may continue any of them.
LAST = 1000


def arrays_of(card: MakeTable) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Return name -> (dtype, shape of one row's part) for each array of a table.

    Raises ValueError or TypeError if this process does not have the optimizer.
    """
    dim, dtype = card.dim, np.dtype(card.dtype)
    optimizer, wide = row_optimizers.decode(card.optimizer, card.numbers), working_dtype(dtype)
    state = {f"state{number}": (wide, (width,)) for number, width in enumerate(optimizer.widths(dim))}
    counts = {"counts": (np.dtype(np.int32), ())} if optimizer.counts_updates else {}
    scores = {"scores": (np.dtype(np.float64), ())} if card.evict_by != AGE else {}
    times = {"times": (np.dtype(np.int64), ())} if card.evict_after else {}
    ages = {"touched": (np.dtype(np.int32), ())}
    return {"ids": (np.dtype(np.int64), ()), "values": (dtype, (dim,)), **state, **counts, **scores, **times, **ages}


class TableRows:
    """The rows of one table on one server.

    Args:
        card: The description of the table.
        limit: Maximum number of rows that this server keeps, which is its share of the table's limit. 0 means no limit.
        file: The file in which rows are stored. None makes a new file.
        survives: True to keep copies of the rows that a round changes, so that the previous round can be restored
            after a death (see `journal`).
        workers: Number of workers whose pushes the journal counts.
        checks_finite: True to raise FloatingPointError if an update makes a row of float16 or bfloat16 infinite or NaN.
    """

    def __init__(
        self,
        card: MakeTable,
        limit: int = 0,
        file: SparseFile | None = None,
        survives: bool = False,
        workers: int = 0,
        checks_finite: bool = False,
    ) -> None:
        self._checks_finite = checks_finite
        self.first_values = FirstValues(card)
        self._key, self._stochastic = card.key, card.stochastic
        self.optimizer = row_optimizers.decode(card.optimizer, card.numbers)
        self._file = SparseFile() if file is None else file
        # name of an array, or "words", "done" or "index" -> offset in the file
        self.places: dict[str, int] = {}
        arrays = arrays_of(card)
        # Bytes of a row, including its id and state. The index needs 8 to 16 more bytes for each row (24 while it
        # grows).
        self.row_bytes = sum(kind.itemsize * math.prod(shape) for kind, shape in arrays.values())
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
        # for `evict_by`, the score of each row; for `evict_after`, the time of its last update
        self._scores, self._times = self._arrays.get("scores"), self._arrays.get("times")
        self._counts_uses = card.evict_by == COUNT
        words = self._reserved("index", (index.WORDS,), np.dtype(np.uint64))
        ids, touched = self._arrays["ids"], self._arrays["touched"]
        rules = card.evict, limit, card.evict_after, self._times, self._scores
        self.positions = Places(ids, touched, self.row_bytes, self._file, words, *rules)
        # number of rows dropped by `evict`, `evict_after` and `limit` together; the part of `evict_after`; the part of
        # `limit`
        self.evicted = self.expired_rows = self.excess_rows = 0
        # number of rows that the program has removed
        self.removed = 0
        self.drops = Drops()
        # True if `put_rows` was called (by a load or a recovery) since the last update
        self._put = False
        self._frozen: list[FrozenRows] = []
        # number and time of the last update
        self._step = 0
        self._now = 0

    @property
    def capacity(self) -> int:
        """The number of positions for which addresses are reserved."""
        return self._capacity

    @property
    def count(self) -> int:
        return self.positions.count

    @property
    def nbytes(self) -> int:
        """The memory of all positions that were ever in use, with state and index."""
        return self.positions.top * self.row_bytes + self.positions.nbytes

    def pull(self, ids: Ids, out: Array | None = None) -> Array:
        """Return the rows (k, dim) of distinct ids. For an id without a row return its first values.

        If `out` is given, write the rows into it and return it.
        """
        found = self.positions.find(ids)
        missing = np.flatnonzero(found < 0)
        found[missing] = 0
        # Without mode="clip" NumPy would first write into a copy of `out`, to leave `out` unchanged if an index is
        # wrong.
        rows = np.take(self._values, found, axis=0, out=out, mode="clip")
        self.first_values.write(rows, missing, ids[missing])
        return rows

    def update(self, ids: Ids, gradients: Array, step: int) -> None:
        """Update the rows of distinct ids with gradients (k, dim). Rows that do not exist are made.

        Gradients of rows of float16 and bfloat16 are float32.

        `step` is the number of this update of the table, counted from 1. Schedules and ages of rows use it. If this
        raises MemoryError, nothing has changed.
        """
        self.begin_update(step)
        self.change_rows(ids, gradients)
        self.drop_due_rows()

    def begin_update(self, step: int, now: int = 0) -> None:
        """Begin an update. Any of `change_rows`, `set_rows` and `remove` may follow, and then `drop_due_rows`.

        `now` is the time of the update, in microseconds since 1970. It must not be before that of the last update.
        """
        if self._put:
            self.positions.rebuild_order()
            self._put = False
        self._step, self._now = step, now

    def change_rows(self, ids: Ids, gradients: Array, scores: Array | None = None) -> None:
        """Update rows by the optimizer, as `update` does, without dropping any.

        `scores` are the scores of these ids that the program has given. None unless the table evicts by score.
        """
        step, at = self._step, self._positions(ids)
        self._keep_old(at)
        if self.optimizer.clipnorm:
            gradients = row_optimizers.clipped(gradients, self.optimizer.clipnorm)
        counts = None
        if self._counts is not None:
            counts = self._counts[at] + 1
            self._counts[at] = counts
        streams = halves.streams_of(self._key, ids, step) if self._stochastic else halves.NEAREST
        if not self.optimizer.update_at(at, self._values, gradients, self._state, counts, step, streams):
            self._update_blocks(at, gradients, counts, step, streams)
        if self._checks_finite and halves.is_half(self._values.dtype):
            self._check_finite(ids, at)
        self._note_use(at, scores)

    def _check_finite(self, ids: Ids, at: Positions) -> None:
        values = self._values[at]
        if not (fine := np.isfinite(values)).all():
            row, column = np.argwhere(~fine)[0]
            raise FloatingPointError(
                f"a value of the row of id {ids[row]} is {values[row, column]} in {values.dtype.name}: look at the "
                "learning rate and the gradients, or give the table dtype='float32'"
            )

    def set_rows(self, ids: Ids, values: Array, scores: Array | None = None) -> None:
        """Set the rows of distinct ids to values (k, dim).

        Rows that do not exist are made. The optimizer's state is kept.
        """
        at = self._positions(ids)
        self._keep_old(at)
        self._values[at] = values
        self._note_use(at, scores)

    def _note_use(self, at: Positions, scores: Array | None) -> None:
        """Note that this update names the rows at these positions."""
        if self._times is not None:
            self._times[at] = self._now
        if self._scores is not None:
            self._scores[at] = self._scores[at] + 1 if self._counts_uses else scores
        self.positions.touch(at, self._step)

    def drop_due_rows(self) -> None:
        """End an update: drop the rows that are due by `evict`, `evict_after` and `limit`."""
        unused = self._remove(self.positions.unused(self._step))
        expired = self._remove(self.positions.expired(self._now))
        excess = self._remove(self.positions.excess())
        self.evicted += unused + expired + excess
        self.expired_rows += expired
        self.excess_rows += excess

    @quiet
    def _update_blocks(
        self, at: Positions, gradients: Array, counts: Array | None, step: int, streams: NDArray[np.uint64]
    ) -> None:
        """Update the rows at these positions in blocks. Temporary arrays of a block fit into the cache."""
        step_rows = max(1, BLOCK_BYTES // self.row_bytes)

        def update(block: slice, rows: Sequence[Array]) -> None:
            values, *state = rows
            wide = values.astype(gradients.dtype, copy=False)
            self.optimizer.update(wide, gradients[block], state, None if counts is None else counts[block], step)
            if wide is not values:
                halves.round_into(values, wide, streams[block])

        update_in_blocks(at, [self._values, *self._state], step_rows, update)

    def remove(self, ids: Ids) -> int:
        """Drop the rows of those ids that have one, and return their number. No id may repeat."""
        found = self.positions.find(ids)
        return self._remove(found[found >= 0])

    def _remove(self, at: Positions) -> int:
        if not len(at):
            return 0
        dropped = self._arrays["ids"][at]
        # Copy only rows that the current update has not changed. Rows that it has changed were copied before the
        # change.
        self._keep_old(at[self._arrays["touched"][at] != self._step])
        self.positions.remove(at)
        self.drops.note(dropped, self._step, self.count)
        return len(at)

    def freeze(self, since: int = FREE, export: int = -1) -> FrozenRows:
        """Freeze the rows that updates after `since` have named, as they are now.

        Until `thaw`, rows are copied before they change.

        Args:
            since: Number of an update. FREE (0) keeps all rows.
            export: For an export or an increment, the number of updates so far. The result then includes the ids that
                were dropped after `since`. Otherwise -1.
        """
        top = self.positions.top
        dropped = self.drops.after(since, export) if export >= 0 else np.zeros(0, np.int64)
        self._frozen.append(FrozenRows(self._arrays, since, top, dropped, self._file))
        return self._frozen[-1]

    def thaw(self, frozen: FrozenRows) -> None:
        self._frozen = [one for one in self._frozen if one is not frozen]

    def _keep_old(self, at: Positions) -> None:
        """Copy the rows at these positions before they change, for the journal and for frozen rows."""
        self.journal.keep_old(at)
        self._keep_frozen(at)

    def _keep_frozen(self, at: Positions) -> None:
        for frozen in self._frozen:
            frozen.keep_old(at)

    def go_to(self, journal: Journal, round_: int) -> None:
        """Restore the rows of `round_` if they are at a later round.

        `journal` is the journal of the last generation.
        """
        self.journal = journal
        changed = self.journal.undo()
        if self.journal.available_rounds()[0].round > round_:
            self.journal.go_back()
            changed = True
        if changed:
            self.positions.restore(int(self.journal.words[ROWS]))

    def begin(self, at: RowsRound, done: Sequence[int], torn: bool) -> None:
        """Begin a generation at a round, with a new journal.

        The journal of the last generation stays unchanged in the file. So other processes can still read it if this
        server dies before the new generation has begun everywhere.
        """
        self.evicted, self.expired_rows, self.excess_rows = at.dropped, at.expired, at.excess
        self.removed = at.removed
        self._frozen, self.drops = [], Drops()
        self.journal.words[HERE] = 0
        self.journal = self._new_journal(len(done))
        self.journal.begin(self.positions.top, at, done, torn)

    def _new_journal(self, workers: int) -> Journal:
        words = self._reserved("words", (WORDS,), np.dtype(np.uint64))
        done = self._reserved("done", (2, workers), np.dtype(np.uint64))
        return Journal(self._arrays, words, done, self._kept)

    def put_rows(self, arrays: Mapping[str, Array]) -> None:
        """Set whole rows, with state. `arrays` has values for every array of the table, by name. No id may repeat."""
        self._put = True
        at = self._positions(arrays["ids"])
        self._keep_frozen(at)
        for name, values in arrays.items():
            self._arrays[name][at] = values

    def _positions(self, ids: Ids) -> Positions:
        """Return the positions of the rows of these ids. Rows that do not exist are made."""
        found = self.positions.find(ids)
        missing = np.flatnonzero(found < 0)
        if len(missing):
            self.positions.check_room(len(missing))
            found[missing] = self._add(ids[missing])
        return found

    def _add(self, ids: Ids) -> Positions:
        """Make rows for these ids, and return their positions."""
        before, after = self.positions.top, self.positions.top_with(len(ids))
        for array in self._arrays.values():
            row_bytes = array[:1].nbytes
            arena.use_huge_pages(array, before * row_bytes, after * row_bytes)
        positions, again = self.positions.add(ids)
        # A position that had another row before still has the state of that row. So reset it.
        for kept in (*self._state, self._counts, self._scores):
            if kept is not None:
                kept[again] = 0
        self.first_values.write(self._values, positions, ids)
        self.journal.words[ROWS] = self.positions.top
        return positions

    def _reserved(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Reserve an array of zeros in the file. The array takes memory only where it is written."""
        array, self.places[name] = self._file.zeros(shape, dtype)
        return array


class FrozenRows:
    """Rows of a table as they were at one moment.

    Args:
        arrays: The table's arrays.
        since: Only rows that an update after this one had named are included.
        top: All rows are at positions before this one.
        dropped: The dropped ids for an export or an increment.
        file: The file in which copies of rows are stored.
    """

    def __init__(self, arrays: Mapping[str, Array], since: int, top: int, dropped: Ids, file: SparseFile) -> None:
        self.count = int(np.count_nonzero(arrays["touched"][:top] > since))
        self.top = top
        self.dropped = dropped
        self._arrays = arrays
        self._since = since
        self._copies = {name: file.zeros((top, *array.shape[1:]), array.dtype)[0] for name, array in arrays.items()}
        self._copied = np.zeros(top, bool)
        self._read = 0

    def keep_old(self, at: Positions) -> None:
        """Copy the rows at these positions before they change, except rows that were already copied or read."""
        at = at[(at >= self._read) & (at < self.top)]
        at = at[~self._copied[at]]
        for name, copy in self._copies.items():
            copy[at] = self._arrays[name][at]
        self._copied[at] = True

    @property
    def names(self) -> list[str]:
        """The names of the table's arrays."""
        return list(self._arrays)

    def read(self, start: int, stop: int, names: Sequence[str] = ()) -> dict[str, Array]:
        """Return the rows at positions [start, stop). `names` are the arrays to read; empty means all.

        Positions must be read in ascending order: the next read must begin at `stop`.
        """
        stop = min(stop, self.top)
        copied, found = np.flatnonzero(self._copied[start:stop]), {}
        for name in {"touched", *(names or self._arrays)}:
            found[name] = self._arrays[name][start:stop].copy()
            found[name][copied] = self._copies[name][start:stop][copied]
        self._read = stop
        chosen = found["touched"] > self._since
        return {name: found[name][chosen] for name in names or self._arrays}


class Drops:
    """Ids of dropped rows, for the next exports and increments.

    The number of ids that are kept is limited by the number of rows of the table, or by FEW if FEW is larger. When
    older ids are forgotten, files that were written before these drops can no longer be continued.
    """

    def __init__(self) -> None:
        # numbers of updates at which files were written; the next export or increment may continue any of these files
        self.exports: list[int] = []
        self._count = 0
        # (number of an update, ids that it has dropped), oldest first
        self._ids: deque[tuple[int, Ids]] = deque()

    def note(self, ids: Ids, update: int, rows: int) -> None:
        """Note the ids that an update has dropped. `rows` is the number of rows left."""
        if not self.exports or not len(ids):
            return
        self._ids.append((update, ids))
        self._count += len(ids)
        while self._count > max(FEW, rows):
            lost, gone = self._ids.popleft()
            self._count -= len(gone)
            self.exports = [one for one in self.exports if one >= lost]

    def after(self, since: int, updates: int) -> Ids:
        """Return the ids dropped after update `since`, and note that a file was written at `updates`."""
        self.exports = [*(one for one in self.exports if one < updates), updates][-LAST:]
        while self._ids and self._ids[0][0] <= self.exports[0]:
            self._count -= len(self._ids.popleft()[1])
        return np.concatenate([np.zeros(0, np.int64), *(ids for update, ids in self._ids if update > since)])

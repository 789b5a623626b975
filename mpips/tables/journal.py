"""The undo copies of a table's rows: whenever a server is killed, one whole round of its rows can be restored.

A server copies rows before a round changes them. The order of writing is that of `store.recovery.undo`. But unlike a
round of a key, a round of a table changes rows at any positions, and may make and drop rows. So the journal stores the
position of each copied row, and the number of copied rows (the *mark*). It also stores the number of positions that
were in use before the round. Rows at later positions are new, and undoing the round removes them.

The copies are in the server's sparse file. Their address range is as large as the table's, but they take memory only
where they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.arena import SparseFile
from mpips.store.recovery.undo import CLOSED, MARK, OPENED, WHOLE, UndoWords
from mpips.tables.places import FREE

Array = NDArray[Any]
Positions = NDArray[np.int64]
Arrays = dict[str, tuple[np.dtype, tuple[int, ...]]]
WORDS = 24
# Words of the journal, besides those of `UndoWords`:
# ROWS: number of positions in use, from 0.
# ROWS_BEFORE: the value of ROWS before the round.
# TORN: 1 while a load or a recovery puts rows into the table, so that no round is whole.
# HERE: 1 as long as the arrays of this journal have the table's current rows. Processes that read rows in place check
# it.
# REFUSALS: number of refused rounds. Processes that read rows in place check it.
ROWS, ROWS_BEFORE, TORN, HERE, REFUSALS = range(4, 9)
# counts at the last round and at the round before it, in the order of `RowsRound`
COUNTS, COUNTS_BEFORE = slice(9, 16), slice(16, 23)
# prefix of the names of the undo copies
KEPT = "kept "
# size of the pieces in which rows are read, in bytes
PIECE_BYTES = 4 << 20


class RowsRound(NamedTuple):
    """A round that can be restored, with the table's counts at the end of this round."""

    round: int
    # number of updates
    updates: int
    # number of rows dropped by `evict`, `evict_after` and `limit`
    dropped: int
    # number of gradients that were dropped because their id got no row
    refused: int
    # the part of `dropped` that `evict_after` has dropped, and the part that `limit` has dropped
    expired: int = 0
    excess: int = 0
    # number of rows that the program has removed
    removed: int = 0
    # Time of the last update, in microseconds since 1970. It never decreases. 0 in a table without `evict_after`.
    time: int = 0


class Journal(UndoWords[RowsRound]):
    """Copies of the rows that a round changes in one table, and words that say which copies are valid.

    Args:
        arrays: The table's arrays by name.
        words: The words of the journal, at the indices ROWS, TORN and so on.
        done: Number of applied pushes of each worker, (2, workers). Row 0 is for even rounds, row 1 for odd rounds.
        kept: For each array of the table, an array for copied rows; and under the name "at", an array for their
            positions. Empty if the store does not survive deaths, so that no copies are kept.
    """

    def __init__(self, arrays: Mapping[str, Array], words: Array, done: Array, kept: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self._done = done
        self._kept = kept
        self.words: Any = memoryview(words)  # type: ignore[arg-type]
        # number of rows that take about PIECE_BYTES
        self.rows_at_once = max(1, PIECE_BYTES // sum(array[:1].nbytes for array in arrays.values()))

    @classmethod
    def attached(
        cls, file: SparseFile, places: Mapping[str, int], arrays: Arrays, capacity: int, workers: int
    ) -> Journal:
        """Open the journal of a table of another process. `places` has the offsets of the arrays in its file."""
        kinds = {name: file.view(places[name], (capacity, *shape), dtype) for name, (dtype, shape) in arrays.items()}
        kept = {
            name: file.view(places[KEPT + name], (capacity, *shape), dtype)
            for name, (dtype, shape) in kept_arrays(arrays).items()
        }
        words = file.view(places["words"], (WORDS,), np.uint64)
        return cls(kinds, words, file.view(places["done"], (2, workers), np.uint64), kept)

    # ---- writing a round

    def open(self) -> None:
        """Begin a round. The caller may change rows from now on."""
        words = self.words
        words[WHOLE] = 0
        words[MARK] = 0
        words[ROWS_BEFORE], words[COUNTS_BEFORE] = words[ROWS], words[COUNTS]
        # Set OPENED last, so that a process that sees the open round also sees a mark of 0 and the old counts.
        words[OPENED] = words[CLOSED] + 1

    def keep_old(self, at: Positions) -> None:
        """Copy the rows at these positions. Call this before each row changes for the first time in the round."""
        if not self._kept:
            return
        at = at[at < self.words[ROWS_BEFORE]]
        mark = int(self.words[MARK])
        stop = mark + len(at)
        for name, array in self._arrays.items():
            np.take(array, at, axis=0, out=self._kept[name][mark:stop], mode="clip")
        self._kept["at"][mark:stop] = at
        # Set the mark only now, after the copies, because it makes them valid. After this call the caller may change
        # the rows.
        self.words[MARK] = stop

    def write(self, at: Positions, arrays: Mapping[str, Array], rows: int) -> None:
        """Copy the old rows at these positions, then write new rows. A position may be written once in a round.

        `rows` is the number of positions in use after the write.
        """
        self.keep_old(at)
        for name, values in arrays.items():
            self._arrays[name][at] = values
        self.words[ROWS] = rows

    def close(self, counts: Sequence[int], done: Sequence[int]) -> None:
        """Complete the round.

        Args:
            counts: The counts of a `RowsRound`.
            done: The number of applied pushes of each worker.
        """
        words = self.words
        self._done[words[OPENED] % 2] = done
        words[COUNTS] = _words(counts)
        words[WHOLE] = bool(self._kept)
        # Set CLOSED last, because this completes the round.
        words[CLOSED] = words[OPENED]

    def begin(self, rows: int, at: RowsRound, done: Sequence[int], torn: bool = False) -> None:
        """Begin a generation at a round, with `rows` positions in use."""
        words, (round_, *counts) = self.words, at
        words[TORN] = torn
        self._done[round_ % 2] = done
        words[ROWS], words[COUNTS] = rows, _words(counts)
        words[OPENED] = words[CLOSED] = round_

    def undo(self) -> bool:
        """Undo the open round. Return False if no round is open, or if no copies are kept."""
        words = self.words
        if not self.is_open or not self._kept:
            return False
        mark, before = int(words[MARK]), int(words[ROWS_BEFORE])
        at = self._kept["at"][:mark]
        for name, array in self._arrays.items():
            array[at] = self._kept[name][:mark]
            # Set the new rows to zeros, as if they had never been made.
            array[before : int(words[ROWS])] = 0
        words[ROWS], words[COUNTS] = before, words[COUNTS_BEFORE]
        words[WHOLE] = 0
        # Set OPENED last. If this process is killed earlier, another one can repeat all the steps above.
        words[OPENED] = words[CLOSED]
        return True

    # ---- reading

    @property
    def torn(self) -> bool:
        """True if no whole round can be restored."""
        return bool(self.words[TORN]) or (self.is_open and not self._kept)

    def _available(self, round_: int, before: bool) -> RowsRound:
        return RowsRound(round_, *self.words[COUNTS_BEFORE if before else COUNTS])

    def pushes_in(self, round_: int) -> list[int]:
        """Return the number of each worker's pushes in a round that can be restored."""
        return [int(count) for count in self._done[round_ % 2]]

    @property
    def workers(self) -> int:
        """The number of workers whose pushes the journal counts."""
        return int(self._done.shape[1])

    def changed(self) -> Positions:
        """Return the positions that the last round has changed, including positions of dropped rows.

        Call this only if the journal keeps copies.
        """
        words = self.words
        fresh = np.arange(int(words[ROWS_BEFORE]), int(words[ROWS]))
        return np.concatenate([self._kept["at"][: int(words[MARK])], fresh])

    def read(self, at: Positions) -> dict[str, Array]:
        """Return the rows at these positions, from all arrays by name."""
        return {name: array[at] for name, array in self._arrays.items()}

    def pieces(self, round_: int) -> Iterable[dict[str, Array]]:
        """Yield the rows of a round piece by piece. Each piece has all arrays by name.

        If `round_` is newer than the last complete round, yield the rows of the last complete round.
        """
        words, at = self.words, np.zeros(0, np.int64)
        rows = int(words[ROWS])
        if self.is_open or round_ < words[CLOSED]:
            rows, at = int(words[ROWS_BEFORE]), self._kept["at"][: int(words[MARK])] if self._kept else at
        for start in range(0, rows, self.rows_at_once):
            stop = min(start + self.rows_at_once, rows)
            part = {name: array[start:stop].copy() for name, array in self._arrays.items()}
            some = np.flatnonzero((at >= start) & (at < stop))
            for name, array in part.items():
                array[at[some] - start] = self._kept[name][some] if len(some) else array[:0]
            lie = part["touched"] != FREE
            yield {name: array[lie] for name, array in part.items()}


def _words(counts: Sequence[int]) -> memoryview:
    return memoryview(np.array(counts, np.uint64))  # type: ignore[arg-type]


def kept_arrays(arrays: Arrays) -> Arrays:
    """Return the arrays of undo copies for a table with these arrays. Each entry is for one changed position."""
    return {"at": (np.dtype(np.int64), ()), **arrays}

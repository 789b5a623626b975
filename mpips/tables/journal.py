"""The undo copy of a table's rows: one whole round can be restored whenever their server is killed.

The idea and the order of writing are those of `store.recovery.undo`. What differs: a round changes rows at any
positions, and may make and drop rows. So the copies have their positions, the mark counts them, and the number of
positions given out before the round is kept: rows behind it are new, and vanish when the round is undone. The copies
lie in the server's sparse file, and are as large as the table, but take memory only where they are written.
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
WORDS = 16
# Words of the journal, besides those of `UndoWords`:
# ROWS: number of positions given out.
# ROWS_BEFORE: ROWS at the round before.
# TORN: rows are being put by a load or a recovery; no round is whole.
# HERE: for processes that read in place: the table's rows are still the ones of this journal.
# REFUSALS: for the same: number of rounds refused.
ROWS, ROWS_BEFORE, TORN, HERE, REFUSALS = range(4, 9)
# counts at the last round and at the one before, in the order of `RowsRound`
COUNTS, COUNTS_BEFORE = slice(9, 12), slice(12, 15)
# prefix of the names of copies
KEPT = "kept "
# size of the pieces in which rows are read
PIECE_BYTES = 4 << 20


class RowsRound(NamedTuple):
    """A round that can be restored, with the table's counts at that time: updates, dropped rows, refused gradients."""

    round: int
    updates: int
    dropped: int
    refused: int


class Journal(UndoWords[RowsRound]):
    """The copies of what a round overwrites in the rows of one table, and the words that say which of them count.

    Args:
        arrays: The table's arrays by name.
        words: See ROWS and the others above.
        done: Number of pushes of each worker that are applied, (2, workers): even rounds in row 0, odd rounds in row 1.
        kept: A copy of each array, and "at", the positions they are from. Empty if the round before need not be kept.
    """

    def __init__(self, arrays: Mapping[str, Array], words: Array, done: Array, kept: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self._done = done
        self._kept = kept
        self.words: Any = memoryview(words)  # type: ignore[arg-type]
        # rows that make about PIECE_BYTES
        self.rows_at_once = max(1, PIECE_BYTES // sum(array[:1].nbytes for array in arrays.values()))

    @classmethod
    def attached(
        cls, file: SparseFile, places: Mapping[str, int], arrays: Arrays, capacity: int, workers: int
    ) -> Journal:
        """Open the journal of another process's table by the offsets in its file."""
        kinds = {name: file.view(places[name], (capacity, *shape), dtype) for name, (dtype, shape) in arrays.items()}
        kept = {
            name: file.view(places[KEPT + name], (capacity, *shape), dtype)
            for name, (dtype, shape) in kept_arrays(arrays).items()
        }
        words = file.view(places["words"], (WORDS,), np.uint64)
        return cls(kinds, words, file.view(places["done"], (2, workers), np.uint64), kept)

    # ---- writing a round

    def open(self) -> None:
        """Begin a round. Rows may be changed from here on."""
        words = self.words
        words[WHOLE] = 0
        words[MARK] = 0
        words[ROWS_BEFORE], words[COUNTS_BEFORE] = words[ROWS], words[COUNTS]
        # Last, so that whoever sees an open round finds the mark at 0 and the counts of the round before.
        words[OPENED] = words[CLOSED] + 1

    def keep_old(self, at: Positions) -> None:
        """Copy what lies at these positions. Each of them is about to change for the first time in this round."""
        if not self._kept:
            return
        at = at[at < self.words[ROWS_BEFORE]]
        mark = int(self.words[MARK])
        stop = mark + len(at)
        for name, array in self._arrays.items():
            np.take(array, at, axis=0, out=self._kept[name][mark:stop], mode="clip")
        self._kept["at"][mark:stop] = at
        # Only now: a copy counts once it is complete, and rows change after that.
        self.words[MARK] = stop

    def write(self, at: Positions, arrays: Mapping[str, Array], rows: int) -> None:
        """Write rows, each position for the first time in this round.

        `rows` is the number of positions given out by now.
        """
        self.keep_old(at)
        for name, values in arrays.items():
            self._arrays[name][at] = values
        self.words[ROWS] = rows

    def close(self, counts: Sequence[int], done: Sequence[int]) -> None:
        """Complete the round, with the counts of a `RowsRound`. `done`: the pushes of each worker that are applied."""
        words = self.words
        self._done[words[OPENED] % 2] = done
        words[COUNTS] = _words(counts)
        words[WHOLE] = bool(self._kept)
        # Last: with this store the round is complete.
        words[CLOSED] = words[OPENED]

    def begin(self, rows: int, at: RowsRound, done: Sequence[int], torn: bool = False) -> None:
        """Begin a generation at a round, with `rows` positions given out."""
        words, (round_, *counts) = self.words, at
        words[TORN] = torn
        self._done[round_ % 2] = done
        words[ROWS], words[COUNTS] = rows, _words(counts)
        words[OPENED] = words[CLOSED] = round_

    def undo(self) -> bool:
        """Undo a round that is not complete. Return True if there was one."""
        words = self.words
        if not self.is_open or not self._kept:
            return False
        mark, before = int(words[MARK]), int(words[ROWS_BEFORE])
        at = self._kept["at"][:mark]
        for name, array in self._arrays.items():
            array[at] = self._kept[name][:mark]
            # as if no row had ever been there
            array[before : int(words[ROWS])] = 0
        words[ROWS], words[COUNTS] = before, words[COUNTS_BEFORE]
        words[WHOLE] = 0
        # Last: if this process is killed before, all of the above can be done again.
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
        """The number of workers whose pushes are counted."""
        return int(self._done.shape[1])

    def changed(self) -> Positions:
        """Return the positions that the last round has changed, also those of dropped rows.

        Only for a journal that keeps copies.
        """
        words = self.words
        fresh = np.arange(int(words[ROWS_BEFORE]), int(words[ROWS]))
        return np.concatenate([self._kept["at"][: int(words[MARK])], fresh])

    def read(self, at: Positions) -> dict[str, Array]:
        """Return the rows at these positions, from all arrays by name."""
        return {name: array[at] for name, array in self._arrays.items()}

    def pieces(self, round_: int) -> Iterable[dict[str, Array]]:
        """Yield the rows of a round piece by piece, all arrays by name.

        A round that is newer than the last complete one gives the last complete one.
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
    """Return the arrays that a journal keeps beside those of a table. Each entry is for one changed position."""
    return {"at": (np.dtype(np.int64), ()), **arrays}

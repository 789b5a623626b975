"""The journal of a table's rows: one whole round of them can be had wherever their server is killed.

Rows are changed in place. Before a round changes what lies at a position, it is copied, and the mark moves on; then it
changes. So the round before is what lies there, with the copies up to the mark in their places. Once a round is
complete, both can be had. All lies in the server's sparse file; stores of one process are seen in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.arena import SparseFile
from mpips.tables.places import FREE

Array = NDArray[Any]
Positions = NDArray[np.int64]
Arrays = dict[str, tuple[np.dtype, tuple[int, ...]]]
WORDS = 16
ROWS, CLOSED, OPENED, WHOLE, MARK, ROWS_BEFORE, TORN, HERE, REFUSALS = range(9)
"""How many positions were given out; the last complete round; the one that is being written, else the same; whether the
copies are whole, of the round before the last; how many positions are copied; positions at the round before; whether
rows are being put from outside; for those who read in place, whether this is the table's journal, and how many rounds
were refused."""
COUNTS, COUNTS_BEFORE = slice(9, 12), slice(12, 15)
"""At the last round, and at the one before, what was counted: see `Standing`."""
KEPT = "kept "
"""What the names of copies begin with."""
PIECE_BYTES = 4 << 20
"""Of rows that are read at a time."""

Standing = tuple[int, int, int, int]
"""A round that can be had, and what the table has counted by then: updates, dropped rows, and refused gradients."""


class Journal:
    """Keep what a round changes in the rows of one table. `arrays`: the table's, by name.

    `done`: how many pushes of each worker are applied, in turn for even and odd rounds. `kept`: positions, "at", and a
    copy of each array; nothing where no round before is kept."""

    def __init__(self, arrays: Mapping[str, Array], words: Array, done: Array, kept: Mapping[str, Array]) -> None:
        self._arrays, self._done, self._kept = arrays, done, kept
        self.words: Any = memoryview(words)  # type: ignore[arg-type]
        self.rows_at_once = max(1, PIECE_BYTES // sum(array[:1].nbytes for array in arrays.values()))
        """Rows that are read at a time."""

    @classmethod
    def attached(
        cls, file: SparseFile, places: Mapping[str, int], arrays: Arrays, capacity: int, workers: int
    ) -> Journal:
        """Return the journal of another process's table, by offsets in its file."""
        kinds = {name: file.view(places[name], (capacity, *shape), dtype) for name, (dtype, shape) in arrays.items()}
        kept = {
            name: file.view(places[KEPT + name], (capacity, *shape), dtype)
            for name, (dtype, shape) in kept_arrays(arrays).items()
        }
        words = file.view(places["words"], (WORDS,), np.uint64)
        return cls(kinds, words, file.view(places["done"], (2, workers), np.uint64), kept)

    # ---- a round is written

    def open(self) -> None:
        """Begin a round: what follows changes rows."""
        words = self.words
        words[WHOLE] = 0
        words[MARK] = 0
        words[ROWS_BEFORE], words[COUNTS_BEFORE] = words[ROWS], words[COUNTS]
        words[OPENED] = words[CLOSED] + 1

    def keep_old(self, at: Positions) -> None:
        """Copy what lies at positions that are about to change, each for the first time in this round."""
        if not self._kept:
            return
        at = at[at < self.words[ROWS_BEFORE]]
        mark = int(self.words[MARK])
        stop = mark + len(at)
        for name, array in self._arrays.items():
            np.take(array, at, axis=0, out=self._kept[name][mark:stop], mode="clip")
        self._kept["at"][mark:stop] = at
        self.words[MARK] = stop

    def write(self, at: Positions, arrays: Mapping[str, Array], rows: int) -> None:
        """Let this lie at positions, each for the first time in this round; so many are given out by now."""
        self.keep_old(at)
        for name, values in arrays.items():
            self._arrays[name][at] = values
        self.words[ROWS] = rows

    def close(self, counts: Sequence[int], done: Sequence[int]) -> None:
        """Complete the round. `counts`: as in `Standing`."""
        words = self.words
        self._done[words[OPENED] % 2] = done
        words[COUNTS] = _words(counts)
        words[WHOLE] = bool(self._kept)
        words[CLOSED] = words[OPENED]

    def begin(self, rows: int, standing: Standing, done: Sequence[int], torn: bool = False) -> None:
        """Begin at a round, with so many positions given out."""
        words, (round_, *counts) = self.words, standing
        words[TORN] = torn
        self._done[round_ % 2] = done
        words[ROWS], words[COUNTS] = rows, _words(counts)
        words[OPENED] = words[CLOSED] = round_

    def put_back(self) -> bool:
        """Give up a round that is not complete; return whether there was one."""
        words = self.words
        if words[OPENED] == words[CLOSED] or not self._kept:
            return False
        mark, before = int(words[MARK]), int(words[ROWS_BEFORE])
        at = self._kept["at"][:mark]
        for name, array in self._arrays.items():
            array[at] = self._kept[name][:mark]
            array[before : int(words[ROWS])] = 0  # as where no row has lain
        words[ROWS], words[COUNTS] = before, words[COUNTS_BEFORE]
        words[WHOLE] = 0
        words[OPENED] = words[CLOSED]
        return True

    def go_back(self) -> bool:
        """Go back to the round before the last, which can be had."""
        self.words[CLOSED] -= 1
        return self.put_back()

    # ---- what there is

    @property
    def torn(self) -> bool:
        """Return whether no whole round can be had."""
        words = self.words
        return bool(words[TORN]) or (words[OPENED] != words[CLOSED] and not self._kept)

    def standings(self) -> list[Standing]:
        """Return the rounds that can be had, the newest first."""
        words = self.words
        if words[OPENED] != words[CLOSED]:
            return [(int(words[CLOSED]), *words[COUNTS_BEFORE])]
        before: list[Standing] = [(int(words[CLOSED]) - 1, *words[COUNTS_BEFORE])] if words[WHOLE] else []
        return [(int(words[CLOSED]), *words[COUNTS]), *before]

    def pushes_in(self, round_: int) -> list[int]:
        """Return how many pushes of each worker are in a round that can be had."""
        return [int(count) for count in self._done[round_ % 2]]

    @property
    def workers(self) -> int:
        """Return whose pushes are counted."""
        return int(self._done.shape[1])

    def changed(self) -> Positions:
        """Return the positions that the last round has written, where copies are kept: those of dropped rows, too."""
        words = self.words
        fresh = np.arange(int(words[ROWS_BEFORE]), int(words[ROWS]))
        return np.concatenate([self._kept["at"][: int(words[MARK])], fresh])

    def read(self, at: Positions) -> dict[str, Array]:
        """Return what lies at positions, of all arrays by name."""
        return {name: array[at] for name, array in self._arrays.items()}

    def pieces(self, round_: int) -> Iterable[dict[str, Array]]:
        """Yield the rows at a round that can be had, or the newest before it, piece by piece, of all arrays by name."""
        words, at = self.words, np.zeros(0, np.int64)
        rows = int(words[ROWS])
        if words[OPENED] != words[CLOSED] or round_ < words[CLOSED]:
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
    """Return what a journal keeps beside the arrays of a table: for each position that changes."""
    return {"at": (np.dtype(np.int64), ()), **arrays}

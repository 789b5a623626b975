"""The undo copy of a unit: one whole round of it can be had wherever its server is killed.

Before a block is written its old bytes are copied, then the mark moves on, then the block changes. So while a round is
being written the one before is the copy up to the mark, and the values behind it. Once the round is complete, both can
be had. A round that changes some rows keeps those rows and their numbers. All lies in memory that outlives the process;
stores of one process are seen in their order.
"""

from __future__ import annotations

import array as words_in
from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric import arena
from mpips.store.keys.key import Array

Words = MutableSequence[int] | memoryview
CLOSED, OPENED, WHOLE, MARK, BY_ROWS, STEP, STEP_BEFORE, TORN, PUSHES = range(9)
"""The last complete round; the one that is being written, else the same; whether the copy is whole, of the round before
the last; how many elements (or rows) are copied; whether these are rows; the optimizer's step at the last round and at
the one before, 0 where there is no state, else 1 more; whether values are being overwritten from outside; twice, in
turn (asynchronous): how many pushes of each contributor count with that round."""
SPARSE_ROW = 4
"""Least elements of a row for which numbers of rows are kept: else they take as long to copy as the values."""
ROWS_AT_A_TIME = 4096


Standing = tuple[int, int | None]
"""A round that can be had: its number, and the optimizer's step, None where there is no state."""


class Version(NamedTuple):
    """A unit or a replica at one round: its values, then the optimizer's state."""

    round: int
    step: int | None
    """The optimizer's; None: there is no state yet."""
    arrays: list[Array]
    pushes: Sequence[tuple[int, int]] = ()
    """See `Holding.pushes`."""


class Undo:
    """The memory of one unit. `arrays`: its values and the optimizer's state, all 1-D of one length. `copies`: one of
    each. `rows`: room for numbers of rows, or None. `words`: as above."""

    __slots__ = ("arrays", "copies", "row_elements", "rows", "words")

    def __init__(
        self,
        arrays: Sequence[Array],
        copies: Sequence[Array],
        words: Words,
        rows: NDArray[np.int64] | None,
        row_elements: int,
    ) -> None:
        self.arrays, self.copies, self.words = list(arrays), list(copies), words
        self.rows, self.row_elements = rows, row_elements

    @property
    def torn(self) -> bool:
        """Return whether values were being overwritten from outside."""
        return bool(self.words[TORN])

    @property
    def state(self) -> list[Array]:
        """Memory of the optimizer's state."""
        return self.arrays[1:]

    # ---- a round is written

    def open(self) -> None:
        """Begin a round: what follows changes the unit."""
        words = self.words
        words[WHOLE] = 0
        words[MARK] = 0
        words[BY_ROWS] = 0
        words[STEP_BEFORE] = words[STEP]
        words[OPENED] = words[CLOSED] + 1

    def note_pushes(self, counts: Sequence[int]) -> None:
        """Note how many pushes of each contributor count with the update that is about to be opened."""
        first = PUSHES + (self.words[CLOSED] + 1) % 2 * len(counts)
        self.words[first : first + len(counts)] = words_in.array("L", counts)  # type: ignore[assignment, index]

    def keep_old(self, start: int, stop: int) -> None:
        """Copy elements [start, stop), which are about to be written, and before which all are copied."""
        for array, copy in self._pairs():
            copy[start:stop] = array[start:stop]
        self.words[MARK] = stop

    def keep_old_rows(self, rows: NDArray[np.int64]) -> None:
        """Copy rows, of which each comes once and which alone are about to be written."""
        if self.rows is None or len(rows) > len(self.rows) // 2:
            self.keep_old(0, len(self.arrays[0]))
            return
        self.words[BY_ROWS] = 1
        self.rows[: len(rows)] = rows
        _move(self._pairs(), rows, self.row_elements)
        self.words[MARK] = len(rows)

    def close(self, step: int | None) -> None:
        """Complete the round; `step`: the optimizer's, None where there is no state."""
        words = self.words
        words[STEP] = 0 if step is None else 1 + step
        words[WHOLE] = 1
        words[CLOSED] = words[OPENED]

    def undo(self) -> Standing:
        """Give up a round that is not complete; return what the unit holds then."""
        words = self.words
        if words[OPENED] != words[CLOSED]:
            self._patch(self.arrays)
            words[WHOLE] = 0
            words[MARK] = 0
            words[STEP] = words[STEP_BEFORE]
            words[OPENED] = words[CLOSED]
        return _standing(words[CLOSED], words[STEP])

    def go_back(self) -> None:
        """Go back to the round before the last, which can be had."""
        self.words[CLOSED] -= 1
        self.undo()

    # ---- other changes

    def note_overwrite(self, torn: bool) -> None:
        """Note that values are being overwritten from outside, or (not `torn`) have been: there is no going back."""
        self.words[WHOLE] = 0
        self.words[TORN] = torn

    def note_state(self, step: int | None) -> None:
        """Note another state of the optimizer, from outside; None: there is none, or it is about to change."""
        self.words[WHOLE] = 0
        self.words[STEP] = 0 if step is None else 1 + step

    def begin_at(self, round_: int, step: int | None, torn: bool) -> None:
        """Begin a generation at this round and step."""
        words = self.words
        words[CLOSED] = words[OPENED] = round_
        words[STEP] = 0 if step is None else 1 + step
        words[TORN] = torn

    # ---- what there is

    def standings(self) -> list[Standing]:
        """Return the rounds that can be had, the newest first."""
        words = self.words
        if words[OPENED] != words[CLOSED]:
            return [_standing(words[CLOSED], words[STEP_BEFORE])]
        before = [_standing(words[CLOSED] - 1, words[STEP_BEFORE])] if words[WHOLE] else []
        return [_standing(words[CLOSED], words[STEP]), *before]

    def arrays_at(self, before: bool) -> list[Array]:
        """Return values and state (where there is one) at the newest round that can be had, or at the one before; not
        to be changed."""
        words = self.words
        opened = words[OPENED] != words[CLOSED]
        stated = words[STEP_BEFORE if opened or before else STEP]
        arrays = self.arrays if stated else self.arrays[:1]
        if not (opened or before):
            return arrays
        if not words[BY_ROWS] and words[MARK] == len(self.arrays[0]):
            return self.copies[: len(arrays)]
        made = [array.copy() for array in arrays]
        self._patch(made)
        return made

    def pushes(self, done: Sequence[int]) -> list[int]:
        """Asynchronous: how many pushes of each contributor count; `done`: those of which the server has told."""
        first = PUSHES + self.words[CLOSED] % 2 * len(done)
        counts = list(self.words[first : first + len(done)])
        return counts if any(counts) else list(done)  # no update yet

    # ---- inside

    def _pairs(self) -> list[tuple[Array, Array]]:
        stated = self.words[STEP_BEFORE]
        return list(zip(self.arrays, self.copies)) if stated else [(self.arrays[0], self.copies[0])]

    def _patch(self, arrays: Sequence[Array]) -> None:
        """Put what is copied back into `arrays`."""
        mark = self.words[MARK]
        if self.words[BY_ROWS]:
            assert self.rows is not None
            _move([(copy, array) for array, copy in zip(arrays, self.copies)], self.rows[:mark], self.row_elements)
            return
        for array, copy in zip(arrays, self.copies):
            array[:mark] = copy[:mark]


def words_of(contributors: int) -> int:
    """Return how many words a unit of so many contributors has: whole cache lines."""
    return -(-(PUSHES + 2 * contributors) // 8) * 8


def new(stored: Array, row_elements: int, states: Sequence[np.dtype], words: Words) -> Undo:
    """Return an undo copy of a unit with these values, at round 0. It has memory for a state of these dtypes, but no
    state yet; `words` are zeros."""
    count = stored.size // row_elements if row_elements >= SPARSE_ROW else 0
    rows = arena.empty(count, np.int64) if count else None
    first = Undo([stored], [arena.empty(stored.shape, stored.dtype)], words, rows, row_elements)
    return with_state(first, states)


def with_state(undo: Undo, states: Sequence[np.dtype]) -> Undo:
    """Return the same unit with new memory for an optimizer's state of these dtypes, which does not hold any yet."""
    undo.note_state(None)
    values = undo.arrays[0]
    state, copies = ([arena.empty(values.shape, dtype) for dtype in states] for _ in range(2))
    return Undo([values, *state], [undo.copies[0], *copies], undo.words, undo.rows, undo.row_elements)


def _standing(round_: int, step: int) -> Standing:
    return round_, step - 1 if step else None


def _move(pairs: Sequence[tuple[Array, Array]], rows: NDArray[np.int64], row_elements: int) -> None:
    """Copy rows of each first array to the second."""
    for source, target in pairs:
        theirs, mine = source.reshape(-1, row_elements), target.reshape(-1, row_elements)
        for at in range(0, len(rows), ROWS_AT_A_TIME):
            some = rows[at : at + ROWS_AT_A_TIME]
            mine[some] = theirs[some]

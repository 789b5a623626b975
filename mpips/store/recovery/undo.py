"""Undo copies: memory from which a complete round can be restored, at whatever moment the server is killed.

A server writes a round in pieces:

1. It opens the round: the word OPENED becomes CLOSED + 1.
2. For each piece it copies the old bytes, then advances the word MARK, and only then changes the piece.
3. It closes the round: CLOSED becomes OPENED.

So a complete round can be restored at any moment. While a round is open, the previous round consists of the copies up
to MARK, and of the original elements after MARK, which have not changed yet. Once the round is closed, both this round
and the previous one can be restored, until the next round is opened. To undo a closed round, decrease CLOSED by 1: the
round then counts as open.

All of this is in memory that outlives the process. A process that reads the memory later sees all writes in their
order, because a single process has made them.

`UndoWords` is the part that is common to all undo copies. `Undo` is the undo copy of a unit. Its pieces are blocks,
from first to last, so MARK is a number of elements. In a round that changes only some rows, `Undo` copies these rows
and their numbers instead. A service may have undo copies of another form.
"""

from __future__ import annotations

import array as words_in
from collections.abc import MutableSequence, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric import arena
from mpips.store.keys.key import Array

Words = MutableSequence[int] | memoryview
# Words of every undo copy:
# CLOSED: the last complete round.
# OPENED: the round that is being written; equal to CLOSED if no round is open.
# WHOLE: 1 if the copies are complete, so that the round before CLOSED can be restored.
# MARK: number of elements or rows whose old content has been copied.
CLOSED, OPENED, WHOLE, MARK = range(4)
# Further words of a unit's undo copy:
# BY_ROWS: 1 if only single rows are copied.
# STEP: 1 + the optimizer's step at the last round; 0 if there is no state.
# STEP_BEFORE: 1 + the optimizer's step at the round before; 0 if there was no state.
# TORN: 1 while something other than a push overwrites values.
# PUSHES: the first of the words that count each contributor's pushes (asynchronous stores only). There are two sets of
# these words: one for even rounds and one for odd rounds.
BY_ROWS, STEP, STEP_BEFORE, TORN, PUSHES = range(4, 9)
# Row numbers are kept only for rows of at least this many elements. For shorter rows, copying the numbers takes as long
# as copying the values.
SPARSE_ROW = 4
ROWS_AT_A_TIME = 4096


class AvailableRound(NamedTuple):
    """A round that can be restored, and the optimizer's step at this round; None if there is no state yet."""

    round: int
    step: int | None


# the record of a round that can be restored
Available = TypeVar("Available")


class Version(NamedTuple):
    """A unit or a replica at one round.

    Attributes:
        step: The optimizer's step; None if there is no state yet.
        arrays: The values, then the optimizer's state.
        pushes: See `UnitCopy.pushes`.
    """

    round: int
    step: int | None
    arrays: list[Array]
    pushes: Sequence[tuple[int, int]] = ()


class UndoWords(Generic[Available]):
    """Base class of undo copies: finds out from their words which rounds can be restored."""

    __slots__ = ("words",)

    words: Words

    def _available(self, round_: int, before: bool) -> Available:
        """Return the record of the round that was opened last, or if `before`, of the round before it."""
        raise NotImplementedError

    def undo(self) -> bool:
        """Undo a round that is not complete. Return True if there was such a round."""
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        """True if a round is being written."""
        return bool(self.words[OPENED] != self.words[CLOSED])

    def available_rounds(self) -> list[Available]:
        """Return the rounds that can be restored, newest first."""
        last = int(self.words[CLOSED])
        if self.is_open:
            return [self._available(last, True)]
        before = [self._available(last - 1, True)] if self.words[WHOLE] else []
        return [self._available(last, False), *before]

    def go_back(self) -> None:
        """Undo the last complete round. The round before it must be restorable."""
        self.words[CLOSED] -= 1
        self.undo()


class Undo(UndoWords[AvailableRound]):
    """The memory of one unit, with its undo copy.

    Args:
        arrays: The unit's values and the arrays of the optimizer's state; all 1-D and of the same length.
        copies: For each array, the memory for copies of its old elements.
        words: The words from CLOSED to PUSHES (see above).
        rows: Room for row numbers, or None if row numbers are not kept.
        row_elements: Number of elements of a row.
    """

    __slots__ = ("arrays", "copies", "row_elements", "rows")

    def __init__(
        self,
        arrays: Sequence[Array],
        copies: Sequence[Array],
        words: Words,
        rows: NDArray[np.int64] | None,
        row_elements: int,
    ) -> None:
        self.arrays = list(arrays)
        self.copies = list(copies)
        self.words = words
        self.rows = rows
        self.row_elements = row_elements

    @property
    def torn(self) -> bool:
        """True if something other than a push was overwriting the values, and has not finished."""
        return bool(self.words[TORN])

    @property
    def state(self) -> list[Array]:
        """Memory for the optimizer's state."""
        return self.arrays[1:]

    # ---- writing a round

    def open(self) -> None:
        """Open a round. From now on the unit may be changed."""
        words = self.words
        words[WHOLE] = 0
        words[MARK] = 0
        words[BY_ROWS] = 0
        words[STEP_BEFORE] = words[STEP]
        # Write this word last: a process that sees an open round must also see MARK at 0 and the step of the previous
        # round.
        words[OPENED] = words[CLOSED] + 1

    def note_pushes(self, counts: Sequence[int]) -> None:
        """Note for each contributor the number of its pushes that the unit contains after the coming update."""
        first = PUSHES + (self.words[CLOSED] + 1) % 2 * len(counts)
        self.words[first : first + len(counts)] = words_in.array("L", counts)  # type: ignore[assignment, index]

    def keep_old(self, start: int, stop: int) -> None:
        """Copy elements [start, stop), which are about to be written. Elements before `start` must have been copied."""
        for array, copy in self._pairs():
            copy[start:stop] = array[start:stop]
        self.words[MARK] = stop

    def keep_old_rows(self, rows: NDArray[np.int64]) -> None:
        """Copy rows that are about to be written. No row occurs twice, and nothing else may change in this round."""
        # If row numbers are not kept, or if many rows change, copy everything.
        if self.rows is None or len(rows) > len(self.rows) // 2:
            self.keep_old(0, len(self.arrays[0]))
            return
        self.words[BY_ROWS] = 1
        self.rows[: len(rows)] = rows
        _move(self._pairs(), rows, self.row_elements)
        self.words[MARK] = len(rows)

    def close(self, step: int | None) -> None:
        """Close the round. `step` is the optimizer's step, or None if there is no state."""
        words = self.words
        words[STEP] = 0 if step is None else 1 + step
        words[WHOLE] = 1
        # Write this word last, because it makes the round complete.
        words[CLOSED] = words[OPENED]

    def undo(self) -> bool:
        """Undo a round that is not complete. Return True if there was such a round."""
        words = self.words
        if not self.is_open:
            return False
        self._patch(self.arrays)
        words[WHOLE] = 0
        words[MARK] = 0
        words[STEP] = words[STEP_BEFORE]
        # Write this word last. If this process is killed earlier, another process can repeat all of the above.
        words[OPENED] = words[CLOSED]
        return True

    # ---- other changes

    def note_overwrite(self, torn: bool) -> None:
        """Note that something other than a push is about to replace values (`torn`), or has finished (not `torn`).

        After that the round before can no longer be restored.
        """
        self.words[WHOLE] = 0
        self.words[TORN] = torn

    def note_state(self, step: int | None) -> None:
        """Note that the optimizer's state was replaced. If `step` is None, there is no state, or it is about to change.

        After that the round before can no longer be restored.
        """
        self.words[WHOLE] = 0
        self.words[STEP] = 0 if step is None else 1 + step

    def begin_at(self, round_: int, step: int | None, torn: bool) -> None:
        """Begin a generation at this round and step."""
        words = self.words
        words[CLOSED] = words[OPENED] = round_
        words[STEP] = 0 if step is None else 1 + step
        words[TORN] = torn

    # ---- reading

    def _available(self, round_: int, before: bool) -> AvailableRound:
        step = self.words[STEP_BEFORE if before else STEP]
        return AvailableRound(round_, step - 1 if step else None)

    def arrays_at(self, before: bool) -> list[Array]:
        """Return the values, and the optimizer's state if there is any, at the newest restorable round.

        If `before` is True, return those of the round before that. The caller must not change the arrays.
        """
        words = self.words
        before |= self.is_open
        arrays = self.arrays if words[STEP_BEFORE if before else STEP] else self.arrays[:1]
        if not before:
            return arrays
        # All elements are copied, so the copies alone are the previous round.
        if not words[BY_ROWS] and words[MARK] == len(self.arrays[0]):
            return self.copies[: len(arrays)]
        made = [array.copy() for array in arrays]
        self._patch(made)
        return made

    def pushes(self, done: Sequence[int]) -> list[int]:
        """Return the number of each contributor's pushes that are in the unit. Only for asynchronous stores.

        `done`: the numbers that the server has announced to workers.
        """
        first = PUSHES + self.words[CLOSED] % 2 * len(done)
        counts = list(self.words[first : first + len(done)])
        # Before the first update the words hold no counts.
        return counts if any(counts) else list(done)

    # ---- inside

    def _pairs(self) -> list[tuple[Array, Array]]:
        stated = self.words[STEP_BEFORE]
        return list(zip(self.arrays, self.copies)) if stated else [(self.arrays[0], self.copies[0])]

    def _patch(self, arrays: Sequence[Array]) -> None:
        """Put the copied elements or rows back into `arrays`."""
        mark = self.words[MARK]
        if self.words[BY_ROWS]:
            assert self.rows is not None
            _move([(copy, array) for array, copy in zip(arrays, self.copies)], self.rows[:mark], self.row_elements)
            return
        for array, copy in zip(arrays, self.copies):
            array[:mark] = copy[:mark]


def words_of(contributors: int) -> int:
    """Return the number of words for a unit with this many contributors, in whole cache lines."""
    return -(-(PUSHES + 2 * contributors) // 8) * 8


def new(stored: Array, row_elements: int, states: Sequence[np.dtype], words: Words) -> Undo:
    """Make an undo copy of a unit with these values, at round 0.

    The undo copy has memory for an optimizer's state of these dtypes, but no state yet. All `words` must be 0.
    """
    count = stored.size // row_elements if row_elements >= SPARSE_ROW else 0
    rows = arena.empty(count, np.int64) if count else None
    first = Undo([stored], [arena.empty(stored.shape, stored.dtype)], words, rows, row_elements)
    return with_state(first, states)


def with_state(undo: Undo, states: Sequence[np.dtype]) -> Undo:
    """Return a unit's undo copy with new, empty memory for an optimizer's state of these dtypes."""
    undo.note_state(None)
    values = undo.arrays[0]
    state, copies = ([arena.empty(values.shape, dtype) for dtype in states] for _ in range(2))
    return Undo([values, *state], [undo.copies[0], *copies], undo.words, undo.rows, undo.row_elements)


def _move(pairs: Sequence[tuple[Array, Array]], rows: NDArray[np.int64], row_elements: int) -> None:
    """Copy rows from the first array of each pair to the second."""
    for source, target in pairs:
        old, new = source.reshape(-1, row_elements), target.reshape(-1, row_elements)
        for at in range(0, len(rows), ROWS_AT_A_TIME):
            some = rows[at : at + ROWS_AT_A_TIME]
            new[some] = old[some]

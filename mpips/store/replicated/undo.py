"""The last but one round of a replica, kept so that all keys can be put back to one round after a death. No I/O.

An optimizer updates in place, so value and state are copied before. Without an optimizer the array that was the value
before still holds it, until the next sum goes there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Copy(NamedTuple):
    """A replica after some round: its value, the optimizer's state, and how often it has updated."""

    round: int
    step: int
    value: Array
    state: list[Array] | None

    @property
    def arrays(self) -> list[Array]:
        """All arrays."""
        return [self.value, *(self.state or ())]


class Undo:
    """What a replica was before its last round; `before` is None where that is not known."""

    __slots__ = ("_allocate", "_room", "before")

    def __init__(self, allocate: Callable[[int, np.dtype], Array]) -> None:
        self._allocate = allocate
        self.before: Copy | None = None
        self._room: list[Array] = []

    def copy(self, now: Copy) -> None:
        """The replica is about to be updated in place."""
        self.before = None
        room = self._room if _alike(self._room, now.arrays) else None
        if room is None:
            room = self._room = [self._allocate(array.size, array.dtype) for array in now.arrays]
        for kept, array in zip(room, now.arrays):
            kept[...] = array
        self.before = Copy(now.round, now.step, room[0], None if now.state is None else room[1:])

    def instead_of(self, now: Copy | None) -> None:
        """The replica becomes another copy, whose arrays are not these: what it was is kept; None where it is torn."""
        if now is not None:
            self.before, self._room = now, now.arrays

    def overwritten(self, array: Array) -> None:
        """The array is about to be written."""
        if self.before is not None and self.before.value is array:
            self.before = None

    def forget(self) -> None:
        """The replica was changed otherwise than by a round."""
        self.before = None


def _alike(one: Sequence[Array], other: Sequence[Array]) -> bool:
    return [(array.size, array.dtype) for array in one] == [(array.size, array.dtype) for array in other]

"""Values and states of units as they were at one moment, while updates go on: copied before a unit is next written to.

Nothing is copied when a snapshot is taken. A unit that is about to be written to is copied first, whole; while the
server has nothing else to do, it copies the others. So it needs memory for a copy of what is frozen, until that is
dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpips.store.server.unit import Frozen, Unit
from mpips.store.transport.frames import Bytes, Snapshotted


class Snapshots:
    """The snapshots of one server, by number."""

    def __init__(self) -> None:
        self._frozen: dict[int, dict[int, tuple[Unit, Frozen]]] = {}
        self._due: list[Unit] = []
        """Units that may be copied while there is time."""

    def take(self, number: int, units: Iterable[Unit]) -> Snapshotted:
        """Freeze these units, of which none is being written to."""
        taken = self._frozen[number] = {}
        for unit in units:
            frozen = Frozen(unit)
            unit.frozen.append(frozen)
            taken[unit.number] = unit, frozen
            self._due.append(unit)
        every = [frozen for _, frozen in taken.values()]
        return Snapshotted([(it.round, it.step, [array.dtype.name for array in it.arrays[1:]]) for it in every])

    def read(self, number: int, unit: int, slot: int, start: int, stop: int) -> Bytes:
        """Elements [start, stop) of a frozen unit's values (slot -1), or of array `slot` of its state."""
        array = self._frozen[number][unit][1].arrays[1 + slot][start:stop]
        return Bytes(array.tobytes())

    def copy_next(self) -> None:
        """Copy one unit; call it when there is nothing else to do."""
        if self._due:
            self._due.pop().thaw()

    def drop(self, number: int) -> None:
        """What is frozen under this number may go; it may have gone already."""
        for unit, frozen in self._frozen.pop(number, {}).values():
            unit.frozen = [other for other in unit.frozen if other is not frozen]

    def clear(self) -> None:
        """Drop all."""
        for number in list(self._frozen):
            self.drop(number)

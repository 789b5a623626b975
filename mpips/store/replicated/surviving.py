"""A replica of a store that survives deaths: it can be put back to the round before its last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.optimizers import Optimizer
from mpips.store.keys.key import Key
from mpips.store.keys.rows import RowSparse
from mpips.store.recovery.undo import ReplicaUndo, Version
from mpips.store.replicated.replica import Replica

Array = NDArray[Any]


class SurvivingReplica(Replica):
    """A replica that also keeps what it was before its last round."""

    __slots__ = ("undo",)

    def __init__(
        self, key: Key, value: Array, optimizer: Optimizer | None, allocate: Callable[[int, np.dtype], Array]
    ) -> None:
        """As of a replica."""
        super().__init__(key, value, optimizer, allocate)
        self.undo = ReplicaUndo(allocate)

    def room(self) -> Array:
        """Return memory for the next sum; what the replica was is not kept there any more."""
        room = super().room()
        self.undo.overwritten(room)
        return room

    def take_rows(self, total: RowSparse) -> None:
        """Keep what it was, unless the rows take another array's place."""
        if self.optimizer is not None:
            self.undo.copy(self.now())
        super().take_rows(total)

    def versions(self) -> list[Version]:
        """Also what it was before."""
        return super().versions() + ([] if self.undo.before is None else [self.undo.before])

    def become_version(self, version: Version) -> None:
        """Be as it was before, or as another worker's is; what it holds is kept instead. `updating` ends."""
        now = None if self.updating else self.now()
        value, *state = version.arrays
        if value is self._arrays[1 - self._turn]:
            self._turn, self.undo.before = 1 - self._turn, now
        else:
            self._arrays[self._turn] = value
            self.undo.instead_of(now)
        self.key.round, self.updating = version.round, False
        self.step, self.state = (0, None) if version.step is None else (version.step, state)

    def changed(self) -> None:
        """There is no way back from that."""
        self.undo.forget()

    def _replace(self) -> None:
        """The old value is kept where it is."""
        before = self.now()
        super()._replace()
        self.undo.before = before

    def _update(self, total: Array) -> None:
        """Keep a copy of what it was."""
        self.undo.copy(self.now())
        super()._update(total)

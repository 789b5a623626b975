"""A key of a store without servers, on one worker: its value, its optimizer's state and its round. No communication.

A value has two arrays, which are used in turn. A sum is written into the array that is free, so that nothing is lost if
a round is interrupted. An optimizer, however, updates the value in place.

On one node, a round may leave a long value *spread*: every worker has only its own block of the value, and copies the
other blocks from the other workers' memory when it needs the whole value. The blocks stay valid during the next round,
because no worker can complete the next round before all workers have begun it.

In a store that survives deaths, a `SurvivingReplica` can go back to the round before its last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpips.optimizers.base import Optimizer, initial
from mpips.store.keys.key import Array, Key
from mpips.store.keys.row_sparse import RowSparse, update_rows
from mpips.store.recovery.undo import Version

Arrays = tuple[Array, Array]


class Replica:
    """A worker's copy of a key. All workers have the same bits after the same rounds."""

    __slots__ = (
        "_allocate",
        "_arrays",
        "_others",
        "_spread",
        "_turn",
        "key",
        "optimizer",
        "state",
        "step",
        "updating",
    )

    def __init__(
        self, key: Key, value: Array, optimizer: Optimizer | None, allocate: Callable[[int, np.dtype], Array]
    ) -> None:
        """`value` is 1-D, and is used without a copy. `allocate` allocates memory where collectives are fastest."""
        self.key = key
        self.optimizer = optimizer
        # the optimizer's state; None before the first update
        self.state: list[Array] | None = None
        # number of updates by the optimizer
        self.step = 0
        # True during an update in place. If the update is interrupted, it stays True, which means that the replica is
        # torn.
        self.updating = False
        self._allocate = allocate
        self._arrays: list[Array | None] = [value, None]
        self._turn = 0
        # the other workers' blocks: (start, stop, their two arrays)
        self._others: Sequence[tuple[int, int, Arrays]] = ()
        # True while the value has only this worker's block of the last round
        self._spread = False

    @property
    def value(self) -> Array:
        """The whole value, 1-D. If the value is spread, first copy the other workers' blocks."""
        value = self._arrays[self._turn]
        assert value is not None
        if self._spread:
            for start, stop, arrays in self._others:
                value[start:stop] = arrays[self._turn][start:stop]
            self._spread = False
        return value

    def room(self) -> Array:
        """Return memory for the next sum: 1-D, as long as the key."""
        room = self._arrays[1 - self._turn]
        if room is None:
            room = self._arrays[1 - self._turn] = self._allocate(self.key.size, self.key.dtype)
        return room

    def arrays(self) -> Arrays:
        """Return both arrays, in the same order on all workers."""
        value, room = self.value, self.room()
        return (room, value) if self._turn else (value, room)

    def share(self, others: Sequence[tuple[int, int, Arrays]]) -> None:
        """Give this replica access to the other workers' blocks.

        `others` has (start, stop, both arrays of the worker) for each block.

        From now on sums may be left spread.
        """
        self._others = others

    def block_room(self) -> Array | None:
        """Return memory for this worker's block of the next sum, or None if the next sum cannot be left spread."""
        return self.room() if self._others and self.optimizer is None else None

    # ---- rounds

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """Use this optimizer from now on, with new state and step 0. None: a sum replaces the value."""
        # Reading `value` collects the blocks of the other workers. The optimizer will need the whole value.
        assert self.value.ndim == 1
        self.changed()
        self.optimizer, self.state, self.step = optimizer, None, 0

    def prepare(self) -> None:
        """Create the optimizer's state before anything is sent.

        Raises TypeError if the key's elements are not floats.
        """
        if self.optimizer is not None and self.state is None:
            self.state = initial(self.optimizer, self.value)

    def take_sum(self, total: Array) -> None:
        """Complete a round with its 1-D sum, which updates or replaces the value.

        A sum that is in `room()` is not copied.
        """
        if self.optimizer is not None:
            self._update(total)
        else:
            room = self.room()
            if total is not room:
                room[...] = total
            self._replace()
        self.key.round += 1

    def take_block(self) -> None:
        """Complete a round whose sum is spread: every worker has its own block of the sum in its `block_room()`."""
        self._turn, self._spread = 1 - self._turn, True
        self.key.round += 1

    def take_rows(self, total: RowSparse) -> None:
        """Complete a round with the sum of the rows that all workers pushed.

        An optimizer changes only these rows and their state. Without an optimizer all other rows become zero.
        """
        if self.optimizer is None:
            room = self.room()
            room[...] = 0
            room.reshape(self.key.shape)[total.rows] = total.values
            self._replace()
        else:
            assert self.state is not None
            rows = self.value.reshape(self.key.shape)
            self.updating = True
            update_rows(self.optimizer, rows, total, self.state, self.step + 1)
            self.step += 1
            self.updating = False
        self.key.round += 1

    def swap_arrays(self) -> None:
        """Make the array returned by `room()` the value."""
        self._turn, self._spread = 1 - self._turn, False

    def _replace(self) -> None:
        """Make the sum in `room()` the value, at the end of a round."""
        self.swap_arrays()

    def _update(self, total: Array) -> None:
        assert self.optimizer is not None and self.state is not None
        value = self.value
        self.updating = True
        self.optimizer.update(value, total, self.state, self.step + 1)
        self.step += 1
        self.updating = False

    # ---- versions; a `SurvivingReplica` may also have an older version

    def now(self) -> Version:
        """Return the current version. Its arrays are the replica's own, not copies."""
        step = None if self.state is None else self.step
        return Version(self.key.round, step, [self.value, *(self.state or ())])

    def versions(self) -> list[Version]:
        """Return the complete versions that are available, newest first.

        If the replica is torn, return an empty list.
        """
        return [] if self.updating else [self.now()]

    def changed(self) -> None:
        """Note that something other than a round has changed the content."""

    # ---- content from checkpoints and from other workers

    def put_state(self, step: int, arrays: Sequence[Array]) -> None:
        """Set the optimizer's state from a checkpoint.

        If the saved state does not fit the optimizer, raise ValueError and keep the old state.
        """
        self.changed()
        if not step and not arrays:
            self.state, self.step = None, 0
            return
        if self.optimizer is None:
            raise ValueError(f"key {self.key.name!r} has no optimizer to give a state: call set_optimizer first")
        state = initial(self.optimizer, self.value)
        if [array.size for array in arrays] != [array.size for array in state]:
            raise ValueError(
                f"key {self.key.name!r}: the saved state does not fit {self.optimizer!r}: set the optimizer that it "
                "was saved of"
            )
        for array, saved in zip(state, arrays, strict=True):
            array[...] = saved
        self.state, self.step = state, step

    def become(self, round_: int, step: int, dtypes: Sequence[str] | None, gives: bool) -> list[Array]:
        """Prepare to send this replica, or to receive another worker's. Return the arrays to send, or to receive into.

        A replica that receives is torn until the caller has filled the arrays and cleared `updating`.

        Args:
            round_: The round of the replica that is sent.
            step: The number of updates of that replica.
            dtypes: The dtypes of its optimizer state, or None if it has no state.
            gives: True if this worker sends its replica, False if it receives.
        """
        if gives and self._turn:
            self.room()[...] = self.value
        elif gives:
            assert self.value.ndim == 1
        else:
            self.updating = True
        self._turn, self._spread, self.key.round, self.step = 0, False, round_, step
        if dtypes is None:
            self.state = None
        elif self.state is None or [array.dtype.name for array in self.state] != list(dtypes):
            self.state = [np.empty(self.key.size, np.dtype(name)) for name in dtypes]
        return [self.value, *(self.state or ())]


class SurvivingReplica(Replica):
    """A replica that also keeps the version before its last round.

    With an optimizer, which updates in place, value and state are copied before each round. Without an optimizer, the
    array that held the value before the round still holds it, until the next sum is written into this array. Unlike a
    server's unit, a replica dies with its process, so nothing about an interrupted update has to be recorded for other
    processes.
    """

    __slots__ = ("_before", "_copies")

    def __init__(
        self, key: Key, value: Array, optimizer: Optimizer | None, allocate: Callable[[int, np.dtype], Array]
    ) -> None:
        super().__init__(key, value, optimizer, allocate)
        # the version before the last round, or None if it is not kept
        self._before: Version | None = None
        self._copies: list[Array] = []

    def room(self) -> Array:
        """Return memory for the next sum. A version that is kept in that memory is dropped."""
        room = super().room()
        if self._before is not None and self._before.arrays[0] is room:
            self._before = None
        return room

    def take_rows(self, total: RowSparse) -> None:
        """Complete a round with rows, but first keep a copy of what an optimizer will update in place."""
        if self.optimizer is not None:
            self._copy()
        super().take_rows(total)

    def versions(self) -> list[Version]:
        """Return the complete versions that are available, newest first, including the one before the last round."""
        return super().versions() + ([] if self._before is None else [self._before])

    def become_version(self, version: Version) -> None:
        """Replace the content by `version`, which is the version before the last round, or another worker's version.

        The current content is kept as the previous version.
        """
        now = None if self.updating else self.now()
        value, *state = version.arrays
        if value is self._arrays[1 - self._turn]:
            self._turn, self._before = 1 - self._turn, now
        else:
            self._arrays[self._turn] = value
            if now is not None:
                self._before, self._copies = now, now.arrays
        self.key.round, self.updating = version.round, False
        self.step, self.state = (0, None) if version.step is None else (version.step, state)

    def changed(self) -> None:
        """Drop the version before the last round: the replica cannot go back past this change."""
        self._before = None

    def _replace(self) -> None:
        """Make the sum the value. The old value stays in its array."""
        before = self.now()
        super()._replace()
        self._before = before

    def _update(self, total: Array) -> None:
        self._copy()
        super()._update(total)

    def _copy(self) -> None:
        """Keep a copy of the current content, which is about to be updated in place."""
        now, self._before = self.now(), None
        if [(array.size, array.dtype) for array in self._copies] != [(one.size, one.dtype) for one in now.arrays]:
            self._copies = [self._allocate(array.size, array.dtype) for array in now.arrays]
        for kept, array in zip(self._copies, now.arrays):
            kept[...] = array
        self._before = Version(now.round, now.step, self._copies)

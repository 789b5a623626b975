"""A key of a store without servers, on one worker: its value, the optimizer's state, and after which round. No I/O.

A value has two arrays, used in turn: a sum goes into the one that is free, so that nothing is lost where a round breaks
off. An optimizer updates in place. On a node, a round may leave a long value *spread*: every worker has its own block,
and takes the others' from their memory when it needs the whole. They stay there through the next round, which nobody
can complete before all have come to it.

Where the store survives deaths, `SurvivingReplica` can be put back to the round before its last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpips.optimizers.base import Optimizer, initial
from mpips.store.keys.key import Array, Key
from mpips.store.keys.row_sparse import RowSparse, sum_of, update_rows
from mpips.store.recovery.undo import Version

Arrays = tuple[Array, Array]


class Replica:
    """A key as every worker has it, bit for bit, after the same rounds."""

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
        """`value`: 1-D, kept. `allocate` makes memory where collectives are fastest."""
        self.key, self.optimizer = key, optimizer
        self.state: list[Array] | None = None
        """None before the first update."""
        self.step = 0
        """How often the optimizer has updated it."""
        self.updating = False
        """Whether an update in place is under way: where it has broken off, the replica is torn."""
        self._allocate = allocate
        self._arrays: list[Array | None] = [value, None]
        self._turn = 0
        self._others: Sequence[tuple[int, int, Arrays]] = ()
        self._spread = False

    @property
    def value(self) -> Array:
        """Return what is stored, all of it, 1-D."""
        value = self._arrays[self._turn]
        assert value is not None
        if self._spread:
            for start, stop, arrays in self._others:
                value[start:stop] = arrays[self._turn][start:stop]
            self._spread = False
        return value

    def room(self) -> Array:
        """Memory for the next sum: 1-D, as long as the key."""
        room = self._arrays[1 - self._turn]
        if room is None:
            room = self._arrays[1 - self._turn] = self._allocate(self.key.size, self.key.dtype)
        return room

    def arrays(self) -> Arrays:
        """Both arrays."""
        value, room = self.value, self.room()
        return (room, value) if self._turn else (value, room)

    def share(self, others: Sequence[tuple[int, int, Arrays]]) -> None:
        """The other workers' blocks [start, stop), and their arrays, which are in this process's reach: sums may leave
        the value spread from now on."""
        self._others = others

    def block_room(self) -> Array | None:
        """Return where a collective is to put this worker's block of the next sum, if that is all that `take_block`
        needs."""
        return self.room() if self._others and self.optimizer is None else None

    # ---- rounds

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """Update the whole value by it from now on; its state begins anew."""
        assert self.value.ndim == 1
        self.changed()
        self.optimizer, self.state, self.step = optimizer, None, 0

    def prepare(self) -> None:
        """Make the optimizer's state, before anything has been sent: TypeError where it does not do for the key."""
        if self.optimizer is not None and self.state is None:
            self.state = initial(self.optimizer, self.value)

    def take_sum(self, total: Array) -> None:
        """A round is complete: the sum, 1-D, updates the value or becomes it. One in `room` is taken without a copy."""
        if self.optimizer is not None:
            self._update(total)
        else:
            room = self.room()
            if total is not room:
                room[...] = total
            self._replace()
        self.key.round += 1

    def take_block(self) -> None:
        """A round is complete, and every worker's block of the sum is in its `block_room`."""
        self._turn, self._spread = 1 - self._turn, True
        self.key.round += 1

    def take_rows(self, parts: Sequence[RowSparse]) -> None:
        """Apply row-sparse pushes of all workers: the optimizer leaves other rows, and their state, as they are."""
        if self.optimizer is None:
            room, total = self.room(), sum_of(parts)
            room[...] = 0
            room.reshape(self.key.shape)[total.rows] = total.values
            self._replace()
        else:
            assert self.state is not None
            rows = self.value.reshape(self.key.shape)
            self.updating = True
            update_rows(self.optimizer, rows, parts, self.state, self.step + 1)
            self.step += 1
            self.updating = False
        self.key.round += 1

    def swap_arrays(self) -> None:
        """Make the content of `room` the value."""
        self._turn, self._spread = 1 - self._turn, False

    def _replace(self) -> None:
        """A round is complete, and its sum in `room` becomes the value."""
        self.swap_arrays()

    def _update(self, total: Array) -> None:
        assert self.optimizer is not None and self.state is not None
        value = self.value
        self.updating = True
        self.optimizer.update(value, total, self.state, self.step + 1)
        self.step += 1
        self.updating = False

    # ---- rounds that it stands at; `SurvivingReplica` may stand at others again

    def now(self) -> Version:
        """Return what it holds."""
        step = None if self.state is None else self.step
        return Version(self.key.round, step, [self.value, *(self.state or ())])

    def versions(self) -> list[Version]:
        """Return what it can be had as, whole; the newest first."""
        return [] if self.updating else [self.now()]

    def changed(self) -> None:
        """It is changed otherwise than by a round."""

    # ---- what comes from elsewhere

    def put_state(self, step: int, arrays: Sequence[Array]) -> None:
        """The state of a checkpoint; ValueError where it does not fit the optimizer, nothing has changed then."""
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
        """Make room for the replica of a worker after so many rounds and updates, which `gives` it: the arrays that
        are to travel. Until they have come it is torn."""
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
    """A replica that also keeps what it was before its last round.

    It dies with its process, so it needs no marks. An optimizer updates in place, so value and state are copied before.
    Without an optimizer the array that was the value before still holds it, until the next sum goes there.
    """

    __slots__ = ("_before", "_copies")

    def __init__(
        self, key: Key, value: Array, optimizer: Optimizer | None, allocate: Callable[[int, np.dtype], Array]
    ) -> None:
        """As of a replica."""
        super().__init__(key, value, optimizer, allocate)
        self._before: Version | None = None
        """None where it is not known."""
        self._copies: list[Array] = []

    def room(self) -> Array:
        """Return memory for the next sum; what the replica was is not kept there any more."""
        room = super().room()
        if self._before is not None and self._before.arrays[0] is room:
            self._before = None
        return room

    def take_rows(self, parts: Sequence[RowSparse]) -> None:
        """Keep what it was, unless the rows take another array's place."""
        if self.optimizer is not None:
            self._copy()
        super().take_rows(parts)

    def versions(self) -> list[Version]:
        """Also what it was before."""
        return super().versions() + ([] if self._before is None else [self._before])

    def become_version(self, version: Version) -> None:
        """Be as it was before, or as another worker's is; what it holds is kept instead. `updating` ends."""
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
        """Forget what it was: there is no way back."""
        self._before = None

    def _replace(self) -> None:
        """The old value is kept where it is."""
        before = self.now()
        super()._replace()
        self._before = before

    def _update(self, total: Array) -> None:
        """Keep a copy of what it was."""
        self._copy()
        super()._update(total)

    def _copy(self) -> None:
        """Keep a copy, as it is about to be updated in place."""
        now, self._before = self.now(), None
        if [(array.size, array.dtype) for array in self._copies] != [(one.size, one.dtype) for one in now.arrays]:
            self._copies = [self._allocate(array.size, array.dtype) for array in now.arrays]
        for kept, array in zip(self._copies, now.arrays):
            kept[...] = array
        self._before = Version(now.round, now.step, self._copies)

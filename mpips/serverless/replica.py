"""What one worker keeps of one key: its value, the optimizer's state, and after which round. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.keys.key import Key
from mpips.keys.row_sparse import RowSparse, update_rows
from mpips.optimizers import Optimizer, initial

Array = NDArray[Any]


class Replica:
    """A key as every worker has it, bit for bit, after the same rounds."""

    __slots__ = ("_allocate", "_spare", "key", "optimizer", "state", "step", "updating", "value")

    def __init__(
        self, key: Key, value: Array, optimizer: Optimizer | None, allocate: Callable[[int, np.dtype], Array]
    ) -> None:
        """`value`: 1-D, kept. `allocate` makes memory where collectives are fastest."""
        self.key, self.value, self.optimizer = key, value, optimizer
        self.state: list[Array] | None = None
        """None before the first update."""
        self.step = 0
        """How often the optimizer has updated it."""
        self.updating = False
        """Whether a change of value or state is under way: where it has broken off, the replica is torn."""
        self._allocate = allocate
        self._spare: Array | None = None

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """Update by it from now on; its state begins anew."""
        self.optimizer, self.state, self.step = optimizer, None, 0

    def room(self) -> Array:
        """Memory for the next sum, where the caller has none: 1-D, as long as the key."""
        if self._spare is None:
            self._spare = self._allocate(self.key.size, self.key.dtype)
        return self._spare

    def prepare(self) -> None:
        """Make the optimizer's state, before anything has been sent: TypeError where it does not do for the key."""
        if self.optimizer is not None and self.state is None:
            self.state = initial(self.optimizer, self.value)

    def take(self, total: Array) -> None:
        """A round is complete: the sum, 1-D, updates the value or becomes it. One in `room` is taken without a copy."""
        if self.optimizer is not None:
            self._update(total)
        elif total is self._spare:
            self.value, self._spare = total, self.value
        else:
            self.updating = True
            self.value[...] = total
            self.updating = False
        self.key.round += 1

    def take_rows(self, total: RowSparse) -> None:
        """The same with the sum of row-sparse pushes: the optimizer leaves other rows, and their state, as they are."""
        self.updating = True
        if self.optimizer is None:
            self.value[...] = 0
            self.value.reshape(self.key.shape)[total.rows] = total.values
        else:
            assert self.state is not None
            rows = self.value.reshape(self.key.shape)
            update_rows(self.optimizer, rows, total, self.state, self.step + 1)
            self.step += 1
        self.updating = False
        self.key.round += 1

    def _update(self, total: Array) -> None:
        assert self.optimizer is not None and self.state is not None
        self.updating = True
        self.optimizer.update(self.value, total, self.state, self.step + 1)
        self.step += 1
        self.updating = False

    def put_state(self, step: int, arrays: Sequence[Array]) -> None:
        """The state of a checkpoint; ValueError where it does not fit the optimizer, nothing has changed then."""
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

    def become(self, round_: int, step: int, dtypes: Sequence[str] | None) -> list[Array]:
        """Make room for another worker's replica after so many rounds and updates: the arrays that it is to fill."""
        self.updating = True
        self.key.round, self.step = round_, step
        if dtypes is None:
            self.state = None
        elif self.state is None or [array.dtype.name for array in self.state] != list(dtypes):
            self.state = [np.empty(self.key.size, np.dtype(name)) for name in dtypes]
        return [self.value, *(self.state or ())]

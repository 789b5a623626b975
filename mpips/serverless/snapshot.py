"""What a store without servers held after one round, for a checkpoint that is written while training goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from mpips.keys.key import Key, Name
from mpips.runtime.tasks import Task, nothing
from mpips.serverless.replica import Replica
from mpips.worker.backend import Frozen

Array = NDArray[Any]


class Snapshot:
    """Copies of values and states, made at once. Without replicas it is empty."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self.records: dict[Name, Frozen] = {}
        self._arrays: dict[Name, list[Array]] = {}
        for replica in replicas:
            name, state = replica.key.name, replica.state or []
            self._arrays[name] = [replica.value.copy(), *(array.copy() for array in state)]
            dtypes = tuple(array.dtype.name for array in state)
            self.records[name] = Frozen(replica.key.round, replica.step, dtypes)

    def read(self, key: Key, slot: int, start: int, stop: int) -> Task[Array]:
        """Elements [start, stop) of the values (slot -1) or of an array of state: a view, good until `release`."""
        yield from ()
        return self._arrays[key.name][slot + 1][start:stop]

    def release(self) -> Task[None]:
        """Give the copies back."""
        self._arrays.clear()
        return nothing()

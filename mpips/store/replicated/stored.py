"""What keys of a store without servers have beside their values, and copies that go to files while training goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

from mpips.store.keys.key import Key, Name
from mpips.store.replicated.replica import Replica
from mpips.store.replicated.replicas import Replicas
from mpips.store.replicated.settings import Settings
from mpips.store.roles import Layout
from mpips.store.runtime.tasks import Task, nothing
from mpips.store.worker.backend import Frozen, States

Array = NDArray[Any]


class Stored:
    """See `worker.backend.Stored`. Every worker has all of it."""

    def __init__(self, layout: Layout, replicas: Replicas, settings: Settings) -> None:
        self._layout, self._replicas, self._settings = layout, replicas, settings

    def states(self, keys: Sequence[Key]) -> Task[States]:
        """Of each key the optimizer's steps and its state, not copied."""
        yield from ()
        return self._replicas.states(keys)

    def put_states(self, keys: Sequence[Key], states: States) -> Task[None]:
        """The same on every worker."""
        self._replicas.put_states(keys, states)
        yield from ()

    def residuals(self, keys: Sequence[Key]) -> Task[Array | None]:
        """What compression has kept back of this worker's pushes."""
        yield from ()
        return self._settings.kept(keys)

    def put_residuals(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Give it back."""
        self._settings.keep(keys, values)
        yield from ()

    def snapshot(self, keys: Sequence[Key], alone: bool = False) -> Task[Snapshot]:
        """What is stored now, on rank 0, which later rounds do not change; elsewhere nothing."""
        yield from ()
        return Snapshot(self._replicas.of(keys) if self._layout.rank == 0 else ())


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

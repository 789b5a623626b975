"""All keys of a store without servers, on one worker: made, replaced, given up, and made alike again by all workers."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from collectives.fabric import arena
from mpips.store.keys.key import Key, Name, Rounds, label
from mpips.store.recovery.undo import Copy
from mpips.store.replicated import sparse
from mpips.store.replicated.fast import Sums
from mpips.store.replicated.reconcile import Having, ReplicaSource, settings_from, sources, standing
from mpips.store.replicated.replica import Replica
from mpips.store.replicated.settings import Settings
from mpips.store.replicated.surviving import SurvivingReplica
from mpips.store.runtime.tasks import Task
from mpips.store.worker.backend import States

Array = NDArray[Any]


class Replicas:
    """This worker's replicas, `by_name`. `sums`: those of the present generation. `survives`: whether a worker may
    die."""

    def __init__(self, settings: Settings, sums: Sums, survives: bool) -> None:
        self._settings, self.sums, self._survives = settings, sums, survives
        self.by_name: dict[Name, Replica] = {}

    def of(self, keys: Sequence[Key]) -> list[Replica]:
        """Those of these keys."""
        return [self.by_name[key.name] for key in keys]

    def make(self, keys: Sequence[Key], values: Sequence[Array], direct: bool) -> Task[None]:
        """Make keys, with rank 0's values. Collective; `direct`: it may block."""
        made = []
        for key, value in zip(keys, values, strict=True):
            stored = self._allocate(key.size, key.dtype)
            stored[...] = value.reshape(-1)
            made.append(self._replica(key, stored))
        yield from self.sums.broadcast([replica.value for replica in made], 0, _label("init", keys), direct)
        if self.sums.one_node and not self._survives:  # a block that lies in a worker's memory alone dies with it
            yield from self._share([replica for replica in made if sparse.long(replica.key)], direct)
        self.by_name.update((replica.key.name, replica) for replica in made)

    def _replica(self, key: Key, value: Array) -> Replica:
        kind = SurvivingReplica if self._survives else Replica
        return kind(key, value, self._settings.groups.of(key.name), self._allocate)

    def _share(self, replicas: Sequence[Replica], direct: bool) -> Task[None]:
        """Tell the other workers where long values lie."""
        if replicas:
            mine = sparse.regions(replicas)
            table = np.empty((self.sums.size, *mine.shape), np.int64)
            text = _label("init", [replica.key for replica in replicas])
            yield from self.sums.gather(mine.reshape(-1), table.reshape(-1), text, direct)
            sparse.share(replicas, table, self.sums.rank)

    def _allocate(self, size: int, dtype: np.dtype) -> Array:
        """Memory for a key, where collectives are fastest."""
        return arena.empty(size, dtype) if self.sums.one_node else np.empty(size, dtype)

    def put(self, keys: Sequence[Key], values: Sequence[Array], direct: bool) -> Task[None]:
        """Replace what is stored by rank 0's values; rounds stay. Collective."""
        replicas = self.of(keys)
        rooms = [replica.room() for replica in replicas]
        for room, value in zip(rooms, values, strict=True):
            room[...] = value.reshape(-1)
        yield from self.sums.broadcast(rooms, 0, _label("put", keys), direct)
        for replica in replicas:
            replica.turn()
            replica.changed()
            replica.updating = False

    def forget(self, keys: Sequence[Key]) -> None:
        """Give up keys."""
        for key in keys:
            self.by_name.pop(key.name, None)
            key.fast = None
        self._settings.forget([key.name for key in keys])

    # ---- settings and states

    def take_settings(self, begin: bool, names: Sequence[Name] | None) -> None:
        """Every key has the optimizer that settings say now; those of `names` (None: all) `begin` their states anew."""
        for name, replica in self.by_name.items():
            optimizer = self._settings.groups.of(name)
            if begin and (names is None or name in names):
                replica.set_optimizer(optimizer)
            else:
                replica.optimizer = optimizer

    def states(self, keys: Sequence[Key]) -> States:
        """Of each key the optimizer's steps and its state, not copied."""
        return {replica.key.name: (replica.step, list(replica.state or ())) for replica in self.of(keys)}

    def put_states(self, keys: Sequence[Key], states: States) -> None:
        """The same on every worker."""
        for replica in self.of(keys):
            replica.put_state(*states[replica.key.name])

    # ---- the next generation

    def keep(self, known: Container[Name]) -> None:
        """Forget all other keys."""
        self.forget([replica.key for name, replica in self.by_name.items() if name not in known])

    def reconcile(self, exchange: Callable[[bytes], list[bytes]], fresh: bool) -> Rounds:
        """Have what the other workers have, settings, values and states. `exchange` gives every worker's bytes.
        `fresh`: this one has just begun. Collective, blocking."""
        keys = [] if fresh else [*map(standing, self.by_name.values())]
        mine = Having(self._settings.changes, self._settings.encode(), keys, fresh)
        told = exchange(msgspec.msgpack.encode(mine))
        having = [msgspec.msgpack.decode(each, type=Having) for each in told]
        best = having[settings_from(having)]
        if fresh or best.changes != mine.changes:
            self._settings.take(best.settings, best.changes)
        found, rounds = sources(having)
        self.forget([replica.key for name, replica in self.by_name.items() if name not in found])
        for name, source in found.items():
            self._take_over(name, source)
        return rounds

    def _take_over(self, name: Name, source: ReplicaSource) -> None:
        there, stand = source.standing, source.stand
        if name not in self.by_name:
            key = Key(name, there.shape, np.dtype(there.dtype))
            self.by_name[name] = self._replica(key, self._allocate(key.size, key.dtype))
            self.by_name[name].updating = True
        replica = self.by_name[name]
        replica.optimizer = self._settings.groups.of(name)
        if self._survives:
            self._stand(replica, source)
        elif not source.everybody:
            for array in replica.become(stand.round, stand.step, stand.state, source.rank == self.sums.rank):
                self.sums.give(array, source.rank, label("recover", [name]))
            replica.updating = False

    def _stand(self, replica: Replica, source: ReplicaSource) -> None:
        """The same where what is there must stay until all is: others may die meanwhile, and it is begun again."""
        stand, holds, key = source.stand, self.sums.rank in source.holders, replica.key
        copy = next((copy for copy in replica.copies() if holds and copy.round == stand.round), None)
        if copy is None:
            state = None if stand.state is None else [self._allocate(key.size, np.dtype(d)) for d in stand.state]
            copy = Copy(stand.round, stand.step, self._allocate(key.size, key.dtype), state)
        if not source.everybody:
            for array in copy.arrays:
                self.sums.give(array, source.rank, label("recover", [key.name]))
        if replica.updating or copy.value is not replica.value:
            assert isinstance(replica, SurvivingReplica)
            replica.become_copy(copy)


def _label(what: str, keys: Sequence[Key]) -> str:
    return label(what, [key.name for key in keys])

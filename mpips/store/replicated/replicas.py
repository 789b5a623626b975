"""All keys of a store without servers, on one worker: made, replaced, given up, and made alike again by all workers."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.fabric import arena
from collectives.fabric.tasks import Task
from mpips.store.keys.key import Key, Name, label
from mpips.store.recovery.plan import Holding, Inventory, KeyCard, RecoveryPlan, ReplicaPlan, Shelf, dtype_names
from mpips.store.recovery.undo import Version
from mpips.store.replicated import sparse
from mpips.store.replicated.fast import Sums
from mpips.store.replicated.replica import Replica, SurvivingReplica
from mpips.store.replicated.settings import Settings
from mpips.store.worker.interface import States

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
        """Write optimizer states of keys, the same on every worker."""
        for replica in self.of(keys):
            replica.put_state(*states[replica.key.name])

    # ---- the next generation

    def keep(self, known: Container[Name]) -> None:
        """Forget all other keys."""
        self.forget([replica.key for name, replica in self.by_name.items() if name not in known])

    def inventory(self, rank: int, fresh: bool) -> Inventory:
        """Return what this worker has of each key. `fresh`: it has just begun, and has nothing."""
        if fresh:
            return Inventory()
        keys = [KeyCard.of(replica.key) for replica in self.by_name.values()]
        units = [_holding(replica) for replica in self.by_name.values()]
        return Inventory([Shelf(rank, True, self._settings.encode(), units, self._settings.changes)], keys=keys)

    def take_over(self, plan: RecoveryPlan) -> None:
        """Have what the plan says: settings, values and states. Collective, blocking."""
        best = plan.best_settings
        if best is not None and (best.changes != self._settings.changes or plan.said[self.sums.rank].keys is None):
            self._settings.take(best.settings, best.changes)
        self.forget([replica.key for name, replica in self.by_name.items() if name not in plan.replicas])
        for key in plan.keys:
            self._take_over(key, plan.replicas[key.name])

    def _take_over(self, key: Key, plan: ReplicaPlan) -> None:
        if key.name not in self.by_name:
            self.by_name[key.name] = self._replica(key, self._allocate(key.size, key.dtype))
            self.by_name[key.name].updating = True
        replica = self.by_name[key.name]
        replica.optimizer = self._settings.groups.of(key.name)
        if self._survives:
            self._stand(replica, plan)
        elif not plan.everybody:
            states = None if plan.step is None else plan.states
            for array in replica.become(plan.round, plan.step or 0, states, plan.root == self.sums.rank):
                self.sums.give(array, plan.root, label("recover", [key.name]))
            replica.updating = False

    def _stand(self, replica: Replica, plan: ReplicaPlan) -> None:
        """Take a key over where what is there must stay until all is: others may die meanwhile, and it is begun
        again."""
        key = replica.key
        there = (replica.versions() or [replica.now()]) if self.sums.rank in plan.holders else []
        version = next((one for one in there if one.round == plan.round), None)
        if version is None:
            dtypes = [key.dtype, *(np.dtype(name) for name in plan.states)]
            version = Version(plan.round, plan.step, [self._allocate(key.size, dtype) for dtype in dtypes])
        if not plan.everybody:
            for array in version.arrays:
                self.sums.give(array, plan.root, label("recover", [key.name]))
        if replica.updating or version.arrays[0] is not replica.value:
            assert isinstance(replica, SurvivingReplica)
            replica.become_version(version)


def _holding(replica: Replica) -> Holding:
    """Return what there is of a replica; of a torn one what it holds."""
    whole = replica.versions()
    there = whole or [replica.now()]
    states = next((dtype_names(one.arrays[1:]) for one in there if one.step is not None), [])
    standings = [(one.round, one.step) for one in there]
    return Holding(replica.key.name, 0, replica.key.size, standings, not whole, states)


def _label(what: str, keys: Sequence[Key]) -> str:
    return label(what, [key.name for key in keys])

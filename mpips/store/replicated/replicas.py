"""All keys of a store without servers, on one worker, with their optimizers and compression.

All workers create, replace and remove keys together. After a failure, recovery makes their replicas equal again.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import Region
from mpips.collectives.fabric.tasks import Task
from mpips.collectives.schedule.model import cut
from mpips.compression.compressors import Compressor, Residuals
from mpips.optimizers.base import Optimizer
from mpips.optimizers.equation import prepare
from mpips.optimizers.schedules import Groups
from mpips.store.keys.key import Array, Key, Name, label
from mpips.store.recovery.plan import (
    Inventory,
    KeyCard,
    OwnerInventory,
    RecoveryPlan,
    ReplicaPlan,
    UnitCopy,
    decode_settings,
    dtype_names,
    encode_settings,
)
from mpips.store.recovery.undo import AvailableRound, Version
from mpips.store.replicated.fast import Sums
from mpips.store.replicated.replica import Replica, SurvivingReplica
from mpips.store.worker.interface import States

# After a sum over a list of keys, each worker of a node may keep only its own block of a value (`replica` calls this
# spread). This is done only for values longer than LEAST_BYTES: copying a shorter value as a whole is as fast.
LEAST_BYTES = 64 << 10
WORDS = 2 * len(Region._fields)


class ReplicaSettings:
    """Optimizers and compression. They are the same on every worker.

    All workers make the same changes together, after comparing their arguments. `changes` is the number of changes.
    """

    def __init__(self, rank: int = 0) -> None:
        self.changes = 0
        self._rank = rank
        self.groups = Groups()
        # what compression has left out of this worker's pushes so far; None if pushes are not compressed
        self.residuals: Residuals | None = None

    def optimizer_of(self, key: Key) -> Optimizer | None:
        """Return the optimizer of a key, or None if it has no optimizer.

        Also load the compiled loop of the key's updates, if it is expected to save more time than loading takes.
        Loading may block for a second or two.
        """
        optimizer = self.groups.of(key.name)
        prepare(optimizer, key.dtype, elements=key.size)
        return optimizer

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None) -> None:
        """Use this optimizer for these keys (None: all keys)."""
        self.groups.set(optimizer, keys)
        self.changes += 1

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None) -> None:
        """Change hyperparameters of these keys' optimizers.

        Raises ValueError or TypeError if an optimizer rejects them.
        """
        self.groups.update(numbers, keys)
        self.changes += 1

    def set_compression(self, compressor: Compressor) -> None:
        """Compress pushes from now on. Residuals begin at zero."""
        self.residuals = Residuals(compressor, self._rank)
        self.changes += 1

    def compressing(self, key: Key) -> Residuals | None:
        """Return the residuals if pushes of this key are compressed, else None."""
        return self.residuals if key.floats else None

    def payload(self, key: Key, flat: Array) -> Array:
        """Return the values that a push adds: `flat`, or with compression, `flat` after encoding and decoding."""
        residuals = self.compressing(key)
        return flat if residuals is None else residuals.decoded(key.name, flat)

    def residuals_of(self, keys: Sequence[Key]) -> Array | None:
        """Return the residuals of this worker's pushes: float64, one key after another.

        Return None without compression.
        """
        if self.residuals is None:
            return None
        kept = [(key.size, self.residuals.get(key.name)) for key in keys]
        return np.concatenate([np.zeros(size) if each is None else each.astype(np.float64) for size, each in kept])

    def put_residuals(self, keys: Sequence[Key], values: Sequence[Array]) -> None:
        """Set the residuals of this worker's pushes, from one array for each key."""
        for key, value in zip(keys, values, strict=True):
            if (residuals := self.compressing(key)) is not None:
                residuals.put(key.name, value, key.dtype)

    def forget(self, names: Sequence[Name]) -> None:
        """Drop the settings and residuals of keys that were removed."""
        self.groups.forget(names)
        if self.residuals is not None:
            self.residuals.forget(names)

    def encode(self) -> bytes:
        """Encode optimizers and compressor. Residuals are not included, since each worker has its own."""
        return encode_settings(self.groups, None if self.residuals is None else self.residuals.compressor)

    def take_over(self, data: bytes, changes: int) -> None:
        """Take over the settings that another worker has encoded after `changes` changes.

        Residuals stay if the compressor is the same.
        """
        self.groups, compressor = decode_settings(data)
        if self.residuals is None or self.residuals.compressor != compressor:
            self.residuals = None if compressor is None else Residuals(compressor, self._rank)
        self.changes = changes


class Replicas:
    """This worker's replicas of all keys.

    Args:
        sums: The collectives of the current generation.
        survives: True if the store continues after the death of a worker.
    """

    def __init__(self, settings: ReplicaSettings, sums: Sums, survives: bool) -> None:
        self._settings = settings
        self.sums = sums
        self._survives = survives
        self.by_name: dict[Name, Replica] = {}

    def of(self, keys: Sequence[Key]) -> list[Replica]:
        """Return the replicas of these keys."""
        return [self.by_name[key.name] for key in keys]

    def make(self, keys: Sequence[Key], values: Sequence[Array], direct: bool) -> Task[None]:
        """A task that creates keys with rank 0's values. Collective; may block if `direct`."""
        made = []
        for key, value in zip(keys, values, strict=True):
            stored = self._allocate(key.size, key.dtype)
            stored[...] = value.reshape(-1)
            made.append(self._replica(key, stored))
        yield from self.sums.broadcast([replica.value for replica in made], 0, _label("init", keys), direct)
        # A block that only one worker has would be lost with this worker. So a store that survives deaths shares no
        # blocks.
        if self.sums.one_node and not self._survives:
            yield from self._share([replica for replica in made if replica.key.nbytes > LEAST_BYTES], direct)
        self.by_name.update((replica.key.name, replica) for replica in made)

    def _replica(self, key: Key, value: Array) -> Replica:
        kind = SurvivingReplica if self._survives else Replica
        return kind(key, value, self._settings.optimizer_of(key), self._allocate)

    def _share(self, replicas: Sequence[Replica], direct: bool) -> Task[None]:
        """Exchange the addresses of long values, so that the workers can read each other's blocks."""
        if replicas:
            mine = _regions(replicas)
            regions = np.empty((self.sums.size, *mine.shape), np.int64)
            text = _label("init", [replica.key for replica in replicas])
            yield from self.sums.gather(mine.reshape(-1), regions.reshape(-1), text, direct)
            _share_blocks(replicas, regions, self.sums.rank)

    def _allocate(self, size: int, dtype: np.dtype) -> Array:
        """Allocate memory for a key. On one node it is shared memory, in which collectives are fastest."""
        return arena.empty(size, dtype) if self.sums.one_node else np.empty(size, dtype)

    def store_values(self, keys: Sequence[Key], values: Sequence[Array], direct: bool) -> Task[None]:
        """A task that replaces values with rank 0's, on all workers. Rounds do not change. Collective."""
        replicas = self.of(keys)
        rooms = [replica.room() for replica in replicas]
        for room, value in zip(rooms, values, strict=True):
            room[...] = value.reshape(-1)
        yield from self.sums.broadcast(rooms, 0, _label("put", keys), direct)
        for replica in replicas:
            replica.swap_arrays()
            replica.changed()
            replica.updating = False

    def forget(self, keys: Sequence[Key]) -> None:
        """Remove keys."""
        for key in keys:
            self.by_name.pop(key.name, None)
            key.fast = None
        self._settings.forget([key.name for key in keys])

    # ---- settings and states

    def take_settings(self, begin: bool, names: Sequence[Name] | None) -> None:
        """Give every key the optimizer of the settings.

        With `begin`, reset the states of `names` (None: of all keys).
        """
        for name, replica in self.by_name.items():
            optimizer = self._settings.optimizer_of(replica.key)
            if begin and (names is None or name in names):
                replica.set_optimizer(optimizer)
            else:
                replica.optimizer = optimizer

    def states(self, keys: Sequence[Key]) -> States:
        """Return each key's optimizer step and state. The arrays are not copied."""
        return {replica.key.name: (replica.step, list(replica.state or ())) for replica in self.of(keys)}

    def put_states(self, keys: Sequence[Key], states: States) -> None:
        """Set the optimizer states of keys. All workers pass the same states."""
        for replica in self.of(keys):
            replica.put_state(*states[replica.key.name])

    # ---- the next generation

    def keep_only(self, known: Container[Name]) -> None:
        """Remove all keys that are not in `known`."""
        self.forget([replica.key for name, replica in self.by_name.items() if name not in known])

    def inventory(self, rank: int, fresh: bool) -> Inventory:
        """Return this worker's inventory for a recovery.

        `fresh` is True if the worker has just joined, and has no keys.
        """
        if fresh:
            return Inventory()
        keys = [KeyCard.of(replica.key) for replica in self.by_name.values()]
        units = [_describe(replica) for replica in self.by_name.values()]
        return Inventory(
            [OwnerInventory(rank, True, self._settings.encode(), units, self._settings.changes)], keys=keys
        )

    def take_over(self, plan: RecoveryPlan) -> None:
        """Change settings, values and states to those of the plan.

        Workers send each other the keys that some of them lack.

        Collective, blocking.
        """
        best = plan.best_settings
        is_new = plan.inventories[self.sums.rank].keys is None
        if best is not None and (is_new or best.changes != self._settings.changes):
            self._settings.take_over(best.settings, best.changes)
        self.forget([replica.key for name, replica in self.by_name.items() if name not in plan.replicas])
        for key in plan.keys:
            self._take_over(key, plan.replicas[key.name])

    def _take_over(self, key: Key, plan: ReplicaPlan) -> None:
        if key.name not in self.by_name:
            self.by_name[key.name] = self._replica(key, self._allocate(key.size, key.dtype))
            self.by_name[key.name].updating = True
        replica = self.by_name[key.name]
        replica.optimizer = self._settings.optimizer_of(key)
        if self._survives:
            self._go_to(replica, plan)
        elif not plan.everybody:
            states = None if plan.step is None else plan.states
            for array in replica.become(plan.round, plan.step or 0, states, plan.root == self.sums.rank):
                self.sums.broadcast_one(array, plan.root, label("recover", [key.name]))
            replica.updating = False

    def _go_to(self, replica: Replica, plan: ReplicaPlan) -> None:
        """Set a key to the version that the plan has chosen, in a store that survives deaths. Collective, blocking.

        The worker keeps its old version until everything has arrived. If another rank dies before that, the recovery
        begins again with the old versions.
        """
        key = replica.key
        versions = (replica.versions() or [replica.now()]) if self.sums.rank in plan.holders else []
        version = next((version for version in versions if version.round == plan.round), None)
        if version is None:
            dtypes = [key.dtype, *(np.dtype(name) for name in plan.states)]
            version = Version(plan.round, plan.step, [self._allocate(key.size, dtype) for dtype in dtypes])
        if not plan.everybody:
            for array in version.arrays:
                self.sums.broadcast_one(array, plan.root, label("recover", [key.name]))
        if replica.updating or version.arrays[0] is not replica.value:
            assert isinstance(replica, SurvivingReplica)
            replica.become_version(version)


def _describe(replica: Replica) -> UnitCopy:
    """Describe the versions of a replica, for an inventory. A torn replica is described by its current content."""
    whole = replica.versions()
    versions = whole or [replica.now()]
    states = next((dtype_names(version.arrays[1:]) for version in versions if version.step is not None), [])
    rounds = [AvailableRound(version.round, version.step) for version in versions]
    return UnitCopy(replica.key.name, 0, replica.key.size, rounds, not whole, states)


def _label(what: str, keys: Sequence[Key]) -> str:
    return label(what, [key.name for key in keys])


# ---- long values: a sum may leave each worker of a node only its own block


def _regions(replicas: Sequence[Replica]) -> Array:
    """Return the places of this worker's arrays of these keys in shared memory, as integers of shape (keys, WORDS)."""
    found = [[number for array in replica.arrays() for number in arena.region_of(array)] for replica in replicas]
    return np.array(found, np.int64).reshape(len(replicas), WORDS)


def _share_blocks(replicas: Sequence[Replica], regions: Array, rank: int) -> None:
    """Give the replicas of worker `rank` access to the other workers' blocks.

    Args:
        regions: The result of `_regions` of every worker.
    """
    workers = len(regions)
    for number, replica in enumerate(replicas):
        key, others = replica.key, []
        for worker in range(workers):
            if worker != rank:
                places = regions[worker, number].reshape(2, -1).tolist()
                first, second = (arena.attach(Region(*words)).view(key.dtype) for words in places)
                others.append((cut(key.size, workers, worker), cut(key.size, workers, worker + 1), (first, second)))
        replica.share(others)

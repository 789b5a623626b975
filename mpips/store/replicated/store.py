"""The backend of a store without servers, in which every worker keeps the same values, bit for bit."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpips.collectives.fabric.tasks import Task, empty_task
from mpips.collectives.group import OverlapError
from mpips.compression import Compressor
from mpips.optimizers import Groups, Optimizer
from mpips.store.keys.key import Array, Key, Name, label
from mpips.store.keys.row_sparse import RowGather, RowSparse, sum_of
from mpips.store.recovery.plan import Inventory, RecoveryPlan, ServerReady
from mpips.store.recovery.recover import Member
from mpips.store.replicated.fast import Blocks, ReplicaFastPath, ReplicaLists, Sums, blocks_of, take_from
from mpips.store.replicated.replica import Replica
from mpips.store.replicated.replicas import Replicas, ReplicaSettings
from mpips.store.roles import Layout
from mpips.store.runtime.generation import Generation
from mpips.store.worker.interface import Frozen, Recovered, States


class ReplicatedStore(Member[Recovered]):
    """The backend of a store without servers (`worker.interface`).

    All workers make the same calls in the same order, because pushes are collectives. A pull is a copy. The constructor
    is collective over the workers, blocking.
    """

    lists = True
    services = ()
    communicators: tuple[Hashable, ...] = (("communicator", "workers"),)

    def __init__(self, layout: Layout, generation: Generation) -> None:
        super().__init__(layout, generation)
        self.direct = False
        self._settings = ReplicaSettings(layout.rank)
        self._replicas = Replicas(self._settings, self._joined(), layout.survives)
        self._join()

    def _joined(self) -> Sums:
        """Return the collectives of the current generation."""
        comm = self.layout.sums
        assert comm is not None
        return Sums(self.generation.within(comm), comm)

    def _join(self) -> None:
        self._sums = self._replicas.sums
        self._gather = RowGather(self._sums.rank, self._sums.size)
        self._lists = ReplicaLists(self._replicas.by_name, self._sums, self.generation)

    # ---- keys

    def init(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        yield from self._replicas.make(keys, values, self.direct)
        for key in keys:
            key.fast = self.bind(key)

    def bind(self, key: Key) -> ReplicaFastPath | None:
        """Return the fast path of a key, or None if its pushes are compressed."""
        if self._settings.compressing(key) is not None:
            return None
        return ReplicaFastPath(self._replicas.by_name[key.name], self._sums, self.generation)

    @property
    def quick_list(self) -> ReplicaLists | None:
        """The fast path of lists of keys, or None if pushes are compressed."""
        return self._lists if self._settings.residuals is None else None

    def forget(self, keys: Sequence[Key]) -> Task[None]:
        self._replicas.forget(keys)
        yield from ()

    def store_values(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """A task that replaces values with rank 0's, on all workers. Rounds do not change. Collective."""
        yield from self._replicas.store_values(keys, values, self.direct)

    # ---- states of keys (`worker.interface.StateAccess`)

    @property
    def stored(self) -> ReplicatedStore:
        """This object itself, because every worker has all states."""
        return self

    def states(self, keys: Sequence[Key]) -> Task[States]:
        """Return each key's optimizer step and state. The arrays are not copied."""
        yield from ()
        return self._replicas.states(keys)

    def put_states(self, keys: Sequence[Key], states: States) -> Task[None]:
        """Set the optimizer states of keys. All workers pass the same states."""
        self._replicas.put_states(keys, states)
        yield from ()

    def residuals(self, keys: Sequence[Key]) -> Task[Array | None]:
        """Return the residuals of this worker's pushes."""
        yield from ()
        return self._settings.residuals_of(keys)

    def put_residuals(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        self._settings.put_residuals(keys, values)
        yield from ()

    def snapshot(self, keys: Sequence[Key], alone: bool = False) -> Task[CopiedSnapshot]:
        """Return a copy of values and states on rank 0, and an empty snapshot on other ranks."""
        yield from ()
        return CopiedSnapshot(self._replicas.of(keys) if self.layout.rank == 0 else ())

    # ---- pushes and pulls

    @property
    def transfers(self) -> ReplicatedStore:
        return self

    def versions(self, keys: Sequence[Key]) -> Task[list[int]]:
        """Return the rounds of the keys. A round has ended once its push has ended."""
        yield from ()
        return [key.round for key in keys]

    def pull_versions(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[list[int]]:
        yield from self.pull(keys, outs)
        return [key.round for key in keys]

    def listen(self) -> None:
        """Do nothing: there are no servers."""

    def push(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task[None]:
        """Run a round of several keys, in one collective."""
        replicas = self._replicas.of(keys)
        totals = [replica.room() for replica in replicas]
        yield from self._sum(replicas, flats, totals)
        for replica, total in zip(replicas, totals):
            replica.take_sum(total)

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None]:
        for key, out in zip(keys, outs):
            out[...] = self._replicas.by_name[key.name].value
        yield from ()

    def pushpull(self, keys: Sequence[Key], flats: Sequence[Array], outs: Sequence[Array], priority: int) -> Task[None]:
        """Push, then pull. The sums of several keys go directly into `outs`, unless these overlap other arrays."""
        if len(keys) > 1 and self._settings.residuals is None:
            replicas = self._replicas.of(keys)
            blocks = blocks_of(replicas)
            try:
                yield from self._sum(replicas, flats, outs, blocks)
            # Nothing has been sent.
            except OverlapError:
                pass
            else:
                take_from(replicas, outs, blocks)
                return
        yield from self.push(keys, flats, priority)
        yield from self.pull(keys, outs)

    def _sum(
        self, replicas: Sequence[Replica], flats: Sequence[Array], outs: Sequence[Array], blocks: Blocks = None
    ) -> Task[None]:
        for replica in replicas:
            replica.prepare()
        payloads = [self._settings.payload(replica.key, flat) for replica, flat in zip(replicas, flats)]
        text = label("push", [replica.key.name for replica in replicas])
        yield from self._sums.task(payloads, outs, text, self.direct, blocks)

    def push_rows(self, key: Key, rows: RowSparse, priority: int) -> Task[None]:
        """Run a round in which all workers exchange their rows, and each worker sums them.

        With compression, push the whole key instead.
        """
        if self._settings.compressing(key) is not None:
            yield from self.push([key], [rows.to_dense().reshape(-1)], priority)
            return
        replica = self._replicas.by_name[key.name]
        replica.prepare()
        text, direct, every = label("push of rows", [key.name]), self.direct, list[RowSparse]()
        self._sums.begin(text)
        yield from self._gather.gather(rows, lambda x: self._sums.gather(x, None, text, direct), every)
        replica.take_rows(sum_of(every))

    def pull_rows(self, key: Key, out: Array, ids: Array) -> Task[None]:
        """Copy rows of the value into `out` of shape (len(ids), ...)."""
        np.take(self._replicas.by_name[key.name].value.reshape(key.shape), ids, axis=0, out=out)
        yield from ()

    def settle(self, keys: Sequence[Key], meets: bool = False) -> Task[None]:
        """Return at once, because a push has completed its round by the time its task ends."""
        return empty_task()

    def tell_wait(self, names: Sequence[Name]) -> None:
        """Do nothing: `collectives` itself detects workers that make different calls."""

    def sums(self) -> tuple[int, str]:
        return self._sums.begun, self._sums.text

    # ---- settings

    def check_updated(self, keys: Sequence[Key], what: str) -> None:
        """Accept every key. In this store a key needs no optimizer: without an optimizer a sum replaces the value."""

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None) -> Task[None]:
        self._settings.set_optimizer(optimizer, keys)
        self._replicas.take_settings(True, keys)
        yield from ()

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None) -> Task[None]:
        self._settings.update_optimizer(numbers, keys)
        self._replicas.take_settings(False, keys)
        yield from ()

    def set_compression(self, options: dict[str, Any], compressor: Compressor) -> Task[None]:
        self._settings.set_compression(compressor)
        self._bind_all()
        yield from ()

    def _bind_all(self) -> None:
        for replica in self._replicas.by_name.values():
            replica.key.fast = self.bind(replica.key)

    # ---- generations and the end

    def take_inventory(self, known: Container[Name]) -> Inventory:
        """Return what this worker has of each key, and its settings. See `Member`."""
        self._replicas.sums = self._joined()
        self._join()
        self._replicas.keep_only(known)
        return self._replicas.inventory(self.layout.rank, self.layout.fresh)

    def move(self, plan: RecoveryPlan) -> ServerReady:
        """Send the chosen version of each key from a worker that has it to the workers that lack it. See `Member`."""
        self._replicas.take_over(plan)
        return ServerReady()

    def rebuild(self, plan: RecoveryPlan, ready: Sequence[ServerReady]) -> Recovered:
        self._bind_all()
        keys = [replica.key for replica in self._replicas.by_name.values()]
        residuals = self._settings.residuals
        groups = Groups(self._settings.groups.default, self._settings.groups.own)
        return Recovered(plan.rounds, keys, groups, None if residuals is None else residuals.compressor)

    def finish(self) -> None:
        """Do nothing: there are no servers."""


class CopiedSnapshot:
    """Copies of values and states, made in the constructor. Empty if there are no replicas."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self.records: dict[Name, Frozen] = {}
        self._arrays: dict[Name, list[Array]] = {}
        for replica in replicas:
            name, state = replica.key.name, replica.state or []
            self._arrays[name] = [replica.value.copy(), *(array.copy() for array in state)]
            dtypes = tuple(array.dtype.name for array in state)
            self.records[name] = Frozen(replica.key.round, replica.step, dtypes)

    def read(self, key: Key, slot: int, start: int, stop: int) -> Task[Array]:
        """Return elements [start, stop) of the values (slot -1) or of a state array: a view, valid until `release`."""
        yield from ()
        return self._arrays[key.name][slot + 1][start:stop]

    def release(self) -> Task[None]:
        """Free the copies."""
        self._arrays.clear()
        return empty_task()

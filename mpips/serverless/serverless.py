"""The operations of a store without servers; the same values, bit for bit, on every worker."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import collectives
from collectives.api import begin
from collectives.node import arena
from mpips.compression import Compressor
from mpips.keys.key import Key, Name, Rounds
from mpips.keys.row_sparse import RowSparse
from mpips.layout import Layout
from mpips.optimizers import Optimizer
from mpips.runtime.epoch import Epoch
from mpips.runtime.rendezvous import exchange
from mpips.runtime.tasks import Task, nothing
from mpips.serverless import spread
from mpips.serverless.fast import Fast, Lists, blocks_of, take_from
from mpips.serverless.reconcile import Having, Source, settings_from, sources, standing
from mpips.serverless.replica import Replica
from mpips.serverless.settings import Settings
from mpips.serverless.snapshot import Snapshot
from mpips.serverless.sparse import Sparse
from mpips.serverless.sums import Sums, in_steps, label

Array = NDArray[Any]
States = dict[Name, tuple[int, list[Array]]]


class Serverless:
    """A store's backend (`worker.backend`). All workers make the same calls, in the same order: pushes are collectives.
    A pull is a copy. Making it is collective over the workers, blocking."""

    lists = True
    communicators: tuple[Hashable, ...] = (("communicator", "workers"),)

    def __init__(self, layout: Layout, epoch: Epoch) -> None:
        self.layout, self._epoch = layout, epoch
        self.direct = False
        self._settings = Settings()
        self._replicas: dict[Name, Replica] = {}
        self._join()

    def _join(self) -> None:
        """Use the communicator of the present epoch."""
        comm = self.layout.workers
        assert comm is not None
        home = self._epoch.within(comm)
        self._comm, self._sums, self._sparse = comm, Sums(comm), Sparse(comm)
        self._shares = home.size > 1 and home.nodes == 1
        self._lists = Lists(self._replicas, self._sums, self._epoch)

    def collective(self, pushes: bool) -> bool:
        """Pushes are."""
        return pushes

    # ---- keys

    def init(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Make keys, with rank 0's values."""
        made = []
        for key, value in zip(keys, values, strict=True):
            stored = self._allocate(key.size, key.dtype)
            stored[...] = value.reshape(-1)
            yield from self._broadcast(stored, 0, label("init", [key.name]))
            made.append(Replica(key, stored, self._settings.groups.of(key.name), self._allocate))
        yield from self._share([replica for replica in made if self._shares and spread.long(replica.key)])
        self._replicas.update((replica.key.name, replica) for replica in made)
        for key in keys:
            key.fast = self.bind(key)

    def bind(self, key: Key) -> Fast | None:
        """The fast route of a key; None where its pushes are compressed."""
        if self._residuals_of(key) is not None:
            return None
        return Fast(self._replicas[key.name], self._sums, self._epoch)

    @property
    def quick_list(self) -> Lists | None:
        """The fast route of lists of keys that have one of their own."""
        return self._lists if self._settings.residuals is None else None

    def forget(self, keys: Sequence[Key]) -> Task[None]:
        """Give up keys."""
        for key in keys:
            self._replicas.pop(key.name, None)
            key.fast = None
        self._settings.forget([key.name for key in keys])
        yield from ()

    def _share(self, replicas: Sequence[Replica]) -> Task[None]:
        """Tell the other workers where long values lie."""
        if replicas:
            mine = spread.regions(replicas)
            table = np.empty((self._comm.Get_size(), *mine.shape), np.int64)
            text = label("init", [replica.key.name for replica in replicas])
            yield from in_steps(begin("allgather", mine.reshape(-1), self._comm, out=table.reshape(-1), label=text))
            spread.share(replicas, table, self._comm.Get_rank())

    def put(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Replace what is stored by rank 0's values; rounds stay. Collective."""
        for key, value in zip(keys, values, strict=True):
            replica = self._replicas[key.name]
            room = replica.room()
            room[...] = value.reshape(-1)
            yield from self._broadcast(room, 0, label("put", [key.name]))
            replica.turn()
            replica.updating = False

    # ---- pushes and pulls

    def push(self, key: Key, flat: Array, priority: int) -> Task[None]:
        """A round of one key."""
        return self.push_list([key], [flat], priority)

    def pull(self, key: Key, out: Array) -> Task[None]:
        """What is stored."""
        out[...] = self._replicas[key.name].value
        yield from ()

    def pushpull(self, key: Key, flat: Array, out: Array, priority: int) -> Task[None]:
        """Both."""
        return self.pushpull_list([key], [flat], [out], priority)

    def push_list(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task[None]:
        """A round of several keys, in one collective."""
        replicas = [self._replicas[key.name] for key in keys]
        totals = [replica.room() for replica in replicas]
        yield from self._sum(replicas, flats, totals)
        for replica, total in zip(replicas, totals):
            replica.take(total)

    def pull_list(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None]:
        """What is stored."""
        for key, out in zip(keys, outs):
            yield from self.pull(key, out)

    def pushpull_list(
        self, keys: Sequence[Key], flats: Sequence[Array], outs: Sequence[Array], priority: int
    ) -> Task[None]:
        """Both. The sums go into `outs` on their way."""
        replicas = [self._replicas[key.name] for key in keys]
        blocks = blocks_of(replicas)
        yield from self._sum(replicas, flats, outs, blocks)
        take_from(replicas, outs, blocks)

    def _sum(
        self,
        replicas: Sequence[Replica],
        flats: Sequence[Array],
        outs: Sequence[Array],
        blocks: Sequence[Array | None] | None = None,
    ) -> Task[None]:
        for replica in replicas:
            replica.prepare()
        payloads = [self._payload(replica.key, flat) for replica, flat in zip(replicas, flats)]
        text = label("push", [replica.key.name for replica in replicas])
        yield from self._sums.task(payloads, outs, text, self.direct, blocks)

    def _payload(self, key: Key, flat: Array) -> Array:
        """What this worker adds: where pushes are compressed, what the others would decode."""
        residuals = self._residuals_of(key)
        return flat if residuals is None else residuals.decoded(key.name, flat)

    def push_rows(self, key: Key, rows: RowSparse, priority: int) -> Task[None]:
        """A round of which every worker hears of all rows; where pushes are compressed the whole key is pushed."""
        if self._residuals_of(key) is not None:
            yield from self.push(key, rows.to_dense().reshape(-1), priority)
            return
        replica = self._replicas[key.name]
        replica.prepare()
        total = yield from self._sparse.total(key, rows, self.direct)
        replica.take_rows(total)

    def pull_rows(self, key: Key, out: Array, ids: Array) -> Task[None]:
        """Rows of what is stored, into `out` of shape (len(ids), ...)."""
        np.take(self._replicas[key.name].value.reshape(key.shape), ids, axis=0, out=out)
        yield from ()

    def settle(self, keys: Sequence[Key]) -> Task[None]:
        """Pushes have ended when they return."""
        return nothing()

    def waits(self, keys: Sequence[Key]) -> None:
        """`collectives` sees by itself that workers make different calls."""

    # ---- settings

    def check_updated(self, what: str) -> None:
        """Without an optimizer a push replaces the value."""

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None) -> Task[None]:
        """From the next round on; state anew."""
        self._settings.set_optimizer(optimizer, keys)
        for name in self._replicas if keys is None else keys:
            self._replicas[name].set_optimizer(optimizer)
        yield from ()

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None) -> Task[None]:
        """From the next round on; state stays."""
        self._settings.update_optimizer(numbers, keys)
        for replica in self._replicas.values():
            replica.optimizer = self._settings.groups.of(replica.key.name)
        yield from ()

    def set_compression(self, options: dict[str, Any], compressor: Compressor) -> Task[None]:
        """From the next push on."""
        self._settings.set_compression(compressor)
        for replica in self._replicas.values():
            replica.key.fast = self.bind(replica.key)
        yield from ()

    # ---- state that goes to files and other keys

    def states(self, keys: Sequence[Key]) -> Task[States]:
        """Of each key the optimizer's steps and its state, not copied."""
        yield from ()
        replicas = [self._replicas[key.name] for key in keys]
        return {replica.key.name: (replica.step, list(replica.state or ())) for replica in replicas}

    def put_states(self, keys: Sequence[Key], states: States) -> Task[None]:
        """The same on every worker."""
        for key in keys:
            self._replicas[key.name].put_state(*states[key.name])
        yield from ()

    def residuals(self, keys: Sequence[Key]) -> Task[Array | None]:
        """What compression has kept back of this worker's pushes."""
        yield from ()
        residuals = self._settings.residuals
        if residuals is None:
            return None
        kept = [(key.size, residuals.get(key.name)) for key in keys]
        return np.concatenate([np.zeros(size) if each is None else each.astype(np.float64) for size, each in kept])

    def put_residuals(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Give it back."""
        for key, value in zip(keys, values, strict=True):
            if (residuals := self._residuals_of(key)) is not None:
                residuals.put(key.name, value, key.dtype)
        yield from ()

    def snapshot(self, keys: Sequence[Key]) -> Task[Snapshot]:
        """What is stored now, on rank 0, which later rounds do not change; elsewhere nothing."""
        yield from ()
        return Snapshot(self._replicas[key.name] for key in keys if self.layout.rank == 0)

    # ---- epochs and the end

    def recover(self) -> Rounds:
        """After `epoch.renew()`: all workers have the same again; see `reconcile`. Collective, blocking."""
        self._join()
        mine = Having(self._settings.changes, self._settings.encode(), [*map(standing, self._replicas.values())])
        data = exchange(self._epoch, msgspec.msgpack.encode(mine), "recover")
        having = [msgspec.msgpack.decode(each, type=Having) for each in data]
        best = having[settings_from(having)]
        if best.changes != mine.changes:
            self._settings.take(best.settings, best.changes)
        found = sources(having)
        for name, source in found.items():
            self._take_over(self._replicas[name], source)
        for name in self._replicas.keys() - found.keys():
            del self._replicas[name]
        for replica in self._replicas.values():
            replica.key.fast = self.bind(replica.key)
        rounds = Rounds({name: source.standing.round for name, source in found.items()})
        rounds.torn = tuple(name for name, source in found.items() if source.torn)
        return rounds

    def _take_over(self, replica: Replica, source: Source) -> None:
        replica.optimizer = self._settings.groups.of(replica.key.name)
        if source.rank < 0:
            return
        there, gives = source.standing, source.rank == self.layout.rank
        for array in replica.become(there.round, there.step, there.state, gives):
            collectives.broadcast(array, self._comm, source.rank, label=label("recover", [replica.key.name]))
        replica.updating = False

    def finish(self) -> None:
        """There is nobody to say goodbye to."""

    # ---- inside

    def _residuals_of(self, key: Key) -> Any:
        """What compression keeps, where it compresses this key."""
        return self._settings.residuals if key.dtype.kind == "f" else None

    def _allocate(self, size: int, dtype: np.dtype) -> Array:
        """Memory for a key, where collectives are fastest."""
        return arena.empty(size, dtype) if self._shares else np.empty(size, dtype)

    def _broadcast(self, array: Array, root: int, text: str) -> Task[None]:
        if self.direct:
            collectives.broadcast(array, self._comm, root, label=text)
        else:
            yield from in_steps(begin("broadcast", array, self._comm, root=root, label=text))

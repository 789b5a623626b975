"""Set optimizers and compression on servers, read and write their states, and take snapshots for checkpoints.

A *shard* is the part of a key on one server. Servers call it a *unit*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import mpips.collectives as collectives
from mpips import compression
from mpips.collectives.errors import CollectiveError, of_caller
from mpips.collectives.fabric.tasks import Task
from mpips.compression import Compressor, Residuals
from mpips.optimizers import Groups, Optimizer, encode, encode_numbers
from mpips.store.keys.arguments import runs
from mpips.store.keys.key import Array, Key, Name, Shard
from mpips.store.remote.link import ServerLink
from mpips.store.remote.setup import Setup
from mpips.store.remote.transfers import Push
from mpips.store.roles import Layout
from mpips.store.transport import frames
from mpips.store.transport.frames import Change
from mpips.store.worker.interface import Frozen, States


class Changes(NamedTuple):
    """A worker's record of the changes of settings in its store, which a recovery compares between workers."""

    # number of changes that this worker has begun
    begun: int = 0
    # number of changes that this worker has completed
    made: int = 0
    # the encoded request of the last change
    last: bytes = b""


class ServerSettings:
    """The settings that all workers change together: optimizers and compression.

    A change takes effect from the first push after all servers have made it. If the generation ends before all servers
    have made the change, they make it at the beginning of the next generation.
    """

    def __init__(self, layout: Layout, setup: Setup, push: Push) -> None:
        self._setup = setup
        self._push = push
        self._rank = layout.rank
        self._asynchronous = layout.asynchronous
        # True if servers can apply pushes of every key, because the store is synchronous or all keys have an optimizer
        self._all = not self._asynchronous
        # keys that have an optimizer of their own
        self._own: set[Name] = set()
        self.changes = Changes()

    def updates(self, name: Name) -> bool:
        """True if servers can apply pushes of this key."""
        return self._all or name in self._own

    def check_updated(self, keys: Sequence[Key], what: str) -> None:
        """Raise ValueError if servers cannot apply pushes of one of the keys, because it has no optimizer."""
        for key in keys:
            if not self.updates(key.name):
                why = f"key {key.name!r} has no optimizer, and an asynchronous store needs an optimizer"
                raise of_caller(ValueError(f"{what}: {why}; call set_optimizer first"))

    def forget(self, names: Iterable[Name]) -> None:
        """Forget the settings of keys that no longer exist."""
        self._own.difference_update(names)

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None) -> Task[None]:
        return self._change(frames.SetOptimizer(encode(optimizer), _names(keys)), "set_optimizer")

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None) -> Task[None]:
        return self._change(frames.UpdateOptimizer(encode_numbers(numbers), _names(keys)), "update_optimizer")

    def set_compression(self, compressor: Compressor) -> Task[None]:
        return self._change(frames.SetCompression(compression.options(compressor)), "set_gradient_compression")

    def begin(self, changes: Changes, groups: Groups) -> None:
        """Begin a generation.

        Args:
            changes: The changes of settings so far.
            groups: The optimizers that the servers have after these changes.
        """
        self.changes = changes
        self._all = not self._asynchronous or groups.default is not None
        self._own = set(groups.own)

    def _change(self, change: Change, what: str) -> Task[None]:
        before = self.changes
        self.changes = Changes(before.begun + 1, before.made, frames.encode(change))
        try:
            yield from self._setup.at_rank_0(lambda: self._setup.tell_all(change), what)
        except ValueError as error:
            # The servers have refused the change, so nothing has changed.
            if not isinstance(error, CollectiveError):
                self.changes = before
            raise
        self.changes = self.changes._replace(made=self.changes.begun)
        if isinstance(change, frames.SetOptimizer):
            self._all |= change.keys is None
            self._own.update(change.keys or ())
        elif isinstance(change, frames.SetCompression):
            self._push.residuals = Residuals(compression.create(change.options), self._rank)


class RemoteStates:
    """Reads the states of whole keys from all servers, and writes them back."""

    def __init__(self, layout: Layout, link: ServerLink, setup: Setup, push: Push, members: int) -> None:
        self._layout = layout
        self._link = link
        self._setup = setup
        self._push = push
        self._members = members
        self._snapshots = 0

    def states(self, keys: Sequence[Key]) -> Task[States]:
        """Return each key's step and optimizer state on rank 0, and an empty dict on other ranks."""
        if self._layout.rank:
            return {}
        found: dict[int, frames.StatePart] = {}
        asked = ((self._get(shard, found), _nbytes(key, shard)) for key in keys for shard in key.shards)
        yield from self._link.in_window(asked)
        return {key.name: _joined([found[shard.number] for shard in key.shards]) for key in keys}

    def _get(self, shard: Shard, found: dict[int, frames.StatePart]) -> Task[None]:
        found[shard.number] = yield from self._link.request(shard.server, frames.GetState(shard.number))

    def put_states(self, keys: Sequence[Key], states: States) -> Task[None]:
        """Send rank 0's states to the servers, cut into units. Collective.

        Raise ValueError on all workers if the states do not fit the optimizer.
        """
        yield from self._setup.at_rank_0(lambda: self._put_all(keys, states), "load_optimizer_states")

    def _put_all(self, keys: Sequence[Key], states: States) -> Task[bytes]:
        by_server: dict[int, list[tuple[Key, Shard]]] = {}
        for key in keys:
            for shard in key.shards:
                by_server.setdefault(shard.server, []).append((key, shard))
        yield from self._link.in_window(
            (self._put(parts[run], states), sum(_nbytes(*part) for part in parts[run]))
            for parts in by_server.values()
            for run in runs(_nbytes(*part) for part in parts)
        )
        return b""

    def _put(self, parts: Sequence[tuple[Key, Shard]], states: States) -> Task[None]:
        """Send one server the states of some of its units."""
        given = []
        for key, shard in parts:
            step, arrays = states[key.name]
            cut = [array[shard.start : shard.stop] for array in arrays]
            given.append(frames.StatePart(step, [a.dtype.name for a in cut], [a.tobytes() for a in cut]))
        request = frames.PutState([shard.number for _, shard in parts], given)
        yield from self._link.request(parts[0][1].server, request)

    def residuals(self, keys: Sequence[Key]) -> Task[Array | None]:
        """See `worker.interface.StateAccess`. Collective over the client."""
        if self._push.residuals is None:
            return None
        kept = np.zeros(sum(key.size for key in keys))
        base = 0
        for key in keys:
            for shard in key.pushes:
                residual = self._push.residuals.get(shard.number)
                if residual is not None:
                    kept[base + shard.start : base + shard.stop] = residual
            base += key.size
        if self._members > 1:
            assert self._layout.sums is not None
            collectives.allreduce(kept, self._layout.sums, label="residuals of compression")
        return kept
        yield

    def put_residuals(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        assert self._push.residuals is not None
        for key, value in zip(keys, values, strict=True):
            for shard in key.pushes:
                self._push.residuals.put(shard.number, value[shard.start : shard.stop], key.dtype)
        yield from ()

    def snapshot(self, keys: Sequence[Key], alone: bool = False) -> Task[RemoteSnapshot]:
        self._snapshots += 1
        made = RemoteSnapshot(self._link, self._snapshots)
        yield from made.freeze(keys) if alone else self._setup.at_rank_0(lambda: made.freeze(keys), "save")
        return made


class RemoteSnapshot:
    """A snapshot of keys that the servers keep (`worker.interface.Snapshot`)."""

    def __init__(self, link: ServerLink, number: int) -> None:
        self._link = link
        self._number = number
        self._servers: list[int] = []
        self.records: dict[Name, Frozen] = {}

    def freeze(self, keys: Sequence[Key]) -> Task[bytes]:
        """Let the servers make the snapshot. Called only on rank 0."""
        by_server: dict[int, list[int]] = {}
        for key in keys:
            for shard in key.shards:
                by_server.setdefault(shard.server, []).append(shard.number)
        self._servers = list(by_server)
        found: dict[int, tuple[int, int, list[str]]] = {}
        for server, units in by_server.items():
            answer = yield from self._link.request(server, frames.TakeSnapshot(self._number, units))
            found.update(zip(units, answer.units, strict=True))
        for key in keys:
            parts = [found[shard.number] for shard in key.shards]
            dtypes = max((tuple(part[2]) for part in parts), key=len)
            self.records[key.name] = Frozen(max(part[0] for part in parts), max(part[1] for part in parts), dtypes)
        return b""

    def read(self, key: Key, slot: int, start: int, stop: int) -> Task[Array]:
        """Return elements [start, stop) of the values (slot -1) or of a state array."""
        dtype = key.dtype if slot < 0 else frames.dtype_of(self.records[key.name].dtypes[slot])
        out = np.zeros(stop - start, dtype)
        for shard in key.shards:
            first, last = max(start, shard.start), min(stop, shard.stop)
            if first < last:
                request = frames.ReadSnapshot(self._number, shard.number, slot, first - shard.start, last - shard.start)
                answer = yield from self._link.request(shard.server, request)
                out[first - start : last - start] = np.frombuffer(answer.data, dtype)
        return out

    def release(self) -> Task[None]:
        """Let the servers drop the snapshot."""
        for server in self._servers:
            yield from self._link.request(server, frames.DropSnapshot(self._number))


def _names(keys: Sequence[Name] | None) -> list[Name] | None:
    return None if keys is None else list(keys)


def _nbytes(key: Key, shard: Shard) -> int:
    """Estimate the bytes of a unit's optimizer state. The estimate is two arrays, because most optimizers have two."""
    return 2 * (shard.stop - shard.start) * key.dtype.itemsize


def _joined(parts: Sequence[frames.StatePart]) -> tuple[int, list[Array]]:
    """Join the states of a key's units into (step, state arrays) of the whole key."""
    pieces = [
        [np.frombuffer(data, frames.dtype_of(name)) for data, name in zip(part.arrays, part.dtypes)] for part in parts
    ]
    slots = max(len(piece) for piece in pieces)
    return max(part.step for part in parts), [np.concatenate([piece[i] for piece in pieces]) for i in range(slots)]

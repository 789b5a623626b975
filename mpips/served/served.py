"""The operations of a store with servers, on a worker: `worker.backend.Backend` says what each does.

dist_*: every worker pushes and pulls by itself. mpi_*: the members of a client push once (`client`).
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from mpips.compression import Compressor
from mpips.keys.key import Fast, FastList, Key, Name, Rounds
from mpips.keys.row_sparse import RowSparse
from mpips.layout import Layout
from mpips.optimizers import Groups, Optimizer
from mpips.runtime import rendezvous
from mpips.runtime.epoch import Epoch
from mpips.runtime.tasks import Task
from mpips.served.alone import Alone
from mpips.served.client import Client
from mpips.served.cutting import Cutting
from mpips.served.fast import General, by_itself, in_client
from mpips.served.link import Link
from mpips.served.members import Members
from mpips.served.pull import Pull
from mpips.served.push import Push
from mpips.served.setup import Setup
from mpips.served.sparse import Sparse
from mpips.served.states import Settings, Snapshot, Stored
from mpips.transport import frames
from mpips.transport.connect import connect
from mpips.transport.frames import Op
from mpips.transport.line import Line
from mpips.worker.backend import Recovered, States

Array = NDArray[Any]


class Served:
    """One worker of a store with servers. Making it is collective over the workers, blocking.

    `cores_shared`: processes of the store share cores. It holds what it is made of: the link to the servers, this
    worker's pushes and pulls, those of its client, rows, the making of keys, settings and states.
    """

    def __init__(self, layout: Layout, lines: list[Line], epoch: Epoch, cores_shared: bool) -> None:
        self.layout, self._epoch = layout, epoch
        self.direct = False
        self._link = Link(layout, lines, epoch)
        near = [data == b"1" for data in rendezvous.exchange(epoch, b"%d" % self._link.all_local, "create")]
        members = range(*layout.clients[layout.client_number]) if layout.kind.startswith("mpi_") else [layout.rank]
        self.one_node = all(near)
        self._size = len(members)
        self._reads = all(near[worker] for worker in members) and not layout.asynchronous
        """Whether the members of this client read the servers' memory, each by itself."""
        self.communicators: tuple[Hashable, ...] = (("communicator", "client"),) if self._size > 1 else ()
        self._push, self._pull = Push(layout, self._link), Pull(layout, self._link)
        side_by_side = not (cores_shared or layout.asynchronous)
        self._setup = Setup(layout, epoch, self._link, Cutting(layout, self.one_node, side_by_side))
        self._settings = Settings(layout, self._setup, self._push)
        self._stored = Stored(layout, self._link, self._setup, self._push, self._size)
        self._begin()
        epoch.on_end.append(self._quiesce)

    def _begin(self) -> None:
        """What an epoch has of its own."""
        layout, self._members = self.layout, None
        self._route: Alone | Client = Alone(self._push, self._pull, self.one_node, layout.asynchronous)
        if self._size > 1:
            assert layout.client is not None
            names = range(*layout.clients[layout.client_number])
            home = self._epoch.within(layout.client, names)
            self._members = Members(home, layout.client, names.start, self.one_node)
            self._route = Client(layout, self._members, self._push, self._pull, self._reads)
        self._rows = Sparse(layout, self._members, self._route, self._push, self._pull, self._reads)
        self._general = General(self._epoch.flag, self._link, self._push, self._pull)

    def _quiesce(self) -> None:
        if self._members is not None:
            self._members.stop()

    @property
    def quick_list(self) -> FastList | None:
        """See `Backend`: keys of a list go one by one."""
        return None

    # ---- keys

    def init(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """See `Backend`."""
        yield from self._setup.init(keys, values)
        for key in keys:
            key.fast = self.bind(key)

    def forget(self, keys: Sequence[Key]) -> Task[None]:
        """See `Backend`."""
        yield from self._setup.forget(keys)
        self._settings.forget(key.name for key in keys)
        if self._push.residuals is not None:
            self._push.residuals.forget(shard.number for key in keys for shard in key.shards)

    def bind(self, key: Key) -> Fast | None:
        """The fast route of a key, where it has one."""
        if self._push.residuals is not None or not self._settings.updates(key.name) or not self._link.all_local:
            return None
        if self._size > 1:
            return in_client(self._general, key, self.layout, self.push) if self.one_node and self._reads else None
        return by_itself(self._general, key, self.layout)

    def _bind_all(self) -> None:
        for key in self._setup.keys.values():
            key.fast = self.bind(key)

    # ---- pushes and pulls

    def push(self, key: Key, flat: Array, priority: int) -> Task[None]:
        """See `Backend`."""
        return self._link.hearing(self._route.push(key, flat, priority))

    def pull(self, key: Key, out: Array) -> Task[None]:
        """See `Backend`."""
        return self._link.hearing(self._route.pull(key, out))

    def pushpull(self, key: Key, flat: Array, out: Array, priority: int) -> Task[None]:
        """See `Backend`."""
        return self._link.hearing(self._route.pushpull(key, flat, out, priority))

    def push_rows(self, key: Key, rows: RowSparse, priority: int) -> Task[None]:
        """See `Backend`."""
        return self._link.hearing(self._rows.push(key, rows, priority))

    def pull_rows(self, key: Key, out: Array, ids: Array) -> Task[None]:
        """See `Backend`."""
        return self._link.hearing(self._rows.pull(key, out, ids))

    def push_list(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task[None]:
        """See `Backend`."""
        return self._link.hearing(self._route.push_list(keys, flats, priority))

    def pull_list(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None]:
        """See `Backend`."""
        return self._link.hearing(self._route.pull_list(keys, outs))

    def pushpull_list(
        self, keys: Sequence[Key], flats: Sequence[Array], outs: Sequence[Array], priority: int
    ) -> Task[None]:
        """See `Backend`."""
        return self._link.hearing(self._route.pushpull_list(keys, flats, outs, priority))

    def settle(self, keys: Sequence[Key]) -> Task[None]:
        """See `Backend`."""
        return self._link.hearing(self._settle(keys))

    def _settle(self, keys: Sequence[Key]) -> Task[None]:
        if self.layout.asynchronous:
            for server in range(self.layout.num_servers):
                yield from self._link.request(server, frames.Flush())
            return
        for key in keys:
            yield from self._push.read(key.round, key.pushes)

    def waits(self, keys: Sequence[Key]) -> None:
        """This worker's program has waited long for what it has called of these keys: the servers look for circles."""
        if not self.layout.asynchronous:
            for key in keys:
                for shard in key.shards:
                    if not shard.local or shard.words[0] < key.round * shard.blocks:
                        shard.line.post(Op.WAITS, shard.number, key.round)

    # ---- settings and states

    def check_updated(self, keys: Sequence[Key], what: str) -> None:
        """See `Backend`."""
        self._settings.see_updated(keys, what)

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None) -> Task[None]:
        """See `Backend`."""
        yield from self._settings.set_optimizer(optimizer, keys)
        self._bind_all()

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None) -> Task[None]:
        """See `Backend`."""
        return self._settings.update_optimizer(numbers, keys)

    def set_compression(self, options: dict[str, Any], compressor: Compressor) -> Task[None]:
        """See `Backend`."""
        yield from self._settings.set_compression(compressor)
        self._bind_all()

    def states(self, keys: Sequence[Key]) -> Task[States]:
        """See `Backend`."""
        return self._stored.states(keys)

    def put_states(self, keys: Sequence[Key], states: States) -> Task[None]:
        """See `Backend`."""
        return self._stored.put_states(keys, states)

    def residuals(self, keys: Sequence[Key]) -> Task[Array | None]:
        """See `Backend`."""
        return self._stored.residuals(keys)

    def put_residuals(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """See `Backend`."""
        return self._stored.put_residuals(keys, values)

    def put(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """See `Backend`."""
        return self._setup.put(keys, values)

    def snapshot(self, keys: Sequence[Key]) -> Task[Snapshot]:
        """See `Backend`."""
        return self._stored.snapshot(keys)

    # ---- epochs and the end

    def recover(self, known: Container[Name]) -> Recovered:
        """See `Backend`."""
        lines, _ = connect(self.layout, self._epoch)
        self._link.renew(lines)
        self._begin()
        before = set(self._setup.keys)
        state = self._epoch.carry_out(self._setup.recover(known), "recover")
        self._settings.forget(before - state.keys())
        self._epoch.carry_out(self._settings.recover(), "recover")
        self._bind_all()
        rounds = Rounds({name: round_ for name, (round_, _) in state.items()})
        rounds.torn = tuple(name for name, (_, torn) in state.items() if torn)
        groups = Groups(self._settings.groups.default, self._settings.groups.own)
        return Recovered(rounds, list(self._setup.keys.values()), groups, self._settings.compressor)

    def committed(self) -> None:
        """See `Backend`."""

    def open_store(self, request: frames.OpenStore) -> Task[None]:
        """Ask all servers to take part in the making of one more store. All workers ask, and then make it."""
        for server in range(self.layout.num_servers):
            yield from self._link.request(server, request)

    def finish(self) -> None:
        """See `Backend`."""
        self._link.goodbye()

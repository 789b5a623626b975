"""A worker's operations in a store with servers.

In stores of the kinds dist_* every worker pushes and pulls by itself. In the kinds mpi_* a group of workers, called a
client, sums its gradients and pushes the sum (see `client`).
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpips.collectives.fabric.tasks import Task, run_together
from mpips.compression import Compressor, Residuals
from mpips.optimizers import Optimizer
from mpips.store.keys.cutting import Cutting
from mpips.store.keys.key import Array, Fast, FastList, Key, Name
from mpips.store.recovery.memory import LastGeneration, NodeMemory
from mpips.store.recovery.plan import Inventory, KeyCard, RecoveryPlan, ServerReady
from mpips.store.recovery.recover import Member, former_rank
from mpips.store.remote.client import Client, SingleWorker
from mpips.store.remote.fast import SlowPath, by_itself, in_client
from mpips.store.remote.link import ServerLink
from mpips.store.remote.members import Members
from mpips.store.remote.setup import Setup
from mpips.store.remote.states import Changes, RemoteStates, ServerSettings
from mpips.store.remote.transfers import Pull, Push
from mpips.store.roles import Layout
from mpips.store.runtime.errors import in_order
from mpips.store.runtime.generation import Generation
from mpips.store.services import KINDS
from mpips.store.transport import frames
from mpips.store.transport.lines import Line
from mpips.store.worker.interface import Recovered, WorkerService


class WorkerCarryOver(NamedTuple):
    """The keys and settings that a worker carries from one generation into the next one."""

    keys: list[Key]
    residuals: Residuals | None
    changes: Changes
    # name of a service -> its collections, as `WorkerService.describe` encodes them
    services: dict[str, bytes]


class RemoteStore(Member[Recovered]):
    """One worker of a store with servers. Call `begin` or `rebuild` before its other methods.

    Args:
        cores_shared: True if processes of the store share cores.
        memory: The memory of other ranks that this rank kept mapped while it was a spare, or None if it was not a
            spare.
    """

    def __init__(
        self, layout: Layout, generation: Generation, cores_shared: bool, memory: NodeMemory | None = None
    ) -> None:
        super().__init__(layout, generation, memory)
        self._cores_shared = cores_shared
        self._asynchronous = layout.asynchronous
        self.direct = False
        self._link = ServerLink(layout, [])
        self._push = Push(layout, self._link)
        self._pull = Pull(layout, self._link)
        self._setup = Setup(layout, generation, self._link)
        self._settings = ServerSettings(layout, self._setup, self._push)
        self.services: list[WorkerService] = [kind.make_worker(layout, self._link, self._setup) for kind in KINDS]
        self._carry_over: LastGeneration[WorkerCarryOver] = LastGeneration()
        self._members: Members | None = None
        generation.on_end.append(self._quiesce)

    def begin(self) -> None:
        """Begin the store's first generation. Collective over workers and servers, blocking."""
        self._link.renew(self.connect().lines)
        self.memory = self.new_memory
        answers = self.generation.meet(b"%d" % self._link.all_local, "create")
        self._serve([data == b"1" for data in answers])
        side_by_side = not (self._cores_shared or self.layout.asynchronous)
        self._setup.cutting = Cutting(self.layout, self.one_node, side_by_side)

    def _serve(self, near: Sequence[bool]) -> None:
        """Make the objects that belong to a single generation.

        Args:
            near: For each worker, True if all servers are on its node.
        """
        layout, self._members = self.layout, None
        names = range(*layout.clients[layout.client_number]) if layout.kind.startswith("mpi_") else [layout.rank]
        self.one_node = all(near)
        self._size = len(names)
        # True if each member of this client pulls by reading the servers' memory
        self._reads = all(near[worker] for worker in names) and not layout.asynchronous
        self.communicators: tuple[Hashable, ...] = (("communicator", "client"),) if self._size > 1 else ()
        self.transfers: SingleWorker | Client = SingleWorker(layout, self._push, self._pull, self.one_node)
        if self._size > 1:
            assert layout.sums is not None
            home = self.generation.within(layout.sums, names)
            self._members = Members(home, layout.sums, names[0], self.one_node)
            self.transfers = Client(layout, self._push, self._pull, self._members, self._reads)
        self.stored = RemoteStates(layout, self._link, self._setup, self._push, self._size)
        self._slow_path = SlowPath(self.generation.flag, self._link, self._push, self._pull)

    def _quiesce(self) -> None:
        """At the end of a generation, make sure that nothing reads or writes the caller's arrays any more."""
        in_order(self._link.quiesce, *([] if self._members is None else [self._members.stop]))

    @property
    def quick_list(self) -> FastList | None:
        """None, because the keys of a list are transferred one by one. See `Backend`."""
        return None

    # ---- keys

    def init(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        yield from self._setup.init(keys, values)
        for key in keys:
            key.fast = self.bind(key)

    def forget(self, keys: Sequence[Key]) -> Task[None]:
        yield from self._setup.forget(keys)
        self._settings.forget(key.name for key in keys)
        if self._push.residuals is not None:
            self._push.residuals.forget(shard.number for key in keys for shard in key.shards)

    def store_values(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        return self._setup.store_values(keys, values)

    def bind(self, key: Key) -> Fast | None:
        """Return the fast path of a key, or None if the key must take the general path."""
        if self._push.residuals is not None or not self._settings.updates(key.name) or not self._link.all_local:
            return None
        if isinstance(self.transfers, Client):
            direct = self.one_node and self._reads
            return in_client(self._slow_path, key, self.layout, self.transfers.push_key) if direct else None
        return by_itself(self._slow_path, key, self.layout)

    def _bind_all(self) -> None:
        for key in self._setup.keys.values():
            key.fast = self.bind(key)

    # ---- pushes and pulls

    def versions(self, keys: Sequence[Key]) -> Task[list[int]]:
        # In a synchronous store no round ends without this worker, so its own count is the version.
        if not self._asynchronous:
            return [key.round for key in keys]
        for key in keys:
            yield from self._push.wait_until_read(key.round, key.pushes)
        return (yield from self._pull.versions(keys))

    def pull_versions(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[list[int]]:
        if not self._asynchronous:
            yield from self.transfers.pull(keys, outs)
            return [key.round for key in keys]
        found: dict[Name, int] = {}
        yield from run_together([self._pull.whole(key, out, found) for key, out in zip(keys, outs)])
        return [found[key.name] for key in keys]

    def listen(self) -> None:
        self._link.listen()

    def settle(self, keys: Sequence[Key], meets: bool = False) -> Task[None]:
        return self._push.settle(keys, meets)

    def tell_wait(self, names: Sequence[Name]) -> None:
        self._push.tell_wait([key for key in self._setup.keys.values() if key.name in names])
        for service in self.services:
            service.tell_wait(names)

    def sums(self) -> tuple[int, str]:
        return 0, ""

    # ---- settings

    def check_updated(self, keys: Sequence[Key], what: str) -> None:
        if self._asynchronous:
            self._settings.check_updated(keys, what)

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None) -> Task[None]:
        yield from self._settings.set_optimizer(optimizer, keys)
        self._bind_all()

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None) -> Task[None]:
        return self._settings.update_optimizer(numbers, keys)

    def set_compression(self, options: dict[str, Any], compressor: Compressor) -> Task[None]:
        yield from self._settings.set_compression(compressor)
        self._bind_all()

    # ---- generations and the end

    @property
    def lines(self) -> Sequence[Line]:
        return self._link.lines

    def take_inventory(self, known: Container[Name]) -> Inventory:
        """Return the inventory of `Member`, with this worker's keys, changes of settings and collections added."""
        services = {service.name: data for service in self.services if (data := service.describe(known))}
        now = WorkerCarryOver(self._setup.known_keys(known), self._push.residuals, self._settings.changes, services)
        old = self._carry_over.get_or_save(self.generation.number, now)
        inventory = super().take_inventory(known)
        self._link.renew(self.connection.lines)
        for service in self.services:
            service.renew()
        inventory.local, inventory.shared_cores = self._link.all_local, self._cores_shared
        if former_rank(self.layout) >= 0:
            inventory.keys, inventory.changes = [KeyCard.of(key) for key in old.keys], old.changes
            inventory.known = old.services
        self._old = old
        return inventory

    def rebuild(self, plan: RecoveryPlan, ready: Sequence[ServerReady]) -> Recovered:
        assert plan.cutting is not None
        self._serve([inventory.local for inventory in plan.inventories[: self.layout.num_workers]])
        self._setup.begin(plan.keys, plan.cutting, plan.cards, [server.where for server in ready])
        groups, compressor, changes = plan.settings_after([server.refusal for server in ready])
        self._settings.begin(Changes(*changes), groups)
        self._push.residuals = _residuals(self._old, plan.keys, compressor, Changes(*changes), self.layout.rank)
        self._bind_all()
        return Recovered(plan.rounds, plan.keys, groups, compressor, plan.services)

    def commit(self) -> None:
        super().commit()
        self._carry_over.forget()

    def open_store(self, request: frames.OpenStore) -> Task[None]:
        """Ask all servers to take part in the creation of another store.

        All workers do this before they create that store.
        """
        for server in range(self.layout.num_servers):
            yield from self._link.request(server, request)

    def finish(self) -> None:
        self._link.goodbye()


def _residuals(
    old: WorkerCarryOver, keys: Sequence[Key], compressor: Compressor | None, changes: Changes, rank: int
) -> Residuals | None:
    """Return this worker's residuals for keys that may be cut differently than before the recovery.

    A residual is the part of a gradient that compression has held back. The residuals of dead workers are lost.
    """
    if compressor is None:
        return None
    made, before = Residuals(compressor, rank), old.residuals
    if before is None or before.compressor != compressor or old.changes.made < changes.made:
        return made
    known = {key.name: key for key in old.keys}
    for key in keys:
        parts = [(shard, before.get(shard.number)) for shard in known[key.name].pushes]
        if all(part is None for _, part in parts):
            continue
        whole = np.zeros(key.size)
        for shard, part in parts:
            if part is not None:
                whole[shard.start : shard.stop] = part
        for shard in key.pushes:
            made.put(shard.number, whole[shard.start : shard.stop], key.dtype)
    return made

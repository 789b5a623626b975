"""The calls that all workers make together: keys, optimizers, compression, barrier (`WorkerStore`).

All workers first compare their arguments in one rendezvous. If an argument is bad, all workers raise the same
ValueError or TypeError, and nothing has changed. Any error after the rendezvous ends the generation: the store is then
unusable until it recovers.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import msgspec
from mpi4py import MPI

from mpips import compression, optimizers
from mpips.collectives import log
from mpips.collectives.errors import MismatchError, warn
from mpips.collectives.fabric.tasks import Task, append_result
from mpips.compression import Compressor
from mpips.optimizers import Groups, Optimizer
from mpips.optimizers.elastic import Elastic1
from mpips.store.keys import arguments
from mpips.store.keys.key import Array, Key, Name, Pushed
from mpips.store.roles import Layout
from mpips.store.runtime import rendezvous
from mpips.store.runtime.engine import Engine, Handle
from mpips.store.runtime.errors import StoreError
from mpips.store.runtime.generation import Generation
from mpips.store.runtime.rendezvous import Items
from mpips.store.worker import waiting
from mpips.store.worker.interface import Backend, BackgroundSave, SaveSchedule
from mpips.store.worker.operations import CALLER_ERRORS, Operations
from mpips.store.worker.restored import Restored

LOG = log.get("mpips.store")

T = TypeVar("T")
# all live stores of this process; `_end_in_fork` ends them
_stores: weakref.WeakSet[WorkerStore] = weakref.WeakSet()


def _end_in_fork() -> None:
    """End the stores in a fork of this process.

    A fork shares memory with its parent, and would receive its messages.
    """
    for store in _stores:
        rank = f"rank {store.layout.rank}"
        store.unbind()
        why = f"this process is a fork of {rank}, and no rank: call the store in {rank}, not in workers of DataLoader"
        store.generation.present.over = StoreError(why)


os.register_at_fork(after_in_child=_end_in_fork)


class WorkerStore:
    """A store on one worker: its keys, optimizers and compression, and the calls that change them.

    All workers have equal keys, optimizers and compression. Users call `KVStore`; checkpoints, services and trainers
    use this class directly.
    """

    def __init__(self, layout: Layout, backend: Backend, generation: Generation) -> None:
        level = MPI.Query_thread()
        # True if MPI does not allow two threads to call it at the same time
        self._alone = level < MPI.THREAD_MULTIPLE
        self.layout = layout
        self.backend = backend
        self.generation = generation
        self.engine = Engine(generation, level >= MPI.THREAD_SERIALIZED)
        generation.on_end.append(self.unbind)
        _stores.add(self)
        generation.checks.append(self._check_waits)
        self.keys: dict[Name, Key] = {}
        self.operations = Operations(layout.rank, backend, self.engine, self.keys)
        self.groups = Groups()
        self.compressor: Compressor | None = None
        # the most recent background save, finished or not
        self.saving: BackgroundSave | None = None
        # the step from which the job has resumed; rounds are counted from this step
        self.base = 0
        # see `KVStore.resumed`
        self.resumed: int | None = 0
        # restored content that the program has not asked for yet
        self.restored = Restored()
        # True if this worker has replaced a dead one, and has not yet reached the step of the other workers
        self.fresh = False
        # the schedule of the store's regular saves, or None if the store does not save itself
        self.regular: SaveSchedule | None = None

    @property
    def collections(self) -> dict[Name, Pushed]:
        """The collections of all services."""
        return {name: one for service in self.backend.services for name, one in service.collections.items()}

    @property
    def pushed(self) -> dict[Name, Pushed]:
        """All keys and collections, by name."""
        return {**self.keys, **self.collections}

    # ---- keys

    def init(self, key: object, value: object, see: Callable[[Sequence[Key]], None] = lambda keys: None) -> None:
        """See `KVStore.init`. `see` is called with the keys, and raises an error if the caller cannot use them."""

        held: dict[Name, Key] = {}
        names: Sequence[Name] = ()
        if self.restored.names:
            with CALLER_ERRORS:
                pairs = arguments.pairs(key, value, "init")
                held, names = _restored_keys(self.restored, self.keys, pairs), [name for name, _ in pairs]
                if len(held) == len(names):
                    see(list(held.values()))
            if len(held) == len(names):
                self.restored.claim(held)
                return
            key, value = map(list, zip(*(pair for pair in pairs if pair[0] not in held)))

        def asked() -> tuple[list[Key], list[Array]]:
            pairs = _first_values(self.keys, key, value)
            collections = self.collections
            if twice := next((name for name, _ in pairs if name in collections), None):
                raise ValueError(f"init: a {collections[twice].noun} has the name {twice!r}: choose another")
            keys = [Key(name, array.shape, array.dtype) for name, array in pairs]
            if self.groups.default is not None:
                _check_floats(keys, "init", "name the keys that have one, set_optimizer(..., keys=[...])")
            every = held | {each.name: each for each in keys}
            see([every[name] for name in names or every])
            return keys, [array for _, array in pairs]

        made, refusal = rendezvous.attempt(asked)
        keys, values = made or ([], [])
        self.agree("init", [(each.name, f"{each.dtype.name}{each.shape}") for each in keys], refusal)
        self.restored.claim(held)
        self.run("init", self.backend.init(keys, values), [each.name for each in keys])
        self.add(keys)

    def forget(self, keys: object) -> None:
        records, refusal = rendezvous.attempt(lambda: self.known(keys, "forget"))
        self.agree_settled("forget", [(record.name, "") for record in records or []], refusal)
        self.drop(records, "forget")

    def add(self, keys: Iterable[Key]) -> None:
        """Register keys that the backend has made."""
        for key in keys:
            self.keys[key.name] = key
            if self.compressor is not None:
                self.compressor.prepare(key.dtype, key.size)

    def drop(self, keys: Sequence[Key], what: str) -> None:
        """Remove keys. All workers have agreed to remove them before. Collective."""
        self.run(what, self.backend.forget(keys), [key.name for key in keys])
        self.groups.forget(key.name for key in keys)
        self.restored.claim(key.name for key in keys)
        for key in keys:
            del self.keys[key.name]
            key.fast = None

    def known(self, names: object, what: str) -> list[Key]:
        """Return the keys of one name or of a list of names. Raise ValueError or TypeError if a name is unknown."""
        return [arguments.find_key(self.keys, name, what) for name in arguments.names(names)]

    # ---- what all keys have in common

    def set_optimizer(self, optimizer: str | Optimizer, keys: object, keywords: dict[str, Any]) -> None:
        what = "set_optimizer"
        chosen, refusal = rendezvous.attempt(lambda: _optimizer(self.layout, optimizer, keywords))
        names, other = rendezvous.attempt(lambda: _names_of_floats(self, keys, what))
        asked = names
        if self.restored.optimizers and chosen is not None and other is None:
            with CALLER_ERRORS:
                names = self.restored.unrestored(chosen, asked)
                if (ignored := self.restored.ignored_numbers(chosen, asked)) and self.layout.rank == 0:
                    warn(f"{what}: {ignored}: the checkpoint's holds; change it by update_optimizer")
        if names is None or names or names is asked:
            items = [("optimizer", optimizers.describe(chosen)), ("keys", repr(names))]
            self.agree_settled(what, items, refusal or other, noun="argument")
            self.run(what, self.backend.set_optimizer(chosen, names))
            self.groups.set(chosen, names)
            LOG.info("the optimizer of %s is %r", "all keys" if names is None else f"{len(names)} keys", chosen)
        self.restored.claim_optimizers(asked)

    def update_optimizer(self, keys: object, numbers: dict[str, Any]) -> None:
        what = "update_optimizer"
        names, refusal = rendezvous.attempt(lambda: self._names(keys, what))
        trial = Groups(self.groups.default, self.groups.own)

        def tried() -> list[tuple[str, str]]:
            trial.update(numbers, names)
            optimizers.encode_numbers(numbers)
            return [(name, repr(numbers[name])) for name in sorted(numbers)]

        items, other = rendezvous.attempt(tried)
        self.agree_settled(what, [("keys", repr(names)), *(items or [])], refusal or other, noun="argument")
        self.run(what, self.backend.update_optimizer(numbers, names))
        self.groups.update(numbers, names)
        LOG.debug("the optimizer of %s has %s", "all keys" if names is None else f"{len(names)} keys", numbers)

    def set_compression(self, options: Mapping[str, Any]) -> None:
        what = "set_gradient_compression"
        chosen, refusal = rendezvous.attempt(lambda: compression.create(options))
        if chosen is not None and self.restored.claim_compressor(chosen):
            return
        self.agree_settled(what, [("compression_params", repr(chosen))], refusal, noun="argument")
        for key in self.keys.values():
            chosen.prepare(key.dtype, key.size)
        self.run(what, self.backend.set_compression(dict(options), chosen))
        self.compressor = chosen
        LOG.info("pushes are compressed by %r", chosen)

    def barrier(self) -> None:
        if self.layout.asynchronous:
            self.settle()
        self.agree("barrier")

    def pushes(self) -> None:
        """Note the first push. After it the program can no longer claim restored optimizers and compression."""
        self.fresh = False
        self.restored.pushed()

    def unbind(self) -> None:
        """Disable all fast paths. Later calls take the general path, which raises the error of the ended generation."""
        for key in self.keys.values():
            key.fast = None

    # ---- waiting for operations, agreeing with the other workers, running tasks

    def finish(self) -> None:
        """Wait for all operations that were started earlier. Raise the first error that no call has raised yet."""
        self.operations.check_open()
        self.engine.finish()

    def settle(self) -> None:
        """Wait for all operations of this worker, and until the servers have read its pushes.

        In an asynchronous store, also wait until the servers have applied the pushes. So a setting that the caller
        changes afterwards takes effect from the next push on.
        """
        self.finish()
        self.run("settle", self.backend.settle(list(self.keys.values())))

    def agree_on_refusals(self, what: str) -> None:
        """Make sure that all workers of a synchronous store know of the same refused rounds. Collective, blocking.

        Servers refuse a round of a table if they lack the memory for its new rows. A worker learns of a refusal only
        from the answer to a request of its own, so some workers may know of a refusal and others not. The rounds of
        these workers differ, and a comparison of rounds would fail. So if the workers find a difference here:

        1. Each worker that did not know of the refusal raises RoomError to its program.
        2. Each worker that knew of it waits in this function, until the program of every other worker has handled the
           RoomError and makes the call again.

        In an asynchronous store workers do not compare rounds, and this function does nothing.

        Args:
            what: The name of the call that the program makes, such as "save", for error messages.
        """
        for service in () if self.layout.asynchronous else self.backend.services:
            while service.collections:
                refusals = self.agree(what, data=service.refusals(), alike="refused rounds")
                if all(each == refusals[0] for each in refusals):
                    break
                self.run(what, service.learn_refusals(refusals))

    def agree_settled(
        self, what: str, items: Items = (), refusal: BaseException | None = None, noun: str = "key", data: bytes = b""
    ) -> list[bytes]:
        """Check that all workers make the same call (see `agree`), and wait until the servers have all their pushes.

        Return the `data` of each worker. The arguments are those of `agree`.

        In a synchronous store, raise ValueError on all workers if some workers have pushed more often than others:
        the servers cannot complete the round of a push before all workers have pushed, so the wait would never end.
        """
        self.finish()
        self.agree_on_refusals(what)
        pushed = list(self.pushed.values())
        encoded = msgspec.msgpack.encode(([each.round for each in pushed], data))
        answers = [
            msgspec.msgpack.decode(word, type=tuple[list[int], bytes])
            for word in self.agree(what, items, refusal, noun, encoded)
        ]
        if not self.layout.asynchronous:
            arguments.check_one_round(what, pushed, [rounds for rounds, _ in answers])
        # Worker 0 sends the request for all workers. So the servers must first have read the pushes of every worker.
        if self.layout.num_servers:
            self.settle()
            self.agree(what)
        return [answer for _, answer in answers]

    def agree(
        self,
        what: str,
        items: Items = (),
        refusal: BaseException | None = None,
        noun: str = "key",
        data: bytes = b"",
        alike: str = "",
    ) -> list[bytes]:
        """Check that all workers make the same call, and exchange data. If calls differ, all raise the same error.

        While a worker of an asynchronous store waits in this call, other workers need not wait for its pushes because
        of `staleness` or `quorum`.

        Args:
            what: The name of the call.
            items: (name, value) of each argument that must be equal on all workers.
            refusal: The error in this worker's arguments, or None.
            noun: The word for the things that `items` names, such as "key", for error messages.
            data: Bytes for the other workers.
            alike: If two calls pass the same `alike`, they match each other even if their `what` differs.

        Returns:
            The data of all workers.
        """
        self.operations.check_open()
        if self._alone:
            # This MPI lacks MPI_THREAD_MULTIPLE, so only one thread may call it at a time: let the communication thread
            # finish first.
            self.engine.finish()
        with self.operations.guard(what):
            if self.layout.asynchronous and max(self.layout.options.staleness, self.layout.options.quorum) >= 0:
                task = self.operations.hearing(self.backend.settle([], meets=True))
                self.engine.run([("beside", what)], task, 0, lambda: what)
            return rendezvous.agree(self.generation, what, items, refusal, noun, data, alike=alike)

    def run(self, what: str, task: Task[T], names: Sequence[Name] = (), collections: Sequence[str] = ()) -> T:
        """Run a task, blocking, and return its result. A failure ends the generation.

        Args:
            names: The keys of the call.
            collections: Collections of services whose rounds the task may wait for.
        """
        results: list[T] = []
        self.operations.run(names, append_result(task, results), 0, what, collections)
        return results[0]

    def start(self, what: str, task: Task[Any], detached: bool = True, collections: Sequence[str] = ()) -> Handle:
        """Run a task in the background. It runs after all earlier tasks with the same `what` or a shared collection.

        Args:
            detached: True if no call waits for the task, except the call that closes the store.
        """
        return self.engine.submit([("beside", what), *collections], self.operations.hearing(task), 0, what, detached)

    # ---- inside

    def _describe_wait(self, what: str) -> bytes:
        """Encode how often this worker has pushed, for a wait in the collective call `what`.

        Return b"" if an unfinished operation uses a communicator, because that operation may still push.
        """
        used = self.engine.names_in_use()
        if any(name in used for name in self.backend.communicators):
            return b""
        keys = [key for key in self.keys.values() if key.name not in used] if self.layout.num_servers else []
        return waiting.describe(what, self.backend.sums()[0], [*keys, *self.collections.values()])

    def _check_waits(self) -> None:
        """If this worker waits in a collective call, tell the other workers how often it has pushed.

        Raise MismatchError on a deadlock: this worker waits for a push by another worker, which waits for this worker
        in a collective call.
        """
        if (what := self.generation.undescribed) and (word := self._describe_wait(what)):
            self.generation.describe_wait(word)
        inside, blocked = self.generation.inside, self.engine.blocked
        others = self.generation.waits_elsewhere() if inside or blocked is not None else {}
        if not others:
            return
        sums, call = self.backend.sums()
        names: Collection[Hashable] = self.keys
        if blocked is not None:
            names, call = blocked[0], blocked[1]()
            if any(name in names for name in self.backend.communicators):
                # The blocked operation also waits for unfinished operations that were started before it.
                names = self.engine.names_in_use() | set(names)
            elif not self.layout.num_servers:
                return
        rounds = {key.name: waiting.needed(key, call) for key in self.keys.values() if key.name in names}
        if not self.layout.asynchronous:
            rounds.update((name, each.round) for name, each in self.collections.items() if name in names)
        wait = waiting.Blocked(call, sums, rounds, blocked is None)
        if why := waiting.why_in_vain(wait, self.layout, others):
            raise MismatchError(why)

    def _names(self, keys: object, what: str) -> list[Name] | None:
        return None if keys is None else [key.name for key in self.known(keys, what)]


def _restored_keys(restored: Restored, known: Mapping[Name, Key], pairs: Sequence[tuple[Name, Any]]) -> dict[Name, Key]:
    """Return those keys of an `init` that were restored. Raise ValueError if `init` asks for another shape or dtype."""
    restored.check_first_init([name for name, _ in pairs])
    restored_keys = {}
    for name, values in pairs:
        if name in restored.names and name in known:
            asked, restored_keys[name] = arguments.first_value(name, values), known[name]
            restored.check_key(restored_keys[name], Key(name, asked.shape, asked.dtype))
    return restored_keys


def _first_values(known: Mapping[Name, Key], key: object, value: object) -> list[tuple[Name, Array]]:
    """Return (name, first value) of the keys to be made. Raise ValueError or TypeError if one cannot be made."""
    result = []
    for name, values in arguments.pairs(key, value, "init"):
        if name in known:
            raise ValueError(f"key {name!r} was already initialised; a key is initialised once")
        other = arguments.of_other_kind(known, name)
        if other is not None:
            raise TypeError(f"key {name!r} is not of the type of the keys before, such as {other!r}: pass one kind")
        arguments.check_new(name, "init")
        result.append((name, arguments.first_value(name, values)))
    return result


def _optimizer(layout: Layout, optimizer: str | Optimizer, keywords: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer. Raise ValueError if the store has a quorum and the optimizer cannot use mean gradients."""
    chosen = optimizers.create(optimizer, **keywords)
    takes_mean = is_dataclass(chosen) and "rescale" in {field.name for field in fields(chosen)}
    if layout.options.quorum >= 0 and layout.asynchronous and (isinstance(chosen, Elastic1) or not takes_mean):
        raise ValueError(
            f"set_optimizer: {chosen!r} takes no mean of gradients, and a store with "
            f"quorum={layout.options.quorum} gives one: give an optimizer of gradients, as SGD, or leave "
            "quorum out"
        )
    return chosen


def _names_of_floats(store: WorkerStore, keys: object, what: str) -> list[Name] | None:
    """Check that an optimizer can update the keys. Return their names, or None if `keys` is None (all keys)."""
    chosen = list(store.keys.values()) if keys is None else store.known(keys, what)
    _check_floats(chosen, what, "give keys=[...] without it")
    return None if keys is None else [key.name for key in chosen]


def _check_floats(keys: Iterable[Key], what: str, cure: str) -> None:
    """Raise ValueError if an optimizer cannot update one of the keys."""
    for key in keys:
        if not key.floats:
            raise ValueError(f"{what}: key {key.name!r} is {key.dtype.name}, and an optimizer needs floats: {cure}")

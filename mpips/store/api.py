"""The key-value store that a training loop sees: MXNet's KVStore contract (1.9.1), extended by the paper's kinds."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, overload

from mpips.collectives.errors import CollectiveError, Uncopied, of_caller
from mpips.ending.process import is_fork
from mpips.optimizers.base import Optimizer
from mpips.store.checkpoint.load import load, load_states, save_states
from mpips.store.checkpoint.save import Saving, save
from mpips.store.keys.key import Name, Rounds
from mpips.store.recovery.recover import Member, recover
from mpips.store.runtime.engine import Handle
from mpips.store.runtime.errors import Step, StoreError, at_exit, in_order, skip_at_exit
from mpips.store.runtime.generation import NEVER
from mpips.store.worker import waiting
from mpips.store.worker.interface import KnownTable, Recovered
from mpips.store.worker.recut import recut
from mpips.store.worker.restored import Restored
from mpips.store.worker.route import Route
from mpips.store.worker.store import WorkerStore
from mpips.tables.admission import Chance, Seen
from mpips.tables.initial import Uniform, uniform
from mpips.tables.table import Asked, Table
from mpips.tables.table import make as make_table

DEFAULT_INIT = uniform(0.05)
"""First values of a table that asks for no others."""
Turns = Sequence[Hashable]
"""Names, any that are hashable: operations with one in common run in program order (`ipush`)."""


class KVStore(Uncopied):
    """Made by `mpips.create`. Every worker of the job has one; calls block unless their name begins with i.

    Arrays are C-contiguous, of float16, bfloat16, float32, float64 or integers: NumPy's, PyTorch's CPU tensors, what
    has `__array_interface__` or DLPack, and arrays on GPUs (`__cuda_array_interface__`). JAX arrays are read only.
    Arrays made by `mpips.empty` are exchanged on a node without being copied. A key is an int or a str. Calls take one
    key or a list, and for each key one array or a list of arrays (one per device), which are summed first. A priority
    is an int of at most 31 bits. Not thread-safe: one thread per process uses a store.

    A bad argument raises ValueError or TypeError on this worker alone, before anything was sent, and changes nothing.
    Any other failure ends the generation: every call of every worker raises `mpips.StoreError` until all call
    `recover()`.
    """

    def __init__(self, worker: WorkerStore, route: Route | None = None, generations: Generations | None = None) -> None:
        """`route`: how pushes and pulls are made."""
        if route is None or generations is None:
            raise of_caller(TypeError("a store is made by mpips.create, on all ranks: kv = mpips.create('dist_sync')"))
        self.worker, self.layout = worker, worker.layout
        """What the workers agree on, for other packages of mpips; roles and communicators."""
        self._route, self._operations, self.generations = route, worker.operations, generations

    # ---- who we are

    @property
    def type(self) -> str:
        """The kind, such as "dist_sync"."""
        return self.layout.kind

    @property
    def rank(self) -> int:
        """This worker's number, 0 <= rank < num_workers."""
        return self.layout.rank

    @property
    def num_workers(self) -> int:
        """Workers in all clients."""
        return self.layout.num_workers

    @property
    def generation(self) -> int:
        """The number of the present generation: 0, and one more after each `recover`."""
        return self.worker.generation.number

    @property
    def spares(self) -> int:
        """Return how many ranks wait to take a place: the same on all workers until the next generation."""
        return self.layout.spares

    @property
    def resumed(self) -> int | None:
        """The step to begin with: so many rounds of each key are stored. 0 where a training begins. More where a job
        has started again, or this worker has joined one. None where its keys stand at several rounds."""
        return self.worker.resumed

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return whether the store can do it; the one capability that is asked for is "optimizer"."""
        if capability.lower() != "optimizer":
            raise of_caller(ValueError(f"unknown capability {capability!r}; known: optimizer"))
        return True

    # ---- all workers together; blocking. Bad or different arguments: all raise the same, and nothing has changed

    def init(self, key: object, value: object) -> None:
        """Store the first values: rank 0's count. Keys, shapes and dtypes are the same everywhere."""
        with self._route.marked("init"):
            self.worker.init(key, value)

    def broadcast(self, key: object, value: object, out: object, priority: int = 0) -> None:
        """`init`, then `pull`; nothing is made where `out` is bad."""
        with self._route.marked("broadcast"):
            self.worker.init(key, value, lambda keys: self._operations.see_pull(keys, key, out, priority))
        self.pull(key, out, priority)

    def set_optimizer(self, optimizer: str | Optimizer, keys: object = None, **keywords: Any) -> None:
        """Let the servers (without servers: the workers) update these keys, or all, by this optimizer from now on.

        By name and keywords (`"sgd", learning_rate=0.1`) or an `mpips.optimizers` record. State starts anew.
        """
        with self._route.marked("set_optimizer"):
            self.worker.set_optimizer(optimizer, keys, keywords)

    def update_optimizer(self, keys: object = None, **numbers: Any) -> None:
        """Change numbers of the optimizers of these keys, or of all, such as `learning_rate`, from the next round on.
        State stays. A number may be a schedule (`mpips.optimizers.schedules`), counted in updates of the key."""
        with self._route.marked("update_optimizer"):
            self.worker.update_optimizer(keys, numbers)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress pushes of float keys from now on, e.g. `{"type": "2bit", "threshold": 0.5}`."""
        with self._route.marked("set_gradient_compression"):
            self.worker.set_compression(compression_params)

    def table(
        self,
        name: str,
        dim: int,
        dtype: object = "float32",
        init: Uniform = DEFAULT_INIT,
        optimizer: str = "sgd",
        seed: int = 0,
        admit: Seen | Chance | None = None,
        evict: int | None = None,
        limit: int | None = None,
        **options: Any,
    ) -> Table:
        """Make an embedding table, whose rows servers make when they are first pushed to. Collective over all workers.

        All give the same. Rows are spread over the servers by a hash of their ids. A first value depends on seed, table
        name and id alone. Every worker is a contributor by itself, also in `mpi_*` kinds.

        Args:
            name: No key and no other table has it.
            dim: Values of a row.
            dtype: "float32" or "float64".
            init: The rule of first values, `mpips.uniform(bound)`.
            optimizer: "sgd", "adagrad", "row_adagrad" (one accumulator for each row) or "adam" (corrected by each row's
                own number of updates).
            seed: Any int.
            admit: Which ids get a row: `mpips.seen(times)` or `mpips.chance(probability)`. Gradients of others are
                dropped, and a pull gives their first values. None: all.
            evict: Rows that no update has named for so many updates are dropped. None: none.
            limit: The table holds at most so many rows after each update: those longest not named are dropped. Each
                server holds its share. None: any number.
            options: The optimizer's numbers, such as `learning_rate`, which may be a schedule; it counts updates of the
                table.

        Raises:
            ValueError: An argument is bad or differs between workers, or the store has no servers. Nothing has changed.
        """
        with self._route.marked("table"):
            asked = Asked(dim, dtype, init, optimizer, seed, admit, evict, limit, options)
            return make_table(self.worker, self._route, name, asked)

    def recut(self, keys: Sequence[Name], new: Mapping[Name, int]) -> None:
        """Cut the elements of `keys`, one behind the other, anew into 1-D keys `new` of so many elements.

        Values, the optimizer's state and what compression kept back go with them; `keys` exist no more, and their
        memory is given back. ValueError where the elements differ in number or dtype, a new key exists already, or the
        optimizer has updated some of `keys` more often than others.
        """
        with self._route.marked("recut"):
            recut(self.worker, keys, new)

    def forget(self, keys: Sequence[Name]) -> None:
        """Give up keys, one or a list, and their memory on workers and servers."""
        with self._route.marked("forget"):
            self.worker.forget(keys)

    def barrier(self) -> None:
        """Wait until all workers have come. A pull after it sees all pushes before it."""
        with self._route.marked("barrier"):
            self.worker.barrier()

    def save(self, path: str | os.PathLike[str], wait: bool = True) -> Saving | None:
        """Write one checkpoint file: keys, tables, optimizers and their state, residuals of compression, after a round.

        A kill at any moment leaves the old file or the new one. `wait=False`: training goes on; `wait()` of what is
        returned blocks until the file is there. ValueError where it cannot be written.
        """
        with self._route.marked("save"):
            saving = save(self.worker, path, wait)
        self._route.write(saving)
        return saving

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read back what `save` wrote, with any number of servers, clients and workers. Rank 0 reads.

        Keys and tables that the store does not have are made. ValueError where the file does not fit those that it has.
        """
        with self._route.marked("load"):
            load(self.worker, path)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Rank 0 writes the optimizers' state of all keys (safetensors), if `dump_optimizer` with names and options."""
        with self._route.marked("save_optimizer_states"):
            save_states(self.worker, fname, dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """Read back what `save_optimizer_states` wrote, with any number of servers."""
        with self._route.marked("load_optimizer_states"):
            load_states(self.worker, fname)

    def recover(self, grow: bool = False) -> Rounds:
        """Begin the next generation after a StoreError. What was under way is forgotten, values stay.

        Returns of each key and table the last complete round, which it stands at: so many pushes of each worker are in
        it, in an asynchronous store of this one (of its client). `.step` is that of all. `.torn` names those of which a
        round was applied in part: load a checkpoint of them. `grow`: ranks that wait (`spares`) become workers, also
        where nobody has died; all call it after the same step, or one does and the others' calls raise StoreError.
        """
        with self._route.marked("recover"):
            rounds = self.generations.recover(grow)
        if self.layout.survives:
            self._route.before_a_push(self.worker.pushes)
        return rounds

    # ---- pushes and pulls

    def push(self, key: object, value: object, priority: int = 0) -> None:
        """Contribute to the keys; returns when the arrays may be overwritten. Higher priority goes first.

        Without an optimizer the stored value becomes the sum over all workers. A value may be an `mpips.RowSparse`.
        """
        self._route.make("push", key, value, None, priority)

    def ipush(self, key: object, value: object, priority: int = 0, turns: Turns = ()) -> Handle:
        """`push` that returns a handle at once; the arrays must stay as they are until it is done.

        Operations on one key run in program order; so do those with one of `turns` (any hashable names) in common. Of
        those that may run, higher priority goes first; but in program order where they hold collectives (`mpi_*` kinds,
        and stores without servers), as these must start in one order on all workers.
        """
        return self._route.start("push", key, value, None, priority, turns)

    def taken(self, key: object, push: Handle) -> Handle:
        """A handle that ends when the servers have read what `push`, the last `ipush` of these keys, sends. (The push
        ends when its arrays may be overwritten.) It is `push` itself where that is all that can be known: without
        servers, and in asynchronous stores."""
        return self._operations.taken(key, push, self.layout.num_servers > 0 and not self.layout.asynchronous)

    @overload
    def pull(
        self, key: object, out: object, priority: int = 0, ignore_sparse: bool = True, newer_than: None = None
    ) -> None: ...

    @overload
    def pull(
        self,
        key: list[Name] | tuple[Name, ...],
        out: object,
        priority: int = 0,
        ignore_sparse: bool = True,
        *,
        newer_than: Sequence[int],
    ) -> list[int]: ...

    @overload
    def pull(
        self, key: Name, out: object, priority: int = 0, ignore_sparse: bool = True, *, newer_than: int
    ) -> int: ...

    def pull(
        self,
        key: object,
        out: object,
        priority: int = 0,
        ignore_sparse: bool = True,
        newer_than: int | Sequence[int] | None = None,
    ) -> int | list[int] | None:
        """Write the keys' values into `out`, after this worker's pushes of them; returns when they are there.

        `newer_than`: the version that `out` holds, -1 where none; for a list of keys a list. Keys that stand at it are
        left as they are, at once. Returns the versions that `out` holds now. A version counts the rounds that this
        worker has pushed, in an asynchronous store the pushes of all workers.
        """
        if newer_than is not None:
            if self.layout.asynchronous:
                self._check_reads_alone()
            self._route.marks.mark("pull", key)
            begun = self._route.marks.begin_records("pull", key)
            found = self._operations.pull_newer(key, out, newer_than, priority, self.worker.base)
            for ring, sequence, _ in begun:
                ring.end(sequence)
            return found if isinstance(key, (list, tuple)) else found[0]
        self._route.make("pull", key, None, out, priority)
        return None

    def _check_reads_alone(self) -> None:
        """ValueError where members of a client pull together: each may find another version of an asynchronous key."""
        layout = self.layout
        members = max(len(range(*client)) for client in layout.clients)
        if layout.kind.startswith("mpi_") and members > 1:
            raise of_caller(
                ValueError(
                    f"pull: newer_than needs workers that read by themselves, and in kind {layout.kind} the {members} "
                    "workers of a client pull together: choose dist_async, or clients of one worker"
                )
            )

    def ipull(self, key: object, out: object, priority: int = 0, turns: Turns = ()) -> Handle:
        """`pull` that returns a handle at once; `out` holds the values when it is done."""
        return self._route.start("pull", key, None, out, priority, turns)

    def pushpull(self, key: object, value: object, out: object = None, priority: int = 0) -> None:
        """`push` and `pull` in one, into `value` where `out` is None; returns when the result is there."""
        self._route.make("pushpull", key, value, out, priority)

    def ipushpull(self, key: object, value: object, out: object = None, priority: int = 0, turns: Turns = ()) -> Handle:
        """`pushpull` that returns a handle at once."""
        return self._route.start("pushpull", key, value, out, priority, turns)

    def row_sparse_pull(self, key: object, out: object, priority: int = 0, row_ids: object = None) -> None:
        """Write rows of the keys into `out` of shape (len(row_ids), ...), in the order of `row_ids`; blocking.

        `row_ids`: integers (k,), any order, repeats allowed, or a list of them for a list of keys.
        """
        with self._route.marked("row_sparse_pull"):
            self._operations.pull_rows(key, out, row_ids, priority)

    # ---- the end

    def close(self) -> None:
        """Finish what is under way and let the servers go; a process that ends does so by itself. Collective.

        Who closes while others wait for it in a call ends the generation there. StoreError where a death has undone
        what this worker has pushed (`spares`): the store is open still.
        """
        with self._route.marked("close"):
            self.generations.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """`close`. Where the block has raised, all other workers hear so at once, and nobody is waited for."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.generations.give_up(error)


STORE = "the store"


class Generations:
    """The generations of a store on this worker: one begins, one is joined, the last one ends.

    `member`: this worker's part in a recovery. `closed` is called when the last one has ended.
    """

    def __init__(self, store: WorkerStore, member: Member[Recovered], closed: Step) -> None:
        self._store, self._member, self._closed = store, member, closed
        store.generation.checks.append(self._check_closing)
        at_exit(self._exit, store.layout.communicators)

    def recover(self, grow: bool = False) -> Rounds:
        store = self._store
        store.operations.check_not_closed()
        with store.operations.guard("recover"):
            store.engine.forget()
            begun = recover(store.generation, lambda: self._member, store.pushed, grow)
            assert begun is not None
        rounds = self._take(begun[1])
        if store.layout.survives:
            store.restored = store.restored.renewed(STORE, store.pushed, store.groups, store.compressor)
        else:
            store.restored.keep_only(store.pushed)
        return rounds

    def join(self, recovered: Recovered) -> None:
        """This worker has taken a dead one's place in a store that has this."""
        store = self._store
        rounds = self._take(recovered)
        store.resumed, store.fresh = rounds.step, True
        begun = store.resumed != 0
        store.restored = Restored(STORE, store.pushed, store.groups, store.compressor, strict=begun)

    def _take(self, recovered: Recovered) -> Rounds:
        """The next generation has begun with this."""
        store = self._store
        store.keys.clear()
        known = store.tables.copy()
        store.tables.clear()
        for card in recovered.tables:
            table = store.tables[card.table] = known.get(card.table) or KnownTable(card)
            table.card, table.round = card, recovered.rounds.get(card.table, 0)
            table.refusals, table.room = 0, {}
        for key in recovered.keys:
            key.replaced = True
        store.add(recovered.keys)
        store.groups, store.compressor = recovered.groups, recovered.compressor
        rounds = recovered.rounds
        if store.regular is not None:
            store.regular.set_rounds(rounds)
        if rounds.step is not None:
            rounds.step += store.base
        return rounds

    def close(self) -> None:
        generation = self._store.generation
        if self._is_open():
            limits, generation.limits = generation.limits, NEVER  # who has more to do may take long
            try:
                self._save_last(self._meet_to_close())
            finally:
                generation.limits = limits
            self._leave()

    def give_up(self, error: BaseException) -> None:
        """The block of a `with` has raised this: end the generation for all, and leave. Waits for some seconds at
        most."""
        if self._is_open():
            self._store.generation.end("the block of `with` that uses the store", error)
            self._leave()

    def _is_open(self) -> bool:
        """Return whether there is a store to close: for a fork of this process there is none."""
        return not self._store.operations.closed and not is_fork()

    def _exit(self) -> None:
        in_order(self.close, self._leave)

    def _save_last(self, told: Sequence[bytes]) -> None:
        """Save what the store holds at its end, where it saves itself and all workers close it after the same step.
        `told`: what each has pushed; empty: they have not met."""
        store = self._store
        if store.regular is None or not told:
            return
        with suppress(CollectiveError):  # somebody has died: what was saved before is there
            store.regular.save_last(alike=all(said == told[0] for said in told))

    def _meet_to_save(self) -> Sequence[bytes]:
        """Wait until all workers close a store that saves itself; what each has pushed, nothing where one does not."""
        store = self._store
        if store.regular is None or store.generation.over is not None:
            return ()
        try:
            store.settle()
            return store.agree(waiting.CLOSE, data=waiting.pushes_of(store.pushed))
        except (CollectiveError, ValueError):  # the others do something else, and hear of this
            return ()

    def _meet_to_close(self) -> Sequence[bytes]:
        """Return where the store survives deaths, wait until all workers close it: one may die before, and the others
        then need this one. StoreError where a death undoes what this worker has pushed: the others make that again.
        What each has pushed; nothing where they have not met."""
        store = self._store
        if not store.layout.survives:
            return self._meet_to_save()
        if store.generation.over is not None:
            return ()
        store.settle()  # what is complete then stays
        pushed = {name: one.round for name, one in store.pushed.items()}
        told = waiting.pushes_of(store.pushed)
        while True:
            try:
                return store.agree(waiting.CLOSE, data=told)
            except StoreError:
                pass
            try:
                rounds = self.recover()
            except StoreError:  # nobody is left who could need this worker
                return ()
            undone = [name for name, round_ in rounds.items() if round_ < pushed.get(name, 0)]
            if undone and not store.layout.asynchronous:
                one = f"{store.pushed[undone[0]].noun} {undone[0]!r}"
                raise StoreError(
                    f"close: a death has undone round {pushed[undone[0]]} of {one}, and the others make it again: call "
                    "recover(), and go on from its step, with close() inside the same try"
                )
            if not store.layout.changed:  # nobody has died: who makes more pushes is not to wait for this worker
                return ()

    def _check_closing(self) -> None:
        """CollectiveError where a worker closes the store whose next push this one waits for."""
        store = self._store
        if store.layout.asynchronous or not (store.layout.survives or store.regular is not None):
            return
        now = () if store.regular is None or store.layout.num_servers else store.regular.pushing
        pushing = now if isinstance(now, (list, tuple)) else (now,)
        if why := waiting.waits_for_closed(store.generation.words(), store.pushed, pushing):
            raise CollectiveError(why)

    def _leave(self) -> None:
        """Take the steps of the end in this order, each though another fails. Collective."""
        store = self._store
        if store.operations.closed:
            return
        skip_at_exit(self._exit)
        store.operations.closed = True
        store.unbind()
        last = [store.engine.close, store.backend.finish, self._closed]
        if store.generation.over is not None:
            in_order(store.engine.forget, *last)
            return
        saving = [] if store.saving is None else [store.saving.finish]
        in_order(*saving, lambda: store.engine.finish(detached=True), *last)

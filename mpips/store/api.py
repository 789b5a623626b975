"""`KVStore`, the key-value store of a training loop: MXNet 1.9.1's API, with the store kinds of the MXNET-MPI paper."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, overload

from mpips.collectives.errors import CollectiveError, NotCopyable, of_caller
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
from mpips.store.worker.interface import Recovered
from mpips.store.worker.recut import recut
from mpips.store.worker.restored import Restored
from mpips.store.worker.route import Route
from mpips.store.worker.store import WorkerStore

if TYPE_CHECKING:
    from mpips.tables.initial import Init
    from mpips.tables.make import Chance, Seen, Table

# any hashable names; operations that have a name in common run in program order (see `KVStore.ipush`)
Turns = Sequence[Hashable]


class KVStore(NotCopyable):
    """A key-value store, as each worker of the job sees it. Made by `mpips.create`.

    Calls block unless their name begins with "i" (`ipush`). Arrays are C-contiguous, of float16, bfloat16, float32,
    float64 or integers: NumPy arrays, PyTorch CPU tensors, anything with `__array_interface__` or DLPack, and arrays on
    GPUs (`__cuda_array_interface__`). JAX arrays can be read but not written. Arrays made by `mpips.empty` are
    exchanged without a copy between ranks of one node.

    A key is an int or a str. A call takes one key or a list of keys, and for each key, one array or a list of arrays
    (one per device). The arrays of a list are summed first. A priority is an int of at most 31 bits.

    Not thread-safe: only one thread of a process may use a store.

    A bad argument raises ValueError or TypeError on this worker alone, before anything is sent, and changes nothing. In
    a call that all workers make together, such as `init`, all workers raise the error. Any other failure ends the
    generation: every call of every worker raises `mpips.StoreError` until all workers call `recover()`.

    Attributes:
        layout: The roles of the store's ranks, and its communicators, such as `layout.workers`.
    """

    def __init__(self, worker: WorkerStore, route: Route | None = None, generations: Generations | None = None) -> None:
        if route is None or generations is None:
            raise of_caller(TypeError("a store is made by mpips.create, on all ranks: kv = mpips.create('dist_sync')"))
        # this worker's part of the store; other packages of mpips use it
        self.worker = worker
        # roles of ranks, and communicators
        self.layout = worker.layout
        self._route = route
        self._operations = worker.operations
        self.generations = generations

    # ---- this worker and the store

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
        """Number of workers in the store."""
        return self.layout.num_workers

    @property
    def generation(self) -> int:
        """The number of the current generation. The first is 0, and each `recover` adds one."""
        return self.worker.generation.number

    @property
    def spares(self) -> int:
        """Number of ranks that wait to replace dead ones. The same on all workers, and constant within a generation."""
        return self.layout.spares

    @property
    def resumed(self) -> int | None:
        """The training step to begin with, which is the number of rounds that each key has completed.

        0 in a new training run. More than 0 if the job has resumed from a checkpoint, or if this worker has joined a
        running job. None if the keys are at different rounds.
        """
        return self.worker.resumed

    @staticmethod
    def is_capable(capability: str) -> bool:
        """True if the store has this capability.

        The only known capability is "optimizer", which every store has. Others raise ValueError.
        """
        if capability.lower() != "optimizer":
            raise of_caller(ValueError(f"unknown capability {capability!r}; known: optimizer"))
        return True

    # ---- Collective calls, which block. If arguments are bad or differ between workers, all workers raise the same
    # error, and nothing has changed.

    def init(self, key: object, value: object) -> None:
        """Create keys and set their first values. Collective over all workers; blocking.

        Only rank 0's values are used.

        Args:
            key: A new key, an int or a str, or a list of keys.
            value: An array, or for a list of keys a list of arrays. Every worker gives the same shapes and dtypes.

        Raises:
            ValueError, TypeError: A key exists already, or an argument is bad or differs between workers.

        Example:
            >>> kv.init(["weights", "bias"], [np.zeros((2, 3), np.float32), np.zeros(3, np.float32)])
        """
        with self._route.marked("init"):
            self.worker.init(key, value)

    def broadcast(self, key: object, value: object, out: object, priority: int = 0) -> None:
        """Create keys with rank 0's values, and write these into `out`. Collective over all workers; blocking.

        The call does `init`, then `pull`. If `out` is bad, no key is created.

        Args:
            key: A new key, or a list of keys.
            value: An array, or for a list of keys a list of arrays. Only rank 0's values are used.
            out: An array of the same shape and dtype, or for a list of keys a list of arrays. May be `value` itself.
            priority: As in `push`.

        Example:
            >>> model = np.arange(3.0)
            >>> kv.broadcast("model", model, out=model)  # now every worker has rank 0's array
        """
        with self._route.marked("broadcast"):
            self.worker.init(key, value, lambda keys: self._operations.check_pull(keys, key, out, priority))
        self.pull(key, out, priority)

    def set_optimizer(self, optimizer: str | Optimizer, keys: object = None, **keywords: Any) -> None:
        """Let the store update keys with an optimizer from now on. Collective over all workers; blocking.

        The servers run the optimizer, or the workers if there are no servers. The optimizer begins with new state.

        Args:
            optimizer: A name with keywords (`"sgd", learning_rate=0.1`), or an `mpips.optimizers` record.
            keys: The keys to update. None: all keys, including those created later.
            keywords: The optimizer's hyperparameters, if `optimizer` is a name.

        Raises:
            ValueError, TypeError: The optimizer is unknown, a number is bad, or a key is not of floats. Nothing has
                changed.

        Example:
            >>> kv.init("x", np.ones(2))
            >>> kv.set_optimizer("sgd", keys="x", learning_rate=0.5)
            >>> x = np.ones(2)  # the gradient, then the result
            >>> kv.pushpull("x", x)
            >>> x
            array([0.5, 0.5])
        """
        with self._route.marked("set_optimizer"):
            self.worker.set_optimizer(optimizer, keys, keywords)

    def update_optimizer(self, keys: object = None, **numbers: Any) -> None:
        """Change hyperparameters, such as `learning_rate`, from the next round on. Collective over all workers.

        The optimizers' state is kept.

        Args:
            keys: The keys whose optimizers to change. None: all keys.
            numbers: The new values. A value may be a schedule (`mpips.optimizers.schedules`), which counts the updates
                of the key.

        Raises:
            ValueError, TypeError: An optimizer has no such hyperparameter, or a value is bad. Nothing has changed.

        Example:
            >>> kv.init("y", np.ones(2))
            >>> kv.set_optimizer("sgd", keys="y", learning_rate=0.5)
            >>> kv.update_optimizer(keys="y", learning_rate=0.25)
        """
        with self._route.marked("update_optimizer"):
            self.worker.update_optimizer(keys, numbers)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress pushes of float keys from now on. Collective over all workers; blocking.

        What a compressed push leaves out (its residual) is added to the next push of the key.

        Args:
            compression_params: The kind and its parameters, such as `{"type": "2bit", "threshold": 0.5}`.

        Raises:
            ValueError, TypeError: The kind is unknown, or a number is bad. Nothing has changed.

        Example:
            >>> kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        """
        with self._route.marked("set_gradient_compression"):
            self.worker.set_compression(compression_params)

    def table(
        self,
        name: str,
        dim: int,
        dtype: object = "float32",
        init: Init | Callable[[Any], Any] | None = None,
        optimizer: str = "sgd",
        seed: int = 0,
        admit: Seen | Chance | None = None,
        evict: int | None = None,
        limit: int | None = None,
        evict_by: str | None = None,
        evict_after: str | float | None = None,
        rounding: str = "nearest",
        **options: Any,
    ) -> Table:
        """Create an embedding table. Servers create a row when it is first pushed to. Collective over all workers.

        All workers must give the same arguments. Rows are spread over the servers by a hash of their ids. The first
        value of a row depends on seed, table name and id alone. Every worker pushes by itself, even in `mpi_*` kinds,
        where clients push keys together.

        Args:
            name: A name that no key and no other table has.
            dim: Number of values in a row.
            dtype: "float16", "bfloat16", "float32" or "float64". Rows of 16 bits are updated in float32, and have
                optimizer state in float32.
            init: The first values: `mpips.uniform`, `mpips.normal`, `mpips.truncated_normal`, `mpips.constant`, or a
                function of ids that was registered by `mpips.register_init`. None: `mpips.uniform(0.05)`.
            optimizer: "sgd", "adagrad", "row_adagrad" (one accumulator for each row), "adam" (its bias correction
                counts each row's own updates), "row_adam" (one second moment for each row) or "ftrl".
            seed: Any int.
            admit: Which ids get a row: `mpips.seen(times)` or `mpips.chance(probability)`. Gradients of other ids are
                dropped, and a pull of such an id returns its first values. None: all ids get a row.
            evict: Drop each row that has not been used by any of the last `evict` updates. None: keep all rows.
            limit: The maximum number of rows that the table holds after an update. The least recently used rows are
                dropped first. Each server has an equal share of the limit. None: no limit.
            evict_by: The order in which `limit` drops rows: "age" (the oldest last update first), "count" (the fewest
                updates first) or "score" (the smallest of the scores that `push` and `set` get). Among equal rows the
                oldest last update comes first, then the smallest id. None: "age".
            evict_after: Drop rows whose last update is at least this long ago on the wall clock of worker 0: "7d",
                "12h", "30m", "90s", or seconds. None: keep all rows.
            rounding: How updated rows of float16 or bfloat16 are rounded: to "nearest", or "stochastic", which means
                at random to one of the two neighbours. The random numbers depend only on seed, table name, id, number
                of the update and column.
            options: The optimizer's hyperparameters, such as `learning_rate`, which may be a schedule, whose steps are
                the updates of the table. All optimizers take `clipnorm`, which scales a row's summed gradient down to
                this norm, and all but "ftrl" take `weight_decay`, which is decoupled as in AdamW.

        Raises:
            ValueError: An argument is bad or differs between workers, or the store has no servers. Nothing has changed.

        Example:
            >>> users = kv.table("users", dim=2, init=mpips.uniform(0), learning_rate=0.5)
            >>> users.push(np.array([7, -3]), np.ones((2, 2), np.float32))
            >>> users.pull(np.array([-3, 8]))
            array([[-0.5, -0.5],
                   [ 0. ,  0. ]], dtype=float32)
        """
        from mpips.tables.make import TableOptions, make

        with self._route.marked("table"):
            life = admit, evict, limit, evict_by, evict_after
            chosen = TableOptions(dim, dtype, init, optimizer, seed, *life, rounding)
            return make(self.worker, self._route, name, chosen, options)

    def recut(self, keys: Sequence[Name], new: Mapping[Name, int]) -> None:
        """Replace keys with new 1-D keys that divide the same elements in another way. Collective over all workers.

        The elements of `keys`, concatenated, are distributed in order to the keys of `new`. Values, the optimizer's
        state and residuals of compression move with them. Afterwards `keys` no longer exist, and their memory is freed.

        Args:
            keys: The keys to replace, in the order of their elements.
            new: The number of elements of each new key.

        Raises:
            ValueError: The number of elements or the dtypes differ, a new key exists already, or the optimizer has
                updated some of `keys` more often than others.

        Example:
            >>> kv.init(["first", "second"], [np.arange(3.0), np.arange(5.0)])
            >>> kv.recut(["first", "second"], {"one": 8})
        """
        with self._route.marked("recut"):
            recut(self.worker, keys, new)

    def forget(self, keys: Sequence[Name]) -> None:
        """Remove keys and free their memory on workers and servers. Collective over all workers; blocking.

        Args:
            keys: One key, or a list.

        Raises:
            ValueError: A key does not exist.

        Example:
            >>> kv.init("z", np.ones(2))
            >>> kv.forget("z")
        """
        with self._route.marked("forget"):
            self.worker.forget(keys)

    def barrier(self) -> None:
        """Wait until all workers have called `barrier`. Collective over all workers; blocking.

        A pull after the barrier sees all pushes made before it.

        Example:
            >>> kv.barrier()
        """
        with self._route.marked("barrier"):
            self.worker.barrier()

    def save(self, path: str | os.PathLike[str], wait: bool = True) -> Saving | None:
        """Write one checkpoint file of the whole store. Collective over all workers.

        The file holds keys, tables, optimizers with their state, and residuals of compression, as they are after a
        round. If the job is killed, the old file or the new one is there, never a partial one.

        Args:
            path: The file to write.
            wait: False: return at once, and write while the training continues.

        Returns:
            None if `wait`. Otherwise an object whose `wait()` blocks until the file is complete.

        Raises:
            ValueError: The file cannot be written.

        Example:
            >>> saving = kv.save(path, wait=False)
            >>> saving.wait()
        """
        with self._route.marked("save"):
            saving = save(self.worker, path, wait)
        self._route.write(saving)
        return saving

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a checkpoint file that `save` wrote. Collective over all workers, blocking; rank 0 reads the file.

        The numbers of servers, clients and workers may differ from those at the time of the save. Keys and tables that
        the store does not have yet are created.

        Args:
            path: The file.

        Raises:
            ValueError: The file cannot be read, is damaged, or does not fit keys or tables of the store. Nothing has
                changed.

        Example:
            >>> kv.save(path)
            >>> kv.load(path)
        """
        with self._route.marked("load"):
            load(self.worker, path)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer states of all keys to a safetensors file. Collective over all workers; rank 0 writes.

        Args:
            fname: The file to write.
            dump_optimizer: Also write the names and hyperparameters of the optimizers.

        Raises:
            ValueError: No optimizer is set, or the file cannot be written.

        Example:
            >>> kv.set_optimizer("adam")
            >>> kv.init("o", np.zeros(2))
            >>> kv.save_optimizer_states(path)
        """
        with self._route.marked("save_optimizer_states"):
            save_states(self.worker, fname, dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """Read a file that `save_optimizer_states` wrote. Collective over all workers, blocking; rank 0 reads.

        The number of servers may differ from that at the time of the save.

        Args:
            fname: The file.

        Raises:
            ValueError: The file cannot be read, or does not fit the keys and their optimizers. Nothing has changed.

        Example:
            >>> kv.set_optimizer("adam")
            >>> kv.init("n", np.zeros(2))
            >>> kv.save_optimizer_states(path)
            >>> kv.load_optimizer_states(path)
        """
        with self._route.marked("load_optimizer_states"):
            load_states(self.worker, fname)

    def recover(self, grow: bool = False) -> Rounds:
        """Begin the next generation after a StoreError. Collective over all living workers.

        Operations that have not ended are abandoned. Values are kept.

        Args:
            grow: Let waiting ranks (`spares`) become workers, even if no rank has died. Either all workers call
                `recover(grow=True)` after the same step, or one worker calls it, and the next calls of the other
                workers raise StoreError.

        Returns:
            For each key and table, the number of its complete rounds. Its values are now those after that round. In an
            asynchronous store, the number of this worker's pushes that count (in `mpi_*` kinds: of its client's
            pushes). `.step` is the common round of all keys and tables that were ever pushed, or None if their rounds
            differ (in an asynchronous store, the lowest round). `.torn` names keys and tables to which a round was
            applied only in part: load a checkpoint to repair them.
        """
        with self._route.marked("recover"):
            rounds = self.generations.recover(grow)
        if self.layout.survives:
            self._route.before_a_push(self.worker.pushes)
        return rounds

    # ---- pushes and pulls

    def push(self, key: object, value: object, priority: int = 0) -> None:
        """Push a gradient (or any values) to each key. Returns when the arrays may be overwritten.

        Without an optimizer the stored value becomes the sum over all workers.

        Args:
            key: A key, or a list of keys.
            value: An array of the key's shape and dtype, a list of such arrays (one for each device, which are summed),
                or an `mpips.RowSparse`. For a list of keys, a list of these.
            priority: An int. Pushes of higher priority are applied first.

        Raises:
            ValueError, TypeError: An argument is bad. Nothing has been sent.
            StoreError: The generation has ended.

        Example:
            >>> kv.init("v", np.zeros(2))
            >>> kv.push("v", np.ones(2))
        """
        self._route.make("push", key, value, None, priority)

    def ipush(self, key: object, value: object, priority: int = 0, turns: Turns = ()) -> Handle:
        """Begin a `push` and return a handle at once. The arrays must not change until the handle is done.

        Operations on the same key run in program order, and so do operations that share a name in `turns`. Otherwise
        operations of higher priority run first. Operations that contain collectives (in `mpi_*` kinds, and in stores
        without servers) always run in program order, because all workers must start them in the same order.

        Args:
            key, value, priority: As in `push`.
            turns: Any hashable names.

        Returns:
            A handle. Its `wait()` blocks until the push has ended, and raises the push's errors; `test()` does not
            block.

        Example:
            >>> kv.init("u", np.zeros(2))
            >>> handle = kv.ipush("u", np.ones(2))
            >>> handle.wait()
        """
        return self._route.start("push", key, value, None, priority, turns)

    def read_by_servers(self, key: object, push: Handle) -> Handle:
        """Return a handle that is done when the servers have read the values of a push. Does not block.

        The handle of the push itself is done earlier, when its arrays may be overwritten. In stores without servers and
        in asynchronous stores, `push` itself is returned.

        Args:
            key: The keys of the push.
            push: The handle of the last `ipush` of these keys.

        Raises:
            TypeError: `push` is not a handle.

        Example:
            >>> kv.init("p", np.zeros(2))
            >>> kv.read_by_servers("p", kv.ipush("p", np.ones(2))).wait()
        """
        return self._operations.read_by_servers(key, push, self.layout.num_servers > 0 and not self.layout.asynchronous)

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
        """Write the keys' values into `out`. Blocks until they have been written.

        The values contain all earlier pushes of this worker.

        Args:
            key: A key, or a list of keys.
            out: A writable array of the key's shape and dtype, or a list of arrays that all get the values. For a list
                of keys, a list of these.
            priority: As in `push`.
            ignore_sparse: Has no effect. MXNet's `pull` has this argument.
            newer_than: The version that `out` holds, or -1 if it holds none. For a list of keys, a list of versions.
                Keys that still have this version are skipped without a wait.

        Returns:
            With `newer_than`, the versions that `out` holds now. A version is the number of rounds that this worker has
            pushed; in an asynchronous store, the number of pushes of all workers.

        Raises:
            ValueError, TypeError: An argument is bad. Nothing has been sent.
            StoreError: The generation has ended.

        Example:
            >>> kv.init("q", np.arange(3.0))
            >>> out = np.empty(3)
            >>> kv.pull("q", out)
            >>> out
            array([0., 1., 2.])
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
        """Raise ValueError if this worker's client pulls as a group.

        Its members might find different versions of a key.
        """
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
        """Begin a `pull` and return a handle at once. `out` holds the values when the handle is done.

        Args:
            key, out, priority: As in `pull`.
            turns: As in `ipush`.

        Example:
            >>> kv.init("t", np.zeros(2))
            >>> out = np.empty(2)
            >>> kv.ipull("t", out).wait()
        """
        return self._route.start("pull", key, None, out, priority, turns)

    def pushpull(self, key: object, value: object, out: object = None, priority: int = 0) -> None:
        """Push and pull in one call. Blocks until the result is in `out`, or in `value` if `out` is None.

        Args:
            key, value, priority: As in `push`.
            out: As in `pull`. None: the result is written into `value`.

        Raises:
            ValueError, TypeError: An argument is bad. Nothing has been sent.
            StoreError: The generation has ended.

        Example:
            >>> kv.init("s", np.zeros(2))
            >>> gradient = np.ones(2)
            >>> kv.pushpull("s", gradient)  # now the sum over all workers
        """
        self._route.make("pushpull", key, value, out, priority)

    def ipushpull(self, key: object, value: object, out: object = None, priority: int = 0, turns: Turns = ()) -> Handle:
        """Begin a `pushpull` and return a handle at once. See `ipush` about order and arrays.

        Example:
            >>> kv.init("r", np.zeros(2))
            >>> gradient = np.ones(2)
            >>> handle = kv.ipushpull("r", gradient)
            >>> handle.wait()
        """
        return self._route.start("pushpull", key, value, out, priority, turns)

    def row_sparse_pull(self, key: object, out: object, priority: int = 0, row_ids: object = None) -> None:
        """Write rows of the keys into `out`, in the order of `row_ids`. Blocks until they have been written.

        Args:
            key: One key or a list of keys.
            out: An array of shape (len(row_ids), ...) for each key.
            priority: As in `push`.
            row_ids: Integers of shape (k,), in any order, repeats allowed. For a list of keys, a list of such arrays.

        Raises:
            ValueError, TypeError: An argument is bad, or the key has no row of some number. Nothing has been sent.

        Example:
            >>> kv.init("rows", np.arange(8.0).reshape(4, 2))
            >>> out = np.empty((3, 2))
            >>> kv.row_sparse_pull("rows", out, row_ids=np.array([3, 0, 3]))
            >>> out[:, 0]
            array([6., 0., 6.])
        """
        with self._route.marked("row_sparse_pull"):
            self._operations.pull_rows(key, out, row_ids, priority)

    # ---- the end

    def close(self) -> None:
        """Finish all operations and release the servers. Collective over all workers; blocking.

        A process that exits closes its stores by itself, and `with kv:` closes at the end of the block. If a worker
        closes the store while other workers wait for it in another call, the generation ends.

        Raises:
            StoreError: A death has undone pushes of this worker (in a store with `spares`). The store is still open:
                call `recover()` and push again.
        """
        with self._route.marked("close"):
            self.generations.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the store. If the block has raised, end the generation instead, so that the other workers raise too."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.generations.give_up(error)


STORE = "the store"


class Generations:
    """Begins and ends the generations of a store on this worker.

    Args:
        member: This worker's part in a recovery.
        closed: Called when the last generation has ended.
    """

    def __init__(self, store: WorkerStore, member: Member[Recovered], closed: Step) -> None:
        self._store = store
        self._member = member
        self._closed = closed
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
        """Begin as a worker that has taken a dead worker's place. `recovered` is the content of the running store."""
        store = self._store
        rounds = self._take(recovered)
        store.resumed, store.fresh = rounds.step, True
        begun = store.resumed != 0
        store.restored = Restored(STORE, store.pushed, store.groups, store.compressor, strict=begun)

    def _take(self, recovered: Recovered) -> Rounds:
        """Replace keys, tables and settings with those of the next generation.

        Return the rounds of all keys and tables.
        """
        store = self._store
        store.keys.clear()
        for service in store.backend.services:
            service.begin(recovered.services.get(service.name), recovered.rounds)
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
            # Wait without a time limit, because another worker may have much work left before it closes the store.
            limits, generation.limits = generation.limits, NEVER
            try:
                self._save_last(self._meet_to_close())
            finally:
                generation.limits = limits
            self._leave()

    def give_up(self, error: BaseException) -> None:
        """End the generation for all workers, because the block of a `with` has raised. Close the store on this worker.

        Blocks for a few seconds at most.
        """
        if self._is_open():
            self._store.generation.end("the block of `with` that uses the store", error)
            self._leave()

    def _is_open(self) -> bool:
        """True if this process has not closed the store yet. False in a forked child."""
        return not self._store.operations.closed and not is_fork()

    def _exit(self) -> None:
        in_order(self.close, self._leave)

    def _save_last(self, pushes: Sequence[bytes]) -> None:
        """Write the final checkpoint of a store that saves itself, if all workers close the store after the same step.

        Args:
            pushes: What each worker has pushed (`waiting.pushes_of`), or empty if not all workers closed the store.
        """
        store = self._store
        if store.regular is None or not pushes:
            return
        # Ignore the error if a rank has died, because earlier saves still exist.
        with suppress(CollectiveError):
            store.regular.save_last(alike=all(each == pushes[0] for each in pushes))

    def _meet_to_save(self) -> Sequence[bytes]:
        """In a store that saves itself, wait until all workers close it. Return what each worker has pushed.

        The result is empty if the store does not save itself, or if some worker does not close it.
        """
        store = self._store
        if store.regular is None or store.generation.over is not None:
            return ()
        try:
            store.settle()
            return store.agree(waiting.CLOSE, data=waiting.pushes_of(store.pushed))
        # The other workers are in another call. That call tells them that this worker closes the store.
        except (CollectiveError, ValueError):
            return ()

    def _meet_to_close(self) -> Sequence[bytes]:
        """In a store that survives deaths, wait until every worker closes it. Return what each worker has pushed.

        Another worker may die before all workers have closed the store. The remaining workers would then need this
        worker to recover. The result is empty if not all workers closed the store. Raise StoreError if a death undoes
        pushes of this worker, which all workers have to repeat. In a store that does not survive deaths, do what
        `_meet_to_save` does.
        """
        store = self._store
        if not store.layout.survives:
            return self._meet_to_save()
        if store.generation.over is not None:
            return ()
        # Complete all rounds now: a death after the meeting cannot undo rounds that were complete before it.
        store.settle()
        pushed = {name: each.round for name, each in store.pushed.items()}
        pushes = waiting.pushes_of(store.pushed)
        while True:
            try:
                return store.agree(waiting.CLOSE, data=pushes)
            except StoreError:
                pass
            try:
                rounds = self.recover()
            # No rank is left that could need this worker.
            except StoreError:
                return ()
            undone = [name for name, round_ in rounds.items() if round_ < pushed.get(name, 0)]
            if undone and not store.layout.asynchronous:
                name = f"{store.pushed[undone[0]].noun} {undone[0]!r}"
                raise StoreError(
                    f"close: a death has undone round {pushed[undone[0]]} of {name}, and the others make it again: "
                    "call recover(), and go on from its step, with close() inside the same try"
                )
            # The ranks are unchanged, so nobody has died. Other workers still push, and must not wait for this worker.
            if not store.layout.changed:
                return ()

    def _check_closing(self) -> None:
        """Raise CollectiveError if this worker waits for a push by a worker that is closing the store."""
        store = self._store
        if store.layout.asynchronous or not (store.layout.survives or store.regular is not None):
            return
        now = () if store.regular is None or store.layout.num_servers else store.regular.pushing
        pushing = now if isinstance(now, (list, tuple)) else (now,)
        if why := waiting.waits_for_closed(store.generation.words(), store.pushed, pushing):
            raise CollectiveError(why)

    def _leave(self) -> None:
        """Close the engine, then the backend, even if one of them fails. Collective."""
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

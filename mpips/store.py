"""The key-value store that a training loop sees: MXNet's KVStore contract (1.9.1), extended by the paper's kinds."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips import arguments, calls, compression, optimizers, recut, states
from mpips.arguments import Name
from mpips.assembly import Assembly
from mpips.calls import Call
from mpips.engine import Engine, Handle
from mpips.errands import Errands
from mpips.layout import Layout
from mpips.optimizers import Optimizer
from mpips.pure import Pure
from mpips.row_sparse import RowSparse
from mpips.served import Served
from mpips.session import Key
from mpips.talk import RECENT, Talk

Array = NDArray[Any]
Task = Generator[None, None, Any]


class KVStore:
    """Made by `mpips.create`. Every worker of the job has one; calls block unless their name begins with i.

    Arrays are C-contiguous host arrays (NumPy, `__array_interface__`, DLPack) of float16, bfloat16, float32, float64 or
    integers; arrays made by `mpips.empty` are exchanged on a node without being copied. A key is an int or a str; calls
    take one key or a list, and for each key one array or a list of arrays (one per device), which are summed first.
    Not thread-safe: one thread per process uses a store.
    """

    def __init__(self, layout: Layout, backend: Served | Pure) -> None:
        options = layout.options
        self._layout, self._backend = layout, backend
        level = MPI.Query_thread()
        self._alone = level < MPI.THREAD_MULTIPLE
        self._engine = Engine(options.stall_seconds, options.timeout_seconds, level >= MPI.THREAD_SERIALIZED)
        self._keys: dict[Name, Key] = {}
        self._optimizer: Optimizer | None = None
        self._closed = False
        if isinstance(backend, Served):
            self._session = backend.session
            backend.session.warn = lambda text: warnings.warn(text, RuntimeWarning, stacklevel=2)
        atexit.register(self.close)

    # ---- who we are

    @property
    def type(self) -> str:
        """The kind, such as "dist_sync"."""
        return self._layout.kind

    @property
    def rank(self) -> int:
        """This worker's number, 0 <= rank < num_workers."""
        return self._layout.rank

    @property
    def num_workers(self) -> int:
        """Workers in all clients."""
        return self._layout.num_workers

    @property
    def layout(self) -> Layout:
        """Roles and communicators."""
        return self._layout

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store can do it; the one capability that is asked for is "optimizer"."""
        if capability.lower() != "optimizer":
            raise ValueError(f"unknown capability {capability!r}; known: optimizer")
        return True

    # ---- calls that all workers make together

    def init(self, key: Any, value: Any) -> None:
        """Store the first values: rank 0's count, all workers call with the same keys, shapes and dtypes; blocking.

        Raises ValueError or TypeError on every worker if one's arguments are bad or differ; nothing is stored then.
        """
        pairs, refusal = self._try(lambda: self._first_values(key, value))
        signature = [(name, f"{array.dtype.name}{array.shape}") for name, array in pairs or []]
        self._agree("init", signature, refusal)
        assert pairs is not None
        keys = [Key(name, array.shape, array.dtype) for name, array in pairs]
        self._run([], self._backend.init(keys, [array for _, array in pairs]), 0, "init")
        self._keys.update((key.name, key) for key in keys)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """`init`, then `pull`; blocking."""
        self.init(key, value)
        self.pull(key, out, priority)

    def set_optimizer(self, optimizer: str | Optimizer, **keywords: Any) -> None:
        """Let the servers (without servers: the workers) update by this optimizer from now on; all workers call.

        By name and keywords (`"sgd", learning_rate=0.1`) or an `mpips.optimizers` record. State starts anew.
        """
        chosen, refusal = self._try(lambda: optimizers.create(optimizer, **keywords))
        self._settle()
        self._agree("set_optimizer", [("optimizer", repr(chosen))], refusal)
        assert chosen is not None
        self._run([], self._backend.set_optimizer(chosen), 0, "set_optimizer")
        self._optimizer = chosen

    def set_gradient_compression(self, compression_params: dict[str, Any]) -> None:
        """Compress pushes of float keys from now on, e.g. `{"type": "2bit", "threshold": 0.5}`; all workers call."""
        compressor, refusal = self._try(lambda: compression.create(compression_params))
        self._settle()
        self._agree("set_gradient_compression", [("compression", repr(compressor))], refusal)
        assert compressor is not None
        task = self._backend.set_compression(dict(compression_params), compressor)
        self._run([], task, 0, "set_gradient_compression")

    def recut(self, keys: Sequence[Name], new: Mapping[Name, int]) -> None:
        """Cut the elements of `keys`, one behind the other, anew into 1-D keys `new` of so many elements each; blocking.

        Values, the optimizer's state and what compression kept back go with them; `keys` exist no more, and their
        memory is given back. All workers call. ValueError where the elements differ in number or dtype, a new key
        exists already, or the optimizer has updated some of `keys` more often than others.
        """
        recut.recut(self, keys, new)

    def forget(self, keys: Sequence[Name]) -> None:
        """Give up `keys` and their memory on workers and servers; all workers call; blocking."""
        records, refusal = self._try(lambda: [self._key(key, "forget") for key in keys])
        self._settle()
        self._agree("forget", [(key, "") for key in keys], refusal)
        self._run([], self._backend.forget(records), 0, "forget")
        for key in keys:
            del self._keys[key]

    def barrier(self) -> None:
        """Wait until all workers have come; blocking."""
        self._agree("barrier", [], "")

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer's state of all keys, from all servers, to one file (safetensors); all workers call.

        Rank 0 writes. `dump_optimizer` stores the optimizer's name and options beside it. Blocking.
        """
        refusal = "" if self._optimizer else "ValueError: it needs an optimizer; call set_optimizer first"
        self._settle()
        self._agree("save_optimizer_states", [("fname", str(fname))], refusal)
        self._at_rank_0(self._save(fname, dump_optimizer), "save_optimizer_states")

    def load_optimizer_states(self, fname: str) -> None:
        """Read back what `save_optimizer_states` wrote, with any number of servers; all workers call; blocking."""
        refusal = "" if self._optimizer else "ValueError: it needs an optimizer; call set_optimizer first"
        self._settle()
        self._agree("load_optimizer_states", [("fname", str(fname))], refusal)
        if isinstance(self._backend, Pure):
            self._at_rank_0(self._load(fname), "load_optimizer_states", everywhere=True)
        else:
            self._at_rank_0(self._load(fname), "load_optimizer_states")

    # ---- pushes and pulls

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Contribute to the keys; returns when the arrays may be overwritten. Higher priority goes first.

        Without an optimizer the stored value becomes the sum over all workers. A value may be an `mpips.RowSparse`.
        Raises ValueError or TypeError on bad arguments; the other workers then raise the same sentence.
        """
        record = self._quick(key, value)
        if record is not None:
            left = self._session.quick_push(record, value, priority)
            if left is not None:
                self._run([key], left, priority, "push", key)
            return
        self._each("push", self._pushes(key, value, priority), priority)

    def ipush(self, key: Any, value: Any, priority: int = 0, turns: Sequence[Hashable] = ()) -> Handle:
        """`push` that returns a handle at once; the arrays must stay as they are until it is done.

        Operations on one key run in program order; so do those with one of `turns` (any hashable names) in common.
        """
        return self._start("push", self._pushes(key, value, priority), priority, turns)

    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the keys' values into `out`, after this worker's pushes of them; returns when they are there."""
        record = self._quick(key, out)
        if record is not None and out.flags.writeable:
            left = self._session.quick_pull(record, out)
            if left is not None:
                self._run([key], left, priority, "pull", key)
            return
        self._each("pull", self._pulls(key, out), priority)

    def ipull(self, key: Any, out: Any, priority: int = 0, turns: Sequence[Hashable] = ()) -> Handle:
        """`pull` that returns a handle at once; `out` holds the values when it is done."""
        return self._start("pull", self._pulls(key, out), priority, turns)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push` and `pull` in one, into `value` where `out` is None; returns when the result is there."""
        record = self._quick(key, value)
        if record is not None and record.nbytes <= self._layout.options.small_bytes:
            self.push(key, value, priority)
            self.pull(key, value if out is None else out, priority)
            return
        self._each("pushpull", self._pushpulls(key, value, out, priority), priority)

    def ipushpull(
        self, key: Any, value: Any, out: Any = None, priority: int = 0, turns: Sequence[Hashable] = ()
    ) -> Handle:
        """`pushpull` that returns a handle at once."""
        return self._start("pushpull", self._pushpulls(key, value, out, priority), priority, turns)

    def row_sparse_pull(self, key: Any, out: Any, priority: int = 0, row_ids: Any = None) -> None:
        """Write rows of the keys into `out` of shape (len(row_ids), ...), in the order of `row_ids`; blocking.

        `row_ids`: integers (k,), any order, repeats allowed, or a list of them for a list of keys.
        """
        if row_ids is None:
            raise ValueError("row_sparse_pull needs row_ids")
        ids = arguments.pairs(key, row_ids if isinstance(key, (list, tuple)) else [row_ids], "row_sparse_pull")
        for (name, outs), (_, rows) in zip(arguments.pairs(key, out, "row_sparse_pull"), ids, strict=True):
            record = self._key(name, "row_sparse_pull")
            if len(rows) not in (1, len(outs)):
                raise ValueError(f"row_sparse_pull: key {name!r} has {len(outs)} outs and {len(rows)} lists of row_ids")
            value = np.empty(record.shape, record.dtype)
            self._run([name], self._backend.pull(record, value.reshape(-1)), priority, "row_sparse_pull", name)
            for index, one in enumerate(outs):
                self._rows(record, value, one, rows[index % len(rows)])

    # ---- the end

    def close(self) -> None:
        """Finish what is under way and let the servers go; called by itself when the process ends. Collective."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._engine.finish()
        self._engine.close()
        self._backend.finish()
        from mpips import processes

        processes.closed(self._layout)

    # ---- inside

    def _quick(self, key: Any, array: Any) -> Key | None:
        """The key, where a call for one plain array can take the short way; all others go the long one."""
        if type(array) is not np.ndarray or type(key) not in (str, int) or not self._engine.idle:
            return None
        record = self._keys.get(key)
        if record is None or record.quick is None or array.shape != record.shape or array.dtype != record.dtype:
            return None
        return record if array.flags.c_contiguous else None

    def _settle(self) -> None:
        """Finish what is under way, so that a setting counts from the next push on."""
        self._engine.finish()
        self._run([], self._backend.settle(list(self._keys.values())), 0, "settle")

    def _try(self, make: Any) -> tuple[Any, str]:
        """What `make` returns, or the sentence of its error, to be told to everybody."""
        try:
            return make(), ""
        except (ValueError, TypeError) as error:
            return None, f"{type(error).__name__}: rank {self.rank}: {error}"

    def _agree(self, what: str, items: list[tuple[Name, str]], refusal: str) -> None:
        """All workers ask for the same, or all raise the same sentence."""
        options, workers = self._layout.options, self._layout.workers
        assert workers is not None
        if self._alone:
            self._engine.finish()  # the communication thread may not use MPI beside this one
        mine = msgspec.msgpack.encode(_Signature([(what, ""), *items], refusal))
        everyone = [
            msgspec.msgpack.decode(data, type=_Signature)
            for data in meet.exchange(workers, mine, what, options.stall_seconds, options.timeout_seconds)
        ]
        for other in everyone:
            if other.refusal:
                kind, _, sentence = other.refusal.partition(": ")
                raise (TypeError if kind == "TypeError" else ValueError)(f"{what}: {sentence}")
        first = everyone[0]
        for rank, other in enumerate(everyone):
            if other.items != first.items:
                raise ValueError(_difference(what, first.items, rank, other.items))

    def _first_values(self, key: Any, value: Any) -> list[tuple[Name, Array]]:
        result = []
        for name, values in arguments.pairs(key, value, "init"):
            if name in self._keys:
                raise ValueError(f"key {name!r} was already initialised; a key is initialised once")
            if len({isinstance(known, str) for known in [*self._keys, name]}) > 1:
                raise TypeError(f"key {name!r} is not of the type of the keys before: all int or all str")
            if isinstance(values[0], RowSparse):
                values = [values[0].to_dense()]
            result.append((name, arguments.readable(values[0], name, "init")))
        return result

    def _key(self, name: Name, what: str) -> Key:
        try:
            return self._keys[name]
        except KeyError:
            raise ValueError(f"{what}: rank {self.rank}: key {name!r} was not initialised; call init first") from None

    def _pushes(self, key: Any, value: Any, priority: int) -> list[tuple[Name, Task]]:
        return [
            (name, self._push(self._key(name, "push"), values, priority))
            for name, values in arguments.pairs(key, value, "push")
        ]

    def _push(self, key: Key, values: list[Any], priority: int) -> Task:
        payload = self._payload(key, values, "push")
        if isinstance(payload, RowSparse):
            yield from self._backend.push_rows(key, payload, priority)
        else:
            yield from self._backend.push(key, payload.reshape(-1), priority)

    def _pulls(self, key: Any, out: Any) -> list[tuple[Name, Task]]:
        return [
            (name, self._pull(self._key(name, "pull"), outs, "pull"))
            for name, outs in arguments.pairs(key, out, "pull")
        ]

    def _pull(self, key: Key, outs: list[Any], what: str) -> Task:
        targets = self._targets(key, outs, what)
        yield from self._backend.pull(key, targets[0].reshape(-1))
        for target in targets[1:]:
            target[...] = targets[0]

    def _pushpulls(self, key: Any, value: Any, out: Any, priority: int) -> list[tuple[Name, Task]]:
        outs = arguments.pairs(key, value if out is None else out, "pushpull")
        return [
            (name, self._pushpull(self._key(name, "pushpull"), values, targets, priority))
            for (name, values), (_, targets) in zip(arguments.pairs(key, value, "pushpull"), outs, strict=True)
        ]

    def _pushpull(self, key: Key, values: list[Any], outs: list[Any], priority: int) -> Task:
        try:
            targets = self._targets(key, outs, "pushpull")
        except (ValueError, TypeError) as error:
            self._backend.refuse(key, str(error))  # the others wait for this worker's push
            raise
        payload = self._payload(key, values, "pushpull")
        if isinstance(payload, RowSparse):
            yield from self._backend.push_rows(key, payload, priority)
            yield from self._backend.pull(key, targets[0].reshape(-1))
        else:
            yield from self._backend.pushpull(key, payload.reshape(-1), targets[0].reshape(-1), priority)
        for target in targets[1:]:
            target[...] = targets[0]

    def _payload(self, key: Key, values: list[Any], what: str) -> Array | RowSparse:
        """The sum of a key's values; where they do not fit, the others learn it before this worker raises."""
        try:
            if any(isinstance(value, RowSparse) for value in values):
                return self._row_payload(key, values, what)
            arrays = [arguments.readable(value, key.name, what) for value in values]
            for array in arrays:
                if array.shape != key.shape or array.dtype != key.dtype:
                    arguments.fits(array, key.shape, key.dtype, key.name, what, self.rank)
            return arguments.total(arrays)
        except (ValueError, TypeError) as error:
            self._backend.refuse(key, str(error))
            raise

    def _row_payload(self, key: Key, values: list[Any], what: str) -> RowSparse:
        from mpips import row_sparse

        for value in values:
            if not isinstance(value, RowSparse):
                raise TypeError(f"{what}: key {key.name!r} got arrays and RowSparse in one list")
            arguments.fits(value, key.shape, key.dtype, key.name, what, self.rank)
        return values[0] if len(values) == 1 else row_sparse.add(values)

    def _targets(self, key: Key, outs: Sequence[Any], what: str) -> list[Array]:
        targets = [arguments.writable(out, key.name, what) for out in outs]
        for target in targets:
            if target.shape != key.shape or target.dtype != key.dtype:
                arguments.fits(target, key.shape, key.dtype, key.name, what, self.rank)
        return targets

    def _rows(self, key: Key, value: Array, out: Any, row_ids: Any) -> None:
        ids = np.asarray(row_ids)
        ids = ids.astype(np.int64) if ids.size == 0 else ids.reshape(-1)
        target = arguments.writable(out, key.name, "row_sparse_pull")
        if ids.dtype.kind not in "iu" or (ids.size and not (ids.min() >= 0 and ids.max() < key.shape[0])):
            raise ValueError(f"row_sparse_pull: key {key.name!r} has rows 0..{key.shape[0] - 1}, not {ids}")
        if target.shape != (len(ids), *key.shape[1:]) or target.dtype != key.dtype:
            arguments.fits(target, (len(ids), *key.shape[1:]), key.dtype, key.name, "row_sparse_pull", self.rank)
        target[...] = value[ids]

    def _run(self, keys: list[Name], task: Task, priority: int, what: str, name: Name | None = None) -> None:
        self._engine.run(self._order(keys), task, priority, lambda: self._wait_text(what, name))

    def _each(self, what: str, tasks: list[tuple[Name, Task]], priority: int) -> None:
        """Do an operation for several keys: at the same time, unless collectives must keep their order."""
        if len(tasks) > 1 and not self._backend.communicators:
            names = [name for name, _ in tasks]
            self._run(names, together([task for _, task in tasks]), priority, what, names[0])
            return
        for name, task in tasks:
            self._run([name], task, priority, what, name)

    def _wait_text(self, what: str, name: Name | None) -> str:
        return f"rank {self.rank}: {what}" + (f" of key {name!r}" if name is not None else "")

    def _start(
        self, what: str, tasks: list[tuple[Name, Task]], priority: int, turns: Sequence[Hashable]
    ) -> Handle:
        names = [name for name, _ in tasks]
        chosen = [task for _, task in tasks]
        task = _chain(chosen) if self._backend.communicators else together(chosen)
        if isinstance(self._backend, Pure):
            self._backend.stepwise = True
        order = [*self._order(names), *(("turns", name) for name in turns)]
        return self._engine.submit(order, task, priority, self._wait_text(what, names[0]))

    def _order(self, names: list[Name]) -> list[Hashable]:
        """What an operation takes turns on: its keys, and communicators, used in one order everywhere."""
        return [*names, *self._backend.communicators]

    def _at_rank_0(self, task: Task, what: str, everywhere: bool = False) -> None:
        """Run it on rank 0 (or everywhere) and let everybody raise what made it fail."""
        failure = ""
        if self.rank == 0 or everywhere:
            try:
                self._run([], task, 0, what)
            except (ValueError, TypeError, OSError) as error:
                failure = f"ValueError: rank {self.rank}: {error}"
        self._agree(what, [], failure)

    def _save(self, fname: str, dump_optimizer: bool) -> Task:
        found = yield from self._backend.states(list(self._keys.values()))
        assert self._optimizer is not None
        states.save(fname, found, self._optimizer, dump_optimizer)

    def _load(self, fname: str) -> Task:
        keys = list(self._keys.values())
        yield from self._backend.put_states(keys, states.load(fname, keys))


def together(tasks: list[Task]) -> Task:
    """Run tasks side by side; when one has failed the others still run to their end, so that no peer waits for them."""
    failure = None
    while tasks:
        left = []
        for task in tasks:
            try:
                next(task)
                left.append(task)
            except StopIteration:
                pass
            except (ValueError, TypeError, RuntimeError) as error:
                failure = failure or error
        tasks = left
        if tasks:
            yield
    if failure is not None:
        raise failure


def _chain(tasks: list[Task]) -> Task:
    for task in tasks:
        yield from task


def _difference(what: str, first: list[tuple[Name, str]], rank: int, other: list[tuple[Name, str]]) -> str:
    """The sentence about the first thing in which two workers' calls differ."""
    if first[0] != other[0]:
        return f"rank 0 calls {first[0][0]}, rank {rank} calls {other[0][0]}: all workers make this call together"
    for mine, theirs in zip(first[1:], other[1:]):
        if mine[0] != theirs[0]:
            return f"{what}: rank 0 gives key {mine[0]!r}, rank {rank} key {theirs[0]!r} in its place"
        if mine[1] != theirs[1]:
            return f"{what}: key {mine[0]!r} is {mine[1]} on rank 0 and {theirs[1]} on rank {rank}"
    return f"{what}: rank 0 gives {len(first) - 1} keys, rank {rank} gives {len(other) - 1}"

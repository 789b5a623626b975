"""The key-value store that a training loop sees: MXNet's KVStore contract (1.9.1), extended by the paper's kinds."""

from __future__ import annotations

import atexit
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any

from mpi4py import MPI
from numpy.typing import NDArray

from collectives.errors import of_caller, warn
from mpips import arguments, compression, optimizers, recut, states
from mpips.arguments import Name
from mpips.assembly import Assembly
from mpips.engine import Engine, Handle
from mpips.keys import Key
from mpips.layout import Layout
from mpips.operations import CLOSED, Operations
from mpips.optimizers import Optimizer
from mpips.pure import Pure
from mpips.quick import Quick
from mpips.row_sparse import RowSparse
from mpips.served import Served

Array = NDArray[Any]
Task = Generator[bool | None, None, Any]


class KVStore:
    """Made by `mpips.create`. Every worker of the job has one; calls block unless their name begins with i.

    Arrays are C-contiguous host arrays (NumPy, `__array_interface__`, DLPack) of float16, bfloat16, float32, float64 or
    integers; arrays made by `mpips.empty` are exchanged on a node without being copied. A key is an int or a str; calls
    take one key or a list, and for each key one array or a list of arrays (one per device), which are summed first. A
    priority is an int of at most 31 bits. Not thread-safe: one thread per process uses a store.
    """

    def __init__(self, layout: Layout, backend: Served | Pure) -> None:
        options = layout.options
        self._layout, self._backend = layout, backend
        level = MPI.Query_thread()
        self._alone = level < MPI.THREAD_MULTIPLE
        self._engine = Engine(options.stall_seconds, options.timeout_seconds, level >= MPI.THREAD_SERIALIZED)
        self._keys: dict[Name, Key] = {}
        self._operations = Operations(layout, backend, self._engine, self._keys)
        self._quick = Quick(self._keys, self._engine, self._operations)
        self._talk = self._operations.talk
        self._assembly = Assembly(layout, self._talk, self._meet, backend.one_node)
        self._optimizer: Optimizer | None = None
        self._closed = False
        if isinstance(backend, Served):
            self._session = backend.session
            backend.session.warn = warn
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
            raise of_caller(ValueError(f"unknown capability {capability!r}; known: optimizer"))
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
        """Cut the elements of `keys`, one behind the other, anew into 1-D keys `new` of so many elements; blocking.

        Values, the optimizer's state and what compression kept back go with them; `keys` exist no more, and their
        memory is given back. All workers call. ValueError where the elements differ in number or dtype, a new key
        exists already, the optimizer has updated some of `keys` more often than others, or `staleness` holds a push of
        them back.
        """
        recut.recut(self, keys, new)

    def forget(self, keys: Sequence[Name]) -> None:
        """Give up `keys` and their memory on workers and servers; all workers call; blocking."""
        records, refusal = self._try(lambda: [self._key(key, "forget") for key in arguments.names(list(keys))])
        self._settle()
        self._agree("forget", [(key, "") for key in keys], refusal)
        with self._operations.whole("forget"):
            self._run([], self._backend.forget(records), 0, "forget")
            for key in keys:
                del self._keys[key]

    def barrier(self) -> None:
        """Wait until all workers have come; blocking.

        In an asynchronous store a pull after it sees all pushes before it, but for those that `staleness` holds back.
        """
        if self._layout.asynchronous:
            self._settle()
        self._agree("barrier", [], "")

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer's state of all keys, from all servers, to one file (safetensors); all workers call.

        Rank 0 writes. `dump_optimizer` stores the optimizer's name and options beside it. Blocking.
        """
        states.gather(self, fname, dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """Read back what `save_optimizer_states` wrote, with any number of servers; all workers call; blocking."""
        states.spread(self, fname)

    # ---- pushes and pulls

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Contribute to the keys; returns when the arrays may be overwritten. Higher priority goes first.

        Without an optimizer the stored value becomes the sum over all workers. A value may be an `mpips.RowSparse`.
        Raises ValueError or TypeError on bad arguments; the other workers then raise the same sentence.
        """
        if not self._quick.push(key, value, priority):
            self._operations.do("push", key, value, None, priority)

    def ipush(self, key: Any, value: Any, priority: int = 0, turns: Sequence[Hashable] = ()) -> Handle:
        """`push` that returns a handle at once; the arrays must stay as they are until it is done.

        Operations on one key run in program order; so do those with one of `turns` (any hashable names) in common. Of
        those that may run, higher priority goes first; but in program order where they hold collectives (`mpi_*` kinds,
        and stores without servers), as these must start in one order on all workers.
        """
        return self._operations.start("push", key, value, None, priority, turns)

    def taken(self, key: Any, push: Handle) -> Handle:
        """A handle that ends when the servers have read what `push`, the last `ipush` of these keys, sends. (The push
        ends when its arrays may be overwritten.) It is `push` itself where that is all that can be known: without
        servers, and in asynchronous stores."""
        return self._operations.taken(key, push)

    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the keys' values into `out`, after this worker's pushes of them; returns when they are there."""
        if not self._quick.pull(key, out, priority):
            self._operations.do("pull", key, None, out, priority)

    def ipull(self, key: Any, out: Any, priority: int = 0, turns: Sequence[Hashable] = ()) -> Handle:
        """`pull` that returns a handle at once; `out` holds the values when it is done."""
        return self._operations.start("pull", key, None, out, priority, turns)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push` and `pull` in one, into `value` where `out` is None; returns when the result is there."""
        if not self._quick.pushpull(key, value, out, priority):
            self._operations.do("pushpull", key, value, out, priority)

    def ipushpull(
        self, key: Any, value: Any, out: Any = None, priority: int = 0, turns: Sequence[Hashable] = ()
    ) -> Handle:
        """`pushpull` that returns a handle at once."""
        return self._operations.start("pushpull", key, value, out, priority, turns)

    def row_sparse_pull(self, key: Any, out: Any, priority: int = 0, row_ids: Any = None) -> None:
        """Write rows of the keys into `out` of shape (len(row_ids), ...), in the order of `row_ids`; blocking.

        `row_ids`: integers (k,), any order, repeats allowed, or a list of them for a list of keys.
        """
        self._operations.pull_rows(key, out, row_ids, priority)

    # ---- the end

    def close(self) -> None:
        """Finish what is under way and let the servers go; called by itself when the process ends. Collective.

        A worker that closes while others wait for it in a call makes that call raise an error there, which says so.
        """
        if self._closed:
            return
        self._closed, self._operations.closed = True, CLOSED
        atexit.unregister(self.close)
        for key in self._keys.values():
            key.short = None
        try:
            self._engine.finish()
        finally:
            self._engine.close()
            self._talk.leave()
            self._backend.finish()
            self._assembly.farewell()
            self._backend.meanwhile(lambda: None)
            self._talk.free()
            from mpips import processes

            processes.closed(self._layout, self._backend.unfinished)

    # ---- inside

    def _settle(self) -> None:
        """Finish what is under way, so that a setting counts from the next push on."""
        self._operations.check_open()
        self._engine.finish()
        self._run([], self._backend.settle(list(self._keys.values())), 0, "settle")

    def _try(self, make: Any) -> tuple[Any, str]:
        """What `make` returns, or the sentence of its error, to be told to everybody."""
        return self._assembly.attempt(make)

    def _agree(
        self, what: str, items: list[tuple[Name, str]], refusal: str, noun: str = "key", data: bytes = b""
    ) -> list[bytes]:
        """All workers ask for the same, and learn everybody's data, or all raise the same sentence."""
        self._operations.check_open()
        if self._alone:
            self._engine.finish()  # the communication thread may not use MPI beside this one
        return self._assembly.agree(what, items, refusal, noun, data)

    def _meet(self, what: str) -> None:
        """Before a meeting: where pushes are collectives of all workers, see that nobody is in one."""
        self._run([], self._backend.meet(what), 0, what)

    def _first_values(self, key: Any, value: Any) -> list[tuple[Name, Array]]:
        result = []
        for name, values in arguments.pairs(key, value, "init"):
            if name in self._keys:
                raise ValueError(f"key {name!r} was already initialised; a key is initialised once")
            other = arguments.of_other_kind(self._keys, name)
            if other is not None:
                raise TypeError(f"key {name!r} is not of the type of the keys before, such as {other!r}: pass one kind")
            if isinstance(values[0], RowSparse):
                values = [values[0].to_dense()]
            result.append((name, arguments.readable(values[0], name, "init")))
        return result

    def _key(self, name: Name, what: str) -> Key:
        return arguments.known(self._keys, name, what)

    def _run(self, names: list[Name], task: Task, priority: int, what: str, name: Name | None = None) -> None:
        self._operations.run(names, task, priority, what)

    def _at_rank_0(self, task: Task, what: str, everywhere: bool = False) -> None:
        """Run it on rank 0 (or everywhere) and let everybody raise what made it fail."""
        failure = ""
        if self.rank == 0 or everywhere:
            try:
                self._run([], task, 0, what)
            except (ValueError, TypeError) as error:
                failure = f"ValueError: rank {self.rank}: {error}"
        self._agree(what, [], failure)

"""The key-value store that a training loop sees: MXNet's KVStore contract (1.9.1), extended by the paper's kinds."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from collectives.errors import Uncopied, of_caller
from mpips.store.checkpoint.load import load, load_states, save_states
from mpips.store.checkpoint.save import Saving, save
from mpips.store.keys.key import Name, Rounds
from mpips.store.runtime.engine import Handle
from mpips.store.worker.generations import Generations
from mpips.store.worker.recut import recut
from mpips.store.worker.route import Route
from mpips.store.worker.settings import Settings

if TYPE_CHECKING:
    from mpips.optimizers.base import Optimizer

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

    def __init__(self, settings: Settings, route: Route, generations: Generations) -> None:
        """`route`: how pushes and pulls are made."""
        self.settings, self.layout = settings, settings.layout
        """What the workers agree on, for other packages of mpips; roles and communicators."""
        self._route, self._operations, self.generations = route, settings.operations, generations

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
        return self.settings.generation.number

    @property
    def spares(self) -> int:
        """Return how many ranks wait to take a place: the same on all workers until the next generation."""
        return self.layout.spares

    @property
    def resumed(self) -> int | None:
        """The step to begin with: so many rounds of each key are stored. 0 where a training begins. More where a job
        has started again, or this worker has joined one. None where its keys stand at several rounds."""
        return self.settings.resumed

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return whether the store can do it; the one capability that is asked for is "optimizer"."""
        if capability.lower() != "optimizer":
            raise of_caller(ValueError(f"unknown capability {capability!r}; known: optimizer"))
        return True

    # ---- all workers together; blocking. Bad or different arguments: all raise the same, and nothing has changed

    def init(self, key: Any, value: Any) -> None:
        """Store the first values: rank 0's count. Keys, shapes and dtypes are the same everywhere."""
        self.settings.init(key, value)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """`init`, then `pull`; nothing is made where `out` is bad."""
        self.settings.init(key, value, lambda keys: self._operations.see_pull(keys, key, out, priority))
        self.pull(key, out, priority)

    def set_optimizer(self, optimizer: str | Optimizer, keys: Any = None, **keywords: Any) -> None:
        """Let the servers (without servers: the workers) update these keys, or all, by this optimizer from now on.

        By name and keywords (`"sgd", learning_rate=0.1`) or an `mpips.optimizers` record. State starts anew.
        """
        self.settings.set_optimizer(optimizer, keys, keywords)

    def update_optimizer(self, keys: Any = None, **numbers: Any) -> None:
        """Change numbers of the optimizers of these keys, or of all, such as `learning_rate`, from the next round on.
        State stays. A number may be a schedule (`mpips.optimizers.schedules`), counted in updates of the key."""
        self.settings.update_optimizer(keys, numbers)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress pushes of float keys from now on, e.g. `{"type": "2bit", "threshold": 0.5}`."""
        self.settings.set_compression(compression_params)

    def recut(self, keys: Sequence[Name], new: Mapping[Name, int]) -> None:
        """Cut the elements of `keys`, one behind the other, anew into 1-D keys `new` of so many elements.

        Values, the optimizer's state and what compression kept back go with them; `keys` exist no more, and their
        memory is given back. ValueError where the elements differ in number or dtype, a new key exists already, the
        optimizer has updated some of `keys` more often than others, or `staleness` holds a push of them back.
        """
        recut(self.settings, keys, new)

    def forget(self, keys: Sequence[Name]) -> None:
        """Give up keys, one or a list, and their memory on workers and servers."""
        self.settings.forget(keys)

    def barrier(self) -> None:
        """Wait until all workers have come. A pull after it sees all pushes before it that `staleness` lets through."""
        self.settings.barrier()

    def save(self, path: str | os.PathLike[str], wait: bool = True) -> Saving | None:
        """Write one checkpoint file: values, optimizers and their state, residuals of compression, after one round.

        A kill at any moment leaves the old file or the new one. `wait=False`: training goes on; `wait()` of what is
        returned blocks until the file is there. ValueError where it cannot be written.
        """
        saving = save(self.settings, path, wait)
        self._route.write(saving)
        return saving

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read back what `save` wrote, with any number of servers, clients and workers. Rank 0 reads.

        Keys that the store does not have are made. ValueError where the file does not fit the keys that it has.
        """
        load(self.settings, path)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Rank 0 writes the optimizers' state of all keys (safetensors), if `dump_optimizer` with names and options."""
        save_states(self.settings, fname, dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """Read back what `save_optimizer_states` wrote, with any number of servers."""
        load_states(self.settings, fname)

    def recover(self, grow: bool = False) -> Rounds:
        """Begin the next generation after a StoreError. What was under way is forgotten, values stay.

        Returns of each key the last complete round, which it stands at: so many pushes of each worker are in it, in an
        asynchronous store of this one (of its client). `.step` is that of all keys. `.torn` names keys of which a round
        was applied in part: load a checkpoint of them. `grow`: ranks that wait (`spares`) become workers, also where
        nobody has died; all call it after the same step, or one does and the others' calls raise StoreError.
        """
        rounds = self.generations.recover(grow)
        if self.layout.survives:
            self._route.before_a_push(self.settings.pushes)
        return rounds

    # ---- pushes and pulls

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Contribute to the keys; returns when the arrays may be overwritten. Higher priority goes first.

        Without an optimizer the stored value becomes the sum over all workers. A value may be an `mpips.RowSparse`.
        """
        if not self._route.try_fast("push", key, value, None, priority):
            self._route.call("push", key, value, None, priority)

    def ipush(self, key: Any, value: Any, priority: int = 0, turns: Turns = ()) -> Handle:
        """`push` that returns a handle at once; the arrays must stay as they are until it is done.

        Operations on one key run in program order; so do those with one of `turns` (any hashable names) in common. Of
        those that may run, higher priority goes first; but in program order where they hold collectives (`mpi_*` kinds,
        and stores without servers), as these must start in one order on all workers.
        """
        return self._route.start("push", key, value, None, priority, turns)

    def taken(self, key: Any, push: Handle) -> Handle:
        """A handle that ends when the servers have read what `push`, the last `ipush` of these keys, sends. (The push
        ends when its arrays may be overwritten.) It is `push` itself where that is all that can be known: without
        servers, and in asynchronous stores."""
        return self._operations.taken(key, push, self.layout.num_servers > 0 and not self.layout.asynchronous)

    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the keys' values into `out`, after this worker's pushes of them; returns when they are there."""
        if not self._route.try_fast("pull", key, None, out, priority):
            self._route.call("pull", key, None, out, priority)

    def ipull(self, key: Any, out: Any, priority: int = 0, turns: Turns = ()) -> Handle:
        """`pull` that returns a handle at once; `out` holds the values when it is done."""
        return self._route.start("pull", key, None, out, priority, turns)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push` and `pull` in one, into `value` where `out` is None; returns when the result is there."""
        if not self._route.try_fast("pushpull", key, value, out, priority):
            self._route.call("pushpull", key, value, out, priority)

    def ipushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0, turns: Turns = ()) -> Handle:
        """`pushpull` that returns a handle at once."""
        return self._route.start("pushpull", key, value, out, priority, turns)

    def row_sparse_pull(self, key: Any, out: Any, priority: int = 0, row_ids: Any = None) -> None:
        """Write rows of the keys into `out` of shape (len(row_ids), ...), in the order of `row_ids`; blocking.

        `row_ids`: integers (k,), any order, repeats allowed, or a list of them for a list of keys.
        """
        self._operations.pull_rows(key, out, row_ids, priority)

    # ---- the end

    def close(self) -> None:
        """Finish what is under way and let the servers go; a process that ends does so by itself. Collective.

        Who closes while others wait for it in a call ends the generation there. StoreError where a death has undone
        what this worker has pushed (`spares`): the store is open still.
        """
        self.generations.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """`close`. Where the block has raised, all other workers hear so at once, and nobody is waited for."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.generations.give_up(error)

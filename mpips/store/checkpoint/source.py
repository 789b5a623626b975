"""A store as checkpoints see it: its keys, a way to run tasks, and what compression has kept back of each worker.

Where as many workers (or clients) load as have saved, each gets back its own residuals. Otherwise worker i of n gets
the sum of those numbered i, i + n, i + 2n, ...: nothing that was kept back is lost, and nothing is sent twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

import collectives
from collectives.fabric.tasks import Task
from mpips.compression.base import Compressor
from mpips.optimizers.schedules import Groups
from mpips.store.checkpoint.file import residual_dtype
from mpips.store.keys.arguments import packed, runs, unpack
from mpips.store.keys.key import Key, Name, label
from mpips.store.roles import Layout
from mpips.store.runtime.engine import Handle
from mpips.store.runtime.generation import Generation
from mpips.store.runtime.rendezvous import Items
from mpips.store.worker.interface import Backend, Frozen, Saves, Snapshot, States, Stored, Written

__all__ = [
    "Backend", "Frozen", "Handle", "Saves", "Snapshot", "States", "Store", "Stored", "Written", "from_worker",
    "senders", "served",
]  # fmt: skip

T = TypeVar("T")
Array = NDArray[Any]


class Store(Protocol):
    """A `KVStore` as `save`, `load` and `recut` see it."""

    layout: Layout
    backend: Backend
    keys: dict[Name, Key]
    groups: Groups
    """The optimizers."""
    compressor: Compressor | None
    saving: Written | None
    """The last one that was begun in the background."""

    @property
    def generation(self) -> Generation: ...

    def agree(
        self, what: str, items: Items = (), refusal: BaseException | None = None, noun: str = "key", data: bytes = b""
    ) -> list[bytes]:
        """Return everybody's data, as all workers ask for the same; or all raise the same ValueError or TypeError."""
        ...

    def settled(
        self, what: str, items: Items = (), refusal: BaseException | None = None, noun: str = "key", data: bytes = b""
    ) -> list[bytes]:
        """`agree`; then nothing that was pushed before is under way. ValueError on all where workers have not pushed
        equally often."""
        ...

    def finish(self) -> None:
        """Wait for all operations that were started before."""
        ...

    def settle(self) -> None:
        """`finish`, and wait until the servers have what this worker has pushed."""
        ...

    def run(self, what: str, task: Task[T], names: Sequence[Name] = ()) -> T:
        """Run a task, blocking; what it raises ends the generation."""
        ...

    def start(self, what: str, task: Task[Any]) -> Handle:
        """Run a task beside the training. Only the end of the store waits for it."""
        ...

    def known(self, names: Any, what: str) -> list[Key]:
        """Return the keys of these names, one or a list; ValueError or TypeError where there is none."""
        ...

    def add(self, keys: Iterable[Key]) -> None:
        """Keys that have been made."""
        ...

    def drop(self, keys: Sequence[Key], what: str) -> None:
        """Give up keys; collective, after all have agreed on it."""
        ...


def served(layout: Layout) -> bool:
    """Return whether servers keep the values."""
    return layout.num_servers > 0


def senders(layout: Layout) -> list[range]:
    """Return the workers that compress as one, by ranks: clients where servers sum over clients, else each worker
    alone."""
    if served(layout) and layout.kind.startswith("mpi_"):
        return [range(*client) for client in layout.clients]
    return [range(worker, worker + 1) for worker in range(layout.num_workers)]


def from_worker(layout: Layout, root: int, names: Sequence[Name], arrays: Sequence[Array], what: str = "load") -> None:
    """Copy the root's arrays, of keys of these names, to all workers. Collective over them, blocking."""
    if layout.num_workers > 1:
        text = label(what, names)
        for run in runs(array.nbytes for array in arrays):
            vector = packed(arrays[run])
            collectives.broadcast(vector, layout.workers, root=root, label=text)
            unpack(vector, arrays[run])


def compressible(dtype: np.dtype | str) -> bool:
    """Return whether pushes of keys of this dtype are compressed."""
    return np.dtype(dtype).kind not in "iub"


def gathered(layout: Layout, stored: Stored, keys: Sequence[Key]) -> Task[list[list[Array]]]:
    """Return the residuals of float keys, an array a key, of each sender; on worker 0 only (elsewhere: nothing).
    Collective."""
    mine = yield from stored.residuals(keys)
    ends = np.cumsum([key.size for key in keys])[:-1]
    parts = [np.zeros(key.size) for key in keys] if mine is None else np.split(mine, ends)
    kept = [part.astype(residual_dtype(key.dtype.name)) for key, part in zip(keys, parts, strict=True)]
    found = []
    for group in senders(layout):
        arrays = kept if group[0] == layout.rank else [np.empty_like(array) for array in kept]
        if group[0]:
            from_worker(layout, group[0], [key.name for key in keys], arrays, "save")
        found.append(arrays)
    return found if layout.rank == 0 else []


def given_back(
    layout: Layout, stored: Stored, keys: Sequence[Key], saved: Sequence[Sequence[Array]], groups: int
) -> Task[None]:
    """Give each sender what is its own of `saved` (worker 0's count; an array a key), which `groups` senders had.
    Collective."""
    group = next(number for number, ranks in enumerate(senders(layout)) if layout.rank in ranks)
    mine = [np.zeros(key.size) for key in keys]
    for number in range(groups):
        arrays = saved[number]
        from_worker(layout, 0, [key.name for key in keys], arrays)
        if number % len(senders(layout)) == group:
            for total, array in zip(mine, arrays, strict=True):
                total += array
    yield from stored.put_residuals(keys, mine)

"""What a checkpoint needs of a store: its keys, a frozen copy of them, and a way to run what takes a while."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from numpy.typing import NDArray

from mpips.compression import Compressor
from mpips.keys.key import Key, Name
from mpips.layout import Layout
from mpips.optimizers import Groups
from mpips.runtime.tasks import Task

T = TypeVar("T")
Array = NDArray[Any]
States = dict[Name, tuple[int, list[Array]]]
"""Of each key: how often the optimizer has updated it, and its 1-D state arrays, each as long as the key."""


class Frozen(NamedTuple):
    """A key in a snapshot: its last round, how often its optimizer has updated it, and the dtypes of its state."""

    round: int
    step: int
    dtypes: tuple[str, ...]


class Snapshot(Protocol):
    """What a store held after one round. On worker 0 it can be read; on the others `records` is empty."""

    records: Mapping[Name, Frozen]

    def read(self, key: Key, slot: int, start: int, stop: int) -> Task[Array]:
        """Elements [start, stop) of the values (slot -1) or of an array of state; good until the next read."""
        ...

    def release(self) -> Task[None]:
        """Give its memory back."""
        ...


class Backend(Protocol):
    """What a store's backend does for a checkpoint; all workers call these, in the same order."""

    def snapshot(self, keys: Sequence[Key]) -> Task[Snapshot]:
        """A copy that nothing pushed later changes. Nothing is under way on the keys."""
        ...

    def init(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Make keys with worker 0's values."""
        ...

    def put(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Store worker 0's values, flat, under keys that are there; they are torn no more."""
        ...

    def states(self, keys: Sequence[Key]) -> Task[States]:
        """Steps and states of the optimizers; complete on worker 0."""
        ...

    def put_states(self, keys: Sequence[Key], states: States) -> Task[None]:
        """Give them back: worker 0's count; without servers they are the same everywhere."""
        ...

    def residuals(self, keys: Sequence[Key]) -> Task[Array | None]:
        """What compression kept back of this worker's (or its client's) pushes, float64, one key behind the other; None
        where nothing is compressed."""
        ...

    def put_residuals(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Give it back, one flat array a key."""
        ...


class Handle(Protocol):
    """An operation of the engine."""

    def test(self) -> bool:
        """Whether it is over; raises what made it fail."""
        ...

    def wait(self) -> Any:
        """Block until it is over; what it returned."""
        ...


class Store(Protocol):
    """What `save` and `load` see of a `KVStore`."""

    layout: Layout
    backend: Backend
    keys: dict[Name, Key]
    groups: Groups
    """The optimizers."""
    compressor: Compressor | None

    def agree(
        self,
        what: str,
        items: Sequence[tuple[Any, str]] = (),
        refusal: BaseException | None = None,
        noun: str = "key",
        data: bytes = b"",
    ) -> list[bytes]:
        """All workers ask for the same, and learn everybody's data, or all raise the same ValueError or TypeError."""
        ...

    def finish(self) -> None:
        """Wait for all operations that were started before."""
        ...

    def settle(self) -> None:
        """`finish`, and wait until the servers have applied what this worker has pushed."""
        ...

    def run(self, what: str, task: Task[T]) -> T:
        """Run a task, blocking; what it raises ends the epoch."""
        ...

    def start(self, what: str, task: Task[Any]) -> Handle:
        """Run a task beside the training. Only the end of the store waits for it."""
        ...

    def use(self, groups: Groups, compressor: Compressor | None) -> Task[None]:
        """Set these optimizers and this compression, as `set_optimizer` and `set_gradient_compression` do."""
        ...

    def add(self, keys: Iterable[Key]) -> None:
        """Keys that have been made."""
        ...


def served(layout: Layout) -> bool:
    """Whether servers keep the values."""
    return layout.num_servers > 0


def senders(layout: Layout) -> list[range]:
    """The workers that compress as one, by ranks: clients where servers sum over clients, else each worker alone."""
    if served(layout) and layout.kind.startswith("mpi_"):
        return [range(*client) for client in layout.clients]
    return [range(worker, worker + 1) for worker in range(layout.num_workers)]

"""Define the protocol of a store's backend: with servers (`remote`) and without (`replicated`).

Arguments have been checked: arrays are C-contiguous host arrays of the key's dtype; `flat` and `out` are 1-D and hold
the whole key. Every method that returns a task does nothing before the task's first step. Tasks raise what they find:
who runs them (`worker.operations`) ends the generation, but for a ValueError that all workers raise, marked by
`of_caller`, or a RoomError, with which nothing has changed. Arrays may be read and written until the task is over, and
no longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from mpips.collectives.fabric.tasks import Task
from mpips.collectives.recorder import own as recorder
from mpips.compression.compressors import Compressor
from mpips.optimizers.base import Optimizer
from mpips.optimizers.schedules import Groups
from mpips.store.keys.key import Array, FastList, Key, Name, Rounds
from mpips.store.keys.row_sparse import RowSparse
from mpips.store.transport.frames import FrozenTable, MakeTable, TableStats

States = dict[Name, tuple[int, list[Array]]]
"""Of each key: how often the optimizer has updated it, and its 1-D state arrays, each as long as the key."""


class Frozen(NamedTuple):
    """A key in a snapshot: its last round, how often its optimizer has updated it, and the dtypes of its state."""

    round: int
    step: int
    dtypes: tuple[str, ...]


class Recovered(NamedTuple):
    """Hold the content of a store when the next generation begins, the same on all workers."""

    rounds: Rounds
    keys: list[Key]
    groups: Groups
    compressor: Compressor | None
    tables: Sequence[MakeTable] = ()


@dataclass
class KnownTable:
    """A table as a worker knows it."""

    card: MakeTable
    """How servers are told of it."""
    round: int = 0
    """How often this worker has pushed; with `recover`, how many of its pushes count."""
    refusals: int = 0
    """How many rounds were refused that this worker has heard of."""
    loads: int = 0
    """How often its rows were loaded from a file."""
    room: dict[int, int] = field(default_factory=dict)
    """By server how many ids this worker may push next without asking for room."""
    noun = "table"

    @functools.cached_property
    def numbers(self) -> memoryview:
        """Return the numbers of what this worker has done with it, as others see them: `recorder.page.TABLE`."""
        return recorder.numbers_of(self.name)

    @property
    def name(self) -> str:
        """Return its name."""
        return self.card.table

    def note_load(self) -> None:
        """Note that its rows become those of a file, for which servers have promised no room."""
        self.loads, self.room = self.loads + 1, {}


class FrozenRows(Protocol):
    """Tables as they were at one moment, for one worker. `parts`: of each what every server has, in their order."""

    @property
    def parts(self) -> Mapping[str, Sequence[FrozenTable]]: ...

    def read(
        self, table: str, server: int, start: int, stop: int, names: Sequence[str] = ()
    ) -> Task[Mapping[str, bytes]]:
        """Return rows that lie at [start, stop) on a server, of these arrays or of all. What lies before was read."""

    def dropped(self, table: str, server: int) -> Task[bytes]:
        """Return the ids that were dropped on a server."""

    def release(self) -> Task[None]:
        """Give its memory back."""


class Snapshot(Protocol):
    """Keep the content of a store after one round. On worker 0 it can be read; on the others `records` is empty."""

    @property
    def records(self) -> Mapping[Name, Frozen]: ...

    def read(self, key: Key, slot: int, start: int, stop: int) -> Task[Array]:
        """Elements [start, stop) of the values (slot -1) or of an array of state; good until the next read."""

    def release(self) -> Task[None]:
        """Give its memory back."""


class Stored(Protocol):
    """Read and write the states of keys: their content goes to files and to other keys, and comes back."""

    def states(self, keys: Sequence[Key]) -> Task[States]:
        """Steps and optimizer states; complete on rank 0 (without servers: everywhere). Collective."""

    def put_states(self, keys: Sequence[Key], states: States) -> Task[None]:
        """Give them back. Rank 0's count; others' may be empty, but without servers they must be the same everywhere.
        ValueError where they do not fit the optimizer. Collective."""

    def residuals(self, keys: Sequence[Key]) -> Task[Array | None]:
        """Return what compression kept back in this worker's client, float64, one key behind the other; None where
        nothing is compressed. Collective."""

    def put_residuals(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Give it back, one 1-D array a key, to this worker. Local."""

    def snapshot(self, keys: Sequence[Key], alone: bool = False) -> Task[Snapshot]:
        """A copy that nothing pushed later changes. Collective; `alone`: worker 0 of an asynchronous store makes it by
        itself."""


class Transfers(Protocol):
    """Push and pull keys, several as one step where that is faster. Where others take part, all give the same list."""

    def push(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task[None]:
        """Contribute to the keys' next rounds; when it is over, `flats` may be overwritten."""

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None]:
        """Write the keys' values into `outs`, after this worker's pushes of them."""

    def pushpull(self, keys: Sequence[Key], flats: Sequence[Array], outs: Sequence[Array], priority: int) -> Task[None]:
        """Both; every `out` may be its own `flat`, and overlaps with no other."""

    def push_rows(self, key: Key, rows: RowSparse, priority: int) -> Task[None]:
        """Contribute some rows to the key's next round."""

    def pull_rows(self, key: Key, out: Array, ids: Array) -> Task[None]:
        """Write rows of the key into `out` of shape (len(ids), ...); `ids`: int64 (k,), any order, repeats allowed."""


class Tables(Protocol):
    """Make, push and pull tables (`worker.table`). Ids are int64 (k,), any order, repeats allowed; rows (k, dim)."""

    def make(self, card: MakeTable) -> Task[None]:
        """Make a table. Collective; ValueError on all workers where a server cannot."""

    def update(self, table: str, numbers: bytes) -> Task[None]:
        """Update rows with other numbers of the optimizer from the next update on. Collective."""

    known: Mapping[str, KnownTable]

    def push(self, pushes: Sequence[tuple[KnownTable, Array, Array]]) -> Task[None]:
        """Contribute to the next round of each table, by ids and gradients; when it is over, these may be overwritten.

        RoomError where a round is refused, or one before it was: nothing of all counts, and each table's round says
        which counts last."""

    def pull(self, table: KnownTable, ids: Array, out: Array) -> Task[None]:
        """Write the rows of `ids` into `out`, after this worker's pushes. RoomError where one of them was refused."""

    def stats(self, table: KnownTable, ahead: int = 0) -> Task[list[TableStats]]:
        """Return each server's figures after this worker's pushes and `ahead` more. Raises RoomError as `pull` does."""

    def freeze(self, tables: Sequence[str], since: int = 0, export: int = -1) -> Task[FrozenRows]:
        """Keep the rows of tables as they are now, those that updates after `since` have named. For one worker.

        `export`: of so many updates, with the ids of rows that were dropped."""

    def reset(self, table: str, updates: int) -> Task[None]:
        """Let all servers forget the table's rows. For one worker."""

    def put_rows(self, table: str, arrays: Mapping[str, Array]) -> Task[None]:
        """Give the servers rows: all arrays of the table by name, ids each once. For one worker."""

    def end_load(self, table: str) -> Task[None]:
        """Let the servers know that they have all rows of the table. For one worker."""

    def at_rank_0(self, do: Callable[[], Task[bytes]], what: str) -> Task[bytes]:
        """Rank 0 does it. Collective; ValueError on all where it raises one, and nothing has changed."""


class Backend(Protocol):
    """The operations of one store on one worker. "Collective": all workers call it, in the same order."""

    direct: bool
    """Set by `worker.operations` while it runs a task with nothing else under way: a task may then block in a
    collective instead of yielding. A worker that does and one that does not take part in the same collective."""
    communicators: tuple[Hashable, ...]
    """Names of what all operations hold collectives on: operations that take turns on them start in program order."""

    @property
    def tables(self) -> Tables | None:
        """Return the tables of a store with servers."""

    @property
    def stored(self) -> Stored:
        """Return what keys have beside their values."""

    @property
    def quick_list(self) -> FastList | None:
        """The fast path of lists, where keys are not better pushed one by one."""

    # ---- keys

    def init(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Make keys with rank 0's values, and bind their fast paths. Collective."""

    def forget(self, keys: Sequence[Key]) -> Task[None]:
        """Give up keys and their memory; nothing is under way on them. Collective."""

    def store_values(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Store worker 0's values under keys that are there; they are torn no more. Collective."""

    # ---- pushes and pulls

    @property
    def transfers(self) -> Transfers:
        """Return the pushes and pulls of the present generation."""

    def versions(self, keys: Sequence[Key]) -> Task[list[int]]:
        """Return how many rounds each key holds, where asynchronous how many pushes of all workers, after this worker's
        own. Local."""

    def pull_versions(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[list[int]]:
        """Write the keys' values into `outs`, each as all its parts stand at one version; return these versions."""

    def listen(self) -> None:
        """Take in what servers have said; to be called before each step of a task. Does not block."""

    def settle(self, keys: Sequence[Key], meets: bool = False) -> Task[None]:
        """Wait until the servers have read all that this worker has pushed, and where asynchronous, applied it.

        `meets`: this worker waits for all then, and pushes nothing until all do: `staleness` counts it not."""

    def tell_wait(self, keys: Sequence[Key], tables: Sequence[KnownTable]) -> None:
        """Tell servers that the program has waited long for a call with these keys, and does nothing else. Local.

        So workers that wait for one another in a circle are found."""

    def sums(self) -> tuple[int, str]:
        """Return how many sums of all workers this one has begun, and what the last one is; (0, "") with servers.
        Local."""

    # ---- settings

    def check_updated(self, keys: Sequence[Key], what: str) -> None:
        """ValueError where nothing would apply a push of one of them: in an asynchronous store a key without an
        optimizer. Local."""

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None) -> Task[None]:
        """Update these keys by it from now on, state anew; None: all keys, also those to come. Collective.

        ValueError on all workers, and nothing has changed, where a server does not know it.
        """

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None) -> Task[None]:
        """Change numbers of the optimizers of these keys from their next round on; state stays. Collective."""

    def set_compression(self, options: dict[str, Any], compressor: Compressor) -> Task[None]:
        """Compress pushes of float keys from now on; residuals start at zero. Collective."""

    # ---- the end

    def finish(self) -> None:
        """This worker makes no more calls: say goodbye to the servers. Not collective; does not wait."""


# ---- checkpoints, as the calls of a worker see them


class Written(Protocol):
    """A checkpoint that is written beside the training."""

    def go_on(self) -> bool:
        """Begin the next piece, if it is time; whether all is over. Does not block."""

    def finish(self) -> None:
        """Wait until it is over."""


class Saves(Protocol):
    """The schedule by which a store saves itself (`resume.RegularSaves`)."""

    pushing: object
    """The key, or list of keys, of the push that is being made; (): none."""

    def is_due(self, key: object) -> bool:
        """Return whether a push of this key, or list of keys, begins a step before which the store has to be saved."""

    def count(self, key: object) -> None:
        """Such a push has been made."""

    def save(self) -> Written | None:
        """Begin to save what is stored, beside the training; None where nothing was begun."""

    def save_last(self, alike: bool) -> None:
        """Begin to save what is stored at the end, unless it has been. `alike`: all workers have pushed as often."""

    def set_rounds(self, rounds: Mapping[Name, int]) -> None:
        """The store stands at these rounds, after `recover`."""

    def leave(self) -> tuple[str, int]:
        """Save no more, as the caller will: to which folder, and after how many rounds each."""

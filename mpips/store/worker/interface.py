"""Define the protocol of a store's backend: with servers (`remote`) and without (`replicated`).

Contract of all methods: arguments have been checked. Arrays are C-contiguous host arrays of the key's dtype; `flat` and
`out` are 1-D and hold the whole key. A method that returns a task does nothing before the task's first step. Arrays may
be read and written until the task is over, and not after.

Errors: a task raises what goes wrong, and its runner (`worker.operations`) then ends the generation. Two errors do not
end it, because nothing has changed: a ValueError that all workers raise (marked by `of_caller`), and a RoomError.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mpips.collectives.fabric.tasks import Task
from mpips.compression.compressors import Compressor
from mpips.optimizers.base import Optimizer
from mpips.optimizers.schedules import Groups
from mpips.store.keys.key import Array, FastList, Key, Name, Pushed, Rounds
from mpips.store.keys.row_sparse import RowSparse

if TYPE_CHECKING:
    from mpips.store.checkpoint.file import CollectionRecord, Reader

# key -> (number of updates by the optimizer, its 1-D state arrays, each as long as the key)
States = dict[Name, tuple[int, list[Array]]]


class Frozen(NamedTuple):
    """A key in a snapshot: its last round, its number of optimizer updates, and the dtypes of its state."""

    round: int
    step: int
    dtypes: tuple[str, ...]


class Recovered(NamedTuple):
    """The content of a store when the next generation begins. The same on all workers."""

    rounds: Rounds
    keys: list[Key]
    groups: Groups
    compressor: Compressor | None
    # name of a service -> its `server.service.ServicePlan`
    services: Mapping[str, Any] = {}


class Snapshot(Protocol):
    """The content of a store after one round. Worker 0 can read it; on other workers `records` is empty."""

    @property
    def records(self) -> Mapping[Name, Frozen]: ...

    def read(self, key: Key, slot: int, start: int, stop: int) -> Task[Array]:
        """Return elements [start, stop) of the key's values (slot -1) or of a state array.

        Valid until the next read.
        """

    def release(self) -> Task[None]:
        """Free its memory."""


class StateAccess(Protocol):
    """Reads and writes the states of keys, for files and for `recut`."""

    def states(self, keys: Sequence[Key]) -> Task[States]:
        """Return steps and optimizer states. Complete on rank 0; without servers, on every rank. Collective."""

    def put_states(self, keys: Sequence[Key], states: States) -> Task[None]:
        """Write steps and optimizer states. Collective.

        Only rank 0's states are used, and other ranks may give none. Without servers they must be the same everywhere.
        ValueError if they do not fit the optimizer.
        """

    def residuals(self, keys: Sequence[Key]) -> Task[Array | None]:
        """Return the residuals of compression in this worker's client: float64, one key after another. Collective.

        None if nothing is compressed.
        """

    def put_residuals(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Write residuals, one 1-D array for each key, to this worker. Local."""

    def snapshot(self, keys: Sequence[Key], alone: bool = False) -> Task[Snapshot]:
        """Make a copy that later pushes do not change. Collective.

        Args:
            alone: Worker 0 of an asynchronous store makes it by itself.
        """


class Transfers(Protocol):
    """Pushes and pulls keys, several in one step if that is faster. In collectives all workers give the same list."""

    def push(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task[None]:
        """Contribute to the keys' next rounds. When the task is over, `flats` may be overwritten."""

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None]:
        """Write the keys' values into `outs`, with all earlier pushes of this worker."""

    def pushpull(self, keys: Sequence[Key], flats: Sequence[Array], outs: Sequence[Array], priority: int) -> Task[None]:
        """Push and pull. An array of `outs` may be the same as its array of `flats`, but must not overlap any other."""

    def push_rows(self, key: Key, rows: RowSparse, priority: int) -> Task[None]:
        """Contribute some rows to the key's next round."""

    def pull_rows(self, key: Key, out: Array, ids: Array) -> Task[None]:
        """Write rows of the key into `out` of shape (len(ids), ...). `ids`: int64 (k,), any order, repeats allowed."""


class CheckpointPiece(Protocol):
    """A part of a checkpoint that is read and written at once."""

    @property
    def nbytes(self) -> int:
        """Size in the file."""

    def read(self) -> Task[Sequence[tuple[str, Array]]]:
        """Return (name of a tensor, its next elements, flat). The arrays are valid until the next read."""


class FrozenService(Protocol):
    """The collections of a service as they were at one moment."""

    @property
    def records(self) -> Sequence[CollectionRecord]:
        """What the header says of each collection."""

    def pieces(self) -> Iterator[CheckpointPiece]:
        """Yield everything that the collections hold."""

    def release(self) -> Task[None]:
        """Free its memory."""


class WorkerService(Protocol):
    """A worker's part in a service, which is anything that servers keep besides keys (see `server.service`).

    A service keeps *collections*. A collection has a name that no key has, and is pushed to in rounds, as keys are.
    """

    # the name of its kind; in the header of a checkpoint its records have it, too
    name: str

    @property
    def collections(self) -> Mapping[str, Pushed]:
        """The collections that this worker knows, by name."""

    def refusals(self) -> bytes:
        """Encode which refused rounds this worker knows of. All workers have to know of the same ones."""

    def learn_refusals(self, refusals: Sequence[bytes]) -> Task[None]:
        """Learn of the refused rounds that only other workers know of. RoomError if there are any."""

    def tell_wait(self, names: Sequence[Name]) -> None:
        """Tell the servers that the program has waited long in a call with those of these names that are its own."""

    def describe(self, known: Container[Name]) -> bytes:
        """Return the collections whose names are in `known`, for a recovery. b"" if there are none."""

    def renew(self) -> None:
        """Forget what belongs to the generation that has ended. Servers no longer use this worker's memory."""

    def begin(self, plan: Any, rounds: Mapping[Name, int]) -> None:
        """Begin the next generation with the collections of a `ServicePlan` (None: with none), at these rounds."""

    def freeze(self) -> Task[FrozenService]:
        """Freeze all collections as they are now. Called by one worker."""

    def check_records(self, path: str, records: Sequence[Any]) -> None:
        """Raise ValueError unless a checkpoint's records have all collections of this service, and fit them."""

    def load(self, reader: Reader | None, records: Sequence[Any]) -> Task[list[str]]:
        """Make the collections of a checkpoint that do not exist, and replace the content of all. Collective.

        Args:
            reader: The open checkpoint, on worker 0.

        Returns:
            The names of the collections that it has made.
        """


class Backend(Protocol):
    """The operations of one store on one worker. "Collective" means: all workers call it, in the same order."""

    # Set by `worker.operations` while it runs a task and no other is under way. The task may then block in a collective
    # instead of yielding. Workers that block and workers that yield can take part in the same collective.
    direct: bool
    # names of the communicators that all operations use; operations take turns on them, in program order
    communicators: tuple[Hashable, ...]

    @property
    def services(self) -> Sequence[WorkerService]:
        """Everything that servers keep besides keys. Empty in a store without servers."""

    @property
    def stored(self) -> StateAccess:
        """Access to everything that keys have besides their values."""

    @property
    def quick_list(self) -> FastList | None:
        """The fast path of lists, or None if keys are better pushed one by one."""

    # ---- keys

    def init(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Make keys with rank 0's values, and bind their fast paths. Collective."""

    def forget(self, keys: Sequence[Key]) -> Task[None]:
        """Remove keys and free their memory. No operation on them is under way. Collective."""

    def store_values(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Set existing keys to worker 0's values. They are no longer torn. Collective."""

    # ---- pushes and pulls

    @property
    def transfers(self) -> Transfers:
        """The pushes and pulls of the present generation."""

    def versions(self, keys: Sequence[Key]) -> Task[list[int]]:
        """Return each key's version after this worker's own pushes. Local.

        That is the number of rounds; in an asynchronous store, the number of pushes of all workers.
        """

    def pull_versions(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[list[int]]:
        """Write the keys' values into `outs`, each with all its parts at one version, and return these versions."""

    def listen(self) -> None:
        """Take in messages of the servers. Called before each step of a task. Does not block."""

    def settle(self, keys: Sequence[Key], meets: bool = False) -> Task[None]:
        """Wait until the servers have read, and in an asynchronous store applied, all pushes of this worker.

        Args:
            meets: This worker waits for all others afterwards, and pushes nothing until all have come. `staleness` then
                does not count it.
        """

    def tell_wait(self, names: Sequence[Name]) -> None:
        """Tell the servers that the program has waited long in a call with these keys and collections. Local.

        From this the servers detect workers that wait for one another in a circle.
        """

    def sums(self) -> tuple[int, str]:
        """Return the number of sums over all workers that this one has begun, and the last one's name. Local.

        (0, "") in a store with servers.
        """

    # ---- settings

    def check_updated(self, keys: Sequence[Key], what: str) -> None:
        """Raise ValueError if an asynchronous store has no optimizer to apply a push of a key. Local."""

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None) -> Task[None]:
        """Update keys by an optimizer from now on, with new state. Collective.

        ValueError on all workers, with nothing changed, if a server does not know the optimizer.

        Args:
            keys: None: all keys, also those made later.
        """

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None) -> Task[None]:
        """Change hyperparameters of keys from their next round on. The optimizers' state is kept. Collective."""

    def set_compression(self, options: dict[str, Any], compressor: Compressor) -> Task[None]:
        """Compress pushes of float keys from now on. Residuals start at zero. Collective."""

    # ---- the end

    def finish(self) -> None:
        """Tell the servers that this worker makes no more calls. Local; does not wait."""


# ---- checkpoints, as the calls of a worker see them


class BackgroundSave(Protocol):
    """A checkpoint that is written while the training goes on."""

    def go_on(self) -> bool:
        """Begin writing the next pieces if it is time. Return True once the file is complete. Does not block."""

    def finish(self) -> None:
        """Wait until all is written."""


class SaveSchedule(Protocol):
    """The schedule by which a store saves itself (`resume.RegularSaves`)."""

    # the key, or list of keys, of the push that is being made; () outside a push
    pushing: object

    def is_due(self, key: object) -> bool:
        """True if a push of this key, or list of keys, begins a step before which the store has to be saved."""

    def count(self, key: object) -> None:
        """Count a push of this key, or list of keys."""

    def save(self) -> BackgroundSave | None:
        """Begin a save in the background. None if none was begun."""

    def save_last(self, alike: bool) -> None:
        """Begin the save at the end of the store, unless it is saved already.

        `alike`: all workers have pushed as often.
        """

    def set_rounds(self, rounds: Mapping[Name, int]) -> None:
        """Continue to count from `rounds`, the state of the store after `recover`."""

    def leave(self) -> tuple[str, int]:
        """Stop saving, because the caller takes over. Return the folder, and the number of rounds between two saves."""

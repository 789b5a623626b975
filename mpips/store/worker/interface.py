"""Protocols of a store's backend. Stores with servers (`remote`) and without servers (`replicated`) implement them.

Contract of all methods: the caller has checked the arguments. Arrays are C-contiguous host arrays of the key's dtype;
`flat` and `out` are 1-D and hold the whole key. A method that returns a task does nothing before the task's first step.
A task may read and write its arrays only until it is over.

Errors: if a task raises an exception, the code that runs it (`worker.operations`) ends the generation, that is, the
store is unusable until it recovers. Two exceptions do not end the generation, because they leave the store unchanged: a
ValueError that all workers raise (marked by `of_caller`), and a RoomError.

Some words: a key is *torn* if a failure has left only some of its parts updated. A *service* is anything that servers
keep besides keys, and its parts are *collections*. *Residuals* are the parts of gradients that compression has held
back.
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
    """The content of a store after a recovery, when the next generation begins. All workers get equal values."""

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
        """Return elements [start, stop) of one array of the key.

        The array is valid until the next read.

        Args:
            slot: -1 for the key's values, or the index of one of the optimizer's state arrays.
        """

    def release(self) -> Task[None]:
        """Free the memory of the snapshot."""


class StateAccess(Protocol):
    """Reads and writes optimizer states and residuals of keys, for checkpoints and for `recut`."""

    def states(self, keys: Sequence[Key]) -> Task[States]:
        """Return the optimizer's step and state for each key. Collective.

        In a store with servers only rank 0 gets the states, and other ranks get an empty dict. Without servers every
        rank gets them.
        """

    def put_states(self, keys: Sequence[Key], states: States) -> Task[None]:
        """Set the optimizer's step and state for each key. Collective.

        In a store with servers only rank 0's `states` are used, and other ranks may pass an empty dict. Without servers
        all ranks must pass equal states. Raise ValueError if the states do not fit the optimizer.
        """

    def residuals(self, keys: Sequence[Key]) -> Task[Array | None]:
        """Return the residuals of the keys in this worker's client as one float64 array, key after key. Collective.

        Return None if pushes are not compressed.
        """

    def put_residuals(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Set the residuals of this worker, from one 1-D array per key. Local."""

    def snapshot(self, keys: Sequence[Key], alone: bool = False) -> Task[Snapshot]:
        """Copy the values and optimizer states of the keys as they are now. Later pushes do not change the copy.

        The caller must release the snapshot. Collective, unless `alone`.

        Args:
            alone: True if only worker 0 makes this call. This is allowed only in an asynchronous store.
        """


class Transfers(Protocol):
    """Pushes and pulls keys, several keys in one step if that is faster.

    Where a backend implements a method by collectives, all workers must pass equal lists of keys.
    """

    def push(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task[None]:
        """Contribute `flats` to the keys' next rounds. When the task is over, `flats` may be overwritten."""

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None]:
        """Write the keys' values into `outs`. They include all earlier pushes of this worker."""

    def pushpull(self, keys: Sequence[Key], flats: Sequence[Array], outs: Sequence[Array], priority: int) -> Task[None]:
        """Push `flats`, then pull into `outs`. A key's own `flat` and `out` may be the same array.

        No other two of these arrays may overlap.
        """

    def push_rows(self, key: Key, rows: RowSparse, priority: int) -> Task[None]:
        """Contribute some rows to the key's next round."""

    def pull_rows(self, key: Key, out: Array, ids: Array) -> Task[None]:
        """Write the rows `ids` of the key into `out` of shape (len(ids), ...).

        `ids` is an int64 array of shape (k,), in any order. It may name a row more than once.
        """


class CheckpointPiece(Protocol):
    """A part of a checkpoint that is read from the store and written to the file in one step."""

    @property
    def nbytes(self) -> int:
        """Size of the piece in the file."""

    def read(self) -> Task[Sequence[tuple[str, Array]]]:
        """Return pairs of a tensor's name and its next elements (1-D). The arrays are valid until the next read."""


class FrozenService(Protocol):
    """The collections of a service as they were at one moment."""

    @property
    def records(self) -> Sequence[CollectionRecord]:
        """The records of all collections, for the header of the checkpoint."""

    def pieces(self) -> Iterator[CheckpointPiece]:
        """Yield the content of all collections, piece by piece."""

    def release(self) -> Task[None]:
        """Free the memory of the frozen copy."""


class WorkerService(Protocol):
    """A worker's side of a service, which is anything that servers keep besides keys (see `server.service`).

    A service keeps *collections*. A collection has a name that no key has. Workers push to it in rounds, as to a key.
    """

    # the name of the kind of service; the service's records in the header of a checkpoint have the same name
    name: str

    @property
    def collections(self) -> Mapping[str, Pushed]:
        """The collections that this worker knows, by name."""

    def refusals(self) -> bytes:
        """Encode the refused rounds that this worker knows of. All workers must know of the same refused rounds."""

    def learn_refusals(self, refusals: Sequence[bytes]) -> Task[None]:
        """Take over the refused rounds that only other workers know of. Raise RoomError if there are any."""

    def tell_wait(self, names: Sequence[Name]) -> None:
        """Tell the servers that the program has waited long in a call with some of this service's collections.

        `names` holds all keys and collections of the call. Names of other services are ignored.
        """

    def describe(self, known: Container[Name]) -> bytes:
        """Encode the collections whose names are in `known`, for a recovery. Return b"" if there are none."""

    def renew(self) -> None:
        """Forget everything that belongs to the generation that has ended.

        Called when servers no longer use this worker's memory.
        """

    def begin(self, plan: Any, rounds: Mapping[Name, int]) -> None:
        """Begin the next generation with the collections of `plan`, at the given rounds.

        `plan` is a `ServicePlan`, or None if the service has no collections.
        """

    def freeze(self) -> Task[FrozenService]:
        """Freeze all collections as they are now. Only one worker calls this."""

    def check_records(self, path: str, records: Sequence[Any]) -> None:
        """Raise ValueError if the records of a checkpoint lack a collection of this service or do not fit it."""

    def load(self, reader: Reader | None, records: Sequence[Any]) -> Task[list[str]]:
        """Load all collections of a checkpoint. Make those that do not exist yet. Collective.

        Args:
            reader: The open checkpoint on worker 0, None on other workers.

        Returns:
            The names of the collections that this call has made.
        """


class Backend(Protocol):
    """The operations of one store on one worker.

    All workers must make the calls marked "Collective", in the same order.
    """

    # True while `worker.operations` runs a task and no other task is unfinished. The task may then block in a
    # collective instead of yielding. Workers that block and workers that yield can take part in one collective.
    direct: bool
    # names of the communicators that all operations use; operations that share a name run one after another, in program
    # order
    communicators: tuple[Hashable, ...]

    @property
    def services(self) -> Sequence[WorkerService]:
        """The services of the store. Empty in a store without servers."""

    @property
    def stored(self) -> StateAccess:
        """Access to optimizer states, residuals and snapshots of keys."""

    @property
    def quick_list(self) -> FastList | None:
        """The fast path for a list of keys, or None if it is faster to push the keys one by one."""

    # ---- keys

    def init(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Make keys with rank 0's values, and bind their fast paths. Collective."""

    def forget(self, keys: Sequence[Key]) -> Task[None]:
        """Remove keys and free their memory. All operations on the keys must have finished. Collective."""

    def store_values(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Set existing keys to worker 0's values. Keys that were torn are whole again. Collective."""

    # ---- pushes and pulls

    @property
    def transfers(self) -> Transfers:
        """The pushes and pulls of the current generation."""

    def versions(self, keys: Sequence[Key]) -> Task[list[int]]:
        """Return each key's version after this worker's own pushes. Local.

        In a synchronous store the version is the key's number of rounds. In an asynchronous store it is the number of
        pushes by all workers.
        """

    def pull_versions(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[list[int]]:
        """Write the keys' values into `outs`, and return the keys' versions.

        All parts of a key have the same version.
        """

    def listen(self) -> None:
        """Read and handle messages from servers. Called before each step of a task. Does not block."""

    def settle(self, keys: Sequence[Key], meets: bool = False) -> Task[None]:
        """Wait until the servers have read this worker's pushes. In an asynchronous store, also wait until the servers
        have applied the pushes.

        Args:
            meets: True if this worker next waits for all other workers, and pushes nothing until they have come. Then
                the limit `staleness` does not make them wait for this worker.
        """

    def tell_wait(self, names: Sequence[Name]) -> None:
        """Tell the servers that the program has waited long in a call with these keys and collections. Local.

        The servers use these messages to detect workers that wait for one another in a circle.
        """

    def sums(self) -> tuple[int, str]:
        """Return the number of sums over all workers that this worker has begun, and the name of the last one. Local.

        In a store with servers return (0, "").
        """

    # ---- settings

    def check_updated(self, keys: Sequence[Key], what: str) -> None:
        """Raise ValueError if an asynchronous store has no optimizer to apply a push of a key. Local."""

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None) -> Task[None]:
        """Let an optimizer with fresh state update the keys from now on. Collective.

        If a server does not know the optimizer, all workers raise ValueError and nothing has changed.

        Args:
            keys: The keys to update. None means all keys, including those made later.
        """

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None) -> Task[None]:
        """Change the hyperparameters of the keys' optimizers from the next round on. Keep their state. Collective."""

    def set_compression(self, options: dict[str, Any], compressor: Compressor) -> Task[None]:
        """Compress pushes of float keys from now on. Residuals start at zero. Collective."""

    # ---- the end

    def finish(self) -> None:
        """Tell the servers that this worker will make no more calls. Local; does not wait for answers."""


# ---- checkpoints, as the calls of a worker see them


class BackgroundSave(Protocol):
    """A checkpoint that is written while training continues."""

    def go_on(self) -> bool:
        """Begin to write the next pieces if it is time. Return True once the file is complete. Does not block."""

    def finish(self) -> None:
        """Wait until the file is complete."""


class SaveSchedule(Protocol):
    """The schedule by which a store saves itself (`resume.RegularSaves`)."""

    # the key or list of keys of the current push; () outside a push
    pushing: object

    def is_due(self, key: object) -> bool:
        """True if the store has to be saved before a push of this key or list of keys."""

    def count(self, key: object) -> None:
        """Count a push of this key, or list of keys."""

    def save(self) -> BackgroundSave | None:
        """Begin a save in the background and return it. Return None if no save was begun."""

    def save_last(self, alike: bool) -> None:
        """Begin the last save when the store closes, unless the current state has been saved already.

        `alike`: True if all workers have pushed equally often.
        """

    def set_rounds(self, rounds: Mapping[Name, int]) -> None:
        """Continue counting from `rounds`, the rounds of the keys after `recover`."""

    def leave(self) -> tuple[str, int]:
        """Stop saving, because the caller now saves instead.

        Return the folder and the number of rounds between two saves.
        """

"""Save a store (`kv.save`): freeze its content after a round, and write the file, optionally while training continues.

All workers check that they have made the same number of rounds, and wait until the servers have applied them. Then the
backend makes a *snapshot*, which later rounds do not change, and all workers may push again. Worker 0 reads the
snapshot piece by piece and writes the file. *Residuals*, the parts of gradients that compression has held back, are
written before training continues.

`Saving` writes the file during training. At the end of each call of the store it writes a few pieces: the longer the
time since the last pieces, the more. Between these times it has no unfinished operations, so that calls of the store
can take their fast paths.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

import mpips.collectives as collectives
from mpips.collectives import log
from mpips.collectives.errors import CollectiveError, warn
from mpips.collectives.fabric.tasks import Task, run_together
from mpips.collectives.kernels.quiet import quietly
from mpips.collectives.recorder import own as recorder
from mpips.collectives.recorder.ring import RecordRing
from mpips.compression.registry import options
from mpips.optimizers.registry import as_data
from mpips.store.checkpoint import folder as files
from mpips.store.checkpoint.file import (
    HOLDS,
    NAMES,
    VERSION,
    KeyRecord,
    StoreHeader,
    Writer,
    file_name,
    metadata,
    open_writer,
    residual_dtype,
    residual_name,
    state_name,
    value_name,
    why,
)
from mpips.store.keys.arguments import packed, runs, unpack
from mpips.store.keys.key import Array, Key, Name, label
from mpips.store.roles import Layout
from mpips.store.runtime.engine import Handle
from mpips.store.runtime.errors import StoreError
from mpips.store.runtime.rendezvous import attempt
from mpips.store.worker.interface import CheckpointPiece, FrozenService, Snapshot, StateAccess
from mpips.store.worker.store import WorkerStore

LOG = log.get("mpips.store")


def save(store: WorkerStore, path: str | os.PathLike[str], wait: bool) -> Saving | None:
    """Save the store; see `KVStore.save`. Collective.

    If `wait` is False, return the `Saving` that writes the file in the background, else None.
    """
    with contextlib.ExitStack() as stack:
        store.finish()
        if store.saving is not None:
            # The last save may still be writing the same file.
            store.saving.finish()
        name, refusal = attempt(lambda: file_name("save", "path", path))
        writer, unfit = attempt(lambda: open_writer(name) if name and store.layout.rank == 0 else None)
        if writer is not None:
            stack.callback(writer.abandon)
        keys = list(store.keys.values())
        store.agree_settled("save", [("path", name or "")], refusal or unfit, noun="argument")
        content, refusal = store.run("save", _frozen(store, keys, writer))
        if refusal is not None:
            store.run("save", content.release())
        elif wait and writer is not None:
            begun = _log_begun(name, keys)
            failure = store.run("save", write_content(content, writer))
            _log_end(name, begun, failure)
            refusal = ValueError(f"{name} cannot be written: {failure}") if failure else None
        # No worker pushes before all workers have reached this line, so the file has the same round of every key.
        store.agree("save", refusal=refusal)
        if wait:
            return None
        store.saving = saving = Saving(store, content, writer)
        stack.pop_all()
        return saving


def save_alone(store: WorkerStore, path: str) -> Saving:
    """Begin a save of an asynchronous store by worker 0 alone.

    The file has each key as it is at some moment after this worker's pushes, and no residuals of compression.

    Raises:
        ValueError: The file cannot be written.
    """
    keys, writer = list(store.keys.values()), open_writer(path)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.abandon)
        store.settle()
        snapshot = store.run("save", store.backend.stored.snapshot(keys, alone=True))
        content = store.run("save", _content(store, keys, snapshot))
        try:
            _begun(_header(store, content, 0), writer)
        except ValueError:
            store.run("save", content.release())
            raise
        store.saving = saving = Saving(store, content, writer)
        stack.pop_all()
    return saving


class Content(NamedTuple):
    """The frozen content of a store. `services` is empty on all workers except worker 0."""

    keys: Sequence[Key]
    snapshot: Snapshot
    services: Mapping[str, FrozenService]

    def release(self) -> Task[None]:
        """Let the servers drop the frozen content."""
        yield from self.snapshot.release()
        for service in self.services.values():
            yield from service.release()


def _content(store: WorkerStore, keys: Sequence[Key], snapshot: Snapshot) -> Task[Content]:
    """Add the collections of services to a snapshot, frozen as they are now."""
    frozen = {}
    for service in store.backend.services:
        if service.collections and not store.layout.rank:
            frozen[service.name] = yield from service.freeze()
    return Content(keys, snapshot, frozen)


def _frozen(
    store: WorkerStore, keys: Sequence[Key], writer: Writer | None
) -> Task[tuple[Content, BaseException | None]]:
    """Make a snapshot of the store, and write the header and the residuals of compression.

    Return the content, and the error if header or residuals cannot be written, else None.
    """
    snapshot = yield from store.backend.stored.snapshot(keys)
    content = yield from _content(store, keys, snapshot)
    groups = 0 if store.compressor is None else len(senders(store.layout))
    _, refusal = attempt(lambda: _begun(_header(store, content, groups), writer) if writer is not None else None)
    floats = [key for key in keys if groups and key.floats]
    for run in runs(key.nbytes for key in floats):
        kept = yield from gathered(store.layout, store.backend.stored, floats[run])
        if writer is None or refusal is not None:
            continue
        for group, arrays in enumerate(kept):
            for key, array in zip(floats[run], arrays, strict=True):
                writer.write(residual_name(key.name, group), 0, array)
    return content, refusal


class Begun(NamedTuple):
    """The time at which a save began, and its timing record (the ring, and the sequence number in the ring)."""

    at: float
    ring: RecordRing
    sequence: int


def _log_begun(path: str, keys: Sequence[Key]) -> Begun:
    """Log that a save begins, and begin its timing record."""
    LOG.info("checkpoint %s: %d keys, %d bytes of values", path, len(keys), sum(key.nbytes for key in keys))
    return Begun(time.perf_counter(), *recorder.begin_rare("checkpoint", path))


def _log_end(path: str, begun: Begun | None, failure: object) -> None:
    if failure or begun is None:
        LOG.info("checkpoint %s: not written: %s", path, failure)
    else:
        recorder.count_checkpoint()
        begun.ring.end(begun.sequence)
        LOG.info("checkpoint %s: written after %.3f s", path, time.perf_counter() - begun.at)


def _begun(header: StoreHeader, writer: Writer) -> None:
    """Write the header. Raises ValueError if the file format cannot hold an optimizer's state."""
    for record in header.records:
        for dtype in record.state:
            if dtype not in NAMES:
                raise ValueError(
                    f"save: the optimizer's state of key {record.key!r} is of {dtype}: {HOLDS}; set another optimizer"
                )
    writer.begin(dict(header.tensors()), metadata(header))


def _header(store: WorkerStore, content: Content, groups: int) -> StoreHeader:
    """Return the header of the file. `groups` is the number of workers or clients whose residuals are in the file."""
    records = []
    for key in content.keys:
        round_, step, dtypes = content.snapshot.records[key.name]
        own = store.groups.own.get(key.name)
        data = None if own is None else as_data(own)
        records.append(KeyRecord(key.name, key.shape, key.dtype.name, round_, step, list(dtypes), data))
    compressor, default = store.compressor, store.groups.default
    return StoreHeader(
        version=VERSION if content.services else 1,
        kind=store.layout.kind,
        options=asdict(store.layout.options),
        records=records,
        optimizer=None if default is None else as_data(default),
        compression=None if compressor is None else options(compressor),
        residuals=groups,
        services={name: frozen.records for name, frozen in content.services.items()},
    )


# ---- residuals of compression


def senders(layout: Layout) -> list[range]:
    """Return the groups of workers (by rank) that compress their pushes together.

    In a store with servers and clients (groups of workers that sum before they push) each client is a group. In all
    other stores each worker is a group.
    """
    if layout.num_servers and layout.kind.startswith("mpi_"):
        return [range(*client) for client in layout.clients]
    return [range(worker, worker + 1) for worker in range(layout.num_workers)]


def gathered(layout: Layout, stored: StateAccess, keys: Sequence[Key]) -> Task[list[list[Array]]]:
    """Gather the residuals of float keys on worker 0. Collective.

    Return a list with one entry for each sender. An entry is a list with one array per key. Workers other than worker 0
    get an empty list.
    """
    residuals = yield from stored.residuals(keys)
    ends = np.cumsum([key.size for key in keys])[:-1]
    parts = [np.zeros(key.size) for key in keys] if residuals is None else np.split(residuals, ends)
    kept = [quietly(part.astype, residual_dtype(key.dtype.name)) for key, part in zip(keys, parts, strict=True)]
    gathered_arrays = []
    for group in senders(layout):
        arrays = kept if group[0] == layout.rank else [np.empty_like(array) for array in kept]
        if group[0]:
            from_worker(layout, group[0], [key.name for key in keys], arrays, "save")
        gathered_arrays.append(arrays)
    return gathered_arrays if layout.rank == 0 else []


def from_worker(layout: Layout, root: int, names: Sequence[Name], arrays: Sequence[Array], what: str = "load") -> None:
    """Copy the arrays of worker `root` to all workers. Collective, blocking. `names` are the keys, for errors."""
    if layout.num_workers > 1:
        text = label(what, names)
        for run in runs(array.nbytes for array in arrays):
            vector = packed(arrays[run])
            collectives.broadcast(vector, layout.workers, root=root, label=text)
            unpack(vector, arrays[run])


# ---- writing while training continues

# size of the pieces that are read and written
PIECE_BYTES = 1 << 20
# maximum number of small pieces that worker 0 requests from servers before the first piece has arrived
AT_ONCE = 64
# Estimated cost of a piece for this worker and its server together, as a multiple of the time that its write takes.
COST = 3
# After a few pieces a save pauses for REST times their cost. So saving takes 1 / (1 + REST) of the time.
REST = 29
# seconds between two checks while a worker waits for the file
LOOK_SECONDS = 5e-5


class KeyPiece(NamedTuple):
    """Elements [start, stop) of a tensor of a key. For `slot` see `Snapshot.read`."""

    snapshot: Snapshot
    key: Key
    slot: int
    start: int
    stop: int
    tensor: str
    nbytes: int

    def read(self) -> Task[list[tuple[str, Array]]]:
        return [(self.tensor, (yield from self.snapshot.read(self.key, self.slot, self.start, self.stop)))]


def pieces(content: Content) -> Iterator[CheckpointPiece]:
    """Yield all pieces of a store's content: the keys in order, then the collections of services."""
    snapshot = content.snapshot
    for key in content.keys:
        for slot, dtype in enumerate((key.dtype.name, *snapshot.records[key.name].dtypes), -1):
            name = value_name(key.name) if slot < 0 else state_name(key.name, slot)
            itemsize = np.dtype(dtype).itemsize
            step = max(1, PIECE_BYTES // itemsize)
            for start in range(0, key.size, step):
                stop = min(start + step, key.size)
                yield KeyPiece(snapshot, key, slot, start, stop, name, (stop - start) * itemsize)
    for service in content.services.values():
        yield from service.pieces()


def copy_piece(piece: CheckpointPiece, writer: Writer) -> Task[float]:
    """Read a piece and write it to the file. Return the estimated cost in seconds, for this worker and the server."""
    parts = yield from piece.read()
    begun = time.perf_counter()
    for name, values in parts:
        writer.append(name, values)
    return COST * (time.perf_counter() - begun)


def write_content(content: Content, writer: Writer) -> Task[str]:
    """Write all pieces, and move the file to its path. Return the reason if that failed, else ""."""
    every = [*pieces(content)]
    # The pieces of one run are written in the order of arrival, but the pieces of one tensor must be written in their
    # own order. A run never has two pieces of one tensor, because the first of them alone fills the run.
    for run in runs((piece.nbytes for piece in every), PIECE_BYTES):
        yield from run_together([copy_piece(piece, writer) for piece in every[run]], AT_ONCE)
        yield True
    yield from content.release()
    disk = Disk(writer)
    while not disk.done:
        yield False
    return disk.failure


class Disk:
    """A thread that waits until a complete file is on disk, and then moves it to its path."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.failure = ""
        self._thread = threading.Thread(target=self._finish, name="mpips checkpoint")
        self._thread.start()

    def _finish(self) -> None:
        try:
            self._writer.finish()
        except OSError as error:
            self.failure = why(error)

    @property
    def done(self) -> bool:
        """True once the thread has ended.

        Then `failure` is "" if the file is at its path, otherwise the reason why it is not.
        """
        return not self._thread.is_alive()


class Saving:
    """A checkpoint that is being written. `KVStore.save` returns it with `wait=False`.

    Only worker 0 writes the file. On other workers the save is over at once.
    """

    def __init__(self, store: WorkerStore, content: Content, writer: Writer | None) -> None:
        self._store = store
        self._content = content
        self._writer = writer
        self._generation = store.generation.number
        # length of the pause after some pieces, as a multiple of their cost; 0 once the program waits for the file
        self._rest = REST
        # the time at which the next pieces may begin
        self._due = 0.0
        # the time at which the last pieces were begun
        self._begun = time.perf_counter()
        # the pieces that have not been begun yet
        self._left = pieces(content) if writer is not None else iter(())
        # the handle of the last pieces that were begun
        self._step: Handle | None = None
        # set once all pieces are written, and only the transfer to the disk is left
        self._disk: Disk | None = None
        self._over = writer is None
        # True once the error has been raised, or shown as a warning
        self._told = False
        self._started = None if writer is None else _log_begun(writer.path, content.keys)
        self._error: BaseException | None = None
        # the folder from which older checkpoints are removed when this save is over, or ""
        self.pruned = ""

    def test(self) -> bool:
        """Return True if the file is complete and at its path. Does not block, but advances the save a little.

        Raises the errors of `wait`.
        """
        if self._step is not None:
            with contextlib.suppress(CollectiveError, RuntimeError):
                self._step.test()
        if not self.go_on():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Block until the file is complete and at its path. The save no longer pauses between pieces.

        Raises:
            ValueError: The file cannot be written. An older file at its path is unchanged.
            StoreError: The generation has ended before everything was written.
        """
        self._finish()
        self._told = True
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait as `wait` does. If the save has failed, warn instead of raising, unless the error was raised before."""
        self._finish()
        if self._error is not None and not self._told:
            warn(str(self._error))
        self._told = True

    def go_on(self) -> bool:
        """Begin the next pieces if the last ones and the pause after them are over. Return True if the save is over.

        Does not block.
        """
        if not self._over and self._lost():
            self._end(StoreError(f"{self._path} was not written: the generation has ended"))
        if self._over or (self._step is not None and not self._step.done) or time.perf_counter() < self._due:
            return self._over
        if self._disk is None and self._step is not None and self._step.error is not None:
            self._end(StoreError(f"{self._path} was not written: {self._step.error}"))
        elif self._disk is None:
            self._next()
        elif self._disk.done:
            failure = self._disk.failure
            self._end(ValueError(f"{self._path} cannot be written: {failure}") if failure else None)
        return self._over

    # ---- inside

    @property
    def _path(self) -> str:
        return "" if self._writer is None else self._writer.path

    def _lost(self) -> bool:
        """True if the generation has ended before everything was written. The snapshot is then lost."""
        at = self._store.generation
        return self._disk is None and (at.over is not None or at.number != self._generation)

    def _next(self) -> None:
        assert self._writer is not None
        now = time.perf_counter()
        allowed, self._begun = (now - self._begun) / (1 + self._rest), now
        piece = next(self._left, None)
        if piece is not None:
            self._step = self._store.start("save", self._some(piece, self._writer, allowed))
        else:
            self._step = self._store.start("save", self._content.release())
            self._disk = Disk(self._writer)

    def _some(self, piece: CheckpointPiece | None, writer: Writer, allowed: float) -> Task[None]:
        """Write `piece`, and then more pieces until all together have cost about `allowed` seconds."""
        cost = 0.0
        while piece is not None:
            cost += yield from copy_piece(piece, writer)
            piece = next(self._left, None) if cost < allowed else None
        self._due = time.perf_counter() + self._rest * cost

    def _finish(self) -> None:
        self._rest, self._due = 0, 0.0
        while not self.go_on():
            if self._step is None or self._step.done:
                time.sleep(LOOK_SECONDS)
            else:
                # Ignore the error here, because go_on() handles it.
                with contextlib.suppress(CollectiveError, RuntimeError):
                    self._step.wait()

    def _end(self, error: BaseException | None) -> None:
        self._over, self._error = True, error
        if self._writer is not None:
            self._writer.abandon()
            _log_end(self._path, self._started, error)
        if self.pruned:
            files.prune(self.pruned)

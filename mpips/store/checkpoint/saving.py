"""How a snapshot gets into its file: piece by piece, at once or beside the training. Worker 0's affair.

Beside the training some pieces go at the end of a call of the store, as many as the time since the last ones allows.
Then comes a rest in which nothing of it is under way, so that calls take their fast routes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from collectives.errors import CollectiveError, warn
from mpips.store.checkpoint.file import state_name, value_name, why
from mpips.store.checkpoint.source import Handle, Snapshot, Store
from mpips.store.checkpoint.tensors import Writer
from mpips.store.keys.arrays import runs
from mpips.store.keys.key import Key
from mpips.store.runtime.errors import StoreError
from mpips.store.runtime.tasks import Task, together

PIECE_BYTES = 1 << 20
"""What is read and written at a time."""
AT_ONCE = 64
"""Small pieces that servers are asked for before the first has come."""
COST = 3
"""What a piece costs this worker and its server, in times of what it takes to write it."""
REST = 29
"""Pieces are followed by a rest of so many times what they cost: they take 1 / 30 of the time."""
LOOK_SECONDS = 5e-5
"""Between two looks of a worker that waits for the file."""


class Piece(NamedTuple):
    """Elements [start, stop) of a tensor of the file; `slot` as in `Snapshot.read`."""

    key: Key
    slot: int
    start: int
    stop: int
    name: str
    nbytes: int


def pieces(snapshot: Snapshot, keys: Sequence[Key]) -> Iterator[Piece]:
    """All of a snapshot, in the order of the keys."""
    for key in keys:
        for slot, dtype in enumerate((key.dtype.name, *snapshot.records[key.name].dtypes), -1):
            name = value_name(key.name) if slot < 0 else state_name(key.name, slot)
            itemsize = np.dtype(dtype).itemsize
            step = max(1, PIECE_BYTES // itemsize)
            for start in range(0, key.size, step):
                stop = min(start + step, key.size)
                yield Piece(key, slot, start, stop, name, (stop - start) * itemsize)


def copied(snapshot: Snapshot, piece: Piece, writer: Writer) -> Task[float]:
    """Write a piece; the seconds that this has cost."""
    array = yield from snapshot.read(piece.key, piece.slot, piece.start, piece.stop)
    begun = time.perf_counter()
    writer.write(piece.name, piece.start, array)
    return COST * (time.perf_counter() - begun)


def written(snapshot: Snapshot, keys: Sequence[Key], writer: Writer) -> Task[str]:
    """Write all of it and put the file in place; why that cannot be, or ""."""
    every = [*pieces(snapshot, keys)]
    for run in runs((piece.nbytes for piece in every), PIECE_BYTES):  # of one tensor never two pieces
        yield from together([copied(snapshot, piece, writer) for piece in every[run]], AT_ONCE)
        yield True
    yield from snapshot.release()
    disk = Disk(writer)
    while not disk.done:
        yield False
    return disk.failure


class Disk:
    """A thread that waits until the disk has a file that is complete, and puts it in place."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self.failure = writer, ""
        self._thread = threading.Thread(target=self._finish, name="mpips checkpoint")
        self._thread.start()

    def _finish(self) -> None:
        try:
            self._writer.finish()
        except OSError as error:
            self.failure = why(error)

    @property
    def done(self) -> bool:
        """Whether it is over; `failure` then says why the file is not in place."""
        return not self._thread.is_alive()


class Saving:
    """A checkpoint that is being written. On all workers but 0 it is over at once."""

    def __init__(self, store: Store, snapshot: Snapshot, keys: Sequence[Key], writer: Writer | None) -> None:
        self._store, self._snapshot, self._writer = store, snapshot, writer
        self._generation, self._rest, self._due = store.generation.number, REST, 0.0
        self._begun = time.perf_counter()
        """When the last pieces were begun."""
        self._left = pieces(snapshot, keys) if writer is not None else iter(())
        self._step: Handle | None = None
        """What is under way."""
        self._disk: Disk | None = None
        self._over, self._told = writer is None, False
        self._error: BaseException | None = None

    def test(self) -> bool:
        """Whether the file is there; lets everything go on a little, and does not block. Raises as `wait` does."""
        if self._step is not None:
            with contextlib.suppress(CollectiveError, RuntimeError):
                self._step.test()
        if not self.go_on():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Block until the file is there, which is now written without rest. ValueError where it cannot be written: what
        was at its place still is. StoreError where the generation has ended before all was written."""
        self._finish()
        self._told = True
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """The same, with a warning in place of the error, unless somebody has heard of it."""
        self._finish()
        if self._error is not None and not self._told:
            warn(str(self._error))
        self._told = True

    def go_on(self) -> bool:
        """Begin the next piece, if the last one is over and the rest after it; whether all is over. Does not block."""
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
        """Whether the servers have forgotten the snapshot, before all of it was written."""
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
            self._step = self._store.start("save", self._snapshot.release())
            self._disk = Disk(self._writer)

    def _some(self, piece: Piece | None, writer: Writer, allowed: float) -> Task[None]:
        """Write pieces, the given one first, that cost about so many seconds."""
        cost = 0.0
        while piece is not None:
            cost += yield from copied(self._snapshot, piece, writer)
            piece = next(self._left, None) if cost < allowed else None
        self._due = time.perf_counter() + self._rest * cost

    def _finish(self) -> None:
        self._rest, self._due = 0, 0.0
        while not self.go_on():
            if self._step is None or self._step.done:
                time.sleep(LOOK_SECONDS)
            else:
                with contextlib.suppress(CollectiveError, RuntimeError):  # `go_on` sees why
                    self._step.wait()

    def _end(self, error: BaseException | None) -> None:
        self._over, self._error = True, error
        if self._writer is not None:
            self._writer.abandon()

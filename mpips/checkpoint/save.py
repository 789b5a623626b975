"""`kv.save`: freeze what a store holds after one round, then write it while training goes on.

All workers see that they are after the same round, and wait until the servers have applied it. Then the backend makes a
*snapshot*, which later rounds do not change, and everybody may push again. Worker 0 reads the snapshot, a piece at a
time, and writes the file. What compression kept back is written before training goes on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from collectives.errors import of_caller, warn
from mpips.checkpoint import residuals
from mpips.checkpoint.file import (
    VERSION,
    Header,
    Record,
    Writer,
    metadata,
    residual_name,
    state_name,
    value_name,
)
from mpips.checkpoint.source import Handle, Snapshot, Store, senders
from mpips.compression.registry import options
from mpips.keys.key import Key
from mpips.optimizers.base import Optimizer
from mpips.optimizers.registry import encode
from mpips.runtime.rendezvous import attempt
from mpips.runtime.tasks import Task, nothing

PIECE = 1 << 20
"""Bytes that are read and written at a time."""
REST = 19
"""In the background a piece is followed by a rest of so many times as long as it took: it takes 1 / 20 of the time."""
LOOK_SECONDS = 5e-5
"""Between two looks of a worker that waits for a file."""


class Pace:
    """How long the writer rests after a piece, in times of what the piece took."""

    def __init__(self, rest: int) -> None:
        self.rest = rest


class Saving:
    """A checkpoint that is being written. On all workers but 0 it is over at once."""

    def __init__(self, handle: Handle, path: str, pace: Pace) -> None:
        self._handle, self._path, self._pace = handle, path, pace
        self._told = False

    def test(self) -> bool:
        """Whether the file is there; lets everything go on a little, and does not block. Raises as `wait` does."""
        if not self._handle.test():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Block until the file is there, which is now written without rest. ValueError where it cannot be written: what
        was at its place still is. EpochError where the epoch has ended before all was written."""
        self._told = True
        if failure := self._over():
            raise ValueError(failure)

    def finish(self) -> None:
        """The same, with a warning in place of the ValueError, unless somebody has heard of it."""
        if (failure := self._over()) and not self._told:
            warn(failure)
        self._told = True

    def _over(self) -> str:
        """Wait until it is over; why there is no file, or ""."""
        self._pace.rest = 0
        while not self._handle.test():
            time.sleep(LOOK_SECONDS)
        failure = self._handle.wait()
        return f"{self._path} cannot be written: {failure}" if failure else ""


def save(store: Store, path: str | os.PathLike[str], wait: bool) -> Saving | None:
    """See `KVStore.save`."""
    with contextlib.ExitStack() as stack:
        writer, refusal = attempt(lambda: _opened(path, store.layout.rank))
        if writer is not None:
            stack.callback(writer.abandon)
        store.finish()
        if store.saving is not None:
            store.saving.finish()
        keys = list(store.keys.values())
        _after_one_round(store, keys, str(path), refusal)
        store.settle()
        snapshot = store.run("save", _frozen(store, keys, writer))
        pace = Pace(0 if wait else REST)
        task = _written(snapshot, keys, writer, pace)
        if wait:
            failure = store.run("save", task)
            refused = ValueError(f"{path} cannot be written: {failure}") if failure else None
            store.agree("save", refusal=refused)
            return None
        store.agree("save")  # until now nobody has pushed: it is one round everywhere
        store.saving = saving = Saving(store.start("save", task), str(path), pace)
        stack.pop_all()
        return saving


def _opened(path: Any, rank: int) -> Writer | None:
    """Worker 0's writer; ValueError or TypeError where there cannot be a file."""
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"save: path {path!r} is of type {type(path).__name__}: give a str or a Path")
    try:
        return Writer(name) if rank == 0 else None
    except OSError as error:
        raise ValueError(f"{name} cannot be written: {error}") from error


def _after_one_round(store: Store, keys: Sequence[Key], path: str, refusal: BaseException | None) -> None:
    """All have called `save` with the same path, and in a synchronous store after the same rounds; else ValueError."""
    rounds = msgspec.msgpack.encode([key.round for key in keys])
    told = store.agree("save", [("path", path)], refusal, noun="argument", data=rounds)
    if store.layout.asynchronous:
        return
    for key, counts in zip(keys, zip(*(msgspec.msgpack.decode(data, type=list[int]) for data in told))):
        if len(set(counts)) > 1:
            most, least = max(counts), min(counts)
            sentence = (
                f"save: key {key.name!r} was pushed {most} times by rank {counts.index(most)} and {least} times by "
                f"rank {counts.index(least)}: save after a round that all have pushed"
            )
            raise of_caller(ValueError(sentence))


def _frozen(store: Store, keys: Sequence[Key], writer: Writer | None) -> Task[Snapshot]:
    """A snapshot of the store; its header, and what compression kept back, are in the file."""
    snapshot = yield from store.backend.snapshot(keys)
    if writer is not None:
        header = _header(store, keys, snapshot)
        writer.begin(header.tensors(), metadata(header))
    for key in keys if store.compressor is not None else ():
        if residuals.compressible(key.dtype):
            kept = yield from residuals.gathered(store.layout, store.backend, key)
            for group, array in enumerate(kept):
                if writer is not None:
                    writer.write(residual_name(key.name, group), 0, array)
    return snapshot


def as_data(optimizer: Optimizer | None) -> dict[str, Any] | None:
    """An optimizer's name and numbers, which the header shows."""
    return None if optimizer is None else msgspec.msgpack.decode(encode(optimizer))


def _header(store: Store, keys: Sequence[Key], snapshot: Snapshot) -> Header:
    records = []
    for key in keys:
        round_, step, dtypes = snapshot.records[key.name]
        own = as_data(store.groups.own.get(key.name))
        records.append(Record(key.name, key.shape, key.dtype.name, round_, step, list(dtypes), own))
    compressor = store.compressor
    return Header(
        version=VERSION,
        kind=store.layout.kind,
        options=asdict(store.layout.options),
        records=records,
        optimizer=as_data(store.groups.default),
        compression=None if compressor is None else options(compressor),
        residuals=0 if compressor is None else len(senders(store.layout)),
    )


def _written(snapshot: Snapshot, keys: Sequence[Key], writer: Writer | None, pace: Pace) -> Task[str]:
    """Write what the snapshot holds and put the file in place; why that cannot be, or "". Worker 0's affair."""
    if writer is None:
        yield from nothing()
        return ""
    try:
        for key in keys:
            frozen = snapshot.records[key.name]
            for slot, dtype in enumerate((key.dtype.name, *frozen.dtypes), -1):
                name = value_name(key.name) if slot < 0 else state_name(key.name, slot)
                step = max(1, PIECE // np.dtype(dtype).itemsize)
                for start in range(0, key.size, step):
                    yield from _copied(snapshot, key, slot, (start, min(start + step, key.size)), writer, name, pace)
        yield from snapshot.release()
        return (yield from _finished(writer))
    finally:
        writer.abandon()


def _copied(
    snapshot: Snapshot, key: Key, slot: int, part: tuple[int, int], writer: Writer, name: str, pace: Pace
) -> Task[None]:
    """One piece from the snapshot into the file, and the rest after it."""
    begun = time.perf_counter()
    array = yield from snapshot.read(key, slot, *part)
    writer.write(name, part[0], array)
    took = time.perf_counter() - begun
    yield True
    while time.perf_counter() - begun < (1 + pace.rest) * took:
        yield False


def _finished(writer: Writer) -> Task[str]:
    """Let another thread wait for the disk; why the file is not in place, or ""."""
    said: list[str] = []

    def finish() -> None:
        try:
            writer.finish()
        except OSError as error:
            said.append(str(error))

    thread = threading.Thread(target=finish, name="mpips checkpoint")
    thread.start()
    while thread.is_alive():
        yield False
    return "".join(said)

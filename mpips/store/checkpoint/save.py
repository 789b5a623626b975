"""`kv.save`: freeze what a store holds after one round, then write it while training goes on.

All workers see that they are after the same round, and wait until the servers have applied it. Then the backend makes a
*snapshot*, which later rounds do not change, and everybody may push again. Worker 0 reads the snapshot, a piece at a
time, and writes the file. What compression kept back is written before training goes on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict

from mpips.compression.registry import options
from mpips.optimizers.registry import as_data
from mpips.store.checkpoint import residuals
from mpips.store.checkpoint.file import VERSION, Header, Record, file_name, metadata, residual_name, why
from mpips.store.checkpoint.saving import Saving, written
from mpips.store.checkpoint.source import Snapshot, Store, senders
from mpips.store.checkpoint.tensors import HOLDS, NAMES, Writer
from mpips.store.keys.arrays import runs
from mpips.store.keys.key import Key
from mpips.store.runtime.rendezvous import attempt
from mpips.store.runtime.tasks import Task


def save(store: Store, path: str | os.PathLike[str], wait: bool) -> Saving | None:
    """See `KVStore.save`."""
    with contextlib.ExitStack() as stack:
        store.finish()
        if store.saving is not None:
            store.saving.finish()  # it may write to the same place
        name, refusal = attempt(lambda: file_name("save", "path", path))
        writer, unfit = attempt(lambda: _opened(name) if name and store.layout.rank == 0 else None)
        if writer is not None:
            stack.callback(writer.abandon)
        keys = list(store.keys.values())
        store.settled("save", [("path", name or "")], refusal or unfit, noun="argument")
        snapshot, refusal = store.run("save", _frozen(store, keys, writer))
        if refusal is not None:
            store.run("save", snapshot.release())
        elif wait and writer is not None:
            failure = store.run("save", written(snapshot, keys, writer))
            refusal = ValueError(f"{name} cannot be written: {failure}") if failure else None
        store.agree("save", refusal=refusal)  # until now nobody has pushed: it is one round everywhere
        if wait:
            return None
        store.saving = saving = Saving(store, snapshot, keys, writer)
        stack.pop_all()
        return saving


def save_alone(store: Store, path: str) -> Saving:
    """Begin it by worker 0 alone, in an asynchronous store: each key as it is at one moment, after the pushes of
    this worker, nothing of what compression kept back. ValueError where it cannot be written."""
    keys, writer = list(store.keys.values()), _opened(path)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.abandon)
        store.settle()
        snapshot = store.run("save", store.backend.stored.snapshot(keys, alone=True))
        try:
            _begun(_header(store, keys, snapshot, 0), writer)
        except ValueError:
            store.run("save", snapshot.release())
            raise
        store.saving = saving = Saving(store, snapshot, keys, writer)
        stack.pop_all()
    return saving


def _opened(path: str) -> Writer:
    """The writer; ValueError where there cannot be a file."""
    try:
        return Writer(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {why(error)}") from error


def _frozen(
    store: Store, keys: Sequence[Key], writer: Writer | None
) -> Task[tuple[Snapshot, BaseException | None]]:
    """A snapshot of the store; its header, and what compression kept back, are in the file, or why they cannot be."""
    snapshot = yield from store.backend.stored.snapshot(keys)
    groups = 0 if store.compressor is None else len(senders(store.layout))
    _, refusal = attempt(lambda: _begun(_header(store, keys, snapshot, groups), writer) if writer is not None else None)
    floats = [key for key in keys if groups and residuals.compressible(key.dtype)]
    for run in runs(key.nbytes for key in floats):
        kept = yield from residuals.gathered(store.layout, store.backend.stored, floats[run])
        if writer is None or refusal is not None:
            continue
        for group, arrays in enumerate(kept):
            for key, array in zip(floats[run], arrays, strict=True):
                writer.write(residual_name(key.name, group), 0, array)
    return snapshot, refusal


def _begun(header: Header, writer: Writer) -> None:
    """Write the header; ValueError where a file cannot hold a key's state."""
    for record in header.records:
        for dtype in record.state:
            if dtype not in NAMES:
                raise ValueError(
                    f"save: the optimizer's state of key {record.key!r} is of {dtype}: {HOLDS}; set another optimizer"
                )
    writer.begin(dict(header.tensors()), metadata(header))


def _header(store: Store, keys: Sequence[Key], snapshot: Snapshot, groups: int) -> Header:
    """`groups`: of so many workers or clients the file has what compression kept back."""
    records = []
    for key in keys:
        round_, step, dtypes = snapshot.records[key.name]
        own = store.groups.own.get(key.name)
        data = None if own is None else as_data(own)
        records.append(Record(key.name, key.shape, key.dtype.name, round_, step, list(dtypes), data))
    compressor, default = store.compressor, store.groups.default
    return Header(
        version=VERSION,
        kind=store.layout.kind,
        options=asdict(store.layout.options),
        records=records,
        optimizer=None if default is None else as_data(default),
        compression=None if compressor is None else options(compressor),
        residuals=groups,
    )

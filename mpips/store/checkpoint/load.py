"""`kv.load`: read a checkpoint into a store with any number of servers, clients and workers.

Worker 0 reads; the others need not see the file. What does not fit is found before anything changes: then all raise the
same ValueError. Keys that the store does not have are made; keys that the file does not have are an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from mpips.compression.base import Compressor
from mpips.compression.registry import create, options
from mpips.optimizers.base import Optimizer, initial
from mpips.optimizers.groups import Groups
from mpips.optimizers.registry import from_data
from mpips.store.checkpoint import residuals
from mpips.store.checkpoint.file import Header, Reader, Record, file_name, residual_name, state_name, value_name
from mpips.store.checkpoint.source import Store, from_worker, served
from mpips.store.keys.arrays import runs
from mpips.store.keys.key import Key, Name
from mpips.store.runtime.rendezvous import attempt
from mpips.store.runtime.tasks import Task

Array = NDArray[Any]


def load(store: Store, path: str | os.PathLike[str]) -> None:
    """See `KVStore.load`."""
    store.finish()
    if store.saving is not None:
        store.saving.finish()  # it may be this file
    with contextlib.ExitStack() as stack:
        name, refusal = attempt(lambda: file_name("load", "path", path))
        reader, unfit = attempt(lambda: _opened(store, name, stack) if refusal is None else None)
        mine = b"" if reader is None else reader.encoded
        told = store.settled("load", [("path", name or "")], refusal or unfit, noun="argument", data=mine)
        store.run("load", _loaded(store, reader, msgspec.msgpack.decode(told[0], type=Header)))


def _opened(store: Store, path: str, stack: contextlib.ExitStack) -> Reader | None:
    """On worker 0 the file; ValueError where it cannot be read, or does not fit the store."""
    if store.layout.rank:
        return None
    reader = stack.enter_context(Reader(path))
    _see_keys(store, reader.path, reader.header)
    groups = _used(store, _groups(reader.header))  # an optimizer of the user's must be registered
    for record in reader.header.records:
        _see_state(reader.path, record, groups.of(record.key))
    if reader.header.compression is not None:
        create(reader.header.compression)
    return reader


def _see_keys(store: Store, path: str, header: Header) -> None:
    """The keys of the store are in the file as they are in the store; else ValueError."""
    records = {record.key: record for record in header.records}
    for key in store.keys.values():
        if key.name not in records:
            raise ValueError(f"{path} has no key {key.name!r}, which the store has: forget it first, or save it too")
        record = records[key.name]
        there, here = f"{record.dtype}{record.shape}", f"{key.dtype.name}{key.shape}"
        if there != here:
            raise ValueError(f"{path}: key {key.name!r} is {there} in the file and {here} in the store")
    kinds = {type(name).__name__ for name in (*records, *store.keys)}
    if len(kinds) > 1:
        raise ValueError(f"{path} has keys of type {' and '.join(sorted(kinds))}, beside those of the store")


def _see_state(path: str, record: Record, optimizer: Optimizer | None) -> None:
    """ValueError where the optimizer cannot update the key, or the state in the file is not one of this optimizer's."""
    if optimizer is None:
        return
    if not residuals.compressible(record.dtype):
        raise ValueError(f"{path}: key {record.key!r} is {record.dtype}, and an optimizer needs floats: load it into a "
                         "store whose optimizers name their keys, set_optimizer(..., keys=[...])")  # fmt: skip
    if not (record.step or record.state):
        return
    wanted = [array.dtype.name for array in initial(optimizer, np.zeros(1, np.dtype(record.dtype)))]
    if record.state != wanted:
        have, need = (", ".join(dtypes) or "no arrays" for dtypes in (record.state, wanted))
        raise ValueError(
            f"{path}: the state of key {record.key!r} is {have}, and {type(optimizer).__name__} keeps {need}: "
            "register the optimizer that it was saved of"
        )


def _used(store: Store, groups: Groups) -> Groups:
    """The optimizers after the load: those of the file, where it has any."""
    return Groups(groups.default or store.groups.default, groups.own) if groups else store.groups


def _groups(header: Header) -> Groups:
    """The optimizers; ValueError or TypeError where one is unknown here."""
    own = {record.key: from_data(record.optimizer) for record in header.records if record.optimizer is not None}
    return Groups(None if header.optimizer is None else from_data(header.optimizer), own)


def _loaded(store: Store, reader: Reader | None, header: Header) -> Task[None]:
    """Everything from the file, which worker 0 reads, into the store, some keys at a time. Collective."""
    parts = [header.records[run] for run in runs(map(_nbytes, header.records))]
    for records in parts:
        yield from _values_loaded(store, reader, records)
    compressor, groups = None if header.compression is None else create(header.compression), _groups(header)
    if groups or compressor is not None:
        yield from _use(store, _used(store, groups), compressor)
    for records in parts:
        yield from _states_loaded(store, reader, [one for one in records if store.groups.of(one.key) is not None])
        if header.residuals:
            floats = [record for record in records if residuals.compressible(record.dtype)]
            yield from _residuals_loaded(store, reader, header, floats)


def _use(store: Store, groups: Groups, compressor: Compressor | None) -> Task[None]:
    """Set these optimizers and this compression, which are the same on all workers."""
    if groups.default is not None:
        yield from store.backend.set_optimizer(groups.default, None)
    alike: dict[str, list[Name]] = {}
    for name, optimizer in groups.own.items():
        alike.setdefault(repr(optimizer), []).append(name)
    for names in alike.values():
        yield from store.backend.set_optimizer(groups.own[names[0]], names)
    store.groups = groups
    if compressor is not None:
        yield from store.backend.set_compression(options(compressor), compressor)
        store.compressor = compressor


def _nbytes(record: Record) -> int:
    """Return the bytes of a key's value and of its optimizer's state."""
    return record.size * sum(np.dtype(dtype).itemsize for dtype in (record.dtype, *record.state))


def _values_loaded(store: Store, reader: Reader | None, records: Sequence[Record]) -> Task[None]:
    there = [record for record in records if record.key in store.keys]
    new = [record for record in records if record.key not in store.keys]
    if there:
        values = [_read(reader, value_name(one.key), one.shape, one.dtype).reshape(-1) for one in there]
        yield from store.backend.put([store.keys[record.key] for record in there], values)
    if new:
        keys = [Key(record.key, tuple(record.shape), np.dtype(record.dtype)) for record in new]
        yield from store.backend.init(keys, [_read(reader, value_name(one.key), one.shape, one.dtype) for one in new])
        store.add(keys)


def _states_loaded(store: Store, reader: Reader | None, records: Sequence[Record]) -> Task[None]:
    states = {
        record.key: (
            record.step,
            [_read(reader, state_name(record.key, slot), (record.size,), d) for slot, d in enumerate(record.state)],
        )
        for record in records
    }
    if not served(store.layout):
        from_worker(store.layout, 0, [*states], [array for _, arrays in states.values() for array in arrays])
    yield from store.backend.stored.put_states([store.keys[name] for name in states], states)


def _residuals_loaded(store: Store, reader: Reader | None, header: Header, records: Sequence[Record]) -> Task[None]:
    saved = [
        [
            _read(reader, residual_name(one.key, group), (one.size,), residuals.residual_dtype(one.dtype).name)
            for one in records
        ]
        for group in range(header.residuals)
    ]
    keys = [store.keys[record.key] for record in records]
    yield from residuals.given_back(store.layout, store.backend.stored, keys, saved, header.residuals)


def _read(reader: Reader | None, name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """A tensor of the file; for those who do not read, an array that holds nothing of use."""
    return np.empty(shape, np.dtype(dtype)) if reader is None else reader.get(name)

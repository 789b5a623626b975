"""Read a checkpoint into a store with any number of servers and workers (`kv.load`), or only optimizer states.

Only worker 0 reads the file, so other nodes need not have access to it. Before anything changes, worker 0 checks that
the file fits the store. If it does not, all workers raise the same ValueError. If the file has keys that the store
lacks, these keys are created. A file that lacks a key of the store does not fit.

Compression holds back parts of gradients, the *residuals*. If the number of workers (or clients) is the same as at the
time of the save, each worker gets its own residuals. Otherwise worker i of n gets the sum of residuals i, i + n, i +
2n, ... So every residual is pushed exactly once.

`save_states` and `load_states` implement `save_optimizer_states` and `load_optimizer_states`, which MXNet also has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import msgspec
import numpy as np

from mpips.collectives import log
from mpips.collectives.fabric.tasks import Task
from mpips.compression.compressors import Compressor
from mpips.compression.registry import create, options
from mpips.optimizers.base import Optimizer, initial
from mpips.optimizers.registry import as_data, from_data
from mpips.optimizers.schedules import Groups
from mpips.store.checkpoint import file
from mpips.store.checkpoint.file import (
    KeyRecord,
    Reader,
    StoreHeader,
    decode_header,
    file_name,
    residual_dtype,
    residual_name,
    state_name,
    value_name,
)
from mpips.store.checkpoint.save import from_worker, senders
from mpips.store.keys.arguments import runs
from mpips.store.keys.key import Array, Key, Name
from mpips.store.options import MOST
from mpips.store.roles import Layout
from mpips.store.runtime.rendezvous import attempt
from mpips.store.services import KINDS
from mpips.store.worker.interface import StateAccess, States
from mpips.store.worker.store import WorkerStore

LOG = log.get("mpips.store")
DECODERS = {kind.name: kind.decode_records for kind in KINDS}


def load(store: WorkerStore, path: str | os.PathLike[str]) -> None:
    """Load a checkpoint; see `KVStore.load`. Collective."""
    store.finish()
    if store.saving is not None:
        # A save in the background may still be writing this file.
        store.saving.finish()
    with contextlib.ExitStack() as stack:
        name, refusal = attempt(lambda: file_name("load", "path", path))
        reader, unfit = attempt(lambda: _opened(store, name, stack) if refusal is None else None)
        header_text = b"" if reader is None else reader.encoded
        texts = store.agree_settled("load", [("path", name or "")], refusal or unfit, noun="argument", data=header_text)
        header = decode_header(texts[0], DECODERS)
        store.run("load", _loaded(store, reader, header, name or ""))
        LOG.info("checkpoint %s is loaded, with %d keys", name, len(header.records))


def _opened(store: WorkerStore, path: str, stack: contextlib.ExitStack) -> Reader | None:
    """Open the file on worker 0. On other workers return None.

    Raises ValueError if the file cannot be read or does not fit the store.
    """
    if store.layout.rank:
        return None
    reader = stack.enter_context(Reader(path, DECODERS))
    _check_keys(store, reader.path, reader.header)
    _check_collections(store, reader.path, reader.header)
    # This raises if the file names an optimizer that the user has not registered.
    groups = _used(store, _groups(reader.header))
    for record in reader.header.records:
        _check_state(reader.path, record, groups.of(record.key))
    if reader.header.compression is not None:
        create(reader.header.compression)
    return reader


def _check_keys(store: WorkerStore, path: str, header: StoreHeader) -> None:
    """Raise ValueError unless the file has every key of the store, with the same shape and dtype."""
    records = {record.key: record for record in header.records}
    for key in store.keys.values():
        if key.name not in records:
            raise ValueError(f"{path} has no key {key.name!r}, which the store has: forget it first, or save it too")
        record = records[key.name]
        in_file, in_store = f"{record.dtype}{record.shape}", f"{key.dtype.name}{key.shape}"
        if in_file != in_store:
            raise ValueError(f"{path}: key {key.name!r} is {in_file} in the file and {in_store} in the store")
    kinds = {type(name).__name__ for name in (*records, *store.keys)}
    if len(kinds) > 1:
        raise ValueError(f"{path} has keys of type {' and '.join(sorted(kinds))}, beside those of the store")


def _check_collections(store: WorkerStore, path: str, header: StoreHeader) -> None:
    """Raise ValueError if the file's collections do not fit the store.

    The file must have every collection of the store, and each must fit. The same name must not belong to a key and to a
    collection.
    """
    services = {service.name: service for service in store.backend.services}
    for name, records in header.services.items():
        if records and name not in services:
            raise ValueError(
                f"{path} has {records[0].noun} {records[0].name!r}, which only servers keep: load it into a store with "
                "servers=1 or more"
            )
    for name, service in services.items():
        service.check_records(path, header.services.get(name, ()))
    keys = {record.key for record in header.records} | store.keys.keys()
    nouns: dict[Name, str] = {each.name: each.noun for each in header.collections}
    nouns |= {name: each.noun for name, each in store.collections.items()}
    if twice := next((name for name in nouns if name in keys), None):
        raise ValueError(
            f"{path} and the store use the name {twice!r} for a key and for a {nouns[twice]}: choose another"
        )


def _check_state(path: str, record: KeyRecord, optimizer: Optimizer | None) -> None:
    """Raise ValueError if the optimizer cannot update the key, or if another optimizer made the state in the file."""
    if optimizer is None:
        return
    if not record.floats:
        raise ValueError(
            f"{path}: key {record.key!r} is {record.dtype}, and an optimizer needs floats: load it into a "
            "store whose optimizers name their keys, set_optimizer(..., keys=[...])"
        )
    if not (record.step or record.state):
        return
    wanted = [array.dtype.name for array in initial(optimizer, np.zeros(1, np.dtype(record.dtype)))]
    if record.state != wanted:
        have, need = (", ".join(dtypes) or "no arrays" for dtypes in (record.state, wanted))
        raise ValueError(
            f"{path}: the state of key {record.key!r} is {have}, and {type(optimizer).__name__} keeps {need}: "
            "register the optimizer that it was saved of"
        )


def _used(store: WorkerStore, groups: Groups) -> Groups:
    """Return the optimizers after the load: those of the file, or those of the store if the file has none."""
    return Groups(groups.default or store.groups.default, groups.own) if groups else store.groups


def _groups(header: StoreHeader) -> Groups:
    """Return the file's optimizers. Raises ValueError or TypeError if one is not registered in this process."""
    own = {record.key: from_data(record.optimizer) for record in header.records if record.optimizer is not None}
    return Groups(None if header.optimizer is None else from_data(header.optimizer), own)


def _loaded(store: WorkerStore, reader: Reader | None, header: StoreHeader, path: str) -> Task[None]:
    """Load the whole file into the store, a group of keys at a time. Worker 0 reads the file. Collective."""
    parts = [header.records[run] for run in runs(map(_nbytes, header.records))]
    for records in parts:
        yield from _values_loaded(store, reader, records)
    compressor, groups = None if header.compression is None else create(header.compression), _groups(header)
    if groups or compressor is not None:
        yield from _use(store, _used(store, groups), compressor)
    for records in parts:
        yield from _states_loaded(store, reader, [each for each in records if store.groups.of(each.key) is not None])
        if header.residuals:
            floats = [record for record in records if record.floats]
            yield from _residuals_loaded(store, reader, header, floats)
    for service in store.backend.services:
        if collections := header.services.get(service.name):
            store.restored.offer((yield from service.load(reader, collections)), path)


def _use(store: WorkerStore, groups: Groups, compressor: Compressor | None) -> Task[None]:
    """Set the optimizers, and also the compression unless `compressor` is None. Collective, with equal arguments."""
    if groups.default is not None:
        yield from store.backend.set_optimizer(groups.default, None)
    # Use one request for all keys with equal optimizers.
    alike: dict[str, list[Name]] = {}
    for name, optimizer in groups.own.items():
        alike.setdefault(repr(optimizer), []).append(name)
    for names in alike.values():
        yield from store.backend.set_optimizer(groups.own[names[0]], names)
    store.groups = groups
    if compressor is not None:
        yield from store.backend.set_compression(options(compressor), compressor)
        store.compressor = compressor


def _nbytes(record: KeyRecord) -> int:
    """Return the size of a key's values and of its optimizer's state, in bytes."""
    return record.size * sum(np.dtype(dtype).itemsize for dtype in (record.dtype, *record.state))


def _values_loaded(store: WorkerStore, reader: Reader | None, records: Sequence[KeyRecord]) -> Task[None]:
    existing = [record for record in records if record.key in store.keys]
    new = [record for record in records if record.key not in store.keys]
    if existing:
        values = [_read(reader, value_name(each.key), each.shape, each.dtype).reshape(-1) for each in existing]
        for record in existing:
            store.keys[record.key].replaced = True
        yield from store.backend.store_values([store.keys[record.key] for record in existing], values)
    if new:
        keys = [Key(record.key, tuple(record.shape), np.dtype(record.dtype)) for record in new]
        yield from store.backend.init(
            keys, [_read(reader, value_name(each.key), each.shape, each.dtype) for each in new]
        )
        store.add(keys)


def _states_loaded(store: WorkerStore, reader: Reader | None, records: Sequence[KeyRecord]) -> Task[None]:
    states = {
        record.key: (
            record.step,
            [_read(reader, state_name(record.key, slot), (record.size,), d) for slot, d in enumerate(record.state)],
        )
        for record in records
    }
    if not store.layout.num_servers:
        from_worker(store.layout, 0, [*states], [array for _, arrays in states.values() for array in arrays])
    yield from store.backend.stored.put_states([store.keys[name] for name in states], states)


def _residuals_loaded(
    store: WorkerStore, reader: Reader | None, header: StoreHeader, records: Sequence[KeyRecord]
) -> Task[None]:
    saved = [
        [
            _read(reader, residual_name(each.key, group), (each.size,), residual_dtype(each.dtype).name)
            for each in records
        ]
        for group in range(header.residuals)
    ]
    keys = [store.keys[record.key] for record in records]
    yield from give_back_residuals(store.layout, store.backend.stored, keys, saved, header.residuals)


def give_back_residuals(
    layout: Layout, stored: StateAccess, keys: Sequence[Key], saved: Sequence[Sequence[Array]], groups: int
) -> Task[None]:
    """Give each sender its share of the residuals in a file that was saved by `groups` senders. Collective.

    A sender is a worker or a whole client (see `save.senders`).

    Args:
        saved: For each of the senders at the time of the save, a list with one array per key. Only worker 0's lists are
            used.
    """
    group = next(number for number, ranks in enumerate(senders(layout)) if layout.rank in ranks)
    totals = [np.zeros(key.size) for key in keys]
    for number in range(groups):
        arrays = saved[number]
        from_worker(layout, 0, [key.name for key in keys], arrays)
        if number % len(senders(layout)) == group:
            for total, array in zip(totals, arrays, strict=True):
                total += array
    yield from stored.put_residuals(keys, totals)


def _read(reader: Reader | None, name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """Return a tensor of the file. If `reader` is None, return an uninitialised array of this shape and dtype."""
    return np.empty(shape, np.dtype(dtype)) if reader is None else reader.get(name)


# metadata keys in a file of optimizer states
STEPS, OPTIMIZERS = "steps", "optimizers"


def save_states(store: WorkerStore, fname: str, dump_optimizer: bool) -> None:
    """Save only the optimizers' states; see `KVStore.save_optimizer_states`. Collective."""
    _all_come(store, "save_optimizer_states", fname)
    states = store.run("save_optimizer_states", store.backend.stored.states(list(store.keys.values())))

    def write() -> None:
        arrays = {f"{key!r}/{slot}": array for key, (_, slots) in states.items() for slot, array in enumerate(slots)}
        metadata = {STEPS: _text({repr(key): step for key, (step, _) in states.items()})}
        if dump_optimizer:
            default, own = (
                store.groups.default,
                {repr(key): as_data(optimizer) for key, optimizer in store.groups.own.items()},
            )
            metadata[OPTIMIZERS] = _text([None if default is None else as_data(default), own])
        try:
            file.write(fname, arrays, metadata)
        except OSError as error:
            raise ValueError(f"{fname} cannot be written: {file.why(error)}") from error

    refusal = attempt(write)[1] if store.layout.rank == 0 else None
    store.agree("save_optimizer_states", refusal=refusal)


def load_states(store: WorkerStore, fname: str) -> None:
    """Load only the optimizers' states; see `KVStore.load_optimizer_states`. Collective."""
    keys = [key for key in store.keys.values() if store.groups.of(key.name) is not None]
    _all_come(store, "load_optimizer_states", fname)
    states, refusal = attempt(lambda: _fitting(store, _read_states(fname, keys)) if store.layout.rank == 0 else {})
    shapes = [(step, [array.dtype.name for array in arrays]) for step, arrays in (states or {}).values()]
    texts = store.agree("load_optimizer_states", refusal=refusal, data=msgspec.json.encode(shapes))
    if not store.layout.num_servers:
        if store.layout.rank:
            states = {
                key.name: (step, [np.empty(key.size, np.dtype(dtype)) for dtype in dtypes])
                for key, (step, dtypes) in zip(keys, msgspec.json.decode(texts[0]))
            }
        every = [array for key in keys for array in states[key.name][1]]
        from_worker(store.layout, 0, [key.name for key in keys], every)
    store.run("load_optimizer_states", store.backend.stored.put_states(keys, states))


def _all_come(store: WorkerStore, what: str, fname: str) -> None:
    """Check a call that saves or loads optimizer states. Raises ValueError on all workers if the check fails.

    All workers must make the call with the same file name after the same rounds, and an optimizer must be set.
    """
    name, unfit = attempt(lambda: file.file_name(what, "fname", fname))
    refusal = None if store.groups else ValueError("it needs an optimizer; call set_optimizer first")
    store.agree_settled(what, [("fname", name or "")], refusal or unfit, noun="argument")


def _fitting(store: WorkerStore, states: States) -> States:
    """Return `states` after a check. Raises ValueError if the state of a key does not fit the key's optimizer."""
    for name, (step, arrays) in states.items():
        optimizer = store.groups.of(name)
        if not (step or arrays) or optimizer is None:
            continue
        wanted = [array.dtype for array in initial(optimizer, np.zeros(1, store.keys[name].dtype))]
        if wanted != [array.dtype for array in arrays]:
            raise ValueError(
                f"key {name!r}: the saved state does not fit {type(optimizer).__name__}: "
                "set the optimizer that it was saved of"
            )
    return states


def _text(data: object) -> str:
    return msgspec.json.encode(data).decode()


def _read_states(fname: str | os.PathLike[str], keys: Sequence[Key]) -> States:
    """Read the optimizer states of `keys` from a file.

    Raises ValueError if the file lacks a key, or has an impossible step or state. The message names the file and the
    key.
    """
    result: dict[Name, tuple[int, list[str]]] = {}
    with file.TensorFile(fname) as saved:
        try:
            steps = msgspec.json.decode(saved.metadata.get(STEPS, ""), type=dict[str, int | float])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"{saved.path} was not written by save_optimizer_states: its steps: {error}") from error
        for key in keys:
            if repr(key.name) not in steps:
                raise ValueError(f"{fname} has no state of key {key.name!r}: save it with the keys of this store")
            step = steps[repr(key.name)]
            if not isinstance(step, int) or not 0 <= step <= MOST:
                raise ValueError(f"{fname}: key {key.name!r} has step {step}: give a whole number in [0, 2**63)")
            names: list[str] = []
            while (name := f"{key.name!r}/{len(names)}") in saved.tensors:
                if saved.tensors[name].shape != (key.size,):
                    raise ValueError(
                        f"{fname}: the state of key {key.name!r} is {saved.tensors[name]}, the key has {key.size} "
                        "elements: load what was saved of keys of the same sizes"
                    )
                names.append(name)
            result[key.name] = step, names
        saved.check_sums((STEPS, OPTIMIZERS))
        return {key: (step, [saved.get(name) for name in names]) for key, (step, names) in result.items()}

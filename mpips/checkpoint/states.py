"""`save_optimizer_states` and its pair, as MXNet has them: the optimizers' states alone, in one file of safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from mpips.checkpoint import file
from mpips.checkpoint.source import States, Store, from_worker, served
from mpips.keys.key import Key
from mpips.optimizers.base import initial
from mpips.optimizers.groups import Groups
from mpips.optimizers.registry import as_data
from mpips.runtime.rendezvous import attempt

Array = NDArray[Any]


def save_states(store: Store, fname: str, dump_optimizer: bool) -> None:
    """See `KVStore.save_optimizer_states`."""
    _all_come(store, "save_optimizer_states", fname)
    found = store.run("save_optimizer_states", store.backend.stored.states(list(store.keys.values())))
    groups = store.groups if dump_optimizer else None
    _, refusal = attempt(lambda: write(fname, found, groups) if store.layout.rank == 0 else None)
    store.agree("save_optimizer_states", refusal=refusal)


def load_states(store: Store, fname: str) -> None:
    """See `KVStore.load_optimizer_states`."""
    keys = [key for key in store.keys.values() if store.groups.of(key.name) is not None]
    _all_come(store, "load_optimizer_states", fname)
    states, refusal = attempt(lambda: _fitting(store, read(fname, keys)) if store.layout.rank == 0 else {})
    shapes = [(step, [array.dtype.name for array in arrays]) for step, arrays in (states or {}).values()]
    told = store.agree("load_optimizer_states", refusal=refusal, data=json.dumps(shapes).encode())
    if not served(store.layout):
        if store.layout.rank:
            states = {
                key.name: (step, [np.empty(key.size, np.dtype(dtype)) for dtype in dtypes])
                for key, (step, dtypes) in zip(keys, json.loads(told[0]))
            }
        every = [array for key in keys for array in states[key.name][1]]
        from_worker(store.layout, 0, [key.name for key in keys], every)
    store.run("load_optimizer_states", store.backend.stored.put_states(keys, states))


def _all_come(store: Store, what: str, fname: str) -> None:
    """ValueError unless all workers have called it with one name, after the same rounds, and there is an optimizer."""
    name, unfit = attempt(lambda: file.file_name(what, "fname", fname))
    refusal = None if store.groups else ValueError("it needs an optimizer; call set_optimizer first")
    store.settled(what, [("fname", name or "")], refusal or unfit, noun="argument")


def _fitting(store: Store, states: States) -> States:
    """The states; ValueError where one is not of its key's optimizer."""
    for name, (_, arrays) in states.items():
        optimizer = store.groups.of(name)
        if not arrays or optimizer is None:
            continue
        wanted = [array.dtype for array in initial(optimizer, np.zeros(1, store.keys[name].dtype))]
        if wanted != [array.dtype for array in arrays]:
            raise ValueError(
                f"key {name!r}: the saved state does not fit {type(optimizer).__name__}: "
                "set the optimizer that it was saved of"
            )
    return states


def write(fname: str | os.PathLike[str], states: States, groups: Groups | None) -> None:
    """Write each key's step and flat arrays; ValueError where the file cannot be written."""
    tensors = {f"{key!r}/{slot}": array for key, (_, arrays) in states.items() for slot, array in enumerate(arrays)}
    header = {"steps": json.dumps({repr(key): step for key, (step, _) in states.items()})}
    if groups is not None:
        own = {repr(key): as_data(optimizer) for key, optimizer in groups.own.items()}
        default = None if groups.default is None else as_data(groups.default)
        header["optimizers"] = json.dumps([default, own])
    try:
        file.write(fname, tensors, header)
    except OSError as error:
        raise ValueError(f"{fname} cannot be written: {file.why(error)}") from error


def read(fname: str | os.PathLike[str], keys: Sequence[Key]) -> States:
    """The states of `keys`; ValueError naming the file, and the key that is missing or has another size."""
    result: States = {}
    try:
        with file.opened(os.fspath(fname)) as tensors:
            steps = json.loads((tensors.metadata() or {})["steps"])
            names = set(tensors.keys())
            for key in keys:
                if repr(key.name) not in steps:
                    raise ValueError(f"{fname} has no state of key {key.name!r}: save it with the keys of this store")
                arrays: list[Array] = []
                while (name := f"{key.name!r}/{len(arrays)}") in names:
                    arrays.append(np.ascontiguousarray(tensors.get_tensor(name)))
                if any(array.size != key.size for array in arrays):
                    raise ValueError(
                        f"{fname}: the state of key {key.name!r} has {arrays[0].size} elements, the key has {key.size}"
                        ": load what was saved of keys of the same sizes"
                    )
                result[key.name] = steps[repr(key.name)], arrays
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{fname} cannot be read: {file.why(error)}") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{fname} was not written by save_optimizer_states: {error}") from error
    return result

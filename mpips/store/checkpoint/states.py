"""`save_optimizer_states` and its pair, as MXNet has them: the optimizers' states alone, in one file of safetensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from mpips.optimizers.base import initial
from mpips.optimizers.groups import Groups
from mpips.optimizers.registry import as_data
from mpips.store.checkpoint import file, tensors
from mpips.store.checkpoint.source import States, Store, from_worker, served
from mpips.store.keys.key import Key, Name
from mpips.store.options import MOST
from mpips.store.runtime.rendezvous import attempt

Array = NDArray[Any]
STEPS, OPTIMIZERS = "steps", "optimizers"
"""The words of the metadata."""


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
    told = store.agree("load_optimizer_states", refusal=refusal, data=msgspec.json.encode(shapes))
    if not served(store.layout):
        if store.layout.rank:
            states = {
                key.name: (step, [np.empty(key.size, np.dtype(dtype)) for dtype in dtypes])
                for key, (step, dtypes) in zip(keys, msgspec.json.decode(told[0]))
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


def write(fname: str | os.PathLike[str], states: States, groups: Groups | None) -> None:
    """Write each key's step and flat arrays; ValueError where the file cannot be written."""
    arrays = {f"{key!r}/{slot}": array for key, (_, kept) in states.items() for slot, array in enumerate(kept)}
    words = {STEPS: _text({repr(key): step for key, (step, _) in states.items()})}
    if groups is not None:
        own = {repr(key): as_data(optimizer) for key, optimizer in groups.own.items()}
        words[OPTIMIZERS] = _text([None if groups.default is None else as_data(groups.default), own])
    try:
        tensors.write(fname, arrays, words)
    except OSError as error:
        raise ValueError(f"{fname} cannot be written: {file.why(error)}") from error


def _text(data: Any) -> str:
    return msgspec.json.encode(data).decode()


def read(fname: str | os.PathLike[str], keys: Sequence[Key]) -> States:
    """The states of `keys`; ValueError naming the file, and the key that is missing, or whose step or state cannot
    be."""
    result: dict[Name, tuple[int, list[str]]] = {}
    with tensors.TensorFile(fname) as found:
        try:
            steps = msgspec.json.decode(found.metadata.get(STEPS, ""), type=dict[str, int | float])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"{found.path} was not written by save_optimizer_states: its steps: {error}") from error
        for key in keys:
            if repr(key.name) not in steps:
                raise ValueError(f"{fname} has no state of key {key.name!r}: save it with the keys of this store")
            step = steps[repr(key.name)]
            if not isinstance(step, int) or not 0 <= step <= MOST:
                raise ValueError(f"{fname}: key {key.name!r} has step {step}: give a whole number in [0, 2**63)")
            names: list[str] = []
            while (name := f"{key.name!r}/{len(names)}") in found.tensors:
                if found.tensors[name].shape != (key.size,):
                    raise ValueError(
                        f"{fname}: the state of key {key.name!r} is {found.tensors[name]}, the key has {key.size} "
                        "elements: load what was saved of keys of the same sizes"
                    )
                names.append(name)
            result[key.name] = step, names
        found.see_sums((STEPS, OPTIMIZERS))
        return {key: (step, [found.get(name) for name in names]) for key, (step, names) in result.items()}

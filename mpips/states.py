"""The optimizer's state of a store in one file, in safetensors' format: no pickle, readable by other tools."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mpips import optimizers, whole_file
from mpips.keys import Key
from mpips.optimizers import Optimizer
from mpips.pure import Pure
from mpips.session import Task

if TYPE_CHECKING:
    from mpips.store import KVStore

States = dict[Any, tuple[int, list[NDArray[Any]]]]


def gather(kv: KVStore, fname: str, dump_optimizer: bool) -> None:
    """See `KVStore.save_optimizer_states`."""
    _all_come(kv, "save_optimizer_states", fname)
    kv._at_rank_0(_gathered(kv, fname, dump_optimizer), "save_optimizer_states")


def spread(kv: KVStore, fname: str) -> None:
    """See `KVStore.load_optimizer_states`."""
    _all_come(kv, "load_optimizer_states", fname)
    kv._at_rank_0(_spread(kv, fname), "load_optimizer_states", everywhere=isinstance(kv._backend, Pure))


def _all_come(kv: KVStore, what: str, fname: str) -> None:
    refusal = "" if kv._optimizer else "ValueError: it needs an optimizer; call set_optimizer first"
    kv._settle()
    kv._agree(what, [("fname", str(fname))], refusal)


def _gathered(kv: KVStore, fname: str, dump_optimizer: bool) -> Task:
    found = yield from kv._backend.states(list(kv._keys.values()))
    assert kv._optimizer is not None
    save(fname, found, kv._optimizer, dump_optimizer)


def _spread(kv: KVStore, fname: str) -> Task:
    keys = list(kv._keys.values())
    yield from kv._backend.put_states(keys, load(fname, keys))


def save(fname: str | os.PathLike[str], states: States, optimizer: Optimizer, dump_optimizer: bool) -> None:
    """Write each key's step and flat arrays; the file appears whole or not at all."""
    tensors = {f"{key!r}/{slot}": array for key, (_, arrays) in states.items() for slot, array in enumerate(arrays)}
    header = {"steps": json.dumps({repr(key): step for key, (step, _) in states.items()})}
    if dump_optimizer:
        header["optimizer"] = optimizers.encode(optimizer).hex()
    try:
        whole_file.put(fname, lambda name: save_file(tensors, name, metadata=header))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{fname} cannot be written: {error}") from error


def load(fname: str | os.PathLike[str], keys: Sequence[Key]) -> States:
    """The states of `keys`; raises ValueError naming the file, and the key that is missing or has another size."""
    result: States = {}
    try:
        with safe_open(os.fspath(fname), framework="numpy") as file:
            steps = json.loads((file.metadata() or {})["steps"])
            names = set(file.keys())
            for key in keys:
                if repr(key.name) not in steps:
                    raise ValueError(f"{fname} has no state of key {key.name!r}: save it with the keys of this store")
                arrays: list[NDArray[Any]] = []
                while (name := f"{key.name!r}/{len(arrays)}") in names:
                    arrays.append(np.ascontiguousarray(file.get_tensor(name)))
                if any(array.size != key.size for array in arrays):
                    raise ValueError(
                        f"{fname}: the state of key {key.name!r} has {arrays[0].size} elements, the key has {key.size}"
                        ": load what was saved of keys of the same sizes"
                    )
                result[key.name] = steps[repr(key.name)], arrays
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{fname} cannot be read: {error}") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{fname} was not written by save_optimizer_states: {error}") from error
    return result

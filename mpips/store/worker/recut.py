"""Move the elements of some keys into new keys.

Training uses this when it groups the layers of the model differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mpips.store.keys import arguments
from mpips.store.keys.key import Array, Key, Name
from mpips.store.runtime.rendezvous import attempt
from mpips.store.worker.interface import States
from mpips.store.worker.store import WorkerStore


def recut(store: WorkerStore, keys: Sequence[Name], new: Mapping[Name, int]) -> None:
    found, refusal = attempt(lambda: _asked(store, keys, new))
    old, sizes = found or ([], {})
    asked = [*((key.name, "") for key in old), *((name, str(size)) for name, size in sizes.items())]
    store.agree_settled("recut", asked, refusal)
    states: States = store.run("recut", store.backend.stored.states(old)) if store.groups else {}
    _, refusal = attempt(lambda: _check_steps(old, states))
    values = _values(store, old)
    kept = store.run("recut", store.backend.stored.residuals(old))
    # Wait until all workers have read the old keys. After that the servers may forget them.
    store.agree("recut", refusal=refusal)
    store.drop(old, "recut")
    made = [Key(name, (size,), values.dtype) for name, size in sizes.items()]
    cuts = np.cumsum([key.size for key in made])[:-1]
    store.run("recut", store.backend.init(made, np.split(values, cuts)))
    store.add(made)
    if store.groups:
        store.run("recut", store.backend.stored.put_states(made, _cut(old, states, made, cuts)))
    if kept is not None:
        store.run("recut", store.backend.stored.put_residuals(made, np.split(kept, cuts)))


def _asked(store: WorkerStore, keys: Sequence[Name], new: Mapping[Name, int]) -> tuple[list[Key], dict[Name, int]]:
    """Return the old keys, and the size of each new key. Raise ValueError or TypeError if the arguments do not fit."""
    old = store.known(keys, "recut")
    if not isinstance(new, Mapping):
        raise TypeError(f"recut: the new keys are a dict of names and sizes, not {type(new).__name__}")
    sizes = {name: _size(name, size) for name, size in zip(arguments.names(list(new)), new.values())}
    if len({key.dtype for key in old}) > 1:
        raise ValueError(f"recut: keys {_shown(old)} must be of one dtype: cut those of each dtype by themselves")
    before, after = sum(key.size for key in old), sum(sizes.values())
    if before != after:
        had, would = f"{_shown(old)} have {before} elements", f"{list(sizes)} would have {after}"
        raise ValueError(f"recut: keys {had}, {would}: give the new ones as many")
    names = [key.name for key in old]
    for name in sizes:
        arguments.check_new(name, "recut")
        if name in store.keys and name not in names:
            raise ValueError(f"recut: key {name!r} exists already; choose another name")
    return old, sizes


def _size(name: Name, size: object) -> int:
    if isinstance(size, (bool, np.bool_)) or not isinstance(size, (int, np.integer)):
        raise TypeError(f"recut: key {name!r} is to have {size!r} elements: pass an int")
    if size < 0:
        raise ValueError(f"recut: key {name!r} is to have {size} elements: pass 0 or more")
    return int(size)


def _shown(keys: Sequence[Key]) -> list[Name]:
    return [key.name for key in keys]


def _check_steps(keys: Sequence[Key], states: States) -> None:
    """Raise ValueError if some keys were updated more often than others.

    In a store with servers only rank 0 has `states`, so only rank 0 can raise.
    """
    steps = sorted({step for step, _ in states.values()})
    if len(steps) > 1:
        raise ValueError(f"keys {_shown(keys)} were updated {steps} times, not equally often")


def _values(store: WorkerStore, keys: Sequence[Key]) -> Array:
    """Return the stored values of the keys as one 1-D array, in the order of `keys`."""
    values = np.empty(sum(key.size for key in keys), keys[0].dtype)
    start = 0
    for key in keys:
        store.run("recut", store.backend.transfers.pull([key], [values[start : start + key.size]]), [key.name])
        start += key.size
    return values


def _cut(old: Sequence[Key], states: States, new: Sequence[Key], cuts: NDArray[np.int64]) -> States:
    """Join the optimizer states of the old keys, and cut them at `cuts` into states for the new keys.

    The old keys must have been updated equally often.
    """
    if not states:
        return {}
    rows = zip(*(states[key.name][1] for key in old), strict=True)
    pieces = [np.split(np.concatenate([array.reshape(-1) for array in row]), cuts) for row in rows]
    step = states[old[0].name][0]
    return {key.name: (step, [slot[index] for slot in pieces]) for index, key in enumerate(new)}

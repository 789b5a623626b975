"""The same elements under other keys: where layers are exchanged in groups, another plan needs other keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from collectives.errors import of_caller
from mpips import arguments
from mpips.arguments import Name
from mpips.keys import Key
from mpips.pure import Pure
from mpips.session import Task
from mpips.states import States

if TYPE_CHECKING:
    from mpips.store import KVStore

Array = NDArray[Any]


def recut(kv: KVStore, keys: Sequence[Name], new: Mapping[Name, int]) -> None:
    """See `KVStore.recut`."""
    kv._settle()
    old, refusal = kv._try(lambda: _old(kv, keys, new))
    asked = [*((key, "") for key in keys), *((name, str(size)) for name, size in new.items())]
    rounds = [key.round for key in old or ()]
    told = kv._agree("recut", asked, refusal, data=msgspec.msgpack.encode(rounds))
    _none_ahead(kv, old, [msgspec.msgpack.decode(data, type=list[int]) for data in told])
    values = _values(kv, old)
    states: States = {}
    everywhere = isinstance(kv._backend, Pure)
    if kv._optimizer is not None:
        kv._at_rank_0(_fetch(kv, old, states), "recut", everywhere)
    residual = kv._backend.residuals(old)
    with kv._operations.whole("recut"):
        kv._run([], kv._backend.forget(old), 0, "recut")
        _make(kv, old, new, values, states, everywhere)
        if residual is not None:
            kv._backend.put_residuals([kv._keys[name] for name in new], np.split(residual, _cuts(new)))


def _make(
    kv: KVStore, old: list[Key], new: Mapping[Name, int], values: Array, states: States, everywhere: bool
) -> None:
    """The new keys with what the forgotten ones had."""
    made = [Key(name, (size,), values.dtype) for name, size in new.items()]
    kv._run([], kv._backend.init(made, np.split(values, _cuts(new))), 0, "recut")
    for key in old:
        del kv._keys[key.name]
    kv._keys.update((key.name, key) for key in made)
    if kv._optimizer is not None:
        kv._at_rank_0(kv._backend.put_states(made, _cut(old, states, made, _cuts(new))), "recut", everywhere)


def _cuts(new: Mapping[Name, int]) -> NDArray[np.int64]:
    return np.cumsum(list(new.values()))[:-1]


def _old(kv: KVStore, keys: Sequence[Name], new: Mapping[Name, int]) -> list[Key]:
    old = [kv._key(key, "recut") for key in arguments.names(list(keys))]
    if len({key.dtype for key in old}) > 1:
        raise ValueError(f"recut: keys {list(keys)} must be of one dtype: cut those of each dtype by themselves")
    sizes = sum(key.size for key in old), sum(new.values())
    if sizes[0] != sizes[1]:
        had, would = f"{list(keys)} have {sizes[0]} elements", f"{list(new)} would have {sizes[1]}"
        raise ValueError(f"recut: keys {had}, {would}: give the new ones as many")
    for name in new:
        if name in kv._keys and name not in keys:
            raise ValueError(f"recut: key {name!r} exists already; choose another name")
    return old


def _none_ahead(kv: KVStore, keys: list[Key], rounds: list[list[int]]) -> None:
    """ValueError where a worker, whose pushes of the keys are given by rank, is so far ahead of another that servers
    hold back its pushes, and its pulls."""
    staleness = kv.layout.options.staleness
    for key, counts in zip(keys, zip(*rounds)):
        if kv.layout.asynchronous and 0 <= staleness < max(counts) - min(counts):
            sentence = (
                f"recut: key {key.name!r} was pushed {max(counts)} times by rank {counts.index(max(counts))} and "
                f"{min(counts)} times by rank {counts.index(min(counts))}, which staleness={staleness} holds back; "
                "let all push it as often first"
            )
            raise of_caller(ValueError(sentence))


def _values(kv: KVStore, keys: list[Key]) -> Array:
    """What is stored, one key behind the other."""
    values = np.empty(sum(key.size for key in keys), keys[0].dtype)
    start = 0
    for key in keys:
        kv._run([key.name], kv._backend.pull(key, values[start : start + key.size]), 0, "recut", key.name)
        start += key.size
    return values


def _fetch(kv: KVStore, keys: list[Key], into: States) -> Task:
    """The optimizer's states of the keys; ValueError where they cannot be those of one key."""
    found = yield from kv._backend.states(keys)
    steps = sorted({step for step, _ in found.values()})
    if len(steps) > 1:
        raise ValueError(f"keys {[key.name for key in keys]} were updated {steps} times, not equally often")
    into.update(found)


def _cut(old: list[Key], states: States, new: list[Key], cuts: NDArray[np.int64]) -> States:
    """The optimizer's states of the old keys, updated equally often, as those of the new ones."""
    if not states:
        return {}
    rows = zip(*(states[key.name][1] for key in old), strict=True)
    pieces = [np.split(np.concatenate([array.reshape(-1) for array in row]), cuts) for row in rows]
    step = states[old[0].name][0]
    return {key.name: (step, [slot[index] for slot in pieces]) for index, key in enumerate(new)}

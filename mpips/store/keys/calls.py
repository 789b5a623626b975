"""Pushes and pulls as data: what a caller handed over, checked as a whole before anything is sent. Local.

Arrays on GPUs get a host array beside them (`arrays.Staged`), and the kernels that sum them are queued here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import see_unmasked
from collectives.fabric.tasks import Task
from mpips.store.keys import arguments
from mpips.store.keys import rows as sparse
from mpips.store.keys.arguments import Staged
from mpips.store.keys.key import Key, Name
from mpips.store.keys.rows import RowSparse

Array = NDArray[Any]
Known = Mapping[Name, Key]


class Call(NamedTuple):
    """One call for one key: what it contributes, where the result goes."""

    key: Key
    payload: Array | RowSparse | None
    """The sum of the caller's arrays, in the key's shape; None where the call only pulls."""
    targets: Sequence[Array]
    """Empty where the call only pushes."""
    gathered: Task[None] | None = None
    """Waits until GPUs have summed the payload."""
    spread: Staged | None = None
    """Copies the first target, its host array, to GPUs."""


def check(known: Known, what: str, key: Any, value: Any = None, out: Any = None) -> list[Call]:
    """The calls for one key or a list of keys; ValueError or TypeError where anything of any of them is bad.

    `what`: push, pull, or pushpull, which writes to `value` where `out` is None.
    """
    values = arguments.pairs(key, value, what) if what != "pull" else None
    target, argument = (value, "value") if out is None and what != "pull" else (out, "out")
    outs = arguments.pairs(key, target, what, argument) if what != "push" else None
    if outs and out is not None:
        _see_apart(outs, what)
    keys = [arguments.known(known, name, what) for name, _ in values or outs or ()]
    made = []
    for index, one in enumerate(keys):
        targets, spread = _targets(one, outs[index][1], what) if outs else ([], None)
        payload, gathered = _payload(one, values[index][1], what) if values else (None, None)
        made.append(Call(one, payload, targets, gathered, spread))
    return made


def _see_apart(outs: Sequence[tuple[Name, Sequence[Any]]], what: str) -> None:
    """ValueError where two keys have one array as out: the second value would be written over the first."""
    taken: dict[int, Name] = {}
    for name, targets in outs:
        for target in targets:
            other = taken.setdefault(id(target), name)
            if other != name:
                raise ValueError(f"{what}: keys {other!r} and {name!r} have one array as out: give each its own")


def rows(known: Known, key: Any, out: Any, row_ids: Any) -> list[tuple[Key, Array, NDArray[np.int64]]]:
    """(key, target, row numbers) of every target of a `row_sparse_pull`; errors as in `check`."""
    what = "row_sparse_pull"
    if row_ids is None:
        raise ValueError("row_sparse_pull needs row_ids: pass the numbers of the rows, as row_ids=[0, 2]")
    outs = arguments.pairs(key, out, what, "out")
    several = isinstance(key, (list, tuple)) and isinstance(row_ids, (list, tuple))
    ids = arguments.pairs(key, [_lists(one) for one in row_ids] if several else [row_ids], what, "row_ids")
    result = []
    for (name, targets), (_, numbers) in zip(outs, ids, strict=True):
        record = arguments.known(known, name, what)
        if len(numbers) not in (1, len(targets)):
            raise ValueError(
                f"{what}: key {name!r} has {len(targets)} outs and {len(numbers)} lists of row_ids; "
                "pass one list, or one for each out"
            )
        for index, target in enumerate(targets):
            chosen = _row_ids(record, numbers[index % len(numbers)])
            array = arguments.writable(target, name, what)
            arguments.fits(array, (len(chosen), *record.shape[1:]), record.dtype, name, what, len(chosen))
            result.append((record, array, chosen))
    return result


def _lists(row_ids: Any) -> Any:
    """A key's lists of row numbers: it may be given one, or a list of them."""
    one = isinstance(row_ids, (list, tuple)) and not any(np.ndim(each) for each in row_ids)
    return [row_ids] if one else row_ids


def _row_ids(key: Key, row_ids: Any) -> NDArray[np.int64]:
    see_unmasked(row_ids, f"row_sparse_pull: row_ids of key {key.name!r}")
    ids = np.asarray(row_ids)
    ids = ids.astype(np.int64) if ids.size == 0 else ids.reshape(-1)
    if not key.shape:
        raise ValueError(f"row_sparse_pull: key {key.name!r} has no rows: it was initialised with a scalar")
    if ids.dtype.kind not in "iu":
        kind = ids.dtype.name
        raise TypeError(f"row_sparse_pull: row_ids of key {key.name!r} are {kind}: pass integers 0..{key.shape[0] - 1}")
    if ids.size and not (ids.min() >= 0 and ids.max() < key.shape[0]):
        raise ValueError(f"row_sparse_pull: key {key.name!r} has rows 0..{key.shape[0] - 1}, not {ids}")
    return ids.astype(np.int64, copy=False)


def _payload(key: Key, values: Sequence[Any], what: str) -> tuple[Array | RowSparse, Task[None] | None]:
    if any(isinstance(value, RowSparse) for value in values):
        return _row_payload(key, values, what), None
    if any(map(arguments.is_device, values)):
        staged = _staged(key, values, what, False)
        return staged.host, staged.gathered(staged.begin())
    given = [arguments.readable(value, key.name, what) for value in values]
    for array in given:
        arguments.fits(array, key.shape, key.dtype, key.name, what)
    return arguments.total(given), None


def _row_payload(key: Key, values: Sequence[Any], what: str) -> RowSparse:
    for value in values:
        if not isinstance(value, RowSparse):
            raise TypeError(f"{what}: key {key.name!r} got arrays and RowSparse in one list; pass either")
        arguments.fits(value, key.shape, key.dtype, key.name, what)
    return values[0] if len(values) == 1 else sparse.add(values)


def _targets(key: Key, outs: Sequence[Any], what: str) -> tuple[list[Array], Staged | None]:
    on_gpus = [out for out in outs if arguments.is_device(out)]
    targets = [arguments.writable(out, key.name, what) for out in outs if not arguments.is_device(out)]
    for target in targets:
        arguments.fits(target, key.shape, key.dtype, key.name, what)
    if not on_gpus:
        return targets, None
    staged = _staged(key, on_gpus, what, True)
    return [staged.host, *targets], staged


def _staged(key: Key, values: Sequence[Any], what: str, written: bool) -> Staged:
    """Host memory beside arrays on GPUs that fit the key; ValueError or TypeError with the key's name."""
    for value in values:
        if arguments.is_jax(value):
            raise TypeError(f"{what}: key {key.name!r} got a JAX array on a GPU: pass numpy.asarray of it")
    try:
        staged = Staged(values, written)
    except (ValueError, TypeError, ImportError) as error:
        raise type(error)(f"{what}: key {key.name!r}: {error}") from error
    arguments.fits(staged.host, key.shape, key.dtype, key.name, what)
    return staged


def first_value(name: Name, values: Sequence[Any]) -> Array:
    """Return what `init` stores: a host array of the sum of a key's arrays. From GPUs it is copied, blocking."""
    what = "init"
    given = [value.to_dense() if isinstance(value, RowSparse) else value for value in values]
    if not any(map(arguments.is_device, given)):
        hosts = [arguments.readable(value, name, what) for value in given]
        arguments.see_alike(hosts, name, what)
        return arguments.total(hosts)
    try:
        staged = Staged(given, False)
    except (ValueError, TypeError, ImportError) as error:
        raise TypeError(f"{what}: key {name!r}: {error}") from error
    arguments.see_dtype(staged.host.dtype, name, what)
    for _ in staged.gathered(staged.begin()):
        os.sched_yield()
    return staged.host

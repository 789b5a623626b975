"""Pushes and pulls as data: what a caller handed over, checked as a whole before anything is sent. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips import arguments, row_sparse
from mpips.arguments import Name
from mpips.keys import Key
from mpips.row_sparse import RowSparse

Array = NDArray[Any]
Known = Mapping[Name, Key]


class Call(NamedTuple):
    """One call for one key: what it contributes, where the result goes."""

    key: Key
    payload: Array | RowSparse | None
    """The sum of the caller's arrays, in the key's shape; None where the call only pulls."""
    targets: Sequence[Array]
    """Empty where the call only pushes."""


def check(known: Known, what: str, key: Any, value: Any = None, out: Any = None) -> list[Call]:
    """The calls for one key or a list of keys; ValueError or TypeError where anything of any of them is bad.

    `what`: push, pull, or pushpull, which writes to `value` where `out` is None.
    """
    values = arguments.pairs(key, value, what) if what != "pull" else None
    target, argument = (value, "value") if out is None and what != "pull" else (out, "out")
    outs = arguments.pairs(key, target, what, argument) if what != "push" else None
    keys = [arguments.known(known, name, what) for name in arguments.names(key)]
    payloads = [_payload(one, given, what) for one, (_, given) in zip(keys, values)] if values else [None] * len(keys)
    targets = [_targets(one, given, what) for one, (_, given) in zip(keys, outs)] if outs else [[] for _ in keys]
    return [Call(*fields) for fields in zip(keys, payloads, targets, strict=True)]


def named(known: Known, key: Any) -> list[Key] | None:
    """The keys of a call whose arguments are bad, so far as they are known; None where one cannot be."""
    try:
        return [known[name] for name in arguments.names(key)]
    except (ValueError, TypeError, KeyError):
        return None


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


def _payload(key: Key, values: Sequence[Any], what: str) -> Array | RowSparse:
    if any(isinstance(value, RowSparse) for value in values):
        return _row_payload(key, values, what)
    given = [arguments.readable(value, key.name, what) for value in values]
    for array in given:
        arguments.fits(array, key.shape, key.dtype, key.name, what)
    return arguments.total(given)


def _row_payload(key: Key, values: Sequence[Any], what: str) -> RowSparse:
    for value in values:
        if not isinstance(value, RowSparse):
            raise TypeError(f"{what}: key {key.name!r} got arrays and RowSparse in one list; pass either")
        arguments.fits(value, key.shape, key.dtype, key.name, what)
    return values[0] if len(values) == 1 else row_sparse.add(values)


def _targets(key: Key, outs: Sequence[Any], what: str) -> list[Array]:
    targets = [arguments.writable(out, key.name, what) for out in outs]
    for target in targets:
        arguments.fits(target, key.shape, key.dtype, key.name, what)
    return targets

"""What a caller may hand to a store, made uniform: pairs of a key and its arrays. Pure; errors name key and values."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import see_unmasked
from collectives.errors import of_caller
from mpips.store.keys import arrays
from mpips.store.keys.key import Key, Name
from mpips.store.keys.row_sparse import RowSparse
from mpips.store.options import LEAST, MOST

T = TypeVar("T")
Array = NDArray[Any]
FLOATS = ("float16", "bfloat16", "float32", "float64")
PRIORITY_BITS = 31


def names(key: Any) -> list[Name]:
    """One key or a list of keys as a list; int or str, never mixed, none twice."""
    if type(key) is str or type(key) is int:
        return [key]
    keys = list(key) if isinstance(key, (list, tuple)) else [key]
    if not keys:
        raise ValueError("an empty list of keys: a call needs at least one")
    for name in keys:
        if isinstance(name, (bool, np.bool_)) or not isinstance(name, (int, str, np.integer)):
            raise TypeError(f"a key is an int or a str, not {name!r}")
    other = of_other_kind(keys, keys[0])
    if other is not None:
        raise TypeError(f"keys are all int or all str, not mixed, as {keys[0]!r} and {other!r} are: pass one kind")
    if len(set(keys)) < len(keys):
        twice = next(name for index, name in enumerate(keys) if name in keys[:index])
        raise ValueError(f"key {twice!r} comes twice in one call: name each once")
    return [str.__str__(name) if isinstance(name, str) else int(name) for name in keys]


def see_new(name: Name, what: str) -> None:
    """ValueError unless messages and files can hold a key of this name."""
    if isinstance(name, int):
        if not LEAST <= name <= MOST:
            raise ValueError(f"{what}: key {name} is out of range: pass an int from -2**63 to 2**63 - 1")
        return
    try:
        name.encode()
    except UnicodeEncodeError as error:
        lone = name[error.start]
        why = f"holds {lone!r}, which UTF-8 has no bytes for"
        raise ValueError(f"{what}: key {name!r} {why}: pass another key") from None


def of_other_kind(keys: Iterable[Name], name: Name) -> Name | None:
    """The first of these keys that is a str where `name` is an int, or the other way round."""
    return next((one for one in keys if isinstance(one, str) != isinstance(name, str)), None)


def known(keys: Mapping[Name, T], name: Name, what: str) -> T:
    """What is kept of a key; ValueError where it was not initialised."""
    try:
        return keys[name]
    except KeyError:
        other = of_other_kind(keys, name)
        such = "" if other is None else f" (keys of this store are {type(other).__name__}, such as {other!r})"
        raise ValueError(f"{what}: key {name!r} was not initialised; call init first{such}") from None


def see_priority(value: Any, what: str) -> None:
    """Raise TypeError or ValueError unless it is an int that a message holds."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{what}: priority={value!r} is no int: pass one, the highest goes first")
    if int(value).bit_length() > PRIORITY_BITS:
        most = (1 << PRIORITY_BITS) - 1
        raise ValueError(f"{what}: priority={value} is out of range: pass an int from {-most} to {most}")


def turns(given: Any, what: str) -> list[Hashable]:
    """What a call takes turns on, beside its keys; TypeError unless all are hashable."""
    chosen = list(given)
    for name in chosen:
        try:
            hash(name)
        except TypeError as error:
            raise TypeError(f"{what}: turns={given!r} holds {name!r}: pass hashable names ({error})") from None
    return chosen


def pairs(key: Any, value: Any, what: str, argument: str = "value") -> list[tuple[Name, list[Any]]]:
    """(key, its arrays) for one key or lists of equal length; a key's value is one array or a list of them.
    `argument`: what the caller calls the values."""
    keys = names(key)
    if not isinstance(key, (list, tuple)):
        return [(keys[0], _arrays(value, keys[0], what))]
    if not isinstance(value, (list, tuple)) or len(value) != len(keys):
        given = f"a list of {len(value)}" if isinstance(value, (list, tuple)) else f"one {type(value).__name__}"
        count = f"{len(keys)} key{'s' if len(keys) > 1 else ''}"
        raise ValueError(f"{what}: a list of {count} needs a list of {len(keys)} as {argument}, not {given}")
    return [(name, _arrays(one, name, what)) for name, one in zip(keys, value)]


def _arrays(value: Any, name: Name, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value]
    if not value:
        raise ValueError(f"{what}: key {name!r} has an empty list of arrays; pass at least one")
    return list(value)


def readable(value: Any, name: Name, what: str) -> Array:
    """A host array to read from: C-contiguous."""
    return _contiguous(value, name, what, "pass numpy.asarray of it")


def _contiguous(value: Any, name: Name, what: str, cure: str) -> Array:
    array = _host(value, name, what, cure)
    if not array.flags.c_contiguous:
        raise ValueError(f"{what}: the array of key {name!r} is not contiguous; pass numpy.ascontiguousarray of it")
    return array


def writable(value: Any, name: Name, what: str) -> Array:
    """A host array to write to: C-contiguous and not read-only."""
    if arrays.is_jax(value):
        raise TypeError(
            f"{what}: key {name!r} got an array of JAX to write to, which cannot be written: pass a NumPy array as "
            "out, and make a JAX array of it"
        )
    array = _contiguous(value, name, what, "pass one, which the value is written into")
    if not array.flags.writeable:
        raise ValueError(f"{what}: the array of key {name!r} is read-only; pass one that may be written")
    return array


def _host(value: Any, name: Name, what: str, cure: str) -> Array:
    if isinstance(value, RowSparse):
        raise TypeError(f"{what}: key {name!r} got a RowSparse where an array is needed; pass its to_dense()")
    if arrays.is_device(value):
        raise TypeError(f"{what}: key {name!r} got an array on a GPU where a host array is needed; copy it there first")
    see_unmasked(value, f"{what}: the array of key {name!r}")
    try:
        array = arrays.host(value)
    except TypeError as error:
        kind = type(value).__name__
        why = f" ({error})" if hasattr(value, "shape") else ""
        raise TypeError(f"{what}: key {name!r} needs an array, not {kind}: {cure}{why}") from None
    see_dtype(array.dtype, name, what)
    return array


def see_dtype(dtype: np.dtype, name: Name, what: str) -> None:
    """TypeError unless servers can sum such elements."""
    if not (dtype.isnative and (dtype.kind in "iu" or dtype.name in FLOATS)):
        raise TypeError(
            f"{what}: key {name!r} has elements of dtype {_called(dtype)}; pass float16, bfloat16, "
            "float32, float64 or integers, in this machine's byte order"
        )


def fits(array: Any, shape: tuple[int, ...], dtype: np.dtype, name: Name, what: str, rows: int | None = None) -> None:
    """Raise ValueError unless shape and dtype are those that the key was initialised with, or those of `rows` of it."""
    if array.shape != shape or array.dtype != dtype:
        cure = f"shape {shape}" if array.shape != shape else f"dtype {dtype.name}, as astype makes it"
        there = f"key {name!r} was initialised as" if rows is None else f"{rows} rows of key {name!r} are"
        raise ValueError(
            f"{what}: {there} {dtype.name}{shape}, "
            f"but this array is {_called(array.dtype)}{tuple(array.shape)}: pass one of {cure}"
        )


def see_alike(values: Sequence[Array], name: Name, what: str) -> None:
    """ValueError unless a key's arrays (one per device) have one shape and one dtype."""
    kinds = [f"{value.dtype.name}{value.shape}" for value in values]
    if len(set(kinds)) > 1:
        given = ", ".join(kinds)
        raise ValueError(f"{what}: the arrays of key {name!r} are {given}: pass arrays of one shape and dtype")


def _called(dtype: np.dtype) -> str:
    return dtype.name if dtype.isnative else dtype.str


def total(values: Sequence[Array]) -> Array:
    """The sum of a key's arrays (one per device), in their order; the array itself where there is one."""
    if len(values) == 1:
        return values[0]
    result = np.add(values[0], values[1], out=np.empty_like(values[0]))
    for value in values[2:]:
        result += value
    return result


def see_one_round(what: str, keys: Sequence[Key], rounds: Sequence[Sequence[int]]) -> None:
    """ValueError where workers, whose rounds of the keys are given by rank, have pushed a key differently often."""
    for key, counts in zip(keys, zip(*rounds)):
        most, least = max(counts), min(counts)
        if most > least:
            raise of_caller(ValueError(
                f"{what}: key {key.name!r} was pushed {most} times by rank {counts.index(most)} and {least} times by "
                f"rank {counts.index(least)}: call it after a round that all have pushed"
            ))  # fmt: skip

"""Check all arguments of a store call before anything is sent, and view the arrays of any library as NumPy arrays.

The functions are local. They turn a call into pairs of a key and its arrays. Error messages name the key and the
values.

Host arrays are viewed, never copied: NumPy arrays, arrays with `__array_interface__` or DLPack, and PyTorch's CPU
tensors. JAX arrays can be read but not written. Arrays on GPUs are summed on the device into pinned host memory, and
results are copied from this memory to the device (`collectives.tensor`). These copies start after the work that the
user has already queued on the device's streams.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpips.collectives import arrays
from mpips.collectives.agreement import difference
from mpips.collectives.arrays import check_unmasked
from mpips.collectives.errors import did_you_mean, of_caller
from mpips.collectives.fabric.tasks import Task
from mpips.collectives.kernels.quiet import quiet
from mpips.store.keys import row_sparse
from mpips.store.keys.key import Array, Key, Name, Pushed
from mpips.store.keys.row_sparse import RowSparse
from mpips.store.options import LEAST, MOST

if TYPE_CHECKING:
    from mpips.collectives.tensor.vectors import Ticket

T = TypeVar("T")
FLOATS = ("float16", "bfloat16", "float32", "float64")
PRIORITY_BITS = 31


def names(key: object) -> list[Name]:
    """Return `key`, which is one key or a list of keys, as a list.

    Raises TypeError or ValueError unless the keys are all ints or all strs, and all different.
    """
    if type(key) is str or type(key) is int:
        return [key]
    keys: list[Any] = list(key) if isinstance(key, (list, tuple)) else [key]
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


def check_new(name: Name, what: str, noun: str = "key") -> None:
    """Raise ValueError if `name` cannot be stored in messages and files. `what` is the call, for the error message."""
    if isinstance(name, int):
        if not LEAST <= name <= MOST:
            raise ValueError(f"{what}: key {name} is out of range: pass an int from -2**63 to 2**63 - 1")
        return
    try:
        name.encode()
    except UnicodeEncodeError as error:
        lone = name[error.start]
        why = f"holds {lone!r}, which UTF-8 has no bytes for"
        raise ValueError(f"{what}: {noun} {name!r} {why}: pass another {noun}") from None


def of_other_kind(keys: Iterable[Name], name: Name) -> Name | None:
    """Return the first key whose type, int or str, differs from that of `name`. Return None if all types are equal."""
    return next((key for key in keys if isinstance(key, str) != isinstance(name, str)), None)


def find_key(keys: Mapping[Name, T], name: Name, what: str) -> T:
    """Return the entry of a key in `keys`. Raises ValueError if the key was not initialised."""
    try:
        return keys[name]
    except KeyError:
        other = of_other_kind(keys, name)
        perhaps = did_you_mean(name, [one for one in keys if isinstance(one, str)])
        such = "" if other is None else f" (keys of this store are {type(other).__name__}, such as {other!r})"
        raise ValueError(f"{what}: key {name!r} was not initialised{perhaps}; call init first{such}") from None


def check_priority(value: object, what: str) -> None:
    """Raise TypeError or ValueError unless a priority is an int that fits into a message."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{what}: priority={value!r} is no int: pass one, the highest goes first")
    if int(value).bit_length() > PRIORITY_BITS:
        most = (1 << PRIORITY_BITS) - 1
        raise ValueError(f"{what}: priority={value} is out of range: pass an int from {-most} to {most}")


def versions(key: object, newer_than: object) -> list[int]:
    """Return the argument `newer_than` of a pull as a list with one version for each key.

    Raises TypeError or ValueError if a version is not an int of at least -1, or if the numbers of versions and keys
    differ.
    """
    keys = names(key)
    given = newer_than if isinstance(key, (list, tuple)) else [newer_than]
    if not isinstance(given, (list, tuple)) or len(given) != len(keys):
        raise ValueError(
            f"pull: newer_than={newer_than!r} for a list of {len(keys)} keys: pass a list of as many "
            "versions, -1 for each key that has not been read yet"
        )
    for name, version in zip(keys, given):
        if isinstance(version, (bool, np.bool_)) or not isinstance(version, (int, np.integer)):
            raise TypeError(
                f"pull: newer_than={version!r} of key {name!r} is no int: pass what the last such pull has "
                "returned, or -1"
            )
        if not -1 <= version <= MOST:
            raise ValueError(
                f"pull: newer_than={version} of key {name!r} is no version: pass what the last such pull "
                "has returned, or -1"
            )
    return [int(version) for version in given]


def turns(given: Iterable[Hashable], what: str) -> list[Hashable]:
    """Return the argument `turns` of a call as a list. Raises TypeError if a name in it is not hashable.

    A call runs after all earlier calls that share a name in `turns`, as it does for calls that share a key.
    """
    chosen = list(given)
    for name in chosen:
        try:
            hash(name)
        except TypeError as error:
            raise TypeError(f"{what}: turns={given!r} holds {name!r}: pass hashable names ({error})") from None
    return chosen


def pairs(key: object, value: object, what: str, argument: str = "value") -> list[tuple[Name, list[Any]]]:
    """Return (key, list of the key's arrays) for each key.

    Args:
        key: One key or a list of keys.
        value: The value of the one key, or a list with a value for each key. A value is one array or a list of arrays.
        argument: The name of the caller's argument that has the values, for error messages.
    """
    keys = names(key)
    if not isinstance(key, (list, tuple)):
        return [(keys[0], _arrays(value, keys[0], what, argument))]
    if not isinstance(value, (list, tuple)) or len(value) != len(keys):
        given = f"a list of {len(value)}" if isinstance(value, (list, tuple)) else f"one {type(value).__name__}"
        count = f"{len(keys)} key{'s' if len(keys) > 1 else ''}"
        raise ValueError(f"{what}: a list of {count} needs a list of {len(keys)} as {argument}, not {given}")
    return [(name, _arrays(one, name, what, argument)) for name, one in zip(keys, value)]


def _arrays(value: object, name: Name, what: str, argument: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value]
    if not value:
        raise ValueError(f"{what}: key {name!r} has an empty list of arrays; pass at least one")
    if isinstance(value[0], (int, float)) and argument == "value":
        kind = f"a {type(value).__name__} of {type(value[0]).__name__}"
        raise TypeError(f"{what}: key {name!r} needs an array, not {kind}: make an array of it by numpy.asarray")
    return list(value)


def readable(value: object, name: Name, what: str) -> Array:
    """View `value` as a C-contiguous host array, for reading. Raises TypeError or ValueError if that is impossible."""
    return _contiguous(value, name, what, f"write {what}({name!r}, numpy.asarray(value))")


def _contiguous(value: object, name: Name, what: str, cure: str) -> Array:
    array = _host(value, name, what, cure)
    if not array.flags.c_contiguous:
        raise ValueError(f"{what}: the array of key {name!r} is not contiguous; pass numpy.ascontiguousarray of it")
    return array


def writable(value: object, name: Name, what: str) -> Array:
    """View `value` as a C-contiguous, writable host array. Raises TypeError or ValueError if that is impossible."""
    if is_jax(value):
        raise TypeError(
            f"{what}: key {name!r} got an array of JAX to write to, which cannot be written: pass a NumPy array as "
            "out, and make a JAX array of it"
        )
    array = _contiguous(value, name, what, "pass one, which the value is written into")
    if not array.flags.writeable:
        raise ValueError(f"{what}: the array of key {name!r} is read-only; pass one that may be written")
    return array


def _host(value: object, name: Name, what: str, cure: str) -> Array:
    if isinstance(value, RowSparse):
        raise TypeError(f"{what}: key {name!r} got a RowSparse where an array is needed; pass its to_dense()")
    if is_device(value):
        raise TypeError(f"{what}: key {name!r} got an array on a GPU where a host array is needed; copy it there first")
    check_unmasked(value, f"{what}: the array of key {name!r}")
    try:
        array = host(value)
    except TypeError as error:
        kind = type(value).__name__
        why = f" ({error})" if hasattr(value, "shape") else ""
        raise TypeError(f"{what}: key {name!r} needs an array, not {kind}: {cure}{why}") from None
    check_dtype(array.dtype, name, what)
    return array


def check_dtype(dtype: np.dtype, name: Name, what: str) -> None:
    """Raise TypeError if servers cannot sum elements of this dtype."""
    if not (dtype.isnative and (dtype.kind in "iu" or dtype.name in FLOATS)):
        cure = " (numbers that were read as text: array.astype(float))" if dtype.kind in "SU" else ""
        raise TypeError(
            f"{what}: key {name!r} has elements of dtype {_called(dtype)}; pass float16, bfloat16, "
            f"float32, float64 or integers, in this machine's byte order{cure}"
        )


def fits(
    array: Array | RowSparse, shape: tuple[int, ...], dtype: np.dtype, name: Name, what: str, rows: int | None = None
) -> None:
    """Raise ValueError unless the array has this shape and dtype.

    If `rows` is given, `shape` is the shape of `rows` rows of the key. Otherwise it is the shape of the whole key.
    """
    if array.shape != shape or array.dtype != dtype:
        cure = f"shape {shape}" if array.shape != shape else f"dtype {dtype.name}, as astype makes it"
        there = f"key {name!r} was initialised as" if rows is None else f"{rows} rows of key {name!r} are"
        raise ValueError(
            f"{what}: {there} {dtype.name}{shape}, "
            f"but this array is {_called(array.dtype)}{tuple(array.shape)}: pass one of {cure}"
        )


def check_alike(values: Sequence[Array], name: Name, what: str) -> None:
    """Raise ValueError if a key's arrays (one per device) differ in shape or dtype."""
    kinds = [f"{value.dtype.name}{value.shape}" for value in values]
    if len(set(kinds)) > 1:
        given = ", ".join(kinds)
        raise ValueError(f"{what}: the arrays of key {name!r} are {given}: pass arrays of one shape and dtype")


def _called(dtype: np.dtype) -> str:
    return dtype.name if dtype.isnative else dtype.str


@quiet
def total(values: Sequence[Array]) -> Array:
    """Sum a key's arrays (one per device) in their order. A single array is returned as it is, without a copy."""
    if len(values) == 1:
        return values[0]
    result = np.add(values[0], values[1], out=np.empty_like(values[0]))
    for value in values[2:]:
        result += value
    return result


def check_one_round(what: str, pushed: Sequence[Pushed], rounds: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless all workers have pushed each key or collection equally often.

    `rounds[rank][i]` is the number of pushes of `pushed[i]` by that rank. An example of the message:
    "save: the number of pushes of key 'w' is 1 on rank 0 and 0 on rank 1: call it after a round that all have pushed".
    """
    if any(counts != rounds[0] for counts in rounds):
        names = [f"the number of pushes of {each.noun} {each.name!r}" for each in pushed]
        unlike = difference({rank: [*zip(names, map(str, counts))] for rank, counts in enumerate(rounds)})
        raise of_caller(ValueError(f"{what}: {unlike}: call it after a round that all have pushed"))


# Small arrays are joined into vectors of at most this many bytes, and sent together.
PACK_BYTES = 4 << 20


def is_device(x: object) -> bool:
    """True for an array in the memory of a GPU."""
    return type(x) is not np.ndarray and arrays.is_device(x)


def host(x: object) -> Array:
    """View an array as a NumPy array.

    If the array has no memory on the host, raises a TypeError whose message says what to pass instead.
    """
    if type(x) is np.ndarray:
        return x
    if is_jax(x):
        return np.asarray(x)
    try:
        return arrays.host(x)
    except TypeError:
        raise
    # The library that made the array may raise any exception.
    except Exception as error:
        raise TypeError(f"{type(x).__name__} cannot be viewed as a host array ({error})") from error


def viewed(x: Any) -> Any:
    """View a PyTorch CPU tensor, or each CPU tensor in a list, as a NumPy array. Return anything else as it is."""
    if type(x) is np.ndarray:
        return x
    if type(x) in (list, tuple):
        views = [viewed(one) for one in x]
        return x if all(map(is_, views, x)) else views
    if not arrays.is_torch(x) or x.device.type != "cpu":
        return x
    try:
        return arrays.host(x)
    # Return the tensor unchanged. The caller checks it later, and then raises an error that says what is wrong with it.
    except (TypeError, RuntimeError):
        return x


def is_jax(x: object) -> bool:
    """True for a JAX array, which must not be written."""
    return type(x).__module__.split(".")[0] in ("jax", "jaxlib")


def runs(sizes: Iterable[int], most: int = PACK_BYTES) -> Iterator[slice]:
    """Yield slices of a list, so that the sizes in each slice add up to at most `most`.

    A size above `most` gets a slice of its own.
    """
    start, end, total = 0, 0, 0
    for size in sizes:
        if end > start and total + size > most:
            yield slice(start, end)
            start, total = end, 0
        end, total = end + 1, total + size
    if end > start:
        yield slice(start, end)


def packed(given: Sequence[Array]) -> Array:
    """Join C-contiguous arrays into one vector of bytes. A single array is returned as it is, without a copy."""
    return given[0] if len(given) == 1 else np.concatenate([array.reshape(-1).view(np.uint8) for array in given])


def unpack(vector: Array, into: Sequence[Array]) -> None:
    """Write `vector`, which `packed` made on another rank from arrays of the same shapes, into the arrays `into`."""
    if len(into) == 1:
        # `packed` returned the array itself as the vector, so it holds the data already.
        return
    at = 0
    for array in into:
        array.reshape(-1).view(np.uint8)[...] = vector[at : at + array.nbytes]
        at += array.nbytes


class HostStaging:
    """Arrays of one shape on GPUs (and perhaps on the host), and one host array in pinned memory for their sum.

    The constructor must run in the thread that calls the store, so that the sum starts after the work that this thread
    has queued on its streams. The constructor raises ValueError or TypeError if the arrays differ in shape or dtype.
    The arrays must not change while a task of this object runs.

    `host` is the host array. It has the shape of the arrays.
    """

    def __init__(self, values: Sequence[Any], written: bool) -> None:
        from mpips.collectives.tensor.cuda import CudaVectors  # needs CuPy
        from mpips.collectives.tensor.vectors import vector_place

        # Keep the arrays alive, because the places (`vector_place`) do not.
        self._values = values
        places = [vector_place(value, f"array {index}", written) for index, value in enumerate(values)]
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1 or len({one.dtype for one in places}) > 1:
            kinds = ", ".join(f"{one.dtype.name}{tuple(value.shape)}" for one, value in zip(places, values))
            raise ValueError(f"the arrays of one key, one per device, differ in shape or dtype: {kinds}")
        self._vectors = CudaVectors(places, places, "add")
        self.host: Array = self._vectors.host(places[0].n).reshape(shapes.pop())
        self._open = False

    def begin(self) -> Ticket:
        """Begin to sum the arrays into `host`, after the work that the caller has queued on the streams.

        Return a ticket for `gathered`, which waits for the sum.
        """
        self._vectors.begin()
        self._open = True
        flat = self.host.reshape(-1)
        return self._vectors.gather(0, flat.size, None, flat)

    def gathered(self, ticket: Ticket) -> Task[None]:
        """Wait for the sum that `begin` has started."""
        with contextlib.closing(self):
            while not ticket():
                yield False

    def spread(self) -> Task[None]:
        """Copy `host` into every array."""
        self._vectors.begin()
        self._open = True
        with contextlib.closing(self):
            ticket = self._vectors.spread(0, self.host.size, self.host.reshape(-1))
            while not ticket():
                yield False

    def close(self) -> None:
        """Wait until no copy or sum uses the arrays and the pinned memory any more."""
        if self._open:
            self._open = False
            self._vectors.finish()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


Known = Mapping[Name, Key]


class KeyCall(NamedTuple):
    """One call for one key: the array that it pushes, and the arrays that it writes."""

    key: Key
    # the sum of the caller's arrays, in the key's shape; None if the call only pulls
    payload: Array | RowSparse | None
    # the host arrays into which the result is written; empty if the call only pushes
    targets: Sequence[Array]
    # the task that waits until the GPUs have summed the payload; None if the payload is not on GPUs
    gathered: Task[None] | None = None
    # The object that copies the result to GPUs. Its host array is then the first target. None if no result goes to
    # GPUs.
    spread: HostStaging | None = None


def check(known: Known, what: str, key: object, value: object = None, out: object = None) -> list[KeyCall]:
    """Check a call, and split it into one `KeyCall` for each key. Raises ValueError or TypeError for bad arguments.

    Args:
        known: The initialised keys.
        what: "push", "pull" or "pushpull". A "pushpull" writes into `value` if `out` is None.
    """
    values = pairs(key, value, what) if what != "pull" else None
    target, argument = (value, "value") if out is None and what != "pull" else (out, "out")
    outs = pairs(key, target, what, argument) if what != "push" else None
    if outs and out is not None:
        _check_apart(outs, what)
    keys = [find_key(known, name, what) for name, _ in values or outs or ()]
    made = []
    for index, one in enumerate(keys):
        targets, spread = _targets(one, outs[index][1], what) if outs else ([], None)
        payload, gathered = _payload(one, values[index][1], what) if values else (None, None)
        made.append(KeyCall(one, payload, targets, gathered, spread))
    return made


def _check_apart(outs: Sequence[tuple[Name, Sequence[Any]]], what: str) -> None:
    """Raise ValueError if two keys have the same output array: the second key's value would overwrite the first's."""
    taken: dict[int, Name] = {}
    for name, targets in outs:
        for target in targets:
            other = taken.setdefault(id(target), name)
            if other != name:
                raise ValueError(f"{what}: keys {other!r} and {name!r} have one array as out: give each its own")


def rows(known: Known, key: object, out: object, row_ids: Any) -> list[tuple[Key, Array, NDArray[np.int64]]]:
    """Return (key, target, row numbers) for every target of a `row_sparse_pull`. Raises the same errors as `check`."""
    what = "row_sparse_pull"
    if row_ids is None:
        raise ValueError("row_sparse_pull needs row_ids: pass the numbers of the rows, as row_ids=[0, 2]")
    outs = pairs(key, out, what, "out")
    several = isinstance(key, (list, tuple)) and isinstance(row_ids, (list, tuple))
    ids = pairs(key, [_lists(single) for single in row_ids] if several else [row_ids], what, "row_ids")
    result = []
    for (name, targets), (_, numbers) in zip(outs, ids, strict=True):
        record = find_key(known, name, what)
        if len(numbers) not in (1, len(targets)):
            raise ValueError(
                f"{what}: key {name!r} has {len(targets)} outs and {len(numbers)} lists of row_ids; "
                "pass one list, or one for each out"
            )
        for index, target in enumerate(targets):
            chosen = _row_ids(record, numbers[index % len(numbers)])
            array = writable(target, name, what)
            fits(array, (len(chosen), *record.shape[1:]), record.dtype, name, what, len(chosen))
            result.append((record, array, chosen))
    return result


def _lists(row_ids: object) -> object:
    """Return a key's row numbers as a list of lists. The caller may have passed one list or several lists."""
    one = isinstance(row_ids, (list, tuple)) and not any(np.ndim(each) for each in row_ids)
    return [row_ids] if one else row_ids


def _row_ids(key: Key, row_ids: object) -> NDArray[np.int64]:
    check_unmasked(row_ids, f"row_sparse_pull: row_ids of key {key.name!r}")
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
    if any(map(is_device, values)):
        staged = _staged(key, values, what, False)
        return staged.host, staged.gathered(staged.begin())
    given = [readable(value, key.name, what) for value in values]
    for array in given:
        fits(array, key.shape, key.dtype, key.name, what)
    return total(given), None


def _row_payload(key: Key, values: Sequence[Any], what: str) -> RowSparse:
    for value in values:
        if not isinstance(value, RowSparse):
            raise TypeError(f"{what}: key {key.name!r} got arrays and RowSparse in one list; pass either")
        fits(value, key.shape, key.dtype, key.name, what)
    return values[0] if len(values) == 1 else row_sparse.add(values)


def _targets(key: Key, outs: Sequence[Any], what: str) -> tuple[list[Array], HostStaging | None]:
    on_gpus = [out for out in outs if is_device(out)]
    targets = [writable(out, key.name, what) for out in outs if not is_device(out)]
    for target in targets:
        fits(target, key.shape, key.dtype, key.name, what)
    if not on_gpus:
        return targets, None
    staged = _staged(key, on_gpus, what, True)
    return [staged.host, *targets], staged


def _staged(key: Key, values: Sequence[Any], what: str, written: bool) -> HostStaging:
    """Allocate host memory for a key's arrays on GPUs.

    If the arrays do not fit the key, raises ValueError or TypeError with the key's name in the message.
    """
    for value in values:
        if is_jax(value):
            raise TypeError(f"{what}: key {key.name!r} got a JAX array on a GPU: pass numpy.asarray of it")
    try:
        staged = HostStaging(values, written)
    except (ValueError, TypeError, ImportError) as error:
        raise type(error)(f"{what}: key {key.name!r}: {error}") from error
    fits(staged.host, key.shape, key.dtype, key.name, what)
    return staged


def first_value(name: Name, values: Sequence[Any]) -> Array:
    """Return the value that `init` stores: the sum, on the host, of the key's arrays. Blocks for arrays on GPUs."""
    what = "init"
    given = [value.to_dense() if isinstance(value, RowSparse) else value for value in values]
    if not any(map(is_device, given)):
        hosts = [readable(value, name, what) for value in given]
        check_alike(hosts, name, what)
        return total(hosts)
    try:
        staged = HostStaging(given, False)
    except (ValueError, TypeError, ImportError) as error:
        raise TypeError(f"{what}: key {name!r}: {error}") from error
    check_dtype(staged.host.dtype, name, what)
    for _ in staged.gathered(staged.begin()):
        os.sched_yield()
    return staged.host

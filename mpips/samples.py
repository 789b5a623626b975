"""Take rows of users' arrays and tables by position: of NumPy, pandas, SciPy, h5py and PyTorch.

A library's labels are left aside: a table becomes an array of NumPy. Sparse matrices, and arrays on disk, are read rows
by rows. Anything else is refused by a sentence with the cure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.collectives import arrays

Positions = slice | NDArray[np.int64]
NUMBERS = "biufc"
"""Kinds of dtype whose elements are numbers."""
NUMBERED = "pass numbers, as astype('float32') makes them, or of words np.unique(words, return_inverse=True)[1]"
CURE = "pass an array of NumPy, such as frame.to_numpy(), matrix.toarray() or dataset[:]"


class Rows:
    """Rows of a table that is no array in memory: every `rows[...]` reads some, by position, into an array of NumPy."""

    def __init__(self, name: str, source: Any, sparse: bool = False) -> None:
        self._name, self._source, self._sparse = name, source, sparse
        self.shape, self.dtype, self.ndim = tuple(source.shape), source.dtype, len(source.shape)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: Positions) -> np.ndarray:
        """Return the rows of a slice, or of an int array in its order; libraries of files want rising numbers."""
        if isinstance(rows, slice):
            return self._read(rows)
        rising, places = np.unique(rows, return_inverse=True)
        return self._read(rising)[places]

    def _read(self, rows: Positions) -> np.ndarray:
        part = self._source[rows]
        found = part.toarray() if self._sparse else np.asarray(part)
        wanted = len(range(*rows.indices(len(self)))) if isinstance(rows, slice) else len(rows)
        if found.shape != (wanted, *self.shape[1:]):
            raise TypeError(
                f"{self._name}: {wanted} rows of a {type(self._source).__name__} came as an array {found.shape}: {CURE}"
            )
        return found


def table(name: str, given: Any) -> Any:
    """Return `given` as a table that has `shape` and gives rows by position, for a slice or an int array.

    Arrays of NumPy, PyTorch and JAX, and those on GPUs, are returned as they are. TypeError where rows cannot be taken
    by position, or are no numbers. Local; reads two rows of what lies elsewhere.
    """
    if arrays.is_torch(given) and str(given.layout) != "torch.strided":
        raise TypeError(f"{name} is a tensor of layout {given.layout}: pass tensor.to_dense()")
    if _is_array(given):
        return see_numbers(name, given)
    if hasattr(given, "toarray") and hasattr(given, "tocsr"):
        return Rows(name, see_numbers(name, given).tocsr(), sparse=True)
    if hasattr(given, "to_numpy"):
        return see_numbers(name, _of_frame(name, given), type(given).__name__)
    if not all(hasattr(given, what) for what in ("dtype", "__len__", "__getitem__")):
        raise TypeError(f"{name} is a {type(given).__name__}, whose rows cannot be taken by position: {CURE}")
    lazy = Rows(name, given)
    see_numbers(name, lazy, type(given).__name__)
    try:
        ends = [lazy[part] for part in (slice(0, 1), slice(len(lazy) - 1, None))] if len(lazy) else []
        same = not ends or np.array_equal(np.concatenate(ends), lazy[np.array([0, len(lazy) - 1])], equal_nan=True)
    except Exception as error:  # of whatever library it is
        raise TypeError(
            f"{name} is a {type(given).__name__}, whose rows cannot be taken by position "
            f"({type(error).__name__}: {error}): {CURE}"
        ) from error
    if not same:
        raise TypeError(f"{name} is a {type(given).__name__}, which finds rows by labels, not by position: {CURE}")
    return lazy


def in_memory(name: str, given: object) -> np.ndarray:
    """Return rows that a caller hands over as an array of NumPy; TypeError where they are none, or no numbers."""
    if type(given) is np.ndarray and given.dtype.kind in NUMBERS:
        return given
    if not hasattr(given, "shape"):
        raise TypeError(f"{name} is a {type(given).__name__}: {CURE}")
    found = table(name, given)
    return found[:] if isinstance(found, Rows) else np.asarray(arrays.host(found, name))


def see_numbers(name: str, given: Any, kind: str = "") -> Any:
    """Return an array, a matrix or a tensor; TypeError where its elements are masked, or no numbers."""
    arrays.see_unmasked(given, name)
    dtype = given.dtype
    if isinstance(dtype, np.dtype) and dtype.kind not in NUMBERS and dtype.name != "bfloat16":
        what = "holds Python objects" if dtype.hasobject else f"has elements of dtype {dtype}"
        raise TypeError(f"{name}{' is a ' + kind + ', which' if kind else ''} {what}: {NUMBERED}")
    return given


def _is_array(given: object) -> bool:
    """Return whether rows of it are taken by position, whatever the library does beside that."""
    module = type(given).__module__.partition(".")[0]
    return isinstance(given, np.ndarray) or arrays.is_torch(given) or arrays.is_device(given) or module == "jaxlib"


def _of_frame(name: str, frame: Any) -> np.ndarray:
    """Return a frame or a series as an array; TypeError that names a column without numbers."""
    found = np.asarray(frame.to_numpy())
    if found.dtype.kind in NUMBERS or not hasattr(frame, "columns"):
        return found
    parts = []  # a frame makes Python objects of floats beside bools
    for column in frame.columns:
        part = np.asarray(frame[column].to_numpy())
        if part.dtype.kind not in NUMBERS or part.ndim != 1:
            raise TypeError(
                f"{name}: column {column!r} has elements of dtype {getattr(frame[column], 'dtype', '?')}: "
                f"leave it out, or {NUMBERED}"
            )
        parts.append(part)
    return np.column_stack(parts)

"""Take rows by position from users' arrays and tables: those of NumPy, pandas, SciPy, h5py and PyTorch.

Row labels are ignored: a data frame becomes a NumPy array. Sparse matrices and arrays on disk are read a few rows at a
time. Any other object is refused with an error that says what to pass instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.collectives import arrays

Positions = slice | NDArray[np.int64]
# dtype kinds whose elements are numbers
NUMBERS = "biufc"
NUMBERED = "pass numbers, as astype('float32') makes them, or of words np.unique(words, return_inverse=True)[1]"
CURE = "pass an array of NumPy, such as frame.to_numpy(), matrix.toarray() or dataset[:]"


class SampleRows:
    """A table that is not an array in memory. `rows[...]` reads some of its rows, by position, into a NumPy array."""

    def __init__(self, name: str, source: Any, sparse: bool = False) -> None:
        self._name = name
        self._source = source
        self._sparse = sparse
        self.shape = tuple(source.shape)
        self.dtype = source.dtype
        self.ndim = len(source.shape)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: Positions) -> np.ndarray:
        """Return the rows at the positions in a slice or an int array, in the order of these positions.

        Libraries for files accept only ascending positions. So the rows are read in ascending order and then reordered.
        """
        if isinstance(rows, slice):
            return self._read(rows)
        rising, places = np.unique(rows, return_inverse=True)
        return self._read(rising)[places]

    def _read(self, rows: Positions) -> np.ndarray:
        part = self._source[rows]
        array = part.toarray() if self._sparse else np.asarray(part)
        wanted = len(range(*rows.indices(len(self)))) if isinstance(rows, slice) else len(rows)
        if array.shape != (wanted, *self.shape[1:]):
            raise TypeError(
                f"{self._name}: {wanted} rows of a {type(self._source).__name__} came as an array {array.shape}: {CURE}"
            )
        return array


def table(name: str, given: Any) -> Any:
    """Return `given` as a table with a `shape`, whose rows `table[...]` takes by position. Local.

    The rows are taken with a slice or with an int array. Arrays of NumPy, PyTorch and JAX, and arrays on GPUs, are
    returned as they are. If the table is not in memory, two of its rows are read as a test.

    Args:
        name: The name of the caller's argument, for errors.
        given: What the caller has passed.

    Raises:
        TypeError: Rows cannot be taken by position, or elements are not numbers.
    """
    if arrays.is_torch(given) and str(given.layout) != "torch.strided":
        raise TypeError(f"{name} is a tensor of layout {given.layout}: pass tensor.to_dense()")
    if _is_array(given):
        return check_numbers(name, given)
    if hasattr(given, "toarray") and hasattr(given, "tocsr"):
        return SampleRows(name, check_numbers(name, given).tocsr(), sparse=True)
    if hasattr(given, "to_numpy"):
        return check_numbers(name, _of_frame(name, given), type(given).__name__)
    if not all(hasattr(given, what) for what in ("dtype", "__len__", "__getitem__")):
        raise TypeError(f"{name} is a {type(given).__name__}, whose rows cannot be taken by position: {CURE}")
    lazy = SampleRows(name, given)
    check_numbers(name, lazy, type(given).__name__)
    # Read the first and the last row twice: by slices and by positions. A library that finds rows by labels returns
    # other rows for the positions.
    try:
        ends = [lazy[part] for part in (slice(0, 1), slice(len(lazy) - 1, None))] if len(lazy) else []
        same = not ends or np.array_equal(np.concatenate(ends), lazy[np.array([0, len(lazy) - 1])], equal_nan=True)
    except Exception as error:
        # The library may raise anything.
        raise TypeError(
            f"{name} is a {type(given).__name__}, whose rows cannot be taken by position "
            f"({type(error).__name__}: {error}): {CURE}"
        ) from error
    if not same:
        raise TypeError(f"{name} is a {type(given).__name__}, which finds rows by labels, not by position: {CURE}")
    return lazy


def in_memory(name: str, given: object) -> np.ndarray:
    """Return `given` as a NumPy array. Raises TypeError if it is not an array or table of numbers."""
    if type(given) is np.ndarray and given.dtype.kind in NUMBERS:
        return given
    if not hasattr(given, "shape"):
        raise TypeError(f"{name} is a {type(given).__name__}: {CURE}")
    rows = table(name, given)
    return rows[:] if isinstance(rows, SampleRows) else np.asarray(arrays.host(rows, name))


def check_numbers(name: str, given: Any, kind: str = "") -> Any:
    """Return an array, matrix or tensor as it is. Raises TypeError if its elements are masked or not numbers."""
    arrays.check_unmasked(given, name)
    dtype = given.dtype
    if isinstance(dtype, np.dtype) and dtype.kind not in NUMBERS and dtype.name != "bfloat16":
        what = "holds Python objects" if dtype.hasobject else f"has elements of dtype {dtype}"
        raise TypeError(f"{name}{' is a ' + kind + ', which' if kind else ''} {what}: {NUMBERED}")
    return given


def _is_array(given: object) -> bool:
    """True for an array of NumPy, PyTorch or JAX, or an array on a GPU. Indexing these takes rows by position."""
    module = type(given).__module__.partition(".")[0]
    return isinstance(given, np.ndarray) or arrays.is_torch(given) or arrays.is_device(given) or module == "jaxlib"


def _of_frame(name: str, frame: Any) -> np.ndarray:
    """Return a frame or a series as an array.

    Raises TypeError if a column holds anything but numbers. The message names the column.
    """
    array = np.asarray(frame.to_numpy())
    if array.dtype.kind in NUMBERS or not hasattr(frame, "columns"):
        return array
    # to_numpy() turns a frame with both float and bool columns into Python objects, so convert each column by itself.
    parts = []
    for column in frame.columns:
        part = np.asarray(frame[column].to_numpy())
        if part.dtype.kind not in NUMBERS or part.ndim != 1:
            raise TypeError(
                f"{name}: column {column!r} has elements of dtype {getattr(frame[column], 'dtype', '?')}: "
                f"leave it out, or {NUMBERED}"
            )
        parts.append(part)
    return np.column_stack(parts)

"""Sum rows with equal ids, and find the server of each id, for row-sparse gradients of keys and for tables.

The order of additions is fixed: the first gradient of a row is copied, and its other gradients are added in the order
of the array. When pushes of several workers are summed, they are added in the order of the workers.

Compiled loops find repeated ids with a hash table. Without compiled loops NumPy sorts the ids. Both ways give rows with
the same bits, and differ only in the order of ids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.kernels.function import WIDE, compiled, widen
from mpips.collectives.kernels.quiet import quiet

if TYPE_CHECKING:
    from mpips.collectives.kernels.compiler import mixed64, prefetch

Array = NDArray[Any]
Ids = NDArray[np.int64]
Places = NDArray[np.int64]
# GOLDEN is the constant of SplitMix64. AHEAD is the number of rows by which compiled loops prefetch memory ahead.
CONSTANTS = {"GOLDEN": 0x9E3779B97F4A7C15, "AHEAD": 12}
GOLDEN, AHEAD = CONSTANTS["GOLDEN"], CONSTANTS["AHEAD"]
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
NO_SLOTS = np.zeros(1, np.int32)
_SCRATCH = threading.local()


# ---- hashes


def mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each 64-bit word. Different words have different hashes (the finalizer of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * MULTIPLIERS[0]
    words = (words ^ (words >> np.uint64(27))) * MULTIPLIERS[1]
    return words ^ (words >> np.uint64(31))


def hashes_of(ids: Ids) -> NDArray[np.uint64]:
    """Return a hash of each id. The upper half of a hash chooses the server, the lower half the slot in an index."""
    return mixed(ids.view(np.uint64) + np.uint64(GOLDEN))


def owners_of(ids: Ids, servers: int) -> NDArray[np.int64]:
    """Return the server of each id, as a number from 0 to `servers` - 1. Ids are spread over servers by hash."""
    upper = hashes_of(ids) >> np.uint64(32)
    return ((upper * np.uint64(servers)) >> np.uint64(32)).astype(np.int64)


# ---- compiled loops; arrays of rows are passed flat


@compiled("const int64[], int32[], int64[], int64[], int32[], int64[]", ("int64",), CONSTANTS)
def merge(ids: Array, slots: Array, distinct: Array, places: Array, owners: Array, counts: Array) -> int:
    """Find the distinct ids. Return their number.

    Args:
        slots: Scratch memory. Its size is a power of two greater than the number of ids.
        distinct: Output: each id once, in order of first appearance.
        places: Output: for each element of `ids` its index in `distinct`.
        owners: Output: the server of each distinct id.
        counts: Output: the number of distinct ids for each server.
    """
    mask, servers, count = np.uint64(slots.size - 1), np.uint64(counts.size), 0
    slots[:] = 0
    counts[:] = 0
    for i in range(ids.size):
        word = mixed64(np.uint64(ids[i]) + np.uint64(GOLDEN))
        at = word & mask
        while True:
            place = slots[at] - 1
            if place < 0:
                place = count
                slots[at] = count + 1
                distinct[count] = ids[i]
                owner = ((word >> np.uint64(32)) * servers) >> np.uint64(32)
                owners[count] = owner
                counts[owner] += 1
                count += 1
                break
            if distinct[place] == ids[i]:
                break
            at = (at + np.uint64(1)) & mask
        places[i] = place
    return count


@compiled("const stored[], wide[], const int64[], uint8[], int64", tuple(WIDE), CONSTANTS)
def add_rows(gradients: Array, total: Array, rows: Array, begun: Array, dim: int) -> int:
    """Add gradients to rows of `total` in order. If `begun[row]` is 0, the first gradient of the row replaces it.

    `total` is float32 if the gradients are float16 or bfloat16.
    """
    for i in range(rows.size):
        ahead = rows[min(i + AHEAD, rows.size - 1)] * dim
        prefetch(total, ahead)
        row = rows[i]
        t_, g_ = total[row * dim : (row + 1) * dim], gradients[i * dim : (i + 1) * dim]
        if begun[row]:
            for k in range(g_.size):
                t_[k] += widen(g_[k])
        else:
            begun[row] = 1
            for k in range(g_.size):
                t_[k] = widen(g_[k])
    return 1


# ---- repeated ids


class Distinct(NamedTuple):
    """The distinct ids of a push or a pull.

    Attributes:
        ids: Each id once.
        owners: The server of each id in `ids`.
        places: For each id of the push or pull, its index in `ids`.
        per_server: The number of distinct ids for each server.
    """

    ids: Ids
    owners: NDArray[np.int32]
    places: Places
    per_server: list[int]


def distinct(ids: Ids, servers: int = 1) -> Distinct:
    """Find the distinct ids and the server of each. Ids are spread over servers by hash."""
    count = len(ids)
    # a power of two, at least twice the number of ids
    slots = _slots(1 << (2 * count - 1).bit_length()) if count else NO_SLOTS
    once, places, owners = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int32)
    counts = np.empty(servers, np.int64)
    if found := merge(ids, slots, once, places, owners, counts):
        return Distinct(once[:found], owners[:found], places, counts.tolist())
    once, places = np.unique(ids, return_inverse=True)
    owners = owners_of(once, servers).astype(np.int32)
    return Distinct(once, owners, places.reshape(-1), np.bincount(owners, minlength=servers).tolist())


def _slots(size: int) -> NDArray[np.int32]:
    """Return scratch memory. This thread keeps the memory for later calls."""
    have: NDArray[np.int32] = getattr(_SCRATCH, "slots", NO_SLOTS)
    if len(have) < size:
        have = _SCRATCH.slots = np.empty(size, np.int32)
    return have[:size]


def last_places(ids: Ids) -> tuple[Ids, Places]:
    """Return the distinct ids, ascending, and for each of them the index of its last occurrence in `ids`."""
    once, places = np.unique(ids[::-1], return_index=True)
    return once, len(ids) - 1 - places


# ---- sums


@quiet
def sum_into(total: Array, gradients: Array, rows: Places) -> None:
    """Set rows of `total` to sums of gradients (k, dim), added in order. Gradient i belongs to row `rows[i]`."""
    if len(rows) and not _add(total, gradients, rows, np.zeros(len(total), np.uint8)):
        once, sums = sorted_sums(rows, gradients)
        total[once] = sums


@quiet
def sorted_sums(rows: Ids, values: Array) -> tuple[Ids, Array]:
    """Sum the values of each row from first to last. Return the row numbers, ascending, and the sums.

    `np.add.reduceat` would add in another order, and takes ten times as long for wide rows.
    """
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
    sums, counts = values[order[starts]], np.diff(starts, append=len(order))
    done, most = 1, int(counts.max())
    longer = np.flatnonzero(counts > done)
    # A run is all the values of one row. While many runs are left, add the next value of all of them with one call.
    # Once fewer runs than steps are left, add up each run with a call of its own.
    while len(longer) > most - done:
        sums[longer] += values[order[starts[longer] + done]]
        done += 1
        longer = longer[counts[longer] > done]
    for run in longer.tolist():
        rest = values[order[starts[run] + done : starts[run] + counts[run]]]
        both = np.concatenate([sums[run : run + 1], rest])
        # NumPy's `reduce` adds in order, except along the axis that is contiguous in memory, where it sums pairwise. If
        # a row has only one element, axis 0 is that axis. `accumulate` always adds in order.
        if sums[run].size > 1:
            sums[run] = np.add.reduce(both, axis=0, dtype=values.dtype)
        else:
            sums[run] = np.add.accumulate(both, dtype=values.dtype)[-1]
    return rows[starts], sums


@quiet
def summed(
    parts: Sequence[tuple[Ids, Array]], ascending: bool = False, dtype: np.dtype | None = None
) -> tuple[Ids, Array]:
    """Sum pushes from first to last. Return the distinct ids and their summed gradients.

    Args:
        parts: (ids, gradients (k, dim)) for each push. No id repeats within a push.
        ascending: True if the ids of each push ascend. Then the ids of the result ascend.
        dtype: The dtype of the sums. None: the dtype of the gradients.
    """
    parts = [part for part in parts if len(part[0])] or parts[:1]
    first = parts[0][1]
    dtype = first.dtype if dtype is None else dtype
    if len(parts) == 1 and dtype == first.dtype:
        return parts[0]
    every = np.concatenate([part[0] for part in parts])
    if ascending:
        # With `return_index` NumPy uses a merge sort. For ids that ascend in parts it is as fast as a hash table.
        once, _, places = np.unique(every, return_index=True, return_inverse=True)
    else:
        once, _, places, _ = distinct(every)
    total, begun, start = np.empty((len(once), first.shape[1]), dtype), np.zeros(len(once), np.uint8), 0
    for ids, gradients in parts:
        rows = places[start : start + len(ids)]
        if not _add(total, gradients, rows, begun):
            again = begun[rows] != 0
            total[rows[~again]] = gradients[~again]
            total[rows[again]] += gradients[again]
            begun[rows] = 1
        start += len(ids)
    return once, total


def _add(total: Array, gradients: Array, rows: Places, begun: NDArray[np.uint8]) -> bool:
    """Call `add_rows`. Return False, with nothing changed, if it is not available for these dtypes."""
    if total.dtype.name != WIDE.get(gradients.dtype.name):
        return False
    return bool(add_rows(gradients.reshape(-1), total.reshape(-1), rows, begun, total.shape[1]))


def update_in_blocks(
    at: Places, arrays: Sequence[Array], rows_at_once: int, update: Callable[[slice, Sequence[Array]], None]
) -> None:
    """Update rows `at` of arrays in blocks: copy the rows of a block from each array, update them, and write them back.

    `update` is called with a slice of `at` and the copied rows of each array. It changes these rows in place.
    """
    for start in range(0, len(at), rows_at_once):
        block = slice(start, start + rows_at_once)
        chosen = [array[at[block]] for array in arrays]
        update(block, chosen)
        for array, rows in zip(arrays, chosen, strict=True):
            array[at[block]] = rows

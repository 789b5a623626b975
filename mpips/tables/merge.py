"""Merge repeated ids of a push and sum their gradients, deal ids out to servers, and sum the pushes of workers.

The order of additions is fixed: the first gradient of a row is copied, and the others are added in the order in which
they stand. Compiled loops find repeated ids with a hash table, and without them NumPy sorts. Both give rows with the
same bits; only the order of ids differs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.kernels.quiet import quiet
from mpips.store.keys.row_sparse import sums_of_runs
from mpips.tables import kernels
from mpips.tables.initial import Ids, owners_of

Array = NDArray[Any]
Places = NDArray[np.int64]
NO_SLOTS = np.zeros(1, np.int32)
_SCRATCH = threading.local()


class Distinct(NamedTuple):
    """The distinct ids of a push or a pull.

    Attributes:
        ids: Each id once.
        owners: The server of each of them.
        places: For each given id its index in `ids`.
        per_server: Number of distinct ids for each server.
    """

    ids: Ids
    owners: NDArray[np.int32]
    places: Places
    per_server: list[int]


def _slots(size: int) -> NDArray[np.int32]:
    """Return scratch memory that this thread keeps."""
    have: NDArray[np.int32] = getattr(_SCRATCH, "slots", NO_SLOTS)
    if len(have) < size:
        have = _SCRATCH.slots = np.empty(size, np.int32)
    return have[:size]


def distinct(ids: Ids, servers: int = 1) -> Distinct:
    """Find the distinct ids, and the server that each belongs to."""
    count = len(ids)
    # a power of two, at least twice the number of ids
    slots = _slots(1 << (2 * count - 1).bit_length()) if count else NO_SLOTS
    once, places, owners = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int32)
    per_server = np.empty(servers, np.int64)
    if found := kernels.merge(ids, slots, once, places, owners, per_server):
        return Distinct(once[:found], owners[:found], places, per_server.tolist())
    once, places = np.unique(ids, return_inverse=True)
    owners = owners_of(once, servers).astype(np.int32)
    return Distinct(once, owners, places.reshape(-1), np.bincount(owners, minlength=servers).tolist())


def deal(found: Distinct, first_rows: Sequence[int], first_words: Sequence[int], words: Ids) -> Places:
    """Lay ids out for the servers. Return for each given id the row that it got.

    Args:
        found: The ids.
        first_rows: For each server the first of its rows. Its ids get consecutive rows.
        first_words: For each server the index in `words` from which its ids are written.
        words: Where ids are written.
    """
    if len(found.per_server) == 1:
        words[first_words[0] :][: len(found.ids)] = found.ids
        return found.places + first_rows[0] if first_rows[0] else found.places
    rows = np.empty(len(found.ids), np.int64)
    next_row, next_word = np.array(first_rows, np.int64), np.array(first_words, np.int64)
    if not kernels.deal(found.ids, found.owners, next_row, next_word, words, rows):
        for server, count in enumerate(found.per_server):
            chosen = np.flatnonzero(found.owners == server)
            rows[chosen] = first_rows[server] + np.arange(count)
            words[first_words[server] :][:count] = found.ids[chosen]
    return rows[found.places]


@quiet
def sum_into(total: Array, gradients: Array, rows: Places) -> None:
    """Set rows of `total` to sums of gradients (k, dim), added in order. `rows` says which row each belongs to."""
    begun = np.zeros(len(total), np.uint8)
    if not len(rows) or kernels.add_rows(total.reshape(-1), gradients.reshape(-1), rows, begun, total.shape[1]):
        return
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    total[ordered[starts]] = sums_of_runs(gradients, order, starts)


@quiet
def summed(parts: Sequence[tuple[Ids, Array]]) -> tuple[Ids, Array]:
    """Sum pushes of a table, given as (ids, gradients), from first to last. Return distinct ids and their gradients.

    No id repeats within a push.
    """
    parts = [part for part in parts if len(part[0])] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    found = distinct(np.concatenate([part[0] for part in parts]))
    dim, start = parts[0][1].shape[1], 0
    total, begun = np.empty((len(found.ids), dim), parts[0][1].dtype), np.zeros(len(found.ids), np.uint8)
    for ids, gradients in parts:
        rows = found.places[start : start + len(ids)]
        if not kernels.add_rows(total.reshape(-1), gradients.reshape(-1), rows, begun, dim):
            again = begun[rows] != 0
            total[rows[~again]] = gradients[~again]
            total[rows[again]] += gradients[again]
            begun[rows] = 1
        start += len(ids)
    return found.ids, total

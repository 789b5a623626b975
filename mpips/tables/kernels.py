"""Compiled loops of tables: find, insert, read and update rows. Without them NumPy code computes the same bits.

The loops of optimizers copy a row of float16 or bfloat16 to float32, update the copy, and round it back. Their argument
`streams` says how to round (see `halves.round_into`).

A *slot* is an entry of the hash table that finds the position of an id's row (see `index`). Arrays of rows are passed
1-D: row p of `values` is values[p * dim : (p + 1) * dim].

Rows are at random places in memory. So a loop prefetches the memory of a row AHEAD iterations before it uses the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpips.collectives.kernels import engine
from mpips.collectives.kernels.function import Compiled, compiled, narrow, store_row, widen, widened_row
from mpips.optimizers.base import working_dtype
from mpips.store.keys.row_sums import AHEAD, CONSTANTS, GOLDEN, add_rows, merge

if TYPE_CHECKING:
    from mpips.collectives.kernels.compiler import mixed64, prefetch, sum_of_row

Array = np.ndarray
FLOATS = ("float32", "float64")
HALVES = ("float16", "bfloat16")
# dtypes of rows
ROWS = (*HALVES, *FLOATS)
IDS = ("int64",)
# NumPy sums rows with more values than this pairwise, in parts. Loops that sum over a row cannot reproduce this order,
# and return 0 for such rows.
PAIRWISE = 128
SUMS = {**CONSTANTS, "PAIRWISE": PAIRWISE}
# the types of gradients, rows and streams, which are arguments of every optimizer's loop
GIVEN = "const wide[], const int64[], const uint64[]"


def load(dtype: np.dtype, loops: Sequence[Compiled]) -> None:
    """Load compiled loops. Blocks for up to some seconds if they have to be compiled."""
    # A loop is for rows, for the dtype in which they are updated, or for ids.
    kinds = dtype, working_dtype(dtype), np.dtype(np.int64)
    for loop in loops:
        for kind in kinds:
            if loop.prepare(kind) is not None:
                break
    engine.load_all()


@compiled("const int64[], const uint32[], const int64[], int64[]", IDS, CONSTANTS)
def find(ids: Array, slots: Array, held: Array, found: Array) -> int:
    """Write the position of each id's row to `found`, or -1 for an id without a row. `held` is the id at each position.

    Return 1 + the number of ids without a row. (0 would mean that the compiled loop is missing.)
    """
    mask, missing = np.uint64(slots.size - 1), 0
    above = np.uint64(0xFFFFFFFF) & ~mask
    # Make three passes over each group of 64 ids, so that many cache misses overlap: prefetch slots, prefetch the ids
    # at the positions in the slots, compare ids.
    for start in range(0, ids.size, 64):
        stop = min(start + 64, ids.size)
        for i in range(start, stop):
            word = mixed64(np.uint64(ids[i]) + np.uint64(GOLDEN))
            found[i] = word
            prefetch(slots, np.int64(word & mask))
        for i in range(start, stop):
            word = np.uint64(found[i])
            at = word & mask
            while slots[at] != 0 and (np.uint64(slots[at]) ^ word) & above != 0:
                at = (at + np.uint64(1)) & mask
            prefetch(held, np.int64(np.uint64(slots[at]) & mask) - 1)
            found[i] = at
        for i in range(start, stop):
            at, mark = np.uint64(found[i]), np.int64(0)
            while slots[at]:
                mark = np.int64(np.uint64(slots[at]) & mask)
                if held[mark - 1] == ids[i]:
                    break
                mark = np.int64(0)
                at = (at + np.uint64(1)) & mask
            found[i] = mark - 1
            missing += mark == 0
    return missing + 1


@compiled("const int64[], uint32[], const int64[]", IDS, CONSTANTS)
def insert(ids: Array, slots: Array, positions: Array) -> int:
    """Write the positions of ids into the slots. The ids must not be in the slots yet."""
    mask = np.uint64(slots.size - 1)
    above = np.uint64(0xFFFFFFFF) & ~mask
    for i in range(ids.size):
        word = mixed64(np.uint64(ids[i]) + np.uint64(GOLDEN))
        at = word & mask
        while slots[at]:
            at = (at + np.uint64(1)) & mask
        slots[at] = (word & above) | np.uint64(positions[i] + 1)
    return 1


@compiled(
    "stored[], const stored[], const int64[], const uint32[], const uint32[], const int64[], const uint64[], "
    "int64[], int64",
    ROWS,
    CONSTANTS,
)
def read_rows(
    out: Array,
    values: Array,
    ids: Array,
    slots: Array,
    growing: Array,
    held: Array,
    numbers: Array,
    missing: Array,
    dim: int,
) -> int:
    """Write the rows of the ids that belong to one server into `out`, at the indices of these ids.

    Return 1 + the number of ids without a row. The loop prefetches memory in two stages ahead of the copy: first the
    slot, then the id and the values.

    Args:
        slots: The slots of the index.
        growing: The slots of the smaller index that is being moved into the index.
        held: The id at each position.
        numbers: The number of the server, and the number of servers.
        missing: Output: the indices of ids that belong to the server and have no row.
    """
    mask, below, server, servers = np.uint64(slots.size - 1), np.uint64(growing.size - 1), numbers[0], numbers[1]
    above, at_of, absent = np.uint64(0xFFFFFFFF) & ~mask, np.empty(32, np.int64), 0
    for step in range(ids.size + 2 * AHEAD):
        if step < ids.size:
            word = mixed64(np.uint64(ids[step]) + np.uint64(GOLDEN))
            at_of[step & 31] = word
            prefetch(slots, np.int64(word & mask))
        i = step - AHEAD
        if 0 <= i < ids.size:
            word = np.uint64(at_of[i & 31])
            if ((word >> np.uint64(32)) * servers) >> np.uint64(32) == server:
                at = word & mask
                while slots[at] != 0 and (np.uint64(slots[at]) ^ word) & above != 0:
                    at = (at + np.uint64(1)) & mask
                at_of[i & 31] = at
                mark = np.int64(np.uint64(slots[at]) & mask)
                prefetch(held, mark - 1)
                for k in range(0, dim, 16):
                    prefetch(values, (mark - 1) * dim + k)
            else:
                at_of[i & 31] = -1
        i = step - 2 * AHEAD
        if i >= 0 and at_of[i & 31] >= 0:
            at, mark = np.uint64(at_of[i & 31]), np.int64(0)
            while slots[at]:
                mark = np.int64(np.uint64(slots[at]) & mask)
                if held[mark - 1] == ids[i]:
                    break
                mark = np.int64(0)
                at = (at + np.uint64(1)) & mask
            if mark == 0:
                at = mixed64(np.uint64(ids[i]) + np.uint64(GOLDEN)) & below
                while growing[at]:
                    mark = np.int64(np.uint64(growing[at]) & below)
                    if held[mark - 1] == ids[i]:
                        break
                    mark = np.int64(0)
                    at = (at + np.uint64(1)) & below
            if mark:
                o_, v_ = out[i * dim : (i + 1) * dim], values[(mark - 1) * dim : mark * dim]
                for k in range(o_.size):
                    o_[k] = v_[k]
            else:
                missing[absent] = i
                absent += 1
    return absent + 1


@compiled("stored[], const stored[], const int64[], int32[], wide[], int64", HALVES)
def merge_halves(total: Array, gradients: Array, rows: Array, begun: Array, sums: Array, dim: int) -> int:
    """Set rows of `total` to sums of gradients, added in order in float32 and then rounded once.

    Args:
        begun: Zeros, one for each row of `total`. The loop writes 1 for a row that has got one gradient so far, and 2 +
            i for a row that has got several, whose sum is row i of `sums`.
        sums: Scratch memory for the sums of all rows that have several gradients.
    """
    count = 0
    for i in range(rows.size):
        row = rows[i]
        t_, g_ = total[row * dim : (row + 1) * dim], gradients[i * dim : (i + 1) * dim]
        if begun[row] == 0:
            begun[row] = 1
            for k in range(g_.size):
                t_[k] = g_[k]
            continue
        if begun[row] == 1:
            begun[row] = 2 + count
            count += 1
            s_ = sums[(count - 1) * dim : count * dim]
            for k in range(s_.size):
                s_[k] = widen(t_[k])
        s_ = sums[(begun[row] - 2) * dim : (begun[row] - 1) * dim]
        for k in range(s_.size):
            s_[k] += widen(g_[k])
    for row in range(begun.size):
        if begun[row] > 1:
            t_, s_ = total[row * dim : (row + 1) * dim], sums[(begun[row] - 2) * dim : (begun[row] - 1) * dim]
            for k in range(s_.size):
                t_[k] = narrow(s_[k])
    return 1


@compiled("const stored[], wide[]", HALVES)
def widen_rows(values: Array, out: Array) -> int:
    """Convert rows to float32."""
    for k in range(out.size):
        out[k] = widen(values[k])
    return 1


@compiled("stored[], const wide[], const uint64[], int64", HALVES)
def round_rows(values: Array, wide: Array, streams: Array, dim: int) -> int:
    """Round float32 rows to the dtype of `values`, like `halves.round_into`."""
    for i in range(values.size // dim):
        store_row(values[i * dim : (i + 1) * dim], wide[i * dim : (i + 1) * dim], streams, i)
    return 1


@compiled(f"stored[], {GIVEN}, const wide[], int64", ROWS, CONSTANTS)
def sgd(values: Array, gradients: Array, rows: Array, streams: Array, numbers: Array, dim: int) -> int:
    """Update rows like `RowSGD`. `numbers`: learning rate, and the factor of weight decay."""
    rate, kept = numbers[0], numbers[1]
    scratch = np.empty(dim, numbers.dtype)
    for i in range(rows.size):
        ahead = rows[min(i + AHEAD, rows.size - 1)] * dim
        for k in range(0, dim, 16):
            prefetch(values, ahead + k)
        row, g_ = values[rows[i] * dim : (rows[i] + 1) * dim], gradients[i * dim : (i + 1) * dim]
        w_ = widened_row(row, scratch)
        for k in range(g_.size):
            w_[k] = w_[k] * kept - g_[k] * rate
        store_row(row, w_, streams, i)
    return 1


@compiled(f"stored[], wide[], {GIVEN}, const wide[], int64", ROWS, CONSTANTS)
def adagrad(values: Array, sums: Array, gradients: Array, rows: Array, streams: Array, numbers: Array, dim: int) -> int:
    """Update rows like `Adagrad`. `numbers`: learning rate, epsilon, and the factor of weight decay."""
    rate, epsilon, kept = numbers[0], numbers[1], numbers[2]
    scratch = np.empty(dim, numbers.dtype)
    for i in range(rows.size):
        ahead = rows[min(i + AHEAD, rows.size - 1)] * dim
        for k in range(0, dim, 16):
            prefetch(values, ahead + k)
            prefetch(sums, ahead + k)
        start, stop = rows[i] * dim, (rows[i] + 1) * dim
        row, s_, g_ = values[start:stop], sums[start:stop], gradients[i * dim : (i + 1) * dim]
        w_ = widened_row(row, scratch)
        for k in range(g_.size):
            total = s_[k] + g_[k] * g_[k]
            s_[k] = total
            below = np.sqrt(total) + epsilon
            w_[k] = w_[k] * kept - g_[k] * rate / (below if below != 0 else np.float32(1))
        store_row(row, w_, streams, i)
    return 1


@compiled(f"stored[], wide[], {GIVEN}, const wide[], int64", ROWS, SUMS)
def row_adagrad(
    values: Array, sums: Array, gradients: Array, rows: Array, streams: Array, numbers: Array, dim: int
) -> int:
    """Update rows of at most PAIRWISE values like `RowAdagrad`. `numbers` as in `adagrad`."""
    if dim > PAIRWISE:
        return 0
    rate, epsilon, kept = numbers[0], numbers[1], numbers[2]
    squares, scratch = np.empty(dim, numbers.dtype), np.empty(dim, numbers.dtype)
    for i in range(rows.size):
        ahead = rows[min(i + AHEAD, rows.size - 1)]
        prefetch(sums, ahead)
        for k in range(0, dim, 16):
            prefetch(values, ahead * dim + k)
        row, g_ = values[rows[i] * dim : (rows[i] + 1) * dim], gradients[i * dim : (i + 1) * dim]
        w_ = widened_row(row, scratch)
        for k in range(g_.size):
            squares[k] = g_[k] * g_[k]
        total = sums[rows[i]] + sum_of_row(squares) / numbers.dtype.type(dim)
        sums[rows[i]] = total
        below = np.sqrt(total) + epsilon
        if below == 0:
            below = numbers.dtype.type(1)
        for k in range(g_.size):
            w_[k] = w_[k] * kept - g_[k] * rate / below
        store_row(row, w_, streams, i)
    return 1


@compiled(f"stored[], wide[], wide[], {GIVEN}, const wide[], const wide[], const wide[], int64", ROWS, CONSTANTS)
def adam(
    values: Array,
    firsts: Array,
    seconds: Array,
    gradients: Array,
    rows: Array,
    streams: Array,
    corrections1: Array,
    corrections2: Array,
    numbers: Array,
    dim: int,
) -> int:
    """Update rows like `ElementwiseAdam`.

    Args:
        numbers: beta1, 1 - beta1, beta2, 1 - beta2, learning rate, epsilon, and the factor of weight decay.
    """
    beta1, share1, beta2, share2 = numbers[0], numbers[1], numbers[2], numbers[3]
    rate, epsilon, kept = numbers[4], numbers[5], numbers[6]
    scratch = np.empty(dim, numbers.dtype)
    for i in range(rows.size):
        ahead = rows[min(i + AHEAD, rows.size - 1)] * dim
        for k in range(0, dim, 16):
            prefetch(values, ahead + k)
            prefetch(firsts, ahead + k)
            prefetch(seconds, ahead + k)
        start, stop, correction1, correction2 = rows[i] * dim, (rows[i] + 1) * dim, corrections1[i], corrections2[i]
        row, m_, v_ = values[start:stop], firsts[start:stop], seconds[start:stop]
        w_, g_ = widened_row(row, scratch), gradients[i * dim : (i + 1) * dim]
        for k in range(g_.size):
            first = m_[k] * beta1 + g_[k] * share1
            second = v_[k] * beta2 + g_[k] * g_[k] * share2
            m_[k], v_[k] = first, second
            below = np.sqrt(second / correction2) + epsilon
            w_[k] = w_[k] * kept - first / correction1 * rate / (below if below != 0 else np.float32(1))
        store_row(row, w_, streams, i)
    return 1


@compiled(f"stored[], wide[], wide[], {GIVEN}, const wide[], const wide[], const wide[], int64", ROWS, SUMS)
def row_adam(
    values: Array,
    firsts: Array,
    seconds: Array,
    gradients: Array,
    rows: Array,
    streams: Array,
    corrections1: Array,
    corrections2: Array,
    numbers: Array,
    dim: int,
) -> int:
    """Update rows of at most PAIRWISE values like `RowAdam`. `numbers` as in `adam`."""
    if dim > PAIRWISE:
        return 0
    beta1, share1, beta2, share2 = numbers[0], numbers[1], numbers[2], numbers[3]
    rate, epsilon, kept = numbers[4], numbers[5], numbers[6]
    squares, scratch = np.empty(dim, numbers.dtype), np.empty(dim, numbers.dtype)
    for i in range(rows.size):
        ahead = rows[min(i + AHEAD, rows.size - 1)]
        prefetch(seconds, ahead)
        for k in range(0, dim, 16):
            prefetch(values, ahead * dim + k)
            prefetch(firsts, ahead * dim + k)
        start, stop, correction1 = rows[i] * dim, (rows[i] + 1) * dim, corrections1[i]
        row, m_, g_ = values[start:stop], firsts[start:stop], gradients[i * dim : (i + 1) * dim]
        w_ = widened_row(row, scratch)
        for k in range(g_.size):
            squares[k] = g_[k] * g_[k]
        second = seconds[rows[i]] * beta2 + sum_of_row(squares) / numbers.dtype.type(dim) * share2
        seconds[rows[i]] = second
        below = np.sqrt(second / corrections2[i]) + epsilon
        if below == 0:
            below = numbers.dtype.type(1)
        for k in range(g_.size):
            first = m_[k] * beta1 + g_[k] * share1
            m_[k] = first
            w_[k] = w_[k] * kept - first / correction1 * rate / below
        store_row(row, w_, streams, i)
    return 1


@compiled(f"stored[], wide[], wide[], {GIVEN}, const wide[], int64", ROWS, CONSTANTS)
def ftrl(
    values: Array, zs: Array, ns: Array, gradients: Array, rows: Array, streams: Array, numbers: Array, dim: int
) -> int:
    """Update rows like `FTRL`. `numbers`: learning rate, beta, l1 and l2."""
    alpha, beta, l1, l2 = numbers[0], numbers[1], numbers[2], numbers[3]
    scratch = np.empty(dim, numbers.dtype)
    for i in range(rows.size):
        ahead = rows[min(i + AHEAD, rows.size - 1)] * dim
        for k in range(0, dim, 16):
            prefetch(values, ahead + k)
            prefetch(zs, ahead + k)
            prefetch(ns, ahead + k)
        start, stop = rows[i] * dim, (rows[i] + 1) * dim
        row, z_, n_, g_ = values[start:stop], zs[start:stop], ns[start:stop], gradients[i * dim : (i + 1) * dim]
        w_ = widened_row(row, scratch)
        for k in range(g_.size):
            total = n_[k] + g_[k] * g_[k]
            root = np.sqrt(total)
            z = z_[k] + (g_[k] - (root - np.sqrt(n_[k])) / alpha * w_[k])
            z_[k], n_[k] = z, total
            below = (beta + root) / alpha + l2
            solved = ((l1 if z > 0 else -l1) - z) / (below if below != 0 else np.float32(1))
            w_[k] = np.float32(0) if abs(z) <= l1 else solved
        store_row(row, w_, streams, i)
    return 1


@compiled("stored[], const stored[], const float64[], int64", FLOATS, SUMS)
def clip(out: Array, gradients: Array, most: Array, dim: int) -> int:
    """Write gradients of at most PAIRWISE values to `out`, like `row_optimizers.clipped`. `most`: the largest norm."""
    if dim > PAIRWISE:
        return 0
    squares = np.empty(dim, np.float64)
    for start in range(0, gradients.size, dim):
        g_, o_ = gradients[start : start + dim], out[start : start + dim]
        for k in range(g_.size):
            squares[k] = np.float64(g_[k]) * np.float64(g_[k])
        norm = np.sqrt(sum_of_row(squares))
        factor = most[0] / (norm if norm > most[0] else most[0])
        for k in range(g_.size):
            o_[k] = np.float64(g_[k]) * factor
    return 1


OF_WORKERS = merge, add_rows, merge_halves, read_rows
OF_SERVERS = merge, add_rows, find, insert, widen_rows, round_rows

"""How rows reach the ranks: every rank reads a part and they exchange, or rank 0 reads and sends in one of the paper's
two ways (section 7). Rows are read in the order of the file, each once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter

import numpy as np
from mpi4py import MPI

from .agreement import TrainingError, agree
from .grid import Grid
from .measure import Link

WAYS = ("read", "scatter", "broadcast")
_BLOCK_BYTES = 32 << 20  # of rows that a reader has on the way at a time, so that nobody holds all
_MEASURED_BYTES = 256 << 10  # a rank's part of the scatter that is timed

Read = Callable[[int, int], np.ndarray]


def scatter_seconds(batch: int, model: int, data: float, alpha: float, beta: float) -> float:
    """One scatter to all ranks, `data` bytes a batch part: ``alpha + nb nm data beta`` (section 7, method one)."""
    return alpha + batch * model * data * beta


def broadcast_seconds(batch: int, model: int, data: float, alpha: float, beta: float) -> float:
    """A scatter to one rank a part, then broadcasts: ``2 alpha + max(nb, nm) data beta`` (section 7, method two)."""
    return 2 * alpha + max(batch, model) * data * beta


def way_seconds(batch: int, model: int, data: float, link: Link) -> dict[str, float]:
    """The cost of both ways of sending, by the paper's rule, the cheaper of two equal ones first."""
    return {
        "scatter": scatter_seconds(batch, model, data, *link),
        "broadcast": broadcast_seconds(batch, model, data, *link),
    }


def measure(comm: MPI.Comm, repeats: int = 5) -> Link:
    """The link for which `scatter_seconds` gives the measured times of a tiny and of a large scatter. Collective.

    Median of `repeats`, of the slowest rank. One rank has nothing to measure: alpha and beta are 0.
    """
    if comm.size == 1:
        return Link(0.0, 0.0)
    tiny, large = (_median(comm, nbytes, repeats) for nbytes in (8, _MEASURED_BYTES))
    return Link(tiny, max(large - tiny, 0.0) / (comm.size * _MEASURED_BYTES))


def _median(comm: MPI.Comm, nbytes: int, repeats: int) -> float:
    mine = np.zeros(nbytes // 8)
    everything = np.zeros(comm.size * mine.size) if comm.rank == 0 else None
    times = np.empty(repeats)
    for index in range(-1, repeats):
        comm.Barrier()
        start = perf_counter()
        comm.Scatter(everything, mine, root=0)
        if index >= 0:
            times[index] = perf_counter() - start
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return float(np.median(times))


def distribute(
    grid: Grid, way: str, read: Read | None, starts: np.ndarray, parts: list[np.ndarray], columns: int
) -> np.ndarray:
    """The rows ``parts[grid.batch_index]`` on every rank, (rows, columns) float64. Collective.

    `parts` holds the row numbers of every batch index. Rank r reads rows [starts[r], starts[r + 1]), which
    `read(start, stop)` gives, counted from its first one; unless the way is "read", rank 0 reads all of them. A
    TrainingError of a reader is raised by all ranks.
    """
    comm = grid.comm
    wanted = parts[grid.batch_index]
    mine = np.empty((len(wanted), columns))
    by_row = np.argsort(wanted)
    in_order = [np.sort(part) for part in parts]
    block = max(1, _BLOCK_BYTES // (8 * columns))
    send = {"read": _exchange, "scatter": _scatter, "broadcast": _scatter_broadcast}[way]
    first = int(starts[comm.rank])
    for offset in range(0, int(np.diff(starts).max(initial=0)), block):
        windows = [(min(start + offset, stop), min(start + offset + block, stop)) for start, stop in pairwise(starts)]
        start, stop = windows[comm.rank]
        table, problem = _attempt(read, start - first, stop - first, columns)
        agree(comm, problem)
        chunks = [table[part[slice(*np.searchsorted(part, (start, stop)))] - start] for part in in_order]
        cuts = [tuple(np.searchsorted(in_order[grid.batch_index], window)) for window in windows]
        received = np.empty((sum(b - a for a, b in cuts), columns))
        send(grid, chunks, received, [(b - a) * columns for a, b in cuts])
        mine[np.concatenate([by_row[a:b] for a, b in cuts])] = received
    return mine


def _attempt(read: Read | None, start: int, stop: int, columns: int) -> tuple[np.ndarray, str | None]:
    if read is None or start == stop:
        return np.empty((0, columns)), None
    try:
        return read(start, stop), None
    except TrainingError as error:
        return np.empty((0, columns)), str(error)


def _exchange(grid: Grid, chunks: list[np.ndarray], received: np.ndarray, counts: list[int]) -> None:
    """Every rank sends every rank what it has read of the other's rows; `counts` elements come from each."""
    outgoing = [chunk for chunk in chunks for _ in range(grid.model)]
    flat, sizes = np.concatenate(outgoing), [chunk.size for chunk in outgoing]
    grid.comm.Alltoallv([flat, sizes, None, MPI.DOUBLE], [received, counts, None, MPI.DOUBLE])


def _scatter(grid: Grid, chunks: list[np.ndarray], received: np.ndarray, counts: list[int]) -> None:
    """Rank 0 sends every rank its rows, the ranks of one model the same ones."""
    outgoing = [chunk for chunk in chunks for _ in range(grid.model)]
    grid.comm.Scatterv(_root(grid, outgoing), received, root=0)


def _scatter_broadcast(grid: Grid, chunks: list[np.ndarray], received: np.ndarray, counts: list[int]) -> None:
    """Rank 0 sends rows to one rank of each model, which broadcasts them to the others."""
    if grid.model_index == 0:
        grid.batch_comm.Scatterv(_root(grid, chunks), received, root=0)
    grid.model_comm.Bcast(received, root=0)


def _root(grid: Grid, outgoing: list[np.ndarray]) -> list[object] | None:
    if grid.comm.rank:
        return None
    return [np.concatenate(outgoing), [chunk.size for chunk in outgoing], None, MPI.DOUBLE]

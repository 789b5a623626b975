"""How rows reach the ranks: every rank reads its own, or rank 0 sends them in one of the paper's two ways (section
7)."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
from mpi4py import MPI

from .agreement import TrainingError, agree
from .grid import Grid
from .measure import Link

WAYS = ("read", "scatter", "broadcast")
_BLOCK_BYTES = 32 << 20  # of one rank's rows that are on the way at a time, so that rank 0 never holds all parts
_MEASURED_BYTES = 256 << 10  # a rank's part of the scatter that is timed

Read = Callable[[np.ndarray], np.ndarray]


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


def distribute(grid: Grid, way: str, read: Read | None, parts: list[np.ndarray], columns: int) -> np.ndarray:
    """The rows ``parts[grid.batch_index]`` on every rank, (rows, columns) float64. Collective.

    `read` gives rows by their numbers; only rank 0 needs one unless the way is "read". `parts` holds the row numbers of
    every batch index. A TrainingError of one reader is raised by all ranks.
    """
    if way == "read":
        table, problem = _attempt(read, parts[grid.batch_index])
        agree(grid.comm, problem)
        return table
    mine = np.empty((len(parts[grid.batch_index]), columns))
    block = max(1, _BLOCK_BYTES // (8 * columns))
    send = _scatter if way == "scatter" else _scatter_broadcast
    for start in range(0, max(len(part) for part in parts), block):
        wanted = [part[start : start + block] for part in parts]
        tables, problem = [], None
        if grid.comm.rank == 0:
            attempts = [_attempt(read, rows) for rows in wanted]
            tables = [table for table, _ in attempts]
            problem = next((problem for _, problem in attempts if problem), None)
        agree(grid.comm, problem)
        send(grid, tables, [len(rows) * columns for rows in wanted], mine[start : start + block])
    return mine


def _attempt(read: Read | None, rows: np.ndarray) -> tuple[np.ndarray, str | None]:
    if read is None:
        return np.empty((0, 0)), "this rank has no source to read its rows from"
    try:
        return read(rows), None
    except TrainingError as error:
        return np.empty((0, 0)), str(error)


def _scatter(grid: Grid, tables: list[np.ndarray], counts: list[int], mine: np.ndarray) -> None:
    """Rank 0 sends every rank its block, the ranks of one model the same one."""
    repeated = [count for count in counts for _ in range(grid.model)]
    flat = np.concatenate([table.ravel() for table in tables for _ in range(grid.model)]) if tables else None
    grid.comm.Scatterv([flat, repeated, None, MPI.DOUBLE] if tables else None, mine, root=0)


def _scatter_broadcast(grid: Grid, tables: list[np.ndarray], counts: list[int], mine: np.ndarray) -> None:
    """Rank 0 sends each block to one rank, which broadcasts it to those that share its model."""
    if grid.model_index == 0:
        flat = np.concatenate([table.ravel() for table in tables]) if tables else None
        grid.batch_comm.Scatterv([flat, counts, None, MPI.DOUBLE] if tables else None, mine, root=0)
    grid.model_comm.Bcast(mine, root=0)

"""How rows reach the ranks: every rank reads a part and they exchange, or rank 0 reads and sends them.

Sending is done in one of the paper's two ways (section 7). Rows are read in the order of the file, each once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from mpips.mlp.agreement import TrainingError, agree
from mpips.mlp.mesh import Mesh

WAYS = ("read", "scatter", "broadcast")
_BLOCK_BYTES = 32 << 20  # of rows that a reader has on the way at a time, so that nobody holds all

Read = Callable[[int, int], np.ndarray]


def distribute(
    mesh: Mesh, way: str, read: Read | None, starts: np.ndarray, parts: list[np.ndarray], columns: int
) -> np.ndarray:
    """The rows ``parts[mesh.batch_index]`` on every rank, (rows, columns) float64. Collective.

    `parts` holds the row numbers of every batch index. Rank r reads rows [starts[r], starts[r + 1]), which
    `read(start, stop)` gives, counted from its first one; unless the way is "read", rank 0 reads all of them. A
    TrainingError of a reader is raised by all ranks.
    """
    comm = mesh.comm
    wanted = parts[mesh.batch_index]
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
        cuts = [tuple(np.searchsorted(in_order[mesh.batch_index], window)) for window in windows]
        received = np.empty((sum(b - a for a, b in cuts), columns))
        send(mesh, chunks, received, [(b - a) * columns for a, b in cuts])
        mine[np.concatenate([by_row[a:b] for a, b in cuts])] = received
    return mine


def _attempt(read: Read | None, start: int, stop: int, columns: int) -> tuple[np.ndarray, str | None]:
    if read is None or start == stop:
        return np.empty((0, columns)), None
    try:
        return read(start, stop), None
    except TrainingError as error:
        return np.empty((0, columns)), str(error)


def _exchange(mesh: Mesh, chunks: list[np.ndarray], received: np.ndarray, counts: list[int]) -> None:
    """Every rank sends every rank what it has read of the other's rows; `counts` elements come from each."""
    outgoing = [chunk for chunk in chunks for _ in range(mesh.model)]
    flat, sizes = np.concatenate(outgoing), [chunk.size for chunk in outgoing]
    mesh.comm.Alltoallv([flat, sizes, None, MPI.DOUBLE], [received, counts, None, MPI.DOUBLE])


def _scatter(mesh: Mesh, chunks: list[np.ndarray], received: np.ndarray, counts: list[int]) -> None:
    """Rank 0 sends every rank its rows, the ranks of one model the same ones."""
    outgoing = [chunk for chunk in chunks for _ in range(mesh.model)]
    mesh.comm.Scatterv(_root(mesh, outgoing), received, root=0)


def _scatter_broadcast(mesh: Mesh, chunks: list[np.ndarray], received: np.ndarray, counts: list[int]) -> None:
    """Rank 0 sends rows to one rank of each model, which broadcasts them to the others."""
    if mesh.model_index == 0:
        mesh.batch_comm.Scatterv(_root(mesh, chunks), received, root=0)
    mesh.model_comm.Bcast(received, root=0)


def _root(mesh: Mesh, outgoing: list[np.ndarray]) -> list[object] | None:
    if mesh.comm.rank:
        return None
    return [np.concatenate(outgoing), [chunk.size for chunk in outgoing], None, MPI.DOUBLE]

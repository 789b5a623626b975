"""Everyone fails together: a problem that one rank sees is raised by all, in the same words."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI


class TrainingError(ValueError):
    """Training cannot start: bad data, or a grid that does not fit the job. Every rank raises the same sentence."""


def agree(comm: MPI.Comm, problem: str | None) -> None:
    """Return if no rank of `comm` has a problem; otherwise raise the lowest such rank's sentence on all. Collective."""
    mine = comm.rank if problem is not None else comm.size
    first = np.array([mine], np.int64)
    comm.Allreduce(MPI.IN_PLACE, first, MPI.MIN)
    if first[0] == comm.size:
        return
    raise TrainingError(broadcast_bytes(comm, (problem or "").encode(), root=int(first[0])).decode())


def broadcast_bytes(comm: MPI.Comm, data: bytes, root: int = 0) -> bytes:
    """`data` of rank `root`, on every rank. Collective."""
    size = np.array([len(data)], np.int64)
    comm.Bcast(size, root)
    buffer = bytearray(data) if comm.rank == root else bytearray(int(size[0]))
    comm.Bcast([buffer, MPI.BYTE], root)
    return bytes(buffer)

"""The collectives a grid needs, on arrays whose memory stays: sums in place, and gathers of blocks of rows."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from collectives import plan

from .slices import intervals


class Sum:
    """The in-place sum of one array over `comm`, begun by `start` and finished by `wait`, any number of times.

    Making one is collective. Arrays made by `collectives.empty` are summed where they lie, without messages, by
    ranks of one node.
    """

    def __init__(self, array: np.ndarray, comm: MPI.Comm) -> None:
        self._plan = plan("allreduce", array, comm) if array.size and comm.size > 1 else None

    def start(self) -> Sum:
        if self._plan:
            self._plan.start()
        return self

    def wait(self) -> None:
        if self._plan:
            self._plan.wait()

    def run(self) -> None:
        """Start and wait."""
        if self._plan:
            self._plan()

    def free(self) -> None:
        if self._plan:
            self._plan.free()


class Gather:
    """Every rank's `interval` of the rows of one (rows, columns) array, gathered in place.

    Blocks of whole rows are the blocks that `collectives` cuts where the ranks divide the rows; else MPI gathers them.
    """

    def __init__(self, array: np.ndarray, comm: MPI.Comm) -> None:
        rows, columns = array.shape
        self._comm, self._plan = comm, None
        if rows % comm.size == 0 and array.size:
            self._plan = plan("allgather", array, comm)
        slices = intervals(rows, comm.size)
        counts = [(stop - start) * columns for start, stop in slices]
        offsets = [start * columns for start, _ in slices]
        self._buffer = [array, counts, offsets, MPI._typedict[array.dtype.char]]

    def run(self) -> None:
        if self._plan:
            self._plan()
        else:
            self._comm.Allgatherv(MPI.IN_PLACE, self._buffer)

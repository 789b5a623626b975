"""The collectives a grid needs, on arrays whose memory stays: sums in place, and gathers of uneven blocks of rows."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from .slices import intervals


class Sum:
    """The in-place sum of one array over `comm`, begun by `start` and finished by `wait`, any number of times."""

    def __init__(self, array: np.ndarray, comm: MPI.Comm) -> None:
        self._array, self._comm = array, comm
        self._request = MPI.REQUEST_NULL

    def start(self) -> Sum:
        self._request = self._comm.Iallreduce(MPI.IN_PLACE, self._array, MPI.SUM)
        return self

    def wait(self) -> None:
        self._request.Wait()


class Gather:
    """Every rank's `interval` of the rows of one (rows, columns) array, gathered in place."""

    def __init__(self, array: np.ndarray, comm: MPI.Comm) -> None:
        rows, columns = array.shape
        slices = intervals(rows, comm.size)
        counts = [(stop - start) * columns for start, stop in slices]
        offsets = [start * columns for start, _ in slices]
        self._buffer = [array, counts, offsets, MPI._typedict[array.dtype.char]]
        self._comm = comm

    def run(self) -> None:
        self._comm.Allgatherv(MPI.IN_PLACE, self._buffer)

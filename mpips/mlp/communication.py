"""The collectives that a step needs, on arrays whose memory stays: sums in place, and gathers of blocks of rows.

With `half` what travels is float16: the array is rounded into a copy, the copy is summed or gathered, and everybody,
the sender too, takes the result from it, so that all ranks go on with the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

import collectives
from collectives import plan

from mpips.mlp.intervals import interval, intervals


def narrow(array: Any, half: Any) -> None:
    """half = array, rounded; what float16 cannot hold becomes infinite."""
    with np.errstate(over="ignore"):
        half[...] = array


class Sum:
    """The in-place sum of one array over `comm`, begun by `start` and finished by `wait`, any number of times.

    Making one is collective. Arrays made by `collectives.empty` are summed where they lie, without messages, by
    ranks of one node.
    """

    def __init__(self, array: Any, comm: MPI.Comm, half: bool = False) -> None:
        self._plan, self._array, self._half = None, array, None
        if array.size and comm.size > 1:
            self._half = collectives.empty(array.shape, np.float16, comm) if half else None
            self._plan = plan("allreduce", array if self._half is None else self._half, comm)

    def start(self) -> Sum:
        if self._plan:
            if self._half is not None:
                narrow(on_host(self._array), self._half)
            self._plan.start()
        return self

    @property
    def moves(self) -> bool:
        """Whether there is anything to send."""
        return self._plan is not None

    def test(self) -> bool:
        """Move on as far as possible without waiting; whether it has arrived."""
        return self._plan is None or self._plan.test()

    def wait(self) -> None:
        if self._plan:
            self._plan.wait()
            self._widen()

    def run(self) -> None:
        """Start and wait."""
        if self._plan:
            if self._half is not None:
                narrow(on_host(self._array), self._half)
            self._plan()
            self._widen()

    def free(self) -> None:
        if self._plan:
            self._plan.free()

    def _widen(self) -> None:
        if self._half is not None:
            put(self._half, self._array)


class Gather:
    """Every rank's `interval` of the rows of one (rows, columns) array, gathered in place.

    Blocks of whole rows are the blocks that `collectives` cuts where the ranks divide the rows; else MPI gathers them.
    Arrays of a GPU travel by a copy on the host.
    """

    def __init__(self, array: Any, comm: MPI.Comm, half: bool = False) -> None:
        rows, columns = array.shape
        self._comm, self._plan, self._array = comm, None, array
        self._own = slice(*interval(rows, comm.size, comm.rank))
        wire = array
        if half:
            wire = collectives.empty(array.shape, np.float16, comm)
        elif not isinstance(array, np.ndarray):
            wire = collectives.empty(array.shape, array.dtype, comm)
        self._copy = None if wire is array else wire
        if rows % comm.size == 0 and array.size:
            self._plan = plan("allgather", wire, comm)
        row = columns * wire.dtype.itemsize
        slices = intervals(rows, comm.size)
        counts, offsets = [(stop - start) * row for start, stop in slices], [start * row for start, _ in slices]
        self._buffer = [wire, counts, offsets, MPI.BYTE]

    def run(self) -> None:
        if self._copy is not None:
            narrow(on_host(self._array[self._own]), self._copy[self._own])
        if self._plan:
            self._plan()
        else:
            self._comm.Allgatherv(MPI.IN_PLACE, self._buffer)
        if self._copy is not None:
            put(self._copy, self._array)


def address(array: Any) -> int:
    """Where an array of the host or of a GPU begins."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


def on_host(array: Any) -> np.ndarray:
    """The array, or the host's copy of one that a GPU holds."""
    return array if isinstance(array, np.ndarray) else array.get()


def put(source: np.ndarray, target: Any) -> None:
    """target = source, which is on the host, wherever the target is."""
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        target.set(np.ascontiguousarray(source, target.dtype))

"""What goes by MPI's own calls: uneven and rooted exchanges, bitwise reductions, sends and receives. As steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from torch import Tensor

from collectives.communicator import Communicator
from collectives.fabric.wait import see_in_time
from collectives.network.requests import keep
from mpips.torch.process_group.tensors import data
from mpips.torch.process_group.works import Found, Steps

LOOK_SECONDS = 1e-2
"""Between two looks for the end of the generation."""


def elements(tensor: Tensor, splits: Sequence[int] | None, ranks: int, argument: str) -> list[int]:
    """How many elements go to, or come from, each rank: rows as told, or an even share. ValueError where they do not
    fit."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % ranks:
            raise ValueError(f"all_to_all_single: {rows} rows do not split evenly over {ranks} ranks: pass {argument}")
        return [tensor.numel() // ranks] * ranks
    if len(splits) != ranks or sum(splits) != rows:
        raise ValueError(f"all_to_all_single: {argument} is {list(splits)}: give {ranks} numbers whose sum is {rows}")
    return [rows_here * (tensor.numel() // max(rows, 1)) for rows_here in splits]


class Exchange:
    """MPI's calls on one communicator, used for nothing else."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def alltoall(self, target: Tensor, into: Sequence[int], source: Tensor, out_of: Sequence[int]) -> Steps:
        size = source.element_size()
        sent, came = _cut(data(source), out_of, size), _cut(data(target), into, size)
        yield from self._through(lambda: self._comm.Ialltoallv(sent, came))

    def allgather(self, target: Tensor, sizes: Sequence[int], source: Tensor) -> Steps:
        came = _cut(data(target), sizes, source.element_size())
        yield from self._through(lambda: self._comm.Iallgatherv(data(source), came))

    def gather(self, target: Tensor, sizes: Sequence[int], source: Tensor, root: int) -> Steps:
        came = _cut(data(target), sizes, source.element_size()) if self._comm.rank == root else None
        yield from self._through(lambda: self._comm.Igatherv(data(source), came, root))

    def scatter(self, target: Tensor, source: Tensor, sizes: Sequence[int], root: int) -> Steps:
        sent = _cut(data(source), sizes, source.element_size()) if self._comm.rank == root else None
        yield from self._through(lambda: self._comm.Iscatterv(sent, data(target), root))

    def reduce(self, target: Tensor, source: Tensor, op: Any, root: int | None) -> Steps:
        """By an operation on bytes; on all ranks where there is no root."""
        given, result = data(source).copy(), data(target)
        if root is None:
            yield from self._through(lambda: self._comm.Iallreduce(given, result, op))
        else:
            mine = result if self._comm.rank == root else None
            yield from self._through(lambda: self._comm.Ireduce(given, mine, op, root))

    def send(self, source: Tensor, destination: int, tag: int) -> Steps:
        yield from self._through(lambda: self._comm.Isend(data(source), destination, tag))

    def receive(self, target: Tensor, source: int, tag: int, found: Found | None = None) -> Steps:
        status = MPI.Status()
        yield from self._through(lambda: self._comm.Irecv(data(target), source, tag), status)
        if found is not None:
            found.rank = status.Get_source()

    def _through(self, start: Callable[[], MPI.Request], status: MPI.Status | None = None) -> Steps:
        request = start()
        try:
            while not request.Test(status):
                yield
        finally:
            if request:
                keep([request])  # which holds the arrays that MPI may still touch


def watched(steps: Steps, home: Communicator, what: str) -> Steps:
    """The same, beside others; it raises where the generation of `home` has ended, and ends it where it fails
    itself."""
    start = due = time.monotonic()
    try:
        home.check()
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                return stop.value
            now = time.monotonic()
            if now >= due:
                home.hear(now - start)
                see_in_time(what, now - start, home.generation)
                due = now + LOOK_SECONDS
            yield
    except Exception as error:
        raise home.fail(what, error) from None


def _cut(memory: np.ndarray, sizes: Sequence[int], itemsize: int) -> list[Any]:
    """A vector of bytes as MPI takes parts of it."""
    counts = np.array(sizes, np.int64) * itemsize
    starts = np.cumsum(counts) - counts
    return [memory, (counts.tolist(), starts.tolist()), MPI.BYTE]

"""Vectors on GPUs, by CuPy: queues the kernel that adds them (`kernels`) on our streams; who waits: `streams`.

One kernel adds an incoming host chunk and all vectors of the worker in one pass, and writes the sum to host memory. The
host's pages are pinned and mapped, so the kernel reads and writes them over the bus while other chunks are copied (the
paper's IBMGpu, section 7.3). With vectors on several GPUs each GPU does its share of the chunk and reads the others'
vectors over the direct links, so these GPUs need peer access to each other.

A list may also hold host arrays. Those that are given are copied to pinned memory when an operation begins, and those
that take the result are written by the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import cupy as cp
import numpy as np

from collectives.arrays import Vector
from collectives.schedule.model import cut
from collectives.tensor import kernels
from collectives.tensor.arguments import Place
from collectives.tensor.pinned import POOL
from collectives.tensor.streams import Streams
from collectives.tensor.vectors import Ticket

PATIENCE = 10.0
"""Seconds that an operation which was broken off waits for its kernels. They wait for what the user has queued, and
that may wait for another rank, which is perhaps why the operation was broken off."""
_LEFT: list[list[Vector]] = []
"""Host memory that kernels may still work on after so long. No other operation gets it."""


class CudaVectors:
    """Vectors of one worker, at least one of them on a GPU. `operation` is a NumPy ufunc's name, of `kernels`."""

    def __init__(self, sources: Sequence[Place], targets: Sequence[Place], operation: str):
        self.n, self.count, self.dtype = sources[0].n, len(sources), sources[0].dtype
        self._operation = operation
        devices = list(dict.fromkeys(p.device for p in [*sources, *targets] if p.device is not None))
        _see_peers(devices)
        self._streams = Streams(devices)
        self._pinned: list[Vector] = []
        self._reducing = tuple(dict.fromkeys(s.device for s in sources if s.device is not None)) or tuple(devices)
        """The GPUs that share the sums: those that hold what is given."""
        self._given = [(self.host(s.n), s.vector()) for s in sources if s.device is None]
        pinned = iter([vector.ctypes.data for vector, _ in self._given])
        self._sources = [s if s.device is not None else s.moved(next(pinned)) for s in sources]
        self._targets = [t for t in targets if t.device is not None]
        self._host_targets = [t.vector() for t in targets if t.device is None]

    def host(self, n: int) -> Vector:
        self._pinned.append(POOL.take(n, self.dtype, self._streams.devices[0]))
        return self._pinned[-1]

    def begin(self) -> None:
        self._streams.after_user()
        for pinned, given in self._given:
            np.copyto(pinned, given)

    def finish(self) -> None:
        if not self._streams.drained(PATIENCE):
            _LEFT.append(self._pinned)

    def free(self) -> None:
        self._given, self._sources, self._targets, self._host_targets, self._pinned = [], [], [], [], []

    def gather(self, start: int, stop: int, incoming: Vector | None, out: Vector) -> Ticket:
        parts = [source.at(start) for source in self._sources]
        if incoming is not None:
            parts.insert(0, incoming.ctypes.data)
        for device, first, last in self._shares(stop - start):
            at = [address + first * self.dtype.itemsize for address in (*parts, out.ctypes.data)]
            self._reduce(device, at[:-1], at[-1], last - first)
        return self._streams.ticket(self._reducing)

    def spread(self, start: int, stop: int, source: Vector) -> Ticket:
        for target in self._targets:
            self._streams.copy(_on(target), target.at(start), source.ctypes.data, source.nbytes)
        for vector in self._host_targets:
            np.copyto(vector[start:stop], source)
        return self._streams.ticket([_on(target) for target in self._targets])

    def adopt(self) -> Ticket:
        for target, source in zip(self._targets, self._sources):
            if target.address != source.address:
                self._streams.copy(_on(target), target.address, source.address, self.n * self.dtype.itemsize)
        return self._streams.ticket([_on(target) for target in self._targets])

    def fetch(self, which: int, start: int, stop: int, out: Vector) -> Ticket:
        target = self._targets[which]
        self._streams.copy(_on(target), out.ctypes.data, target.at(start), out.nbytes)
        return self._streams.ticket([_on(target)])

    def store(self, which: int, start: int, stop: int, source: Vector, add: bool) -> Ticket:
        return self._take_in(self._targets[which], source.ctypes.data, start, stop, add)

    def pass_on(self, which: int, start: int, stop: int, add: bool) -> Ticket:
        return self._take_in(self._targets[which + 1], self._targets[which].at(start), start, stop, add)

    def _take_in(self, target: Place, source: int, start: int, stop: int, add: bool) -> Ticket:
        """Elements of one target = those at the address `source`, or their reduction with them."""
        parts = [target.at(start), source] if add else [source]
        self._reduce(_on(target), parts, target.at(start), stop - start)
        return self._streams.ticket([_on(target)])

    def _reduce(self, device: int, parts: Sequence[int], out: int, n: int) -> None:
        """Queue out = the reduction of n elements at each of these addresses; of one vector that is a copy."""
        if len(parts) == 1:
            self._streams.copy(device, out, parts[0], n * self.dtype.itemsize)
        elif n:
            blocks, threads = kernels.grid(n)
            with self._streams.on(device):
                _kernel(self._operation, self.dtype.name, len(parts))((blocks,), (threads,), (*parts, out, n))

    def _shares(self, n: int) -> Iterator[tuple[int, int, int]]:
        """(device, first, last): which part of n elements each GPU reduces."""
        parts = len(self._reducing)
        for number, device in enumerate(self._reducing):
            yield device, int(cut(n, parts, number)), int(cut(n, parts, number + 1))


@cache
def _kernel(operation: str, dtype: str, count: int) -> Any:
    """The kernel, built at its first use and kept by the process."""
    return cp.RawKernel(kernels.source(operation, dtype, count), kernels.name(operation, dtype, count))


def _on(place: Place) -> int:
    assert place.device is not None
    return place.device


def _see_peers(devices: Sequence[int]) -> None:
    """Let each GPU read the others; ValueError where one cannot."""
    runtime = cp.cuda.runtime
    for device in devices:
        for other in devices:
            if other == device:
                continue
            if not runtime.deviceCanAccessPeer(device, other):
                raise ValueError(f"GPU {device} cannot read GPU {other}: a tensor's GPUs need peer access")
            with cp.cuda.Device(device):
                try:
                    runtime.deviceEnablePeerAccess(other)
                except runtime.CUDARuntimeError as error:
                    if "AlreadyEnabled" not in str(error):
                        raise

"""CuPy's side of `collectives.tensor.vectors.Vectors`: fused kernels on pinned host memory, streams and events.

One kernel adds an incoming host chunk and all vectors of the worker in one pass, and writes the sum to host memory: the
host's pages are pinned and mapped, so the kernel reads and writes them over the bus while other chunks are copied (the
paper's IBMGpu, section 7.3). With vectors on several GPUs each GPU does its share of the chunk and reads the others'
over the direct links, so peer access between them is needed.

A ticket is an event on each stream: MPI reads host memory only after it. `begin` makes our streams wait for what the
user has queued on the current stream of each device.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import cupy as cp
import numpy as np
from cupy.cuda import runtime

from collectives.arrays import Vector
from collectives.errors import CollectiveError
from collectives.node import arena
from collectives.schedule.model import cut
from collectives.tensor.vectors import Ticket

EXPRESSIONS = {"add": "{} + {}", "multiply": "{} * {}", "minimum": "min({}, {})", "maximum": "max({}, {})"}
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind
PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
PAGE = mmap.PAGESIZE
SAME_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


@cache
def kernel(name: str, count: int) -> Any:
    """out = reduction of `count` arrays, elementwise, in one pass."""
    total = "v0"
    for i in range(1, count):
        total = EXPRESSIONS[name].format(total, f"v{i}")
    inputs = ", ".join(f"T v{i}" for i in range(count))
    return cp.ElementwiseKernel(inputs, "T out", f"out = {total}", f"collectives_{name}_{count}")


class CudaVectors:
    """Vectors of one worker in GPU memory. `name` is the NumPy ufunc of the reduction."""

    def __init__(self, sources: Sequence[Any], targets: Sequence[Any], name: str):
        self._sources, self._targets = [_flat(v) for v in sources], [_flat(v) for v in targets]
        self._name = name
        self.n, self.count = self._sources[0].size, len(self._sources)
        self.dtype = np.dtype(self._sources[0].dtype)
        self._devices = list(dict.fromkeys(int(v.device.id) for v in [*self._sources, *self._targets]))
        self._meet_peers()
        self._streams = {device: self._stream(device) for device in self._devices}
        self._pinned: list[_Pinned] = []

    def host(self, n: int) -> Vector:
        pinned = _Pinned(n, self.dtype, self._devices[0])
        self._pinned.append(pinned)
        return pinned.vector

    def begin(self) -> None:
        for device, stream in self._streams.items():
            with cp.cuda.Device(device):
                stream.wait_event(cp.cuda.get_current_stream().record())

    def gather(self, start: int, stop: int, incoming: Vector | None, out: Vector) -> Ticket:
        count = self.count + (incoming is not None)
        for device, first, last in self._shares(stop - start):
            parts = [source[start + first : start + last] for source in self._sources]
            if incoming is not None:
                parts.insert(0, _mapped(incoming[first:last], device))
            with cp.cuda.Device(device), self._streams[device]:
                kernel(self._name, count)(*parts, _mapped(out[first:last], device))
        return self._ticket(self._devices)

    def spread(self, start: int, stop: int, source: Vector) -> Ticket:
        for target in self._targets:
            self._copy(target.device.id, target[start:stop].data.ptr, source.ctypes.data, source.nbytes, TO_DEVICE)
        return self._ticket(self._devices)

    def adopt(self) -> Ticket:
        for target, source in zip(self._targets, self._sources):
            if target.data.ptr != source.data.ptr:
                device = int(target.device.id)
                with cp.cuda.Device(device), self._streams[device]:
                    cp.copyto(target, source)
        return self._ticket(self._devices)

    def fetch(self, which: int, start: int, stop: int, out: Vector) -> Ticket:
        target = self._targets[which]
        self._copy(target.device.id, out.ctypes.data, target[start:stop].data.ptr, out.nbytes, TO_HOST)
        return self._ticket([int(target.device.id)])

    def store(self, which: int, start: int, stop: int, source: Vector, add: bool) -> Ticket:
        target = self._targets[which][start:stop]
        if not add:
            self._copy(target.device.id, target.data.ptr, source.ctypes.data, source.nbytes, TO_DEVICE)
        else:
            self._reduce_into(target, _mapped(source, int(target.device.id)))
        return self._ticket([int(target.device.id)])

    def pass_on(self, which: int, start: int, stop: int, add: bool) -> Ticket:
        source, target = self._targets[which][start:stop], self._targets[which + 1][start:stop]
        device = int(target.device.id)
        if add:
            self._reduce_into(target, source)
        else:
            with cp.cuda.Device(device), self._streams[device]:
                cp.copyto(target, source)
        return self._ticket([device])

    def _reduce_into(self, target: Any, source: Any) -> None:
        device = int(target.device.id)
        with cp.cuda.Device(device), self._streams[device]:
            kernel(self._name, 2)(target, source, target)

    def _copy(self, device: int, to: int, source: int, nbytes: int, direction: int) -> None:
        if nbytes:
            with cp.cuda.Device(device):
                runtime.memcpyAsync(to, source, nbytes, direction, self._streams[int(device)].ptr)

    def _shares(self, n: int) -> Iterator[tuple[int, int, int]]:
        """(device, first, last): which part of n elements each GPU reduces."""
        parts = len(self._devices)
        for number, device in enumerate(self._devices):
            first, last = int(cut(n, parts, number)), int(cut(n, parts, number + 1))
            if last > first:
                yield device, first, last

    def _ticket(self, devices: Sequence[int]) -> Ticket:
        events = []
        for device in devices:
            with cp.cuda.Device(device):
                events.append(self._streams[device].record())
        return lambda: all(event.done for event in events)

    @staticmethod
    def _stream(device: int) -> Any:
        with cp.cuda.Device(device):
            return cp.cuda.Stream(non_blocking=True)

    def _meet_peers(self) -> None:
        for device in self._devices:
            for other in self._devices:
                if other == device:
                    continue
                if not runtime.deviceCanAccessPeer(device, other):
                    raise CollectiveError(f"GPU {device} cannot read GPU {other}: a tensor's GPUs need peer access")
                with cp.cuda.Device(device):
                    try:
                        runtime.deviceEnablePeerAccess(other)
                    except runtime.CUDARuntimeError as error:
                        if "AlreadyEnabled" not in str(error):
                            raise


class _Pinned:
    """Node-shared host memory that GPUs can read and write in place."""

    def __init__(self, n: int, dtype: np.dtype[Any], device: int):
        if not runtime.deviceGetAttribute(SAME_POINTER, device):
            raise CollectiveError(f"GPU {device} cannot use host memory by its host address: pass NumPy arrays instead")
        pages = -(-max(1, n * dtype.itemsize) // PAGE) * PAGE  # a page can be registered once only, so take whole ones
        raw = arena.empty(pages + PAGE, np.uint8)
        start = -raw.ctypes.data % PAGE
        self._address = raw.ctypes.data + start
        self.vector: Vector = raw[start : start + n * dtype.itemsize].view(dtype)
        runtime.hostRegister(self._address, pages, PORTABLE_MAPPED)

    def __del__(self) -> None:
        runtime.hostUnregister(self._address)


def _flat(x: Any) -> Any:
    """A one-dimensional CuPy view of any device array; ValueError where its memory is not contiguous."""
    array = cp.asarray(x)
    if not array.flags.c_contiguous:
        raise ValueError(f"a device array of shape {array.shape} is not C-contiguous: pass cupy.ascontiguousarray(x)")
    return array.reshape(-1)


def _mapped(vector: Vector, device: int) -> Any:
    """Host memory that is pinned and mapped, as a device array over the same bytes."""
    memory = cp.cuda.UnownedMemory(vector.ctypes.data, vector.nbytes, vector, device)
    return cp.ndarray(vector.shape, vector.dtype, cp.cuda.MemoryPointer(memory, 0))

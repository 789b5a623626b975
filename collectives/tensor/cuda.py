"""GPU vectors by CuPy: streams and their order, and pinned host memory. The kernels are in `cuda_kernels`.

One kernel adds a received chunk in host memory and all vectors of the worker in one pass, and writes the sum to host
memory. The host's pages are pinned and mapped, so the kernel reads and writes them over the bus while other chunks are
copied (IBMGpu in the MXNET-MPI paper, section 7.3). If vectors are on several GPUs, each GPU reduces its share of the
chunk and reads the vectors of the other GPUs over the direct links. So these GPUs need peer access to each other.

A list of vectors may also contain host arrays. Host arrays that are sources are copied to pinned memory when an
operation begins. Host arrays that are targets are written by the host.

**Streams.** A kernel on one GPU reads the vectors of the other GPUs. So before an operation *each* of our streams waits
for the user's streams of *every* device: the current stream of CuPy in this thread, the current stream of torch if
torch uses CUDA, and the legacy default stream, which itself waits for every blocking stream. Users must synchronize
other non-blocking streams themselves. At its end an operation waits on the host until all work that it has queued is
done. So work that the user queues later, on any stream, also runs later.

**Pinned memory.** Pinning is slow, so pinned memory that is no longer used is kept for the next use, up to
`KEEP_BYTES`. Pinned memory is node-shared, so that the other ranks of the node can also read it. It is pinned on a
device that has vectors of the caller, because pinning opens a context on the device.
"""

from __future__ import annotations

import mmap
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from mpips.collectives.arrays import Flat, Vector
from mpips.collectives.fabric import arena
from mpips.collectives.schedule.model import cut
from mpips.collectives.tensor import cuda_kernels
from mpips.collectives.tensor.vectors import Ticket, VectorPlace

# How many seconds an operation that has failed waits for its kernels. The wait must be limited: a kernel may wait for
# work of the user, and that work may wait for another rank. If that rank has failed, the kernel never ends.
PATIENCE = 10.0
# Host memory on which kernels may still work after PATIENCE seconds. It is kept for ever, so that it is not reused.
_LEFT: list[list[Vector]] = []


class CudaVectors:
    """The vectors of one worker, of which at least one is on a GPU. `operation` is in `cuda_kernels.OPERATIONS`."""

    def __init__(self, sources: Sequence[VectorPlace], targets: Sequence[VectorPlace], operation: str):
        self.n = sources[0].n
        self.count = len(sources)
        self.dtype = sources[0].dtype
        self._operation = operation
        devices = list(dict.fromkeys(p.device for p in [*sources, *targets] if p.device is not None))
        _enable_peer_access(devices)
        self._streams = Streams(devices)
        self._pinned: list[Vector] = []
        # the GPUs that share the work of a reduction: the GPUs that have sources
        self._reducing = tuple(dict.fromkeys(s.device for s in sources if s.device is not None)) or tuple(devices)
        # for each source on the host, (the memory for its pinned copy, the source)
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
        self._given = []
        self._sources = []
        self._targets = []
        self._host_targets = []
        self._pinned = []

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
            self._streams.copy(_device_of(target), target.at(start), source.ctypes.data, source.nbytes)
        for vector in self._host_targets:
            np.copyto(vector[start:stop], source)
        return self._streams.ticket([_device_of(target) for target in self._targets])

    def _reduce(self, device: int, parts: Sequence[int], out: int, n: int) -> None:
        """Queue the reduction of the vectors at the addresses `parts` (n elements each) into `out`. One is copied."""
        if len(parts) == 1:
            self._streams.copy(device, out, parts[0], n * self.dtype.itemsize)
        elif n:
            blocks, threads = cuda_kernels.grid(n)
            with self._streams.on(device):
                _kernel(self._operation, self.dtype.name, len(parts))((blocks,), (threads,), (*parts, out, n))

    def _shares(self, n: int) -> Iterator[tuple[int, int, int]]:
        """Yield (device, first, last) for each GPU, which reduces elements [first, last) of a vector of n elements."""
        parts = len(self._reducing)
        for number, device in enumerate(self._reducing):
            yield device, int(cut(n, parts, number)), int(cut(n, parts, number + 1))


@cache
def _kernel(operation: str, dtype: str, count: int) -> Any:
    """Return a kernel. CuPy builds it at its first launch. The process keeps it for later calls."""
    return cp.RawKernel(cuda_kernels.source(operation, dtype, count), cuda_kernels.name(operation, dtype, count))


def _device_of(place: VectorPlace) -> int:
    assert place.device is not None
    return place.device


def _enable_peer_access(devices: Sequence[int]) -> None:
    """Enable peer access between all GPUs, or raise ValueError if a GPU cannot read another."""
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


# the seconds between two checks whether queued work has run
NAP = 1e-4
# cudaMemcpyDefault: CUDA finds the direction of a copy from the addresses
BY_ADDRESS = 4


class Streams:
    """The streams on which this package works: one on each device, shared by all operations of the process."""

    def __init__(self, devices: Iterable[int]):
        self._own = {device: _our_stream(device) for device in devices}

    @property
    def devices(self) -> tuple[int, ...]:
        """The GPUs, as numbered by CUDA."""
        return tuple(self._own)

    def after_user(self) -> None:
        """Make later work on any of our streams wait for the work that the user has queued on any of the devices."""
        events = [_event(device, stream) for device in self._own for stream in _user_streams(device)]
        for device, own in self._own.items():
            with cp.cuda.Device(device):
                for event in events:
                    own.wait_event(event)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """A context in which our stream on this device is CuPy's current stream."""
        with cp.cuda.Device(device), self._own[device]:
            yield

    def copy(self, device: int, to: int, source: int, nbytes: int) -> None:
        """Queue a copy between addresses on a device's stream. Host memory must be pinned."""
        if nbytes:
            with cp.cuda.Device(device):
                cp.cuda.runtime.memcpyAsync(to, source, nbytes, BY_ADDRESS, self._own[device].ptr)

    def ticket(self, devices: Sequence[int]) -> Callable[[], bool]:
        """Return a ticket (a function: True once the work is done) for all work now queued on these devices."""
        left = [_event(device, self._own[device]) for device in devices]

        def done() -> bool:
            while left and left[-1].done:
                left.pop()
            return not left

        return done

    def drained(self, seconds: float) -> bool:
        """Wait until all work on our streams has run. Return False if it takes longer than `seconds`."""
        if all(own.done for own in self._own.values()):
            return True
        ticket, end = self.ticket(self.devices), time.monotonic() + seconds
        while not ticket():
            if time.monotonic() > end:
                return False
            time.sleep(NAP)
        return True


@cache
def _our_stream(device: int) -> Any:
    with cp.cuda.Device(device):
        return cp.cuda.Stream(non_blocking=True)


def _event(device: int, stream: Any) -> Any:
    """Return a CUDA event that is complete when all work that is now queued on a stream has run."""
    with cp.cuda.Device(device):
        event = cp.cuda.Event(disable_timing=True)
        event.record(stream)
        return event


def _user_streams(device: int) -> Iterable[Any]:
    """Return the streams on which the user may have queued work of a device."""
    streams = [cp.cuda.Stream.null, cp.cuda.get_current_stream(device)]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        streams.append(cp.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream, device))
    return {stream.ptr: stream for stream in streams}.values()


# the most unused pinned memory that is kept
KEEP_BYTES = 256 << 20
# cudaHostRegisterPortable | cudaHostRegisterMapped
PORTABLE_MAPPED = 1 | 2
# cudaDevAttrCanUseHostPointerForRegisteredMem
SAME_POINTER = 91
PAGE = mmap.PAGESIZE


class Slab(NamedTuple):
    """A piece of pinned memory. It consists of whole pages, because a page can be pinned only once."""

    # the array that owns the pages
    memory: Vector
    address: int
    nbytes: int
    device: int


class PinnedPool:
    """The pinned memory of one process. The memory of a vector comes back to the pool when its last view is gone."""

    def __init__(self, keep_bytes: int = KEEP_BYTES):
        self._keep_bytes = keep_bytes
        self._idle: list[Slab] = []
        self._returned: deque[Slab] = deque()
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """The bytes of pinned memory that no vector uses now."""
        return sum(slab.nbytes for slab in self._idle)

    def take(self, n: int, dtype: np.dtype[Any], device: int) -> Vector:
        """Return n uninitialised elements that every GPU can access by their host address.

        Raises:
            ValueError: `device` cannot access host memory by its host address.
            MemoryError: The node has no memory left.
        """
        with self._lock:
            self._sort_returned()
            slab = self._find(n * dtype.itemsize) or _pin(n * dtype.itemsize, device)
        vector = Flat(slab.address, n, dtype).vector()
        # Do not give memory back at exit: by then the driver has already unpinned all memory.
        weakref.finalize(vector, self._take_back, slab).atexit = False
        return vector

    def _take_back(self, slab: Slab) -> None:
        # The garbage collector may call this while this thread is inside take() and has the lock. So the slab only goes
        # into a queue, which the next holder of the lock empties.
        self._returned.append(slab)
        if not self._lock.locked():
            with self._lock:
                self._sort_returned()

    def _sort_returned(self) -> None:
        """Keep the slabs whose vectors were freed. Unpin the oldest slabs while the idle slabs exceed `KEEP_BYTES`."""
        while self._returned:
            self._idle.append(self._returned.popleft())
        while self._idle and self.idle_bytes > self._keep_bytes:
            _unpin(self._idle.pop(0))

    def _find(self, nbytes: int) -> Slab | None:
        """Take the smallest idle slab that fits, or return None. Slabs of more than twice the size stay idle."""
        fitting = [slab for slab in self._idle if nbytes <= slab.nbytes <= max(PAGE, 2 * nbytes)]
        if not fitting:
            return None
        best = min(fitting, key=lambda slab: slab.nbytes)
        self._idle = [slab for slab in self._idle if slab is not best]
        return best


POOL = PinnedPool()


def _pin(nbytes: int, device: int) -> Slab:
    runtime = cp.cuda.runtime
    if not runtime.deviceGetAttribute(SAME_POINTER, device):
        raise ValueError(f"GPU {device} cannot use host memory by its host address: pass NumPy arrays instead")
    pages = -(-max(1, nbytes) // PAGE) * PAGE
    memory = arena.empty(pages + PAGE, np.uint8)
    address = memory.ctypes.data + -memory.ctypes.data % PAGE
    with cp.cuda.Device(device):
        runtime.hostRegister(address, pages, PORTABLE_MAPPED)
    return Slab(memory, address, pages, device)


def _unpin(slab: Slab) -> None:
    with cp.cuda.Device(slab.device):
        cp.cuda.runtime.hostUnregister(slab.address)

"""Host memory that GPUs read and write in place: pinned once, then used again by later operations of the process.

Pinning takes long, so memory that is given back is kept, up to `KEEP_BYTES`. It is node-shared, so that the other ranks
of the node read it too. It is pinned on a device that the caller's vectors lie on: no other gets a context by it.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from collectives.arrays import Flat, Vector
from collectives.fabric import arena

KEEP_BYTES = 256 << 20
"""Pinned memory that nobody uses is kept up to here."""
PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
SAME_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
PAGE = mmap.PAGESIZE


class Slab(NamedTuple):
    """Whole pages that are pinned: a page can be pinned only once."""

    memory: Vector
    """Owns the pages."""
    address: int
    nbytes: int
    device: int


class PinnedPool:
    """Pinned memory of one process. A vector's memory comes back when its last view has gone."""

    def __init__(self, keep_bytes: int = KEEP_BYTES):
        self._keep_bytes = keep_bytes
        self._idle: list[Slab] = []
        self._returned: deque[Slab] = deque()
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """What is pinned and used by nobody."""
        return sum(slab.nbytes for slab in self._idle)

    def take(self, n: int, dtype: np.dtype[Any], device: int) -> Vector:
        """n uninitialised elements that every GPU reaches by their host address, once `device` has been seen to.

        ValueError where it cannot; MemoryError where the node has no memory left.
        """
        with self._lock:
            self._settle()
            slab = self._find(n * dtype.itemsize) or _pin(n * dtype.itemsize, device)
        vector = Flat(slab.address, n, dtype).vector()
        weakref.finalize(vector, self._give, slab).atexit = False  # at exit the driver unpins
        return vector

    def _give(self, slab: Slab) -> None:
        """Called by the garbage collector, perhaps inside `take`: queue, and work only if the lock is free."""
        self._returned.append(slab)
        if not self._lock.locked():
            with self._lock:
                self._settle()

    def _settle(self) -> None:
        """Keep what has come back, and unpin the oldest beyond the limit."""
        while self._returned:
            self._idle.append(self._returned.popleft())
        while self._idle and self.idle_bytes > self._keep_bytes:
            _unpin(self._idle.pop(0))

    def _find(self, nbytes: int) -> Slab | None:
        """The smallest slab that holds so much, and not more than twice as much."""
        fitting = [slab for slab in self._idle if nbytes <= slab.nbytes <= max(PAGE, 2 * nbytes)]
        if not fitting:
            return None
        best = min(fitting, key=lambda slab: slab.nbytes)
        self._idle = [slab for slab in self._idle if slab is not best]
        return best


POOL = PinnedPool()
"""The pool of this process."""


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

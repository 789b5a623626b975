"""Copies between the private memories of two processes of a node, made by the kernel.

Linux copies to and from another process's memory where that process might be traced (process_vm_readv and
process_vm_writev, "cross memory attach"). Every page costs the kernel a look, and no memory need be shared beforehand.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.errors import CollectiveError
from mpips.collectives.machine import read_number

_PR_SET_PTRACER = 0x59616D61
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Extent(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _kernel_copy(name: str) -> Any:
    """The system call of that name, or None where the C library has none."""
    function = getattr(_LIBC, name, None)
    if function is not None:
        extents, count = ctypes.c_void_p, ctypes.c_ulong
        function.argtypes = [ctypes.c_int, extents, count, extents, count, count]
        function.restype = ctypes.c_ssize_t
    return function


_READ, _WRITE = _kernel_copy("process_vm_readv"), _kernel_copy("process_vm_writev")


class OutOfReach(CollectiveError):
    """The kernel does not copy from or to a process."""

    def __init__(self, pid: int, number: int):
        super().__init__(f"cannot reach the memory of process {pid}: {os.strerror(number)}")
        self.pid, self.errno = pid, number


class Move:
    """A copy between `here` in this process and `there` in process `pid`. The call begins soon, as all that the kernel
    asks for lies ready."""

    def __init__(self, call: Callable[..., int], pid: int, here: int, there: int, nbytes: int):
        self._call, self.pid, self._nbytes = call, pid, nbytes
        self._extents = (_Extent * 2)(_Extent(here, nbytes), _Extent(there, nbytes))
        mine = ctypes.addressof(self._extents)
        self._arguments = pid, mine, 1, mine + ctypes.sizeof(_Extent), 1, 0

    def __call__(self) -> None:
        moved = self._call(*self._arguments)
        if moved != self._nbytes:
            self._go_on(moved)

    def _go_on(self, moved: int) -> None:
        """The rest, where the kernel stops on the way, as it does after 2 GiB."""
        here, there = (extent.base for extent in self._extents)
        done = moved
        while moved > 0 and done < self._nbytes:
            mine, others = _Extent(here + done, self._nbytes - done), _Extent(there + done, self._nbytes - done)
            moved = self._call(self.pid, ctypes.addressof(mine), 1, ctypes.addressof(others), 1, 0)
            done += moved
        if moved <= 0:
            raise OutOfReach(self.pid, ctypes.get_errno())


def fetch(to: NDArray[Any], pid: int, address: int) -> Move:
    """The copy that fills `to` with what lies at that address of another process."""
    return Move(_READ, pid, to.__array_interface__["data"][0], address, to.nbytes)


def deliver(source: NDArray[Any], pid: int, address: int) -> Move:
    """The copy that puts `source` at that address of another process."""
    return Move(_WRITE, pid, source.__array_interface__["data"][0], address, source.nbytes)


def open_to_all(node: MPI.Comm) -> bool:
    """Return whether every rank of the node can reach every other's memory: one answer for all. Collective, blocking.

    Where only a parent may trace a process (Yama), ranks permit it to what their launcher started, if that helps.
    """
    return node.size > 1 and (_all_reach(node) or (_all_restricted(node) and _all_reach(node)))


def place(array: NDArray[Any], written: bool = False) -> int:
    """The array's address; 0 where the kernel cannot copy from it, or not to it though it is to be `written`, as is so
    of a device's memory. Found out on its first and last byte, which stay as they are."""
    pid, begin, word = os.getpid(), int(array.__array_interface__["data"][0]), np.zeros(1, np.uint8)
    here = word.ctypes.data
    try:
        for at in (begin, begin + array.nbytes - 1) if array.nbytes else ():
            Move(_READ, pid, here, at, 1)()
            if written:
                Move(_WRITE, pid, here, at, 1)()
    except OutOfReach:
        return 0
    return begin


def _all_reach(node: MPI.Comm) -> bool:
    secret = np.array([secrets.randbits(62)], np.int64)
    descriptors = np.empty((node.size, 3), np.int64)
    node.Allgather(np.array([os.getpid(), secret.ctypes.data, secret[0]], np.int64), descriptors)
    return _everybody(node, _READ is not None and _WRITE is not None and all(_reads(*map(int, c)) for c in descriptors))


def _reads(pid: int, address: int, secret: int) -> bool:
    """Return whether the word there is the secret, so that the process is who it should be."""
    word = np.zeros(1, np.int64)
    try:
        Move(_READ, pid, word.ctypes.data, address, word.nbytes)()
    except OutOfReach:
        return False
    return bool(word[0] == secret)


def _all_restricted(node: MPI.Comm) -> bool:
    """Return whether all ranks are restricted to their parents and have permitted more."""
    to_parents = read_number("/proc/sys/kernel/yama/ptrace_scope") == 1
    permitted = to_parents and _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0) == 0
    return _everybody(node, permitted)


def _everybody(node: MPI.Comm, good: bool) -> bool:
    """Return whether it is so on all ranks."""
    least = np.array([good], np.int64)
    node.Allreduce(MPI.IN_PLACE, least, MPI.MIN)
    return bool(least[0])

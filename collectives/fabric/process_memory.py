"""Copies between the private memories of two processes of a node, made by the kernel.

With the system calls process_vm_readv and process_vm_writev ("cross memory attach"), a process can copy to and from the
memory of any process that it would be allowed to trace. The memory need not be shared beforehand, but the kernel spends
time on every page.
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


def _c_function(name: str) -> Any:
    """Return the function of the C library with this name, or None if the library does not have it."""
    function = getattr(_LIBC, name, None)
    if function is not None:
        extents, count = ctypes.c_void_p, ctypes.c_ulong
        function.argtypes = [ctypes.c_int, extents, count, extents, count, count]
        function.restype = ctypes.c_ssize_t
    return function


# _READ copies from the memory of another process, and _WRITE copies to it.
_READ, _WRITE = _c_function("process_vm_readv"), _c_function("process_vm_writev")


class OutOfReach(CollectiveError):
    """The kernel refuses to copy from or to a process."""

    def __init__(self, pid: int, number: int):
        super().__init__(f"cannot reach the memory of process {pid}: {os.strerror(number)}")
        self.pid = pid
        self.errno = number


class KernelCopy:
    """A copy of `nbytes` bytes between this process and another one, prepared once and made by each call of the object.

    `call` is the system call and decides the direction: `_READ` copies from the other process to this one, and `_WRITE`
    copies from this process to the other one. `fetch` and `deliver` make objects for the two directions.

    The constructor prepares all arguments of the system call, because preparing them at each copy took as long as the
    system call itself.

    Args:
        call: `_READ` or `_WRITE`.
        pid: The other process.
        local: The address in this process.
        remote: The address in the other process.
        nbytes: The number of bytes to copy.
    """

    def __init__(self, call: Callable[..., int], pid: int, local: int, remote: int, nbytes: int):
        self._call = call
        self.pid = pid
        self._nbytes = nbytes
        self._extents = (_Extent * 2)(_Extent(local, nbytes), _Extent(remote, nbytes))
        extents = ctypes.addressof(self._extents)
        self._arguments = pid, extents, 1, extents + ctypes.sizeof(_Extent), 1, 0

    def __call__(self) -> None:
        moved = self._call(*self._arguments)
        if moved != self._nbytes:
            self._copy_rest(moved)

    def _copy_rest(self, moved: int) -> None:
        """Copy the bytes that the kernel has left out. For instance, it copies at most 2 GiB in one system call."""
        local, remote = (extent.base for extent in self._extents)
        done = moved
        while moved > 0 and done < self._nbytes:
            left = self._nbytes - done
            local_rest, remote_rest = _Extent(local + done, left), _Extent(remote + done, left)
            moved = self._call(self.pid, ctypes.addressof(local_rest), 1, ctypes.addressof(remote_rest), 1, 0)
            done += moved
        if moved <= 0:
            raise OutOfReach(self.pid, ctypes.get_errno())


def fetch(to: NDArray[Any], pid: int, address: int) -> KernelCopy:
    """Prepare a copy from `address` in process `pid` into the array `to`. Calling the result makes the copy."""
    return KernelCopy(_READ, pid, to.__array_interface__["data"][0], address, to.nbytes)


def deliver(source: NDArray[Any], pid: int, address: int) -> KernelCopy:
    """Prepare a copy of the array `source` to `address` in process `pid`. Calling the result makes the copy."""
    return KernelCopy(_WRITE, pid, source.__array_interface__["data"][0], address, source.nbytes)


def all_reachable(node: MPI.Comm) -> bool:
    """True on all ranks if every rank of the node can reach the memory of every other rank. Collective and blocking.

    On a system with the security module Yama, only a parent may trace a process. Then each rank permits its launcher,
    and so all processes that the launcher has started, to trace it. The other ranks are among these processes.
    """
    return node.size > 1 and (_all_reach(node) or (_permit_launcher(node) and _all_reach(node)))


def reachable_address(array: NDArray[Any], written: bool = False) -> int:
    """Return the address of an array, or 0 if the kernel cannot copy from it, for example from memory of a device.

    If the array will be `written`, the kernel must also be able to copy to it. To find out, this function copies the
    first and the last byte onto themselves.
    """
    pid, begin, byte = os.getpid(), int(array.__array_interface__["data"][0]), np.zeros(1, np.uint8)
    local = byte.ctypes.data
    try:
        for at in (begin, begin + array.nbytes - 1) if array.nbytes else ():
            KernelCopy(_READ, pid, local, at, 1)()
            if written:
                KernelCopy(_WRITE, pid, local, at, 1)()
    except OutOfReach:
        return 0
    return begin


def _all_reach(node: MPI.Comm) -> bool:
    secret = np.array([secrets.randbits(62)], np.int64)
    descriptors = np.empty((node.size, 3), np.int64)
    node.Allgather(np.array([os.getpid(), secret.ctypes.data, secret[0]], np.int64), descriptors)
    return _true_on_all(
        node, _READ is not None and _WRITE is not None and all(_reads(*map(int, c)) for c in descriptors)
    )


def _reads(pid: int, address: int, secret: int) -> bool:
    """True if process `pid` has the secret at that address.

    In this rank's PID namespace, `pid` may name a process other than the rank that sent it. That process does not have
    the secret.
    """
    word = np.zeros(1, np.int64)
    try:
        KernelCopy(_READ, pid, word.ctypes.data, address, word.nbytes)()
    except OutOfReach:
        return False
    return bool(word[0] == secret)


def _permit_launcher(node: MPI.Comm) -> bool:
    """Permit the launcher to trace this rank, if Yama lets only parents do so. Collective.

    Return True on all ranks if that was necessary and has succeeded on every rank.
    """
    to_parents = read_number("/proc/sys/kernel/yama/ptrace_scope") == 1
    permitted = to_parents and _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0) == 0
    return _true_on_all(node, permitted)


def _true_on_all(node: MPI.Comm, value: bool) -> bool:
    """True on all ranks if `value` is true on every rank. Collective."""
    least = np.array([value], np.int64)
    node.Allreduce(MPI.IN_PLACE, least, MPI.MIN)
    return bool(least[0])

"""Ordinary arrays by reach: one copy between the memories of two processes of a node, made by the kernel.

Linux copies to and from another process's memory where that process might be traced (process_vm_readv, "cross memory
attach"). The owner of a piece of the vector fetches the sources' parts block by block into a buffer that its cache
holds, reduces them, and delivers the finished block, still in its cache, into the readers' arrays: what the direct
protocol does by loads and stores. Against stages, an element is copied once less on either side of the sum, but every
page costs the kernel a look. In alltoall everybody fetches its blocks.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.arrays import Vector
from collectives.call import Call
from collectives.errors import CollectiveError
from collectives.machine.memory import number_in
from collectives.operations import scale
from collectives.transport.program import Phase, Program, Step, Window, copy

if TYPE_CHECKING:
    from collectives.transport.cards import Card
    from collectives.transport.room import Room

BLOCK_BYTES = 256 << 10
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


_FETCH, _DELIVER = _kernel_copy("process_vm_readv"), _kernel_copy("process_vm_writev")


class OutOfReach(CollectiveError):
    """The kernel does not copy from or to a process."""

    def __init__(self, pid: int, number: int):
        super().__init__(f"cannot reach the memory of process {pid}: {os.strerror(number)}")
        self.pid, self.errno = pid, number


class _Move:
    """A copy between `here` in this process and `there` in process `pid`: a call that begins soon, as all that the
    kernel asks for lies ready."""

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


def _fetch(to: Vector, pid: int, address: int) -> Iterator[Step]:
    if to.nbytes:
        yield _Move(_FETCH, pid, to.__array_interface__["data"][0], address, to.nbytes), ()


def _deliver(source: Vector, pid: int, address: int) -> Iterator[Step]:
    if source.nbytes:
        yield _Move(_DELIVER, pid, source.__array_interface__["data"][0], address, source.nbytes), ()


def open_to_all(node: MPI.Comm) -> bool:
    """Whether every rank of the node can reach every other's memory; the same on all ranks. Collective, blocking.

    Where only a parent may trace a process (Yama), ranks permit it to what their launcher started, if that helps.
    """
    return node.size > 1 and (_all_reach(node) or (_all_restricted(node) and _all_reach(node)))


def place(array: Vector, written: bool = False) -> int:
    """The array's address; 0 where the kernel cannot copy from it, or not to it though it is to be `written`, as is so
    of a device's memory. Found out on its first and last byte, which stay as they are."""
    pid, begin, word = os.getpid(), int(array.__array_interface__["data"][0]), np.zeros(1, np.uint8)
    here = word.ctypes.data
    try:
        for at in (begin, begin + array.nbytes - 1) if array.nbytes else ():
            _Move(_FETCH, pid, here, at, 1)()
            if written:
                _Move(_DELIVER, pid, here, at, 1)()
    except OutOfReach:
        return 0
    return begin


def _all_reach(node: MPI.Comm) -> bool:
    secret = np.array([secrets.randbits(62)], np.int64)
    cards = np.empty((node.size, 3), np.int64)
    node.Allgather(np.array([os.getpid(), secret.ctypes.data, secret[0]], np.int64), cards)
    return _everybody(node, _FETCH is not None and _DELIVER is not None and all(_reads(*map(int, c)) for c in cards))


def _reads(pid: int, address: int, secret: int) -> bool:
    """Whether the word there is the secret, so that the process is who it should be."""
    word = np.zeros(1, np.int64)
    try:
        _Move(_FETCH, pid, word.ctypes.data, address, word.nbytes)()
    except OutOfReach:
        return False
    return bool(word[0] == secret)


def _all_restricted(node: MPI.Comm) -> bool:
    """Whether all ranks are restricted to their parents and have permitted more."""
    to_parents = number_in("/proc/sys/kernel/yama/ptrace_scope") == 1
    permitted = to_parents and _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0) == 0
    return _everybody(node, permitted)


def _everybody(node: MPI.Comm, good: bool) -> bool:
    """Whether it is so on all ranks."""
    least = np.array([good], np.int64)
    node.Allreduce(MPI.IN_PLACE, least, MPI.MIN)
    return bool(least[0])


class _Far(NamedTuple):
    """A part of the vector in another process: elements from `first` on lie at `address`."""

    pid: int
    address: int
    first: int
    itemsize: int

    def at(self, start: int) -> tuple[int, int]:
        return self.pid, self.address + (start - self.first) * self.itemsize


def program(room: Room, call: Call, x: Window, out: Window, cards: Sequence[Card]) -> Program:
    """One rank's part of a call, in which it touches the others' arrays, where their cards say they are."""
    reached = _Reached(room, call, x, out, cards)
    if call.kind == "alltoall":
        return Program((Phase(tuple(reached.arrivals()), tuple(reached.own())),), reaches=True)
    return Program((Phase(tuple(reached.steps())),), reaches=True)


class _Reached:
    def __init__(self, room: Room, call: Call, x: Window, out: Window, cards: Sequence[Card]):
        self._call, self._rank, self._order = call, room.rank, [room.rank, *room.turn()]
        self._x, self._out, self._buffers = x, out, room.buffers(BLOCK_BYTES)
        self._xs: dict[int, _Far] = {}
        self._outs: dict[int, _Far] = {}
        for rank in room.turn():
            card, size = cards[rank], call.dtype.itemsize
            in_place = card.x_at == card.out_at
            self._xs[rank] = _Far(room.pids[rank], card.x_at, call.extent_of_x(rank, in_place)[0], size)
            self._outs[rank] = _Far(room.pids[rank], card.out_at, call.extent_of_out(rank, in_place)[0], size)

    def steps(self) -> Iterator[Step]:
        call, rank = self._call, self._rank
        start, end = call.block(rank)
        block = max(1, BLOCK_BYTES // call.dtype.itemsize)
        size = block * call.dtype.itemsize if call.operation is not None else 0  # elements of any size are only copied
        buffers = [buffer[:size].view(call.dtype) for buffer in self._buffers]
        readers = [reader for reader in self._order if reader in call.readers(rank) and not self._has_it(reader)]
        for first in range(start, end, block):
            last = min(first + block, end)
            total = self._place(first, last, buffers[0])
            yield from self._combined(first, last, total, [buffer[: last - first] for buffer in buffers])
            for reader in readers:
                if reader == rank:
                    yield from copy(self._out.part(first, last), total)
                else:
                    yield from _deliver(total, *self._outs[reader].at(first))

    def _has_it(self, reader: int) -> bool:
        """Whether the piece comes from that very place, as in a broadcast in place it does on the root."""
        far = reader != self._rank and self._call.sources(self._rank) == [reader]
        return far and self._xs[reader] == self._outs[reader]

    def _place(self, first: int, last: int, buffer: Vector) -> Vector:
        """Where this rank makes its piece of the result."""
        if self._call.sources(self._rank) == [self._rank]:
            return self._x.part(first, last)
        return self._out.part(first, last) if self._rank in self._call.readers(self._rank) else buffer[: last - first]

    def _combined(self, first: int, last: int, total: Vector, buffers: Sequence[Vector]) -> Iterator[Step]:
        """total = the sources' parts, in the order of the ranks; this rank's own may be `total`, so that is written
        last."""
        sources, operation = self._call.sources(self._rank), self._call.operation
        if len(sources) == 1:
            if sources != [self._rank]:
                yield from _fetch(total, *self._xs[sources[0]].at(first))
        else:
            assert operation is not None
            so_far = yield from self._part(sources[0], first, last, buffers[0])
            for source in sources[1:]:
                part = yield from self._part(source, first, last, buffers[1])
                to = total if source == sources[-1] else buffers[0]
                yield operation.into, (so_far, part, to)
                so_far = to
        if operation is not None and operation.is_mean:
            yield scale(total, self._call.p)

    def _part(self, source: int, first: int, last: int, buffer: Vector) -> Generator[Step, None, Vector]:
        """Returns the source's part, which the steps fetch into the buffer if it is another's."""
        if source == self._rank:
            return self._x.part(first, last)
        yield from _fetch(buffer, *self._xs[source].at(first))
        return buffer

    def arrivals(self) -> Iterator[Step]:
        """alltoall: what all others have for this rank."""
        start, _ = self._call.block(self._rank)
        for source in self._order[1:]:
            yield from _fetch(self._out.part(*self._call.arrival(self._rank, source)), *self._xs[source].at(start))

    def own(self) -> Iterator[Step]:
        """alltoall: what this rank has for itself."""
        to = self._call.arrival(self._rank, self._rank)
        return copy(self._out.part(*to), self._x.part(*self._call.block(self._rank)))

"""Arrays that every process of the node can read and write in place.

`empty` takes memory from *segments*: sparse files in memory (memfd) of this process, mapped shared. A peer on the same
node opens ``/proc/<pid>/fd/<fd>`` and maps the same pages, so no call here is collective, nothing has a name in a file
system and nothing outlives the processes. Each segment is twice as large as the one before, so few are needed, and a
peer maps each of them once. Pages are touched when an array is made, as far as they are free, in huge pages where the
kernel offers them; pages of freed arrays are kept for the next array, up to `IDLE_BYTES`, and given back to the system
beyond that.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import errno
import math
import mmap
import os
import resource
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpips.collectives.errors import CollectiveError, of_caller
from mpips.collectives.machine import count_local_ranks, free_memory, free_room, free_swap, open_memory

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64
HUGE_PAGE = 2 << 20
FIRST_BYTES = 256 << 20  # of the first segment: every rank of a node maps it, and `ulimit -v` counts addresses
SEGMENT_BYTES = 4 << 30  # of the fifth, and of later ones
COPY_PERIOD = 4 << 30
"""Intel's `rep movsb`, in which long copies end, goes byte by byte where the target begins 1 to 63 bytes above the
source modulo this."""
IDLE_BYTES = 512 << 20
SEEN_BYTES = 64 << 20
"""Bytes that all ranks of a node together may touch between two looks at the memory that is free."""
LEAST_SEEN_BYTES = 8 << 20
SPARSE_BYTES = 128 << 20
"""What a folder should have free for arrays that grow, where they cannot lie in memory without one."""
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23


class Region(NamedTuple):
    """A place of bytes, in terms any process of the node can follow: five integers, fit for a message."""

    pid: int
    fd: int
    inode: int
    offset: int
    nbytes: int


def segment_bytes(nbytes: int, before: int = 0) -> int:
    """Return the bytes of a segment for an array of `nbytes`, where `before` segments are there: huge pages, and no
    multiple of 256 MiB, so that not even several, mapped side by side, are one of 4 GiB.

    Else what is mapped below another array, which NumPy begins 16 bytes behind a page, would lie where a copy between
    their beginnings takes 4 to 9 times as long (see COPY_PERIOD).
    """
    size = max(min(FIRST_BYTES << before, SEGMENT_BYTES), -(-nbytes // HUGE_PAGE) * HUGE_PAGE)
    return size if size % FIRST_BYTES else size + HUGE_PAGE


class _FreeList:
    """Half-open free intervals of one segment; best fit, neighbours merge. What is taken tells what is free where an
    interrupt has come between two steps of either."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: dict[int, int] = {}
        self._mend()

    def take(self, nbytes: int) -> int | None:
        try:
            start = self._find(nbytes)
            if start is not None:
                self._taken[start] = nbytes
            return start
        except BaseException:
            self._mend()
            raise

    def give(self, start: int, nbytes: int) -> None:
        try:
            del self._taken[start]
            self._join(start, start + nbytes)
        except BaseException:
            self._mend()
            raise

    def _mend(self) -> None:
        self._by_size: list[tuple[int, int]] = []
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        begin = 0
        for start, nbytes in [*sorted(self._taken.items()), (self._size, 0)]:
            if start > begin:
                self._insert(begin, start)
            begin = start + nbytes

    def _find(self, nbytes: int) -> int | None:
        index = bisect.bisect_left(self._by_size, (nbytes, -1))
        if index == len(self._by_size):
            return None
        size, start = self._by_size[index]
        self._remove(start, start + size)
        if size > nbytes:
            self._insert(start + nbytes, start + size)
        return start

    def _join(self, start: int, end: int) -> None:
        if start in self._start_of:
            before = self._start_of[start]
            self._remove(before, start)
            start = before
        if end in self._end_of:
            after = self._end_of[end]
            self._remove(end, after)
            end = after
        self._insert(start, end)

    def _insert(self, start: int, end: int) -> None:
        bisect.insort(self._by_size, (end - start, start))
        self._end_of[start] = end
        self._start_of[end] = start

    def _remove(self, start: int, end: int) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (end - start, start))]
        del self._end_of[start], self._start_of[end]


class _Segment:
    """One file in memory of this process, mapped whole. `nbytes`: of the array for which it is made."""

    def __init__(self, size: int, nbytes: int) -> None:
        self.fd = open_memory(nbytes)
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0] // mmap.PAGESIZE * mmap.PAGESIZE
        size = most if nbytes <= most < size else size  # -1 is no limit
        try:
            os.ftruncate(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.inode = os.fstat(self.fd).st_ino
        self.map = _map(self.fd, size)
        self.base = np.frombuffer(self.map, np.uint8).ctypes.data
        self.size = size
        self.free = _FreeList(size)
        # bytes of free intervals whose pages are kept
        self.idle = 0
        # whether it lies in a file system that may be full though the node has memory
        self.bounded = os.fstatvfs(self.fd).f_blocks > 0
        # bytes that may be touched before the next look at what is free
        self._sure = 0

    def allocate(self, nbytes: int) -> int | None:
        """The offset of an array whose pages are there; None where no interval is long enough."""
        offset = self.free.take(nbytes)
        if offset is None:
            return None
        try:
            self._touch(offset, nbytes)
        except BaseException as error:
            self._remove(offset, nbytes)
            self.free.give(offset, nbytes)
            if isinstance(error, OSError):
                raise _no_memory(nbytes, error) from error
            raise
        finally:
            self.idle = max(0, self.idle - nbytes)
        return offset

    def _touch(self, offset: int, nbytes: int) -> None:
        """Touch the pages step by step, and look at what is free before each step.

        Memory that is not there is no error of the kernel's: it ends a process, perhaps another's. And one look at the
        beginning does not do: 1. 10 GiB are free. 2. Each of two ranks asks for 6 GiB, and sees that they are there.
        3. Both touch them. So each looks again on the way, and sees what the other has touched meanwhile.
        """
        if nbytes - self.idle <= self._sure:
            self._sure -= max(0, nbytes - self.idle)
            _populate(self.map, offset, nbytes)
            return
        step = max(LEAST_SEEN_BYTES, SEEN_BYTES // count_local_ranks())
        others = min(SEEN_BYTES, nbytes // 8)  # what ranks touch between a look of this one and its step
        idle, end, self._sure = self.idle, offset + nbytes, 0
        while offset < end:
            needed, free = end - offset - idle + others, free_room(self.fd)
            if needed > free:
                raise _lacks(free)
            length = min(step, end - offset)
            _populate(self.map, offset, length)
            offset, idle = offset + length, max(0, idle - length)
        self._sure = min(step, free - needed)

    def release(self, offset: int, nbytes: int) -> None:
        self.free.give(offset, nbytes)
        if self.idle + nbytes <= IDLE_BYTES:
            self.idle += nbytes
            return
        self._remove(offset, nbytes)

    def _remove(self, offset: int, nbytes: int) -> None:
        """Give whole pages back to the system."""
        start, end = -(-offset // HUGE_PAGE) * HUGE_PAGE, (offset + nbytes) // HUGE_PAGE * HUGE_PAGE
        if end > start:
            with contextlib.suppress(OSError):  # a file system of temporary files may keep them
                self.map.madvise(_MADV_REMOVE, start, end - start)


def _no_memory(nbytes: int, error: OSError) -> MemoryError:
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):  # what to do is told there
        return of_caller(MemoryError(f"no memory for {nbytes} bytes of node-shared array: {error.strerror}"))
    cure = f"ask for less, or give the job fewer ranks on a node{_limit_of_addresses()}"
    cure = _limit_of_files(error) or cure
    return of_caller(MemoryError(f"no memory for {nbytes} bytes of node-shared array ({error.strerror}): {cure}"))


def _lacks(free: int) -> OSError:
    return OSError(errno.ENOMEM, f"{max(0, free) / 2**20:,.0f} MiB are free here")


def _limit_of_files(error: OSError) -> str:
    """Return what to do about `ulimit -f`, where that is the cause: it bounds files in memory, too."""
    if error.errno != errno.EFBIG:
        return ""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return f"raise ulimit -f, which is {most / 2**20:,.1f} MiB here and bounds memory that ranks share, too"


def _limit_of_addresses() -> str:
    """Return what to say of `ulimit -v` where it is set: it counts what ranks map of each other, used or not."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if most == resource.RLIM_INFINITY else f", or raise ulimit -v, which is {most / 2**30:.1f} GiB here"


class _Arena:
    """All segments of this process."""

    def __init__(self) -> None:
        self.segments: list[_Segment] = []
        self.bases: list[int] = []
        self.least = 0
        self._lock = threading.Lock()
        self._released: collections.deque[tuple[_Segment, int, int]] = collections.deque()

    def allocate(self, nbytes: int) -> tuple[_Segment, int]:
        with self._lock:
            self._drain()
            for segment in self.segments:
                if segment.size < self.least or (segment.bounded and free_room(segment.fd) < nbytes):
                    continue
                offset = segment.allocate(nbytes)
                if offset is not None:
                    return segment, offset
            free = free_memory() + free_swap()
            if nbytes > free:  # before there is a segment for it
                raise _no_memory(nbytes, _lacks(free))
            try:
                segment = _Segment(segment_bytes(max(nbytes, self.least), len(self.segments)), nbytes)
            except OSError as error:
                raise _no_memory(nbytes, error) from error
            index = bisect.bisect(self.bases, segment.base)
            self.bases.insert(index, segment.base)
            self.segments.insert(index, segment)
            offset = segment.allocate(nbytes)
            assert offset is not None
            return segment, offset

    def release(self, segment: _Segment, offset: int, nbytes: int) -> None:
        """Called by the garbage collector, perhaps inside `allocate`: queue, and work only if the lock is free. It is
        taken by `with`, which gives it back whenever an interrupt comes."""
        self._released.append((segment, offset, nbytes))
        if not self._lock.locked():
            with self._lock:
                self._drain()

    def _drain(self) -> None:
        while self._released:
            segment, offset, nbytes = self._released.popleft()
            segment.release(offset, nbytes)

    def find(self, address: int) -> _Segment | None:
        index = bisect.bisect(self.bases, address) - 1
        if index < 0:
            return None
        segment = self.segments[index]
        return segment if address < segment.base + segment.size else None


_arena = _Arena()
_attached: weakref.WeakValueDictionary[tuple[int, int, int], NDArray[np.uint8]] = weakref.WeakValueDictionary()


def _forget_after_fork() -> None:
    """A child must not hand out its parent's free memory."""
    global _arena
    _arena = _Arena()


os.register_at_fork(after_in_child=_forget_after_fork)


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32, comm: MPI.Comm | None = None) -> NDArray[Any]:
    """An uninitialised C-contiguous array in node-shared memory, aligned to 64 bytes, with its pages touched.

    Local, not collective; returns at once.  The memory is freed with the array and its last view.  ``comm`` is the
    communicator the array is meant for: a communicator of one rank has nobody to share with and gets ordinary memory.
    Raises MemoryError, before it takes any, where the array is larger than what is free on the node (limits of control
    groups count), and where the node denies such memory; ValueError or TypeError, as `numpy.empty`, for what is no
    shape or dtype; TypeError for a dtype of Python objects.
    """
    dimensions, dtype = _dimensions(shape), _type(dtype)
    if comm is not None and comm.Get_size() == 1:
        return np.empty(dimensions, dtype)
    nbytes = max(ALIGNMENT, -(-math.prod(dimensions) * dtype.itemsize // ALIGNMENT) * ALIGNMENT)
    segment, offset = _arena.allocate(nbytes)
    array: NDArray[Any] = np.ndarray(dimensions, dtype, buffer=segment.map, offset=offset)
    weakref.finalize(array, _arena.release, segment, offset, nbytes).atexit = False
    return array


def in_one_segment() -> None:
    """From now on this process's arrays lie in one segment, as large as the node's memory: who has mapped it once
    reaches them all, and does so when this process has ended."""
    _arena.least = max(SEGMENT_BYTES, os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE)


def _dimensions(shape: Any) -> tuple[int, ...]:
    """A tuple of what NumPy takes for a shape, else its error, with what to do."""
    try:
        return np.broadcast_shapes(shape)
    except (TypeError, ValueError) as error:
        cure = "pass a number of elements of at least 0, or a tuple of such"
        raise of_caller(type(error)(f"shape={shape!r} is no shape ({error}): {cure}")) from None


def _type(dtype: DTypeLike) -> np.dtype[Any]:
    cure = "pass a numeric type, such as numpy.float32"
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise of_caller(type(error)(f"dtype={dtype!r} is no type of NumPy's ({error}): {cure}")) from None
    if found.hasobject:
        raise of_caller(TypeError(f"dtype={found} holds Python objects, which other processes cannot read: {cure}"))
    return found


def locate(array: NDArray[Any]) -> Region | None:
    """The region that holds a C-contiguous array or view made by `empty`; None for any other array."""
    address = array.__array_interface__["data"][0]
    segment = _arena.find(address)
    if segment is None or not array.flags.c_contiguous:
        return None
    return Region(os.getpid(), segment.fd, segment.inode, address - segment.base, array.nbytes)


def region_of(array: NDArray[Any]) -> Region:
    """The region of an array that was made by `empty`."""
    region = locate(array)
    assert region is not None
    return region


def attach(region: Region) -> NDArray[np.uint8]:
    """The bytes of a region of this or another process of the node, for reading and writing.

    The peer's segment stays mapped while any array over it lives.  Raises CollectiveError when the process or its
    segment cannot be reached (another node or container, another user, or already gone).
    """
    whole = segment(region)
    part = whole[region.offset : region.offset + region.nbytes]
    if part.nbytes != region.nbytes:
        raise CollectiveError(f"{region} reaches past the end of its segment of {whole.nbytes} bytes")
    if region.nbytes and region.pid != os.getpid():
        with contextlib.suppress(OSError):
            _populate(whole.base.obj, region.offset, region.nbytes)  # type: ignore[union-attr]
    return part


def segment(region: Region) -> NDArray[np.uint8]:
    """All bytes of the segment that a region lies in. It is mapped, and raises, as in `attach`; no page is touched."""
    key = region[:3]
    whole = _attached.get(key)
    if whole is None:
        whole = _attached[key] = _open(region)
    return whole


def _open(region: Region) -> NDArray[np.uint8]:
    fd = _descriptor(region)
    try:
        nbytes = os.fstat(fd).st_size
        return np.frombuffer(_map(fd, nbytes), np.uint8)
    except OSError as error:
        size = f"{nbytes / 2**30:.1f} GiB of memory of process {region.pid}"
        cure = f"give the job fewer ranks on a node{_limit_of_addresses()}"
        raise CollectiveError(f"cannot map {size} ({error.strerror}): {cure}") from error
    finally:
        os.close(fd)


def _descriptor(region: Region) -> int:
    """Return a descriptor of the file that a region lies in."""
    path = f"/proc/{region.pid}/fd/{region.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CollectiveError(f"cannot map memory of process {region.pid} ({path}): {error.strerror}") from error
    if os.fstat(fd).st_ino != region.inode:
        os.close(fd)
        raise CollectiveError(f"cannot map memory of process {region.pid}: {path} is another file by now")
    return fd


def _open_sparse() -> int:
    try:
        return open_memory(SPARSE_BYTES)
    except OSError:  # a store without tables needs no room here
        return open_memory()


class SparseFile:
    """Arrays that grow, in one file of this process's memory: they take memory where they are written, no array moves.

    Each array is mapped by itself, so the file may be far longer than the node's memory. Who has it open reaches all
    arrays by their offsets, also when this process has ended: `opened` opens that of another process of the node.
    """

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: of a file that is there, which is taken over; None: a new one."""
        try:
            self._fd = _open_sparse() if fd is None else fd
        except OSError as error:
            raise _no_memory(0, error) from error
        weakref.finalize(self, os.close, self._fd)
        self._inode = os.fstat(self._fd).st_ino

    @classmethod
    def opened(cls, region: Region) -> SparseFile:
        """Open the file of another process. CollectiveError where it cannot be reached, as `attach`."""
        return cls(_descriptor(region))

    @property
    def region(self) -> Region:
        """Return where others find the file; its offset and bytes say nothing."""
        return Region(os.getpid(), self._fd, self._inode, 0, 0)

    @property
    def room(self) -> int:
        """Return the bytes that its file system leaves it: the node's memory is not looked at."""
        system = os.fstatvfs(self._fd)
        return system.f_bavail * system.f_frsize if system.f_blocks else sys.maxsize

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[NDArray[Any], int]:
        """Return a new array of zeros, and its offset in the file. Its memory goes with it, for all. MemoryError where
        there are no addresses for it."""
        offset = os.fstat(self._fd).st_size
        nbytes = max(1, -(-math.prod(shape) * np.dtype(dtype).itemsize // mmap.PAGESIZE)) * mmap.PAGESIZE
        try:
            os.ftruncate(self._fd, offset + nbytes)
            array = self.view(offset, shape, dtype)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            limit = _limit_of_files(error) if isinstance(error, OSError) else ""
            cure = limit or f"make fewer or smaller arrays{_limit_of_addresses()}"
            said = f"no addresses for an array of {nbytes} bytes that grows ({why}): {cure}"
            raise of_caller(MemoryError(said)) from error
        mapping = array.base
        assert isinstance(mapping, mmap.mmap)
        weakref.finalize(array, mapping.madvise, _MADV_REMOVE).atexit = False
        return array, offset

    def view(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array that is there, by its offset. OSError where there are no addresses for it."""
        nbytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        return np.ndarray(shape, dtype, buffer=mmap.mmap(self._fd, nbytes, offset=offset))


def _map(fd: int, size: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, size)
    with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _populate(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Touch the pages without changing them."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, start, end - start)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14 cannot; the first use touches them
            raise

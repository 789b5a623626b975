"""Arrays that every process of the node can read and write in place.

`empty` takes memory from *segments*: sparse memory files (memfd) of this process, mapped as shared. Another process of
the node opens ``/proc/<pid>/fd/<fd>`` and maps the same pages. So no call of this module is collective, and the files
have no names in a file system. The system frees their memory when no process maps it any more. Until then, other
processes can still read the memory of a process that has died: recovery does so. Each segment is twice as large as the
one before, up to a limit. So there are few segments, and other processes map each of them once.

Making an array touches its pages, so that the kernel allocates them: as huge pages if it has them, and never more pages
than are free. A segment keeps the pages of freed arrays for later arrays, up to `IDLE_BYTES`. Further pages go back to
the system.
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
# The size of the first segment. It is small, because every rank of the node maps it, and `ulimit -v` counts all mapped
# addresses, used or not.
FIRST_BYTES = 256 << 20
# the size of the fifth segment and of all later ones
SEGMENT_BYTES = 4 << 30
# how much memory of freed arrays a segment keeps
IDLE_BYTES = 512 << 20
# While a rank touches pages, it checks the free memory again and again. Between two checks, all ranks of a node
# together may touch SEEN_BYTES. Each rank may touch an equal share of SEEN_BYTES, but at least LEAST_SEEN_BYTES.
SEEN_BYTES = 64 << 20
LEAST_SEEN_BYTES = 8 << 20
# If memfd is denied, the files for arrays that grow are made in a folder with at least this much room.
SPARSE_BYTES = 128 << 20
# constants of Linux that Python's mmap does not have
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
# An array that grows gets huge pages only once it is longer than this many huge pages, so that small arrays take little
# memory.
FEW_HUGE_PAGES = 2


class Region(NamedTuple):
    """An interval of bytes in a file of a process, which any process of the node can map."""

    pid: int
    fd: int
    inode: int
    offset: int
    nbytes: int


def segment_bytes(nbytes: int, before: int = 0) -> int:
    """Return the size of a new segment for an array of `nbytes`, if `before` segments exist already.

    The size is a multiple of the huge page size, but not of 256 MiB, so that adjacent segments do not add up to 4 GiB.
    Long copies use the x86 instruction `rep movsb`. It copies byte by byte if (target - source) modulo 4 GiB is 1 to 63
    bytes. NumPy's own long arrays begin 16 bytes after the start of a page. If such an array lay a multiple of 4 GiB
    above the start of a segment, a copy from the segment to the array would take 4 to 9 times as long.
    """
    size = max(min(FIRST_BYTES << before, SEGMENT_BYTES), -(-nbytes // HUGE_PAGE) * HUGE_PAGE)
    return size if size % FIRST_BYTES else size + HUGE_PAGE


class _FreeList:
    """The free intervals of a segment. `take` uses the smallest one that fits; `give` merges adjacent ones.

    Ctrl-C may come in the middle of `take` or `give`, and leave the index of free intervals inconsistent. Then the
    index is rebuilt from `_taken`, which changes in a single step.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # the intervals in use: start -> length
        self._taken: dict[int, int] = {}
        self._rebuild()

    def take(self, nbytes: int) -> int | None:
        try:
            start = self._find(nbytes)
            if start is not None:
                self._taken[start] = nbytes
            return start
        except BaseException:
            self._rebuild()
            raise

    def give(self, start: int, nbytes: int) -> None:
        try:
            del self._taken[start]
            self._join(start, start + nbytes)
        except BaseException:
            self._rebuild()
            raise

    def _rebuild(self) -> None:
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
    """A memory file of this process, mapped completely.

    Args:
        size: The length of the file.
        nbytes: The size of the first array that will be put into the segment.
    """

    def __init__(self, size: int, nbytes: int) -> None:
        self.fd = open_memory(nbytes)
        # Stay below `ulimit -f`, if the array fits. Without a limit, `most` is negative.
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0] // mmap.PAGESIZE * mmap.PAGESIZE
        size = most if nbytes <= most < size else size
        try:
            os.ftruncate(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.inode = os.fstat(self.fd).st_ino
        self.map = _map_file(self.fd, size)
        self.base = np.frombuffer(self.map, np.uint8).ctypes.data
        self.size = size
        self.free = _FreeList(size)
        # bytes of free intervals that still have their pages
        self.idle = 0
        # True if the file is in a file system that may fill up while the node still has free memory
        self.bounded = os.fstatvfs(self.fd).f_blocks > 0
        # the bytes that this rank may touch before it must check the free memory again
        self._sure = 0

    def allocate(self, nbytes: int) -> int | None:
        """Reserve an interval and touch its pages. Return its offset, or None if no free interval is long enough."""
        offset = self.free.take(nbytes)
        if offset is None:
            return None
        try:
            self._touch(offset, nbytes)
        except BaseException as error:
            self._remove(offset, nbytes)
            self.free.give(offset, nbytes)
            if isinstance(error, OSError):
                raise _memory_error(nbytes, error) from error
            raise
        finally:
            self.idle = max(0, self.idle - nbytes)
        return offset

    def _touch(self, offset: int, nbytes: int) -> None:
        """Touch the pages in steps, and check the free memory before each step. Raise OSError if it is too little.

        When memory runs out the kernel does not return an error. It kills a process, which need not be this one. A
        single check at the beginning would not be enough:

        1. 10 GiB are free.
        2. Two ranks ask for 6 GiB each. Both see that there is enough.
        3. Both touch their pages, and memory runs out.

        With a check before each step, each rank sees how much the other has touched in the meantime.
        """
        if nbytes - self.idle <= self._sure:
            self._sure -= max(0, nbytes - self.idle)
            _touch_pages(self.map, offset, nbytes)
            return
        step = max(LEAST_SEEN_BYTES, SEEN_BYTES // count_local_ranks())
        # an allowance for pages that other ranks touch between this rank's check and its step
        others = min(SEEN_BYTES, nbytes // 8)
        idle, end, self._sure = self.idle, offset + nbytes, 0
        while offset < end:
            needed, free = end - offset - idle + others, free_room(self.fd)
            if needed > free:
                raise _out_of_memory(free)
            length = min(step, end - offset)
            _touch_pages(self.map, offset, length)
            offset, idle = offset + length, max(0, idle - length)
        self._sure = min(step, free - needed)

    def release(self, offset: int, nbytes: int) -> None:
        self.free.give(offset, nbytes)
        if self.idle + nbytes <= IDLE_BYTES:
            self.idle += nbytes
            return
        self._remove(offset, nbytes)

    def _remove(self, offset: int, nbytes: int) -> None:
        """Give the huge pages that lie within the interval back to the system."""
        start, end = -(-offset // HUGE_PAGE) * HUGE_PAGE, (offset + nbytes) // HUGE_PAGE * HUGE_PAGE
        if end > start:
            # Some file systems cannot give pages back. Then the memory stays in use.
            with contextlib.suppress(OSError):
                self.map.madvise(_MADV_REMOVE, start, end - start)


def _memory_error(nbytes: int, error: OSError) -> MemoryError:
    # Errors of these kinds come from machine.open_memory. Their text already says what to do.
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return of_caller(MemoryError(f"no memory for {nbytes} bytes of node-shared array: {error.strerror}"))
    cure = f"ask for less, or give the job fewer ranks on a node{_advice_on_ulimit_v()}"
    cure = _advice_on_ulimit_f(error) or cure
    return of_caller(MemoryError(f"no memory for {nbytes} bytes of node-shared array ({error.strerror}): {cure}"))


def _out_of_memory(free: int) -> OSError:
    return OSError(errno.ENOMEM, f"{max(0, free) / 2**20:,.0f} MiB are free here")


def _advice_on_ulimit_f(error: OSError) -> str:
    """Return advice about `ulimit -f` if it has caused this error, or "". The limit also applies to memory files."""
    if error.errno != errno.EFBIG:
        return ""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return f"raise ulimit -f, which is {most / 2**20:,.1f} MiB here and bounds memory that ranks share, too"


def _advice_on_ulimit_v() -> str:
    """Return advice about `ulimit -v` if that limit is set, or "". It counts all mapped addresses, used or not."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if most == resource.RLIM_INFINITY else f", or raise ulimit -v, which is {most / 2**30:.1f} GiB here"


class _Arena:
    """All segments of this process."""

    def __init__(self) -> None:
        # the segments, in the order of their addresses
        self.segments: list[_Segment] = []
        # the address of each segment
        self.bases: list[int] = []
        # Segments smaller than this are not used for new arrays; see `in_one_segment`.
        self.least = 0
        self._lock = threading.Lock()
        # freed arrays whose memory `_drain` has not taken back yet
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
            # Check the free memory first, so that no segment is made for an array that will not fit.
            free = free_memory() + free_swap()
            if nbytes > free:
                raise _memory_error(nbytes, _out_of_memory(free))
            try:
                segment = _Segment(segment_bytes(max(nbytes, self.least), len(self.segments)), nbytes)
            except OSError as error:
                raise _memory_error(nbytes, error) from error
            index = bisect.bisect(self.bases, segment.base)
            self.bases.insert(index, segment.base)
            self.segments.insert(index, segment)
            offset = segment.allocate(nbytes)
            assert offset is not None
            return segment, offset

    def release(self, segment: _Segment, offset: int, nbytes: int) -> None:
        """Queue the memory of a freed array, and take it back now if the lock is free.

        The garbage collector may call this at any moment, even within `allocate` in the same thread, where waiting for
        the lock would deadlock. `with` releases the lock no matter when Ctrl-C arrives.
        """
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
# (pid, fd, inode) -> a segment of another process, mapped as long as any array over it lives
_attached: weakref.WeakValueDictionary[tuple[int, int, int], NDArray[np.uint8]] = weakref.WeakValueDictionary()


def _forget_after_fork() -> None:
    """Start with an empty arena in a forked child, because the memory in the old arena still belongs to the parent."""
    global _arena
    _arena = _Arena()


os.register_at_fork(after_in_child=_forget_after_fork)


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32, comm: MPI.Comm | None = None) -> NDArray[Any]:
    """Make an uninitialised array in memory that the ranks of the node share.

    Collectives and stores read and write such an array where it is, without copies. It is C-contiguous and aligned to
    64 bytes, and its pages are already allocated. The call is local and does not block. The memory is freed when the
    array and its last view are gone.

    Args:
        comm: The communicator that the array is meant for. If it has only one rank, the array is in ordinary memory.

    Raises:
        MemoryError: The array is larger than the free memory of the node (limits of control groups count), or the node
            denies shared memory. No memory was taken.
        ValueError, TypeError: The shape or dtype is bad, as in `numpy.empty`, or the dtype holds Python objects.
    """
    dimensions, dtype = _parse_shape(shape), _parse_dtype(dtype)
    if comm is not None and comm.Get_size() == 1:
        return np.empty(dimensions, dtype)
    nbytes = max(ALIGNMENT, -(-math.prod(dimensions) * dtype.itemsize // ALIGNMENT) * ALIGNMENT)
    segment, offset = _arena.allocate(nbytes)
    array: NDArray[Any] = np.ndarray(dimensions, dtype, buffer=segment.map, offset=offset)
    weakref.finalize(array, _arena.release, segment, offset, nbytes).atexit = False
    return array


def in_one_segment() -> None:
    """From now on, put all arrays of this process into one segment, as large as the node's memory.

    A process that has mapped the segment can reach all arrays in it, even after this process has ended.
    """
    _arena.least = max(SEGMENT_BYTES, os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE)


def _parse_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple. If it is not a shape, raise NumPy's error with advice added."""
    try:
        return np.broadcast_shapes(shape)
    except (TypeError, ValueError) as error:
        cure = "pass a number of elements of at least 0, or a tuple of such"
        raise of_caller(type(error)(f"shape={shape!r} is not a shape ({error}): {cure}")) from None


def _parse_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    cure = "pass a numeric type, such as numpy.float32"
    try:
        parsed = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise of_caller(type(error)(f"dtype={dtype!r} is not a NumPy type ({error}): {cure}")) from None
    if parsed.hasobject:
        raise of_caller(TypeError(f"dtype={parsed} holds Python objects, which other processes cannot read: {cure}"))
    return parsed


def locate(array: NDArray[Any]) -> Region | None:
    """Return the region of a C-contiguous array or view made by `empty`, or None for any other array."""
    address = array.__array_interface__["data"][0]
    segment = _arena.find(address)
    if segment is None or not array.flags.c_contiguous:
        return None
    return Region(os.getpid(), segment.fd, segment.inode, address - segment.base, array.nbytes)


def region_of(array: NDArray[Any]) -> Region:
    """Return the region of an array that `empty` must have made."""
    region = locate(array)
    assert region is not None
    return region


def attach(region: Region) -> NDArray[np.uint8]:
    """Map a region of this or another process of the node, for reading and writing. Return its bytes.

    The segment stays mapped as long as any array over it lives. Raises CollectiveError if the segment cannot be
    reached: its process is on another node or in another container, belongs to another user, or has ended.
    """
    whole = segment(region)
    part = whole[region.offset : region.offset + region.nbytes]
    if part.nbytes != region.nbytes:
        raise CollectiveError(f"{region} reaches past the end of its segment of {whole.nbytes} bytes")
    if region.nbytes and region.pid != os.getpid():
        with contextlib.suppress(OSError):
            _touch_pages(whole.base.obj, region.offset, region.nbytes)  # type: ignore[union-attr]
    return part


def segment(region: Region) -> NDArray[np.uint8]:
    """Map the whole segment of a region and return its bytes. Raises as `attach` does, but touches no pages."""
    key = region[:3]
    whole = _attached.get(key)
    if whole is None:
        whole = _attached[key] = _map_segment(region)
    return whole


def _map_segment(region: Region) -> NDArray[np.uint8]:
    fd = _open_file(region)
    try:
        nbytes = os.fstat(fd).st_size
        return np.frombuffer(_map_file(fd, nbytes), np.uint8)
    except OSError as error:
        size = f"{nbytes / 2**30:.1f} GiB of memory of process {region.pid}"
        cure = f"give the job fewer ranks on a node{_advice_on_ulimit_v()}"
        raise CollectiveError(f"cannot map {size} ({error.strerror}): {cure}") from error
    finally:
        os.close(fd)


def _open_file(region: Region) -> int:
    """Open the file of a region. Raise CollectiveError if it cannot be opened, or if its descriptor was reused."""
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
    except OSError:
        # No folder has that much room. Take any folder, because a store without embedding tables needs no room.
        return open_memory()


class SparseFile:
    """A memory file of this process, for arrays that grow. Memory is used only for pages that are written.

    So an array can get its largest possible length at once, and never has to move. Each array is mapped separately, and
    the file may be far longer than the node's memory. Another process of the node opens the file with `opened`. It can
    then map every array by its offset, even after this process has ended.
    """

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: an open file that this object takes over. None: make a new file."""
        try:
            self._fd = _open_sparse() if fd is None else fd
        except OSError as error:
            raise _memory_error(0, error) from error
        weakref.finalize(self, os.close, self._fd)
        self._inode = os.fstat(self._fd).st_ino

    @classmethod
    def opened(cls, region: Region) -> SparseFile:
        """Open the file of another process. Raises CollectiveError if that process or file cannot be reached."""
        return cls(_open_file(region))

    @property
    def region(self) -> Region:
        """The region by which other processes find the file. Its offset and size are 0."""
        return Region(os.getpid(), self._fd, self._inode, 0, 0)

    @property
    def room(self) -> int:
        """The free bytes of the file system that holds the file. The node's free memory may be less."""
        system = os.fstatvfs(self._fd)
        return system.f_bavail * system.f_frsize if system.f_blocks else sys.maxsize

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[NDArray[Any], int]:
        """Make an array of zeros. Return it and its offset in the file.

        When the array is freed, its memory goes back to the system, even if other processes have mapped it. Raises
        MemoryError if this process cannot map that many addresses.
        """
        nbytes = max(1, -(-math.prod(shape) * np.dtype(dtype).itemsize // mmap.PAGESIZE)) * mmap.PAGESIZE
        offset = os.fstat(self._fd).st_size
        if nbytes >= HUGE_PAGE:
            # Huge pages need an offset that is a multiple of their size.
            offset = -(-offset // HUGE_PAGE) * HUGE_PAGE
        try:
            os.ftruncate(self._fd, offset + nbytes + (HUGE_PAGE if nbytes >= HUGE_PAGE else 0))
            array = self.view(offset, shape, dtype)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            limit = _advice_on_ulimit_f(error) if isinstance(error, OSError) else ""
            cure = limit or f"make fewer or smaller arrays{_advice_on_ulimit_v()}"
            sentence = f"no addresses for an array of {nbytes} bytes that grows ({why}): {cure}"
            raise of_caller(MemoryError(sentence)) from error
        mapping = array.base
        assert isinstance(mapping, mmap.mmap)
        weakref.finalize(array, mapping.madvise, _MADV_REMOVE, 0, nbytes).atexit = False
        return array, offset

    def view(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Map an array that `zeros` has made at this offset, in this or another process. Raises OSError on failure."""
        nbytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        array = np.ndarray(shape, dtype, buffer=mmap.mmap(self._fd, nbytes, offset=offset))
        if nbytes >= HUGE_PAGE and (past := (array.ctypes.data - offset) % HUGE_PAGE):
            # Huge pages also need an address that is a multiple of their size. This mapping begins `past` bytes after
            # such an address. The kernel fills free addresses from the top down. So unmap the file, and map it again
            # with `past` bytes more. The new mapping ends where this one ended, and so begins `past` bytes lower, which
            # is such an address. The last `past` bytes of the new mapping are not used.
            del array
            array = np.ndarray(shape, dtype, buffer=mmap.mmap(self._fd, nbytes + past, offset=offset))
        return array


def use_huge_pages(array: NDArray[Any], before: int, after: int) -> None:
    """Let the kernel provide huge pages for an array of a sparse file whose first `before` bytes are in use.

    Call this before the bytes up to `after` are written. Random reads of huge pages take less time, because the
    processor's address cache (TLB) then covers 512 times as much memory. The first writes are faster, too. Does nothing
    where the system has no huge pages.
    """
    first, last = -(-before // HUGE_PAGE), -(-after // HUGE_PAGE)
    if last <= FEW_HUGE_PAGES or first >= last:
        return
    start = 0 if first <= FEW_HUGE_PAGES else first * HUGE_PAGE
    stop = min(last * HUGE_PAGE, array.nbytes // HUGE_PAGE * HUGE_PAGE)
    # The kernel makes no huge page of memory that it has not provided yet. So touch one byte in each.
    array.reshape(-1).view(np.uint8)[start:stop:HUGE_PAGE] += np.uint8(0)
    mapping = array.base
    assert isinstance(mapping, mmap.mmap)
    # EINVAL: this kernel is older than 6.1. Other errors: no free memory lies together.
    with contextlib.suppress(OSError):
        mapping.madvise(_MADV_COLLAPSE, start, stop - start)


def _map_file(fd: int, size: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, size)
    # Some kernels have no huge pages. Without them everything works, but slower.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _touch_pages(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Let the kernel allocate the pages of this interval. Their contents stay the same."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, start, end - start)
    except OSError as error:
        # EINVAL: this kernel is older than 5.14 and does not know the call. Then each page is allocated at its first
        # use.
        if error.errno != errno.EINVAL:
            raise

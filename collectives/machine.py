"""This machine: cores, memory and caches that a process may use, addresses of loaded programs, peers of sockets.

Cores are those of this process' affinity, or of the CPU quotas of its control groups if they are less.

Copies: glibc's memcpy, which NumPy's copies end in, writes around the caches when a copy is longer than 3/4 of the last
one: what lands there will not be found in it anyway, and lines that are only overwritten need not be fetched first. On
EPYC several versions take that cache for the sum of all on the socket, 384 MiB for 32, so that no copy is ever long. In
a virtual machine the kernel does, too: 480 MiB for 2 cores of a Xeon, where copies of more than 32 MiB found nothing in
it and took twice as long as past it. A setting of glibc sends long copies past the caches.

Addresses: a core remembers branches by their addresses. Where several ranks share one, and each is at addresses of its
own, each finds at its turn that the core has learned the others' branches. So such ranks start at fixed addresses.

Peers: sockets without a name in any folder, and some folders, are open to all users of a machine. The kernel says who
is at the other end of a Unix socket, so nobody can claim to be another. A process that listens admits `ours` alone.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import select
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
UNLIMITED = sys.maxsize >> 12 << 12  # of memory, as cgroups v1 have it
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
CREDENTIALS = struct.Struct("iII")  # as of SO_PEERCRED
TUNABLES, THRESHOLD = "GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold"
SYSCONF_LEVEL3 = 194  # _SC_LEVEL3_CACHE_SIZE; Python has no name for it
LARGEST_CACHE = 32 << 20
"""Bytes of a last cache that one process can count on, as others fill it, too; copies past a larger one lose nothing
worth mention, as was seen on a Xeon of 480 MiB."""
LEVEL3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # as the kernel has it, "32768K"


class Quota(NamedTuple):
    """The whole cores that a control group allows all its processes together, and which group that is."""

    cores: int
    group: int


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of cores that this process may use: those of its affinity, or of its quota if they are less."""
    found = find_quota(root)
    return bound_cores(len(os.sched_getaffinity(0)), [found] if found else [])


def bound_cores(cores: int, quotas: Sequence[Quota | None]) -> int:
    """Return how many of `cores` the processes with these quotas may use together; a process without one has no bound.

    Processes of one group share its quota.
    """
    known = [quota for quota in quotas if quota]
    if not known or len(known) < len(quotas):
        return cores
    return min(cores, sum({quota.group: quota.cores for quota in known}.values()))


def find_quota(root: Path = ROOT) -> Quota | None:
    """Return the smallest quota of this process' control groups and their parents; None where there is none.

    Quotas are rounded down, but for less than one core. Ranks that wait keep looking: those on a part of a core use the
    quota up, and then the kernel stops all ranks of the group until the next period.
    """
    found = []
    for folder in _find_groups(root, "cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            spent, period = _read_quota(folder)
            if spent > 0:
                found.append(Quota(max(1, spent // period), folder.stat().st_ino))
    return min(found, default=None)


def _read_quota(folder: Path) -> tuple[int, int]:
    """Return microseconds of processor time in a period, by cgroups v2 or v1; -1 or ValueError where there is no
    bound."""
    if (folder / "cpu.max").exists():
        spent, period = (folder / "cpu.max").read_text().split()
        return int(spent), int(period)
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())


def _find_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process' control groups that may bound its "cpu" or "memory", and of their parents."""
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines if line)}
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = (after.split(" ", 2) + ["", ""])[:3]
            mounted, point = before.split(" ")[3:5]
            for controllers, path in paths.items():
                version_1 = kind == "cgroup" and all(controller in words.split(",") for words in (controllers, options))
                if version_1 or (kind == "cgroup2" and not controllers):
                    yield from _walk_up(root / point.lstrip("/").replace("\\040", " "), mounted, path)


def _walk_up(top: Path, mounted: str, path: str) -> Iterator[Path]:
    """Yield the group's folder and its parents up to `top`, where the group `mounted` is; `top` where it is outside."""
    group = PurePosixPath(path)
    inside = group.relative_to(mounted) if group.is_relative_to(mounted) and ".." not in group.parts else None
    folder = top / inside if inside else top
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def total_memory(root: Path = ROOT) -> int:
    """Return bytes of memory and swap for all processes here: the machine's, or those of its control groups where they
    are less."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [limit.most for limit in _memory_limits(root)]
    return min([found, *limits]) + _numbers(root / "proc/meminfo").get("SwapTotal:", 0) * 1024


def free_memory(root: Path = ROOT) -> int:
    """Return bytes that processes here can still take without swap: the machine's, or a control group's if less."""
    available = _numbers(root / "proc/meminfo").get("MemAvailable:", sys.maxsize >> 10) * 1024
    return min([available, *(limit.most - limit.taken for limit in _memory_limits(root))])


def free_swap(root: Path = ROOT) -> int:
    """Return bytes of swap that processes here can still take: the machine's, or a control group's if less."""
    free = [_numbers(root / "proc/meminfo").get("SwapFree:", 0) * 1024]
    for folder in _memory_groups(root):
        if (read_number(folder / "memory.limit_in_bytes") or sys.maxsize) < UNLIMITED:
            return 0  # v1 bounds swap together with memory: what of it is left is not known here
        most, taken = (read_number(folder / f"memory.swap.{name}") for name in ("max", "current"))
        if most is not None and taken is not None:
            free.append(most - taken)
    return max(0, min(free))


def open_memory(nbytes: int = 0) -> int:
    """Open a file without a name whose bytes lie in memory, and go with its last descriptor: memfd_create. Other
    processes reach it by /proc/PID/fd.

    Containers may deny that call. Then the file lies in /dev/shm, or among temporary files, where there is room for
    `nbytes`. OSError where there is no such place: that of memfd_create, with what else was tried.
    """
    try:
        return os.memfd_create("collectives", os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise
        import tempfile  # which takes longer to import than all else here, and is seldom needed

        tried = []
        for find in (lambda: "/dev/shm", tempfile.gettempdir):
            try:
                folder = find()
                room = shutil.disk_usage(folder).free
                if room > nbytes:
                    with tempfile.TemporaryFile(dir=folder) as file:
                        return os.dup(file.fileno())
                tried.append(f"{folder} has {room / 2**20:,.0f} MiB free")
            except OSError as other:
                tried.append(str(other))
        cure = "allow the call (docker run --security-opt seccomp=unconfined), or give /dev/shm room (--shm-size=1g)"
        why = f"memfd_create is denied here ({error.strerror}); {'; '.join(tried)}: {cure}"
        raise OSError(error.errno, why) from None


def free_room(fd: int) -> int:
    """Return bytes that a file of `open_memory` can still take: of memory and swap, and of its file system."""
    system, free = os.fstatvfs(fd), free_memory() + free_swap()
    return min(free, system.f_bavail * system.f_frsize) if system.f_blocks else free


class _MemoryLimit(NamedTuple):
    """Bytes that a control group may take, and that it has taken but for files that were not read of late."""

    most: int
    taken: int


def _memory_limits(root: Path) -> Iterator[_MemoryLimit]:
    """Yield the limits of this process' control groups and their parents, of cgroups v2 and v1."""
    for folder in _memory_groups(root):
        for most, taken, files in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = read_number(folder / most)
            if limit is None or limit >= UNLIMITED:
                continue
            if (used := read_number(folder / taken)) is not None:
                yield _MemoryLimit(limit, used - _numbers(folder / "memory.stat").get(files, 0))


@functools.cache
def _memory_groups(root: Path) -> list[Path]:
    return list(_find_groups(root, "memory"))


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file of the kernel that has one behind a name on each line; none where it is missing."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def count_local_ranks() -> int:
    """Return ranks of the job on this machine, as the launcher says; 1 where there is none or it does not say."""
    return next((int(os.environ[name]) for name in LOCAL_SIZES if name in os.environ), 1)


def check_memory(words: str, nbytes: int, arrays: int, ranks: int = 1) -> None:
    """ValueError where `ranks` ranks of this machine cannot each hold so many arrays of `nbytes`; `words` asked for."""
    needed, held = nbytes * arrays * ranks, total_memory()
    if needed > held:
        each = f"{arrays} array{'s' * (arrays > 1)} of {nbytes:,} bytes"
        whose = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise ValueError(
            f"{words} takes at least {each}{whose}, {needed / 2**30:,.1f} GiB, and this machine has "
            f"{held / 2**30:,.1f} GiB of memory: ask for less"
        )


def read_number(path: str | Path) -> int | None:
    """Return the whole number in a file of the kernel; None where there is no such file, or no limit in it."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def choose_long_copies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that sends copies of 3/4 of the last cache, 24 MiB at most, past it in a process started
    here.

    Nothing where glibc does so by itself, is not there, or was told already.
    """
    try:
        real = int(LEVEL3.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return {}
    return correct_threshold(_read_believed_cache(), real, environment)


def past_caches(environment: Mapping[str, str]) -> int:
    """Return bytes from which on copies of a process that was started with this environment go past the caches;
    `sys.maxsize` where that is not known."""
    for setting in environment.get(TUNABLES, "").split(":"):
        name, _, value = setting.partition("=")
        with suppress(ValueError):  # which glibc ignores, too
            if name == THRESHOLD and int(value, 0) > 0:
                return int(value, 0)
    believed = _read_believed_cache()
    return 3 * believed // 4 if believed > 0 else sys.maxsize


def _read_believed_cache() -> int:
    """Return bytes of the last cache as glibc has it; 0, or less, where it does not know, or is not there."""
    try:
        return os.sysconf(SYSCONF_LEVEL3) if "CS_GNU_LIBC_VERSION" in os.confstr_names else 0
    except (OSError, ValueError):
        return 0


def correct_threshold(believed: int, real: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the same from the cache's bytes as glibc and as the kernel have them."""
    given = environment.get(TUNABLES, "")
    counts = min(real, LARGEST_CACHE)
    if not 0 < counts < believed or THRESHOLD in given:
        return {}
    return {TUNABLES: ":".join(filter(None, (given, f"{THRESHOLD}={3 * counts // 4:#x}")))}


def fix_addresses() -> tuple[str, ...]:
    """Return what a command begins with, so that its processes all load their code at the same addresses.

    Empty where the machine has no such command, or, as containers may, forbids it.
    """
    setarch = shutil.which("setarch")
    if setarch is None:
        return ()
    words = (setarch, platform.machine(), "-R")
    try:
        subprocess.run([*words, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return words


def read_stat(pid: int) -> list[bytes]:
    """Return what the kernel says of a process behind its name: its state, its parent, and more; OSError without it."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()


def find_carriers(variable: str) -> Iterator[int]:
    """Yield the processes with this variable, as NAME=VALUE, in their environment, as far as it may be read."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (place / "environ").read_bytes().split(b"\0"):
                yield int(place.name)


class Peer(NamedTuple):
    """The process at the other end, as this process sees it: 0 where it is of a PID namespace that is out of sight."""

    pid: int
    user: int

    @property
    def ours(self) -> bool:
        """Return whether it belongs to the user of this process."""
        return self.user == os.geteuid()


def find_peer(line: socket.socket) -> Peer:
    """Return who made this connection, or, on the side that made it, who listens."""
    pid, user, _ = CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return Peer(pid, user)


def find_readable(files: Iterable[int], seconds: float | None = None) -> list[int]:
    """Return the descriptors that can be read or have ended; wait for one, so many seconds at most.

    `select.select` refuses numbers above 1023, which a launcher of many hosts has."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(None if seconds is None else 1000 * seconds)]

"""Facts about this machine: usable cores, memory and caches, fixed code addresses, and the peers of Unix sockets.

**Cores.** A process may use the cores of its affinity, or fewer cores if the CPU quotas of its control groups do not
allow so many.

**Copies.** NumPy copies with glibc's memcpy. If a copy is longer than 3/4 of the last cache, memcpy writes past the
caches, that is, directly to memory: a copy of this size would not stay in the cache anyway, and memcpy then need not
fetch the cache lines that it overwrites. But on EPYC, several versions of glibc add up the caches of all cores of a
socket, 384 MiB instead of 32, so that no copy counts as long. In a virtual machine the kernel can be wrong in the same
way: it reported 480 MiB for 2 cores of a Xeon, where copies of more than 32 MiB found nothing in the cache and took
twice as long as copies past the cache. A setting of glibc corrects this (`choose_long_copies`).

**Addresses.** A core predicts branches by their addresses. If several ranks share a core and have their code at
different addresses, the core forgets the branches of a rank while another rank runs. So ranks that share cores are
started with fixed addresses (`fix_addresses`).

**Peers.** Abstract Unix sockets, and sockets in some folders, are open to all users of a machine. The kernel reports
which process is at the other end of a Unix socket, and a process cannot forge this. A process that listens admits only
processes of its own user (`Peer.ours`).
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
# the memory limit that cgroups v1 report when there is no limit
UNLIMITED = sys.maxsize >> 12 << 12
# environment variables that launchers set to the number of ranks on this machine
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# what SO_PEERCRED returns: pid, user, group
CREDENTIALS = struct.Struct("iII")
TUNABLES, THRESHOLD = "GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold"
# _SC_LEVEL3_CACHE_SIZE, for which Python has no name
SYSCONF_LEVEL3 = 194
# No process can count on more than this of a last-level cache, because other processes fill it as well. If the cache is
# larger, copies past it lose almost nothing (measured on a Xeon with 480 MiB).
LARGEST_CACHE = 32 << 20
# the file in which the kernel reports the size of the last-level cache, such as "32768K"
LEVEL3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


class Quota(NamedTuple):
    """The number of whole cores that a control group allows all its processes together."""

    cores: int
    # the inode of the group's folder
    group: int


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of cores that this process may use, by its affinity and its CPU quota.

    `root`, here and in the functions below, is the folder that has /proc and the mounted control groups. Tests pass a
    folder of their own.
    """
    quota = find_quota(root)
    return bound_cores(len(os.sched_getaffinity(0)), [quota] if quota else [])


def bound_cores(cores: int, quotas: Sequence[Quota | None]) -> int:
    """Return how many of `cores` several processes may use together.

    `quotas` has the quota of each process, or None for a process without a quota. Processes of the same group share
    the group's quota. If any process has no quota, the processes may use all `cores`.
    """
    known = [quota for quota in quotas if quota]
    if not known or len(known) < len(quotas):
        return cores
    return min(cores, sum({quota.group: quota.cores for quota in known}.values()))


def find_quota(root: Path = ROOT) -> Quota | None:
    """Return the smallest CPU quota of this process' control groups and their parents, or None without a quota.

    Quotas are rounded down to whole cores, but to at least one. They are not rounded up, because waiting ranks poll
    without pause: a rank on the last fraction of a core would exhaust the quota, and then the kernel stops all ranks of
    the group until the next period.
    """
    quotas = []
    for folder in _find_groups(root, "cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            spent, period = _read_quota(folder)
            if spent > 0:
                quotas.append(Quota(max(1, spent // period), folder.stat().st_ino))
    return min(quotas, default=None)


def _read_quota(folder: Path) -> tuple[int, int]:
    """Return (processor time allowed in a period, length of the period) in microseconds, from cgroups v2 or v1.

    If there is no limit, the time is -1 in v1. In v2 it is the word "max", and this function raises ValueError.
    """
    if (folder / "cpu.max").exists():
        spent, period = (folder / "cpu.max").read_text().split()
        return int(spent), int(period)
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())


def _find_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process' control groups for `controller` ("cpu" or "memory"), and their parents."""
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines if line)}
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = (after.split(" ", 2) + ["", ""])[:3]
            mounted, point = before.split(" ")[3:5]
            for controllers, path in paths.items():
                version_1 = kind == "cgroup" and all(controller in names.split(",") for names in (controllers, options))
                if version_1 or (kind == "cgroup2" and not controllers):
                    yield from _walk_up(root / point.lstrip("/").replace("\\040", " "), mounted, path)


def _walk_up(top: Path, mounted: str, path: str) -> Iterator[Path]:
    """Yield the folder of the control group `path`, and its parents up to `top`.

    `top` is the folder at which the group `mounted` is mounted. If `path` is outside of `mounted`, its folder is not
    visible; then yield only `top`.
    """
    group = PurePosixPath(path)
    inside = group.relative_to(mounted) if group.is_relative_to(mounted) and ".." not in group.parts else None
    folder = top / inside if inside else top
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def total_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory and swap, used and free, as limited by the machine and the control groups."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [limit.most for limit in _memory_limits(root)]
    return min([physical, *limits]) + _numbers(root / "proc/meminfo").get("SwapTotal:", 0) * 1024


def free_memory(root: Path = ROOT) -> int:
    """Return the free memory in bytes, without swap, as limited by the machine and this process' control groups."""
    available = _numbers(root / "proc/meminfo").get("MemAvailable:", sys.maxsize >> 10) * 1024
    return min([available, *(limit.most - limit.taken for limit in _memory_limits(root))])


def free_swap(root: Path = ROOT) -> int:
    """Return the free swap in bytes, as limited by the machine and by this process' control groups."""
    free = [_numbers(root / "proc/meminfo").get("SwapFree:", 0) * 1024]
    for folder in _memory_groups(root):
        if (read_number(folder / "memory.limit_in_bytes") or sys.maxsize) < UNLIMITED:
            # v1 limits memory and swap together, so the free swap is not known.
            return 0
        most, taken = (read_number(folder / f"memory.swap.{name}") for name in ("max", "current"))
        if most is not None and taken is not None:
            free.append(most - taken)
    return max(0, min(free))


def open_memory(nbytes: int = 0) -> int:
    """Make a nameless file in memory with memfd_create, and return its descriptor.

    Other processes can open the file through /proc/PID/fd. Its memory is freed with the last descriptor and mapping.
    Containers may deny memfd_create. Then the file is made in /dev/shm or in the folder for temporary files, if that
    folder has room for `nbytes`. If neither folder has room, raise the OSError of memfd_create, with a text that says
    which folders were tried.
    """
    try:
        return os.memfd_create("collectives", os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise
        # Imported only here, because it is seldom needed and takes longer than all other imports of this module.
        import tempfile

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
    """Return the bytes by which a file of `open_memory` can still grow. Memory, swap and its file system limit this."""
    system, free = os.fstatvfs(fd), free_memory() + free_swap()
    return min(free, system.f_bavail * system.f_frsize) if system.f_blocks else free


class _MemoryLimit(NamedTuple):
    """The memory limit of a control group, and how much of it is used."""

    most: int
    # Bytes in use. Cached file contents that were not read recently do not count: the kernel drops them when needed.
    taken: int


def _memory_limits(root: Path) -> Iterator[_MemoryLimit]:
    """Yield the memory limits of this process' control groups and their parents, from cgroups v2 and v1."""
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
    """Read a file of the kernel with lines "name number". Return an empty dict if the file is missing."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def count_local_ranks() -> int:
    """Return the number of ranks of the job on this machine, from the launcher's variables. Without those, return 1."""
    return next((int(os.environ[name]) for name in LOCAL_SIZES if name in os.environ), 1)


def check_memory(asker: str, nbytes: int, arrays: int, ranks: int = 1) -> None:
    """Raise ValueError if `ranks` ranks of this machine cannot each hold `arrays` arrays of `nbytes`.

    `asker` is the name, for the error message, of what needs the arrays, such as an option.
    """
    needed, held = nbytes * arrays * ranks, total_memory()
    if needed > held:
        each = f"{arrays} array{'s' * (arrays > 1)} of {nbytes:,} bytes"
        whose = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise ValueError(
            f"{asker} takes at least {each}{whose}, {needed / 2**30:,.1f} GiB, and this machine has "
            f"{held / 2**30:,.1f} GiB of memory: ask for less"
        )


def read_number(path: str | Path) -> int | None:
    """Return the number in a file of the kernel, or None if there is no such file or it has a word such as "max"."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def choose_long_copies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make a new process copy past the caches from the right size on.

    That size is 3/4 of the last cache, but at most 24 MiB; see the module's docstring. The result is empty if glibc
    chooses a size that is right, if there is no glibc, or if `environment` already sets the size.
    """
    try:
        real = int(LEVEL3.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return {}
    return correct_threshold(_read_believed_cache(), real, environment)


def past_caches(environment: Mapping[str, str]) -> int:
    """Return the size in bytes from which copies go past the caches, in a process started with this environment.

    Return `sys.maxsize` if that is not known.
    """
    for setting in environment.get(TUNABLES, "").split(":"):
        name, _, value = setting.partition("=")
        # glibc also ignores a value that is not a number.
        with suppress(ValueError):
            if name == THRESHOLD and int(value, 0) > 0:
                return int(value, 0)
    believed = _read_believed_cache()
    return 3 * believed // 4 if believed > 0 else sys.maxsize


def _read_believed_cache() -> int:
    """Return the size that glibc assumes for the last cache, or 0 or less if it is unknown or there is no glibc."""
    try:
        return os.sysconf(SYSCONF_LEVEL3) if "CS_GNU_LIBC_VERSION" in os.confstr_names else 0
    except (OSError, ValueError):
        return 0


def correct_threshold(believed: int, real: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Like `choose_long_copies`, if glibc assumes a last-level cache of `believed` bytes that has `real` bytes."""
    given = environment.get(TUNABLES, "")
    counts = min(real, LARGEST_CACHE)
    if not 0 < counts < believed or THRESHOLD in given:
        return {}
    return {TUNABLES: ":".join(filter(None, (given, f"{THRESHOLD}={3 * counts // 4:#x}")))}


def fix_addresses() -> tuple[str, ...]:
    """Return a prefix for a command, so that all its processes load their code at the same addresses.

    Return () if this machine has no `setarch`, or forbids it, as containers may.
    """
    setarch = shutil.which("setarch")
    if setarch is None:
        return ()
    command = (setarch, platform.machine(), "-R")
    try:
        subprocess.run([*command, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return command


def read_stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name: state, parent, ... Raises OSError if no such process runs."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()


def find_processes_with(variable: str) -> Iterator[int]:
    """Yield the pids of processes with `variable` ("NAME=VALUE") in an environment that this user may read."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


class Peer(NamedTuple):
    """The process at the other end of a Unix socket."""

    # 0 if the peer is in a PID namespace that this process cannot see
    pid: int
    user: int

    @property
    def ours(self) -> bool:
        """True if the peer belongs to the user of this process."""
        return self.user == os.geteuid()


def find_peer(connection: socket.socket) -> Peer:
    """Return the process at the other end of a connection, whichever of the two processes has connected."""
    pid, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return Peer(pid, user)


def find_readable(files: Iterable[int], seconds: float | None = None) -> list[int]:
    """Wait until a descriptor can be read or is at its end, for at most `seconds`. Return all such descriptors.

    `select.select` would refuse numbers above 1023, which a launcher of many hosts has.
    """
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(None if seconds is None else 1000 * seconds)]

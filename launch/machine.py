"""The machine that starts a job: its room for ranks, settings that make them fast, hindrances, and leftovers of jobs.

The number of ranks is limited by processes and memory, not by cores, because ranks may share a core.
`check_surroundings` is called before a job starts. It refuses a job that is certain to fail. A problem that the job may
survive is mentioned only if the job fails.

`find_leftovers` counts the shared memory and session folders of jobs that were killed, and `remove_leftovers` removes
those of one job. All users can write to the folders where these lie (/dev/shm, /tmp), so both take only files that this
user owns, that are not links, and that have a name as an MPI gives.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import shlex
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpips.collectives.machine import choose_long_copies, fix_addresses, read_number, total_memory, usable_cores
from mpips.launch.mpirun import NAMES, Flavour, Job, Launcher, LauncherError, Machine, lacks_scheduler

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Every rank takes more memory than this once MPI has started: 11 MiB with Open MPI, 16 MiB with MPICH.
RANK_BYTES = 10 << 20
# settings that keep MPI's TCP connections on the loopback interface
ON_LOOPBACK: dict[Flavour, dict[str, str]] = {
    "openmpi": {"OMPI_MCA_btl_tcp_if_include": "127.0.0.0/8"},
    "mpich": {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"},
    "intel": {"FI_TCP_IFACE": "lo"},
}
# Open MPI accepts this or btl_tcp_if_include, not both. If the user has set it, mpips does not set the other.
EXCLUDES = "OMPI_MCA_btl_tcp_if_exclude"
# seconds of one core until a rank has started Python, NumPy and MPI
START_SECONDS = 0.6
# Warn if all ranks together take longer than this to start, because the user may think that the job hangs.
LONG_SECONDS = 20.0


class Capacity(NamedTuple):
    """The largest number of ranks that fit on a machine, and the reason why no more do."""

    ranks: int
    why: str


def this_machine() -> Machine:
    """Return the properties of the machine that this process runs on."""
    folder = Path("/sys/class/infiniband")
    infiniband = folder.is_dir() and any(folder.iterdir())
    root, cut_off = os.geteuid() == 0, lacks_scheduler(os.environ)
    return Machine(usable_cores(), root, infiniband, fix_addresses(), cut_off)


def choose_settings(ranks: int, machine: Machine, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make the ranks of a host compute and copy fast. What the user has set stays.

    Each rank gets its share of the cores as compute threads. Otherwise NumPy's BLAS would take all cores on every rank.
    `ranks` is the number of ranks on the host.
    """
    given = {name: environment[name] for name in THREADS if name in environment}
    threads = given or {"OMP_NUM_THREADS": str(max(1, machine.cores // ranks))}
    return {**threads, **choose_long_copies(environment)}


def choose_loopback(job: Job, launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep MPI's TCP ports from other machines, for a job whose ranks are all on this one.

    Empty if the user has set one of them, or if ranks may start on another machine.
    """
    settings = ON_LOOPBACK[launcher.flavour]
    names = (*settings, EXCLUDES)
    named = any(name in environment or name.removeprefix("OMPI_MCA_") in job.extra for name in names)
    elsewhere = job.hosts or job.interface or job.ranks_here(environment) < job.ranks
    return {} if named or elsewhere or "lo" not in list_interfaces() else dict(settings)


def measure_room() -> Capacity:
    """Return how many ranks this machine can hold at most, by its memory and its limits on processes."""
    memory = total_memory()
    each = f"each takes {RANK_BYTES >> 20} MiB of memory and more"
    found = [Capacity(memory // RANK_BYTES, f"{each}, and there are {memory / 2**30:.1f} GiB")]
    pids = read_number("/proc/sys/kernel/pid_max")
    if pids is not None:
        found.append(Capacity(pids, f"its kernel has room for {pids} processes (kernel.pid_max)"))
    mine = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # The limit does not apply to root.
    if mine != resource.RLIM_INFINITY and os.geteuid():
        found.append(Capacity(mine, f"you may have {mine} processes there (ulimit -u)"))
    return min(found)


def check_room(job: Job, environment: Mapping[str, str] = os.environ, held: Capacity | None = None) -> None:
    """Raise LauncherError if more ranks would start on this machine than it can hold. Other hosts are not checked.

    `held`: the room of this machine, if it is known already.
    """
    ranks, held = job.ranks_here(environment), held or measure_room()
    if ranks > held.ranks:
        raise LauncherError(f"{ranks} ranks cannot start on this machine: {held.why}; ask for at most {held.ranks}")


def warn_of_crowd(job: Job, machine: Machine, environment: Mapping[str, str]) -> str | None:
    """Return a warning if the ranks on this machine are so many that starting them takes long; otherwise None."""
    ranks = job.ranks_here(environment)
    seconds = ranks * START_SECONDS / machine.cores
    if seconds < LONG_SECONDS:
        return None
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    return (
        f"mpips: {ranks} ranks share {cores}: starting them takes some {seconds:.0f} s, and whatever they do together "
        f"takes long, too; ask for fewer, or spread them over more machines"
    )


SHARED = Path("/dev/shm")
MIB = 1 << 20
# A rank of MPICH takes this much of /dev/shm. It can do with less, because it looks first for how much is free.
SHARED_OF_RANK = 5.2 * MIB
# Open MPI warns if less than this is free in /dev/shm.
SHARED_OF_OPEN_MPI = 16 * MIB
# Files of shared memory are as large as this. `ulimit -f` limits them as it limits files on disks.
LARGEST_FILE = 16 * MIB
# With less than this in /dev/shm for each rank, a rank of MPICH ends by SIGBUS.
LEAST_SHARED = 1.0 * MIB
# MPI -> (files that a process has open, further ones for each rank of the job)
FILES = {"openmpi": (24, 4), "mpich": (36, 4), "intel": (36, 4)}
# MPI -> (processes and threads of mpirun, further ones for each rank of the job)
PROCESSES = {"openmpi": (4, 2), "mpich": (3, 2), "intel": (3, 2)}
# for ioctl(2) on a network interface (netdevice(7)): the request, a flag of the answer, and struct ifreq
SIOCGIFFLAGS = 0x8913
IFF_UP = 1
REQUEST = struct.Struct("16sH22x")


class Hindrance(NamedTuple):
    """A problem of this machine that makes a job fail, or that may make it fail."""

    name: str
    # what is wrong, and what the user can do: two halves of a sentence
    found: str
    cure: str
    # True: the job is certain to fail
    sure: bool = True

    def __str__(self) -> str:
        return f"{self.found}: {self.cure}"


def find_hindrances(launcher: Launcher, ranks: int, environment: Mapping[str, str] = os.environ) -> list[Hindrance]:
    """Return the problems of this machine for a job with `ranks` ranks on it. Those that are certain come first."""
    found: list[Hindrance] = []
    most, (own, each) = resource.getrlimit(resource.RLIMIT_NOFILE)[0], FILES[launcher.flavour]
    needed = own + each * ranks
    if most != resource.RLIM_INFINITY and most < needed:
        files = f"a process may have {most} files open (ulimit -n), and {ranks} ranks need some {needed}"
        found.append(Hindrance("open files", files, "raise it (ulimit -n 1024)", sure=most < own))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY and most < LARGEST_FILE:
        files = f"no file may be larger than {most / MIB:.1f} MiB (ulimit -f), and ranks share memory as such files"
        found.append(Hindrance("size of files", files, "raise it (ulimit -f unlimited)", sure=False))
    found += _lacks_processes(launcher, ranks)
    if launcher.flavour == "openmpi":
        found += _lacks_folder(environment)
        # Open MPI's processes reach each other by a network interface on a single machine, too.
        if not list_interfaces():
            none = "no network interface is up, and Open MPI's ranks find each other by one, also on one machine"
            found.append(Hindrance("network", none, "ip link set lo up, or use MPICH, which needs none on one machine"))
    if ranks:
        found += _lacks_shared_memory(launcher, ranks)
    return sorted(found, key=lambda one: not one.sure)


def check_surroundings(launcher: Launcher, ranks: int) -> str:
    """Check that this machine has what a job with `ranks` ranks on it needs.

    Returns:
        A problem that may make the job fail, to be mentioned if it does; or "".

    Raises:
        LauncherError: The job is certain to fail.
    """
    found = find_hindrances(launcher, ranks)
    if found and found[0].sure:
        raise LauncherError(str(found[0]))
    return str(found[0]) if found else ""


def list_interfaces() -> list[str]:
    """Return the names of the network interfaces that are up."""
    up = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, REQUEST.pack(name.encode(), 0))
                if REQUEST.unpack(answer)[1] & IFF_UP:
                    up.append(name)
    return up


def _lacks_shared_memory(launcher: Launcher, ranks: int) -> Iterator[Hindrance]:
    """Check that /dev/shm has room for the memory that ranks share. A write to more than is free ends a rank by SIGBUS.

    Ranks of Open MPI look first whether there is room, and if they cannot write to /dev/shm they use temporary files.
    """
    open_mpi = launcher.flavour == "openmpi"
    cure = "give it more (docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm)"
    mpi = NAMES[launcher.flavour]
    if not os.access(SHARED, os.W_OK | os.X_OK):
        if open_mpi:
            return
        yield Hindrance(
            str(SHARED),
            f"nothing can be written to {SHARED}, in which ranks of {mpi} meet",
            "mount it for writing (docker run without --read-only, or with --tmpfs /dev/shm)",
        )
        return
    held = os.statvfs(SHARED)
    free = held.f_bavail * held.f_frsize
    needed = SHARED_OF_OPEN_MPI if open_mpi else ranks * SHARED_OF_RANK
    # A file system with 0 blocks does not count them.
    if held.f_blocks and free < needed:
        found = f"{SHARED} has {free / MIB:.1f} MiB free, and {ranks} ranks of {mpi} want {needed / MIB:.0f} MiB there"
        yield Hindrance(str(SHARED), found, cure, sure=not open_mpi and free <= ranks * LEAST_SHARED)


def _lacks_folder(environment: Mapping[str, str]) -> Iterator[Hindrance]:
    """Check that Open MPI's mpirun can make its session folder."""
    folder = environment.get("TMPDIR") or "/tmp"
    there = Path(folder)
    # mpirun makes the folders that are missing.
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=there))
    except OSError as error:
        found = f"Open MPI needs a folder for files, and nothing can be written to {folder} ({error.strerror})"
        yield Hindrance("temporary files", found, "export TMPDIR=DIR, with a folder of yours")


def _lacks_processes(launcher: Launcher, ranks: int) -> Iterator[Hindrance]:
    """Check that the limit on this user's processes and threads leaves room for the job. It does not apply to root."""
    most, (own, each) = resource.getrlimit(resource.RLIMIT_NPROC)[0], PROCESSES[launcher.flavour]
    if most == resource.RLIM_INFINITY or not os.geteuid():
        return
    needed, there = own + each * ranks, 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, StopIteration, ValueError):
            if process.stat().st_uid == os.getuid():
                lines = (process / "status").read_text().splitlines()
                there += next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))
    if there + needed > most:
        have = f"you may have {most} processes and threads (ulimit -u), and have {there}"
        found = f"{have}; {ranks} ranks need {needed} more"
        yield Hindrance("processes", found, "raise it, or end some")


# the unit of st_blocks in bytes
BLOCK = 512
# Other users can make files with any name in these folders. Take only names without characters that a shell or a
# terminal would interpret, because the names are printed as a command.
LEFTOVER_NAME = re.compile(r"[A-Za-z0-9._@+-]+")


class LeftoverKind(NamedTuple):
    """A kind of files or folders that a killed job leaves behind."""

    # name of the MPI that makes them
    mpi: str
    # "files" or "session folders"
    what: str
    # the folder they lie in
    folder: Path
    # glob pattern of their names
    pattern: str


def list_leftover_kinds() -> tuple[LeftoverKind, ...]:
    """Return the kinds of leftovers to look for. The names of Open MPI's session folders contain mpirun's pid."""
    sessions = _session_folder()
    return (
        LeftoverKind("MPICH", "files", SHARED, "mpich_shm_*"),
        LeftoverKind("Open MPI", "files", SHARED, "sm_segment.*"),
        LeftoverKind("Open MPI", "session folders", sessions, "ompi.[0-9]*"),
        LeftoverKind("Open MPI", "session folders", sessions, "prte.*.[0-9]*"),
    )


def find_leftovers(searched: tuple[LeftoverKind, ...]) -> list[dict[str, object]]:
    """Return, for each kind, the number, size and removal command of files that no process has open.

    The result is JSON-serialisable. Kinds of which there is nothing are left out.
    """
    sizes = _measure_unused(searched)
    return [
        {
            "mpi": kind.mpi,
            "what": kind.what,
            "place": str(kind.folder),
            "count": len(found),
            "bytes": sum(found.values()),
            "remove": _write_removal(kind, list(found)),
        }
        for kind, found in sizes.items()
        if found
    ]


def remove_leftovers(mpirun: int, began: float) -> None:
    """Remove what is left of a job that has ended.

    File names do not tell which job a file belongs to. So this removes all files of this user that were made since the
    job began and that no process has open.

    Args:
        mpirun: The pid of the job's mpirun.
        began: When the job began, in Unix time.
    """
    remove_session(mpirun)
    files = [kind for kind in list_leftover_kinds() if kind.folder == SHARED]
    for path in (path for found in _measure_unused(files).values() for path in found):
        with suppress(OSError):
            if path.lstat().st_ctime >= began:
                path.unlink()


def remove_session(mpirun: int) -> None:
    """Remove the session folder that an earlier mpirun of Open MPI with this pid has left.

    An mpirun that gets the same pid does not start if that folder is there.
    """
    folder = _session_folder() / f"ompi.{mpirun}"
    if _is_own(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _session_folder() -> Path:
    """Return the folder in which Open MPI makes its session folders. It may not be writable."""
    return Path(os.environ.get("TMPDIR") or "/tmp")


def _measure_unused(searched: Iterable[LeftoverKind]) -> dict[LeftoverKind, dict[Path, int]]:
    """Return, for each kind, the paths that no process has open, with their sizes in bytes."""
    sizes = {kind: _measure(kind) for kind in searched}
    if any(sizes.values()):
        folders = tuple(f"{kind.folder.resolve()}/" for kind in sizes)
        used = {name for name in _list_open_files() if name.startswith(folders)}
        for found in sizes.values():
            for path in list(found):
                if any(name == str(path) or name.startswith(f"{path}/") for name in used):
                    del found[path]
    return sizes


def _measure(kind: LeftoverKind) -> dict[Path, int]:
    """Return the bytes of memory or disk that each path of a kind takes.

    Counts blocks, because Open MPI's files are sparse: they are longer than what they hold.
    """
    found = {}
    for path in kind.folder.resolve().glob(kind.pattern):
        with suppress(OSError):
            if LEFTOVER_NAME.fullmatch(path.name) and _is_own(path):
                held = [file.lstat() for file in (path.rglob("*") if path.is_dir() else (path,))]
                found[path] = sum(status.st_blocks * BLOCK for status in held if stat.S_ISREG(status.st_mode))
    return found


def _is_own(path: Path) -> bool:
    """True if this user owns the path, and it is a file or a folder and not a link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))


def _write_removal(kind: LeftoverKind, found: list[Path]) -> str:
    """Return the shell command that removes the paths.

    Names them one by one if they are few, because the pattern would also match the files of running jobs.
    """
    if len(found) <= 3:
        return shlex.join(["rm", *["-r"][: found[0].is_dir()], *map(str, found)])
    own = ["find", str(kind.folder), "-maxdepth", "1", "-user", str(os.geteuid()), "-name", kind.pattern]
    return shlex.join([*own, "-exec", "rm", "-r", "{}", "+"])


def _list_open_files() -> Iterator[str]:
    """Yield the files that processes of this user have open or mapped."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # A process that makes shared memory opens the file, maps it, and closes it. So look at open files first: a
            # file that is closed in between is found among the mapped ones.
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    yield os.readlink(link)
            for line in (process / "maps").read_text(errors="replace").splitlines():
                yield line.split(maxsplit=5)[-1]

"""Examine the machine that starts a job: room for ranks, settings that make ranks fast, problems, leftovers of jobs.

Limits on processes and memory limit the number of ranks. Cores do not, because ranks may share a core. Before a job
starts, `check_surroundings` refuses it if it is certain to fail. If there is a problem, but the job may still succeed,
the problem is printed only if the job fails.

A job that was killed leaves shared memory and session folders behind. `find_leftovers` counts these leftovers, and
`remove_leftovers` removes the leftovers of one job. The leftovers are in folders to which all users can write
(/dev/shm, /tmp). So both functions touch only files that this user owns, that are not links, and whose names are like
those that an MPI gives.
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
from mpips.launch.mpirun import NAMES, Flavour, Job, Launcher, LauncherError, Machine, describe_missing_scheduler

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Every rank takes more memory than this once MPI has started: 11 MiB with Open MPI, 16 MiB with MPICH.
RANK_BYTES = 10 << 20
# settings that keep MPI's TCP connections on the loopback interface
ON_LOOPBACK: dict[Flavour, dict[str, str]] = {
    "openmpi": {"OMPI_MCA_btl_tcp_if_include": "127.0.0.0/8"},
    "mpich": {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"},
    "intel": {"FI_TCP_IFACE": "lo"},
}
# Open MPI accepts either this variable or OMPI_MCA_btl_tcp_if_include, but not both. If the user has set this variable,
# mpips does not set the other.
EXCLUDES = "OMPI_MCA_btl_tcp_if_exclude"
# the processor time, in seconds, that a rank needs to start Python, NumPy and MPI
START_SECONDS = 0.6
# If the ranks will take longer than this to start, print a warning, because the user could think that the job hangs.
LONG_SECONDS = 20.0


class Capacity(NamedTuple):
    """The number of ranks that fit on a machine."""

    ranks: int
    # why no more ranks fit
    why: str


def this_machine() -> Machine:
    """Return the properties of the machine that this process runs on."""
    folder = Path("/sys/class/infiniband")
    infiniband = folder.is_dir() and any(folder.iterdir())
    root = os.geteuid() == 0
    return Machine(usable_cores(), root, infiniband, fix_addresses(), describe_missing_scheduler(os.environ))


def choose_settings(ranks: int, machine: Machine, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make the ranks of a host compute and copy fast.

    `ranks` is the number of ranks on the host. Each rank gets as many compute threads as its share of the cores.
    Without this setting, NumPy's BLAS on every rank would start a thread for every core. Variables that the user has
    set in `environment` keep their values.
    """
    threads = {name: environment[name] for name in THREADS if name in environment}
    threads = threads or {"OMP_NUM_THREADS": str(max(1, machine.cores // ranks))}
    return {**threads, **choose_long_copies(environment)}


def choose_loopback(job: Job, launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make MPI listen only on the loopback interface.

    With these variables, other machines cannot connect to the ranks of a job that runs on this machine alone. Returns
    no variables if ranks may start on another machine, or if the user has set one of the variables.
    """
    settings = ON_LOOPBACK[launcher.flavour]
    names = (*settings, EXCLUDES)
    set_by_user = any(name in environment or name.removeprefix("OMPI_MCA_") in job.extra for name in names)
    may_be_remote = job.hosts or job.interface or job.ranks_here(environment) < job.ranks
    return {} if set_by_user or may_be_remote or "lo" not in list_interfaces() else dict(settings)


def measure_room() -> Capacity:
    """Return how many ranks fit on this machine, by its memory and its limits on processes."""
    memory = total_memory()
    each = f"each takes {RANK_BYTES >> 20} MiB of memory and more"
    capacities = [Capacity(memory // RANK_BYTES, f"{each}, and there are {memory / 2**30:.1f} GiB")]
    pids = read_number("/proc/sys/kernel/pid_max")
    if pids is not None:
        capacities.append(Capacity(pids, f"its kernel has room for {pids} processes (kernel.pid_max)"))
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # The limit does not apply to root.
    if processes != resource.RLIM_INFINITY and os.geteuid():
        capacities.append(Capacity(processes, f"you may have {processes} processes there (ulimit -u)"))
    return min(capacities)


def check_room(job: Job, environment: Mapping[str, str] = os.environ, room: Capacity | None = None) -> None:
    """Check that this machine has room for the ranks that start on it. Other hosts are not checked.

    Args:
        job: The job.
        environment: The environment variables. They tell whether a scheduler chooses the hosts.
        room: The result of `measure_room`, if the caller already has it.

    Raises:
        LauncherError: There are too many ranks. The message says how many fit.
    """
    ranks, room = job.ranks_here(environment), room or measure_room()
    if ranks > room.ranks:
        raise LauncherError(f"{ranks} ranks cannot start on this machine: {room.why}; ask for at most {room.ranks}")


def describe_crowd(job: Job, machine: Machine, environment: Mapping[str, str]) -> str | None:
    """Return a warning if the start takes long because many ranks start on this machine. Otherwise return None."""
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
# A rank of MPICH takes this many bytes of /dev/shm, or fewer if fewer are free.
SHARED_OF_RANK = 5.2 * MIB
# Open MPI warns if fewer bytes than this are free in /dev/shm.
SHARED_OF_OPEN_MPI = 16 * MIB
# The largest size of a file of shared memory. `ulimit -f` limits such files like files on disks.
LARGEST_FILE = 16 * MIB
# If /dev/shm has fewer bytes than this for each rank, SIGBUS ends a rank of MPICH.
LEAST_SHARED = 1.0 * MIB
# MPI -> (open files that a process needs, open files that it needs in addition for each rank of the job)
FILES = {"openmpi": (24, 4), "mpich": (36, 4), "intel": (36, 4)}
# MPI -> (processes and threads of mpirun, further processes and threads for each rank of the job)
PROCESSES = {"openmpi": (4, 2), "mpich": (3, 2), "intel": (3, 2)}
# For ioctl(2) on a network interface, see netdevice(7): the number of the request, a flag in the answer, and the format
# of struct ifreq.
SIOCGIFFLAGS = 0x8913
IFF_UP = 1
REQUEST = struct.Struct("16sH22x")


class Hindrance(NamedTuple):
    """A problem of this machine that makes a job fail, or that may make it fail."""

    # what this machine lacks or limits, such as "open files"
    name: str
    # what is wrong
    problem: str
    # what the user can do
    cure: str
    # True: the job is certain to fail. False: the job may fail
    certain: bool = True

    def __str__(self) -> str:
        return f"{self.problem}: {self.cure}"


def find_hindrances(launcher: Launcher, ranks: int, environment: Mapping[str, str] = os.environ) -> list[Hindrance]:
    """Return the problems of this machine for a job that has `ranks` ranks on it.

    Problems with which the job is certain to fail come first.
    """
    hindrances: list[Hindrance] = []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fixed, per_rank = FILES[launcher.flavour]
    needed = fixed + per_rank * ranks
    if limit != resource.RLIM_INFINITY and limit < needed:
        files = f"a process may have {limit} files open (ulimit -n), and {ranks} ranks need some {needed}"
        hindrances.append(Hindrance("open files", files, "raise it (ulimit -n 1024)", certain=limit < fixed))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < LARGEST_FILE:
        files = f"no file may be larger than {limit / MIB:.1f} MiB (ulimit -f), and ranks share memory as such files"
        hindrances.append(Hindrance("size of files", files, "raise it (ulimit -f unlimited)", certain=False))
    hindrances += _check_processes(launcher, ranks)
    if launcher.flavour == "openmpi":
        hindrances += _check_session_folder(environment)
        # Open MPI's processes need a network interface to find each other, even on a single machine.
        if not list_interfaces():
            problem = "no network interface is up, and Open MPI's ranks find each other by one, also on one machine"
            hindrances.append(
                Hindrance("network", problem, "ip link set lo up, or use MPICH, which needs none on one machine")
            )
    if ranks:
        hindrances += _check_shared_memory(launcher, ranks)
    return sorted(hindrances, key=lambda hindrance: not hindrance.certain)


def check_surroundings(launcher: Launcher, ranks: int) -> str:
    """Check that this machine has what a job with `ranks` ranks on this machine needs.

    Returns:
        A message about a problem that may make the job fail, or "". The caller prints it if the job fails.

    Raises:
        LauncherError: The job is certain to fail.
    """
    hindrances = find_hindrances(launcher, ranks)
    if hindrances and hindrances[0].certain:
        raise LauncherError(str(hindrances[0]))
    return str(hindrances[0]) if hindrances else ""


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


def _check_shared_memory(launcher: Launcher, ranks: int) -> Iterator[Hindrance]:
    """Check that /dev/shm has room for the memory that ranks share.

    Without enough room, SIGBUS ends a rank of MPICH. Ranks of Open MPI first look how much is free. If Open MPI cannot
    write to /dev/shm at all, it uses temporary files.
    """
    open_mpi = launcher.flavour == "openmpi"
    cure = "give it more (docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm)"
    mpi = NAMES[launcher.flavour]
    if not os.access(SHARED, os.W_OK | os.X_OK):
        if open_mpi:
            return
        yield Hindrance(
            str(SHARED),
            f"{SHARED} is not writable, and ranks of {mpi} share memory in it",
            "mount it for writing (docker run without --read-only, or with --tmpfs /dev/shm)",
        )
        return
    status = os.statvfs(SHARED)
    free = status.f_bavail * status.f_frsize
    needed = SHARED_OF_OPEN_MPI if open_mpi else ranks * SHARED_OF_RANK
    # A file system that reports a size of 0 blocks has no size limit.
    if status.f_blocks and free < needed:
        problem = (
            f"{SHARED} has {free / MIB:.1f} MiB free, and {ranks} ranks of {mpi} want {needed / MIB:.0f} MiB there"
        )
        yield Hindrance(str(SHARED), problem, cure, certain=not open_mpi and free <= ranks * LEAST_SHARED)


def _check_session_folder(environment: Mapping[str, str]) -> Iterator[Hindrance]:
    """Check that Open MPI's mpirun can make its session folder."""
    folder = environment.get("TMPDIR") or "/tmp"
    existing = Path(folder)
    # mpirun makes missing folders, so look at the first one that exists.
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=existing))
    except OSError as error:
        problem = f"Open MPI needs a folder for files, and {folder} is not writable ({error.strerror})"
        yield Hindrance("temporary files", problem, "export TMPDIR=DIR, with a folder of yours")


def _check_processes(launcher: Launcher, ranks: int) -> Iterator[Hindrance]:
    """Check that the limit on this user's processes and threads leaves room for the job. Root has no limit."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    fixed, per_rank = PROCESSES[launcher.flavour]
    if limit == resource.RLIM_INFINITY or not os.geteuid():
        return
    needed, running = fixed + per_rank * ranks, 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, StopIteration, ValueError):
            if process.stat().st_uid == os.getuid():
                lines = (process / "status").read_text().splitlines()
                running += next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))
    if running + needed > limit:
        have = f"you may have {limit} processes and threads (ulimit -u), and have {running}"
        problem = f"{have}; {ranks} ranks need {needed} more"
        yield Hindrance("processes", problem, "raise it, or end some")


# the size in bytes of the blocks that `st_blocks` counts
BLOCK = 512
# Names of leftovers are printed as part of a shell command, and other users can make files with any name in /dev/shm
# and /tmp. So accept only names without characters that a shell or a terminal would interpret.
LEFTOVER_NAME = re.compile(r"[A-Za-z0-9._@+-]+")


class LeftoverKind(NamedTuple):
    """A kind of files or folders that a killed job leaves behind."""

    # the name of the MPI whose jobs leave them
    mpi: str
    # "files" or "session folders"
    what: str
    # the folder that contains them
    folder: Path
    # a glob pattern that their names match
    pattern: str


def list_leftover_kinds() -> tuple[LeftoverKind, ...]:
    """Return the kinds of leftovers to look for."""
    sessions = _session_folder()
    return (
        LeftoverKind("MPICH", "files", SHARED, "mpich_shm_*"),
        LeftoverKind("Open MPI", "files", SHARED, "sm_segment.*"),
        LeftoverKind("Open MPI", "session folders", sessions, "ompi.[0-9]*"),
        LeftoverKind("Open MPI", "session folders", sessions, "prte.*.[0-9]*"),
    )


def find_leftovers(searched: tuple[LeftoverKind, ...]) -> list[dict[str, object]]:
    """Return a record for each kind of leftover: the number, the total size, and the shell command that removes them.

    Files that a process has open are not leftovers. Kinds without leftovers have no record. The result can be written
    as JSON.
    """
    unused = _measure_unused(searched)
    return [
        {
            "mpi": kind.mpi,
            "what": kind.what,
            "place": str(kind.folder),
            "count": len(sizes),
            "bytes": sum(sizes.values()),
            "remove": _write_removal(kind, list(sizes)),
        }
        for kind, sizes in unused.items()
        if sizes
    ]


def remove_leftovers(mpirun: int, began: float) -> None:
    """Remove the session folder and the shared memory of a job that has ended.

    The name of a file in shared memory does not tell which job it belongs to. So this removes all such files of this
    user that have changed since the job began and that no process has open.

    Args:
        mpirun: The pid of the job's mpirun.
        began: The time at which the job began, in Unix time.
    """
    remove_session(mpirun)
    files = [kind for kind in list_leftover_kinds() if kind.folder == SHARED]
    for path in (path for sizes in _measure_unused(files).values() for path in sizes):
        with suppress(OSError):
            if path.lstat().st_ctime >= began:
                path.unlink()


def remove_session(mpirun: int) -> None:
    """Remove the session folder that an mpirun of Open MPI with this pid has left.

    If the folder stayed, a later mpirun with the same pid would not start.
    """
    folder = _session_folder() / f"ompi.{mpirun}"
    if _is_own(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _session_folder() -> Path:
    """Return the folder in which Open MPI makes its session folders. This user may lack the right to write to it."""
    return Path(os.environ.get("TMPDIR") or "/tmp")


def _measure_unused(searched: Iterable[LeftoverKind]) -> dict[LeftoverKind, dict[Path, int]]:
    """Return the leftovers that no process has open, as a dict: kind -> (path -> size in bytes)."""
    unused = {kind: _measure(kind) for kind in searched}
    if any(unused.values()):
        folders = tuple(f"{kind.folder.resolve()}/" for kind in unused)
        used = {name for name in _list_open_files() if name.startswith(folders)}
        for sizes in unused.values():
            for path in list(sizes):
                if any(name == str(path) or name.startswith(f"{path}/") for name in used):
                    del sizes[path]
    return unused


def _measure(kind: LeftoverKind) -> dict[Path, int]:
    """Return a dict of all leftovers of a kind: path -> the bytes of memory or disk that the path takes.

    A size is the number of blocks that a file takes and not the length of the file, because Open MPI's files are
    sparse.
    """
    sizes = {}
    for path in kind.folder.resolve().glob(kind.pattern):
        with suppress(OSError):
            if LEFTOVER_NAME.fullmatch(path.name) and _is_own(path):
                statuses = [file.lstat() for file in (path.rglob("*") if path.is_dir() else (path,))]
                sizes[path] = sum(status.st_blocks * BLOCK for status in statuses if stat.S_ISREG(status.st_mode))
    return sizes


def _is_own(path: Path) -> bool:
    """True if the path is a file or a folder that this user owns, and not a link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))


def _write_removal(kind: LeftoverKind, paths: list[Path]) -> str:
    """Return the shell command that removes the paths.

    The command names up to three paths. For more paths it uses the pattern, which also matches files of running jobs.
    """
    if len(paths) <= 3:
        return shlex.join(["rm", *["-r"][: paths[0].is_dir()], *map(str, paths)])
    find = ["find", str(kind.folder), "-maxdepth", "1", "-user", str(os.geteuid()), "-name", kind.pattern]
    return shlex.join([*find, "-exec", "rm", "-r", "{}", "+"])


def _list_open_files() -> Iterator[str]:
    """Yield the files that processes of this user have open or mapped."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # A process that makes shared memory opens the file, maps it, and then closes it. So look at open files
            # first, and then at mapped files: a file that is closed between the two looks is mapped by then.
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    yield os.readlink(link)
            for line in (process / "maps").read_text(errors="replace").splitlines():
                yield line.split(maxsplit=5)[-1]

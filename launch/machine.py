"""The machine that starts a job: its room for ranks, settings that make them fast, hindrances, and leftovers of jobs.

Cores are no bound, as ranks may share them; processes and memory are. `check_surroundings` is asked before a job
starts: what is sure to fail is refused, what may do well is said once the job has failed. `find_leftovers` counts
shared memory and session folders of jobs that were killed, and `remove_leftovers` removes those of one job. All users
can put something into these folders: what counts is this user's own, no link, and named as an MPI names it.
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
RANK_BYTES = 10 << 20  # no rank has less of its own once MPI is started: Open MPI's have 11 MiB, MPICH's 16
ON_LOOPBACK: dict[Flavour, dict[str, str]] = {
    "openmpi": {"OMPI_MCA_btl_tcp_if_include": "127.0.0.0/8"},
    "mpich": {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"},
    "intel": {"FI_TCP_IFACE": "lo"},
}
EXCLUDES = "OMPI_MCA_btl_tcp_if_exclude"  # which Open MPI takes in place of its first
START_SECONDS = 0.6  # of a core, until a rank has started Python, NumPy and MPI
LONG_SECONDS = 20.0  # to start all; who waits longer may take the job for one that hangs


class Capacity(NamedTuple):
    """The most ranks that fit, and what bounds them."""

    ranks: int
    why: str


def this_machine() -> Machine:
    """Return the machine this process runs on; cores are those this process may use."""
    folder = Path("/sys/class/infiniband")
    infiniband = folder.is_dir() and any(folder.iterdir())
    root, cut_off = os.geteuid() == 0, lacks_scheduler(os.environ)
    return Machine(usable_cores(), root, infiniband, fix_addresses(), cut_off)


def choose_settings(ranks: int, machine: Machine, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what each of the ranks of a host needs to compute and to copy well, but for what the user set.

    Its compute threads are its share of the cores, so that ranks do not fight.
    """
    given = {name: environment[name] for name in THREADS if name in environment}
    threads = given or {"OMP_NUM_THREADS": str(max(1, machine.cores // ranks))}
    return {**threads, **choose_long_copies(environment)}


def choose_loopback(job: Job, launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what lets no other machine reach the TCP of ranks that are all on this one, but for what the user set."""
    settings = ON_LOOPBACK[launcher.flavour]
    names = (*settings, EXCLUDES)
    named = any(name in environment or name.removeprefix("OMPI_MCA_") in job.extra for name in names)
    elsewhere = job.hosts or job.interface or job.ranks_here(environment) < job.ranks
    return {} if named or elsewhere or "lo" not in list_interfaces() else dict(settings)


def measure_room() -> Capacity:
    """Return the room of this machine, from its kernel's own figures: a rank is a process, at least, and has memory."""
    memory = total_memory()
    each = f"each takes {RANK_BYTES >> 20} MiB of memory and more"
    found = [Capacity(memory // RANK_BYTES, f"{each}, and there are {memory / 2**30:.1f} GiB")]
    pids = read_number("/proc/sys/kernel/pid_max")
    if pids is not None:
        found.append(Capacity(pids, f"its kernel has room for {pids} processes (kernel.pid_max)"))
    mine = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if mine != resource.RLIM_INFINITY and os.geteuid():  # root has no such limit
        found.append(Capacity(mine, f"you may have {mine} processes there (ulimit -u)"))
    return min(found)


def check_room(job: Job, environment: Mapping[str, str] = os.environ, held: Capacity | None = None) -> None:
    """LauncherError where more ranks than fit are to start on this machine; other hosts know their own."""
    ranks, held = job.ranks_here(environment), held or measure_room()
    if ranks > held.ranks:
        raise LauncherError(f"{ranks} ranks cannot start on this machine: {held.why}; ask for at most {held.ranks}")


def warn_of_crowd(job: Job, machine: Machine, environment: Mapping[str, str]) -> str | None:
    """Return what to say where so many ranks share the cores of this machine that starting alone takes long; else
    None."""
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
SHARED_OF_RANK = 5.2 * MIB  # what a rank of MPICH takes in /dev/shm; it does with less where it looks for room first
SHARED_OF_OPEN_MPI = 16 * MIB  # below which it warns
LARGEST_FILE = 16 * MIB  # of memory that ranks share, which `ulimit -f` bounds as it does files on disks
LEAST_SHARED = 1.0 * MIB  # with less a rank of MPICH ends by SIGBUS
FILES = {"openmpi": (24, 4), "mpich": (36, 4), "intel": (36, 4)}  # open in a process: some, and more for each rank
PROCESSES = {"openmpi": (4, 2), "mpich": (3, 2), "intel": (3, 2)}  # mpirun's, with threads, and more for each rank
SIOCGIFFLAGS, IFF_UP, REQUEST = 0x8913, 1, struct.Struct("16sH22x")


class Hindrance(NamedTuple):
    """A thing in the way of a job: its name, what was found, what to do, and whether the job is sure to fail."""

    name: str
    found: str
    cure: str
    sure: bool = True

    def __str__(self) -> str:
        return f"{self.found}: {self.cure}"


def find_hindrances(launcher: Launcher, ranks: int, environment: Mapping[str, str] = os.environ) -> list[Hindrance]:
    """Return what is in the way of a job of `launcher` with `ranks` ranks on this machine; what is sure comes first."""
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
        if not list_interfaces():  # by which its processes reach each other, on one machine, too
            none = "no network interface is up, and Open MPI's ranks find each other by one, also on one machine"
            found.append(Hindrance("network", none, "ip link set lo up, or use MPICH, which needs none on one machine"))
    if ranks:
        found += _lacks_shared_memory(launcher, ranks)
    return sorted(found, key=lambda one: not one.sure)


def check_surroundings(launcher: Launcher, ranks: int) -> str:
    """Return what may be in the way of a job with `ranks` ranks here, to be said once it has failed; "" for nothing.

    Raises:
        LauncherError: The job is sure to fail.
    """
    found = find_hindrances(launcher, ranks)
    if found and found[0].sure:
        raise LauncherError(str(found[0]))
    return str(found[0]) if found else ""


def list_interfaces() -> list[str]:
    """Return the names of the network interfaces that are up, as the kernel tells this process."""
    up = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, REQUEST.pack(name.encode(), 0))
                if REQUEST.unpack(answer)[1] & IFF_UP:
                    up.append(name)
    return up


def _lacks_shared_memory(launcher: Launcher, ranks: int) -> Iterator[Hindrance]:
    """Look for room in /dev/shm, in which ranks meet: a write beyond it ends one by SIGBUS.

    Open MPI's look for room first, and meet in its folder for files where nothing can be written there.
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
    if held.f_blocks and free < needed:  # no blocks: a file system that does not count them
        found = f"{SHARED} has {free / MIB:.1f} MiB free, and {ranks} ranks of {mpi} want {needed / MIB:.0f} MiB there"
        yield Hindrance(str(SHARED), found, cure, sure=not open_mpi and free <= ranks * LEAST_SHARED)


def _lacks_folder(environment: Mapping[str, str]) -> Iterator[Hindrance]:
    """Look whether Open MPI's mpirun can make a folder of its own."""
    folder = environment.get("TMPDIR") or "/tmp"
    there = Path(folder)
    while not there.exists() and there != there.parent:  # mpirun makes what is not there
        there = there.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=there))
    except OSError as error:
        found = f"Open MPI needs a folder for files, and nothing can be written to {folder} ({error.strerror})"
        yield Hindrance("temporary files", found, "export TMPDIR=DIR, with a folder of yours")


def _lacks_processes(launcher: Launcher, ranks: int) -> Iterator[Hindrance]:
    """Compare the processes and threads that this user may have with those of the job. Root may have any number."""
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


BLOCK = 512  # bytes, of st_blocks
LEFTOVER_NAME = re.compile(r"[A-Za-z0-9._@+-]+")  # in which nothing means something to a shell or a terminal


class LeftoverKind(NamedTuple):
    """A kind of leftovers: the MPI that makes them, their folder, and a pattern of their names."""

    mpi: str
    what: str
    folder: Path
    pattern: str


def list_leftover_kinds() -> tuple[LeftoverKind, ...]:
    """Return all that is looked for. Open MPI's session folders bear the number of their mpirun."""
    sessions = _session_folder()
    return (
        LeftoverKind("MPICH", "files", SHARED, "mpich_shm_*"),
        LeftoverKind("Open MPI", "files", SHARED, "sm_segment.*"),
        LeftoverKind("Open MPI", "session folders", sessions, "ompi.[0-9]*"),
        LeftoverKind("Open MPI", "session folders", sessions, "prte.*.[0-9]*"),
    )


def find_leftovers(searched: tuple[LeftoverKind, ...]) -> list[dict[str, object]]:
    """Return what of each kind lies there, is this user's, and no process has open: JSON-serialisable."""
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
    """Remove what is left of a job that has ended: its mpirun had this number, and all of it was made since `began`.

    MPIs do not say whose a file is. So those of this user go that are as new and that no process has open.
    """
    remove_session(mpirun)
    files = [kind for kind in list_leftover_kinds() if kind.folder == SHARED]
    for path in (path for found in _measure_unused(files).values() for path in found):
        with suppress(OSError):
            if path.lstat().st_ctime >= began:
                path.unlink()


def remove_session(mpirun: int) -> None:
    """Remove what Open MPI's mpirun with this number has left: where it is there, another one does not start."""
    folder = _session_folder() / f"ompi.{mpirun}"
    if _is_own(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _session_folder() -> Path:
    """Return the folder in which Open MPI makes its session folders, whether or not it can be written to."""
    return Path(os.environ.get("TMPDIR") or "/tmp")


def _measure_unused(searched: Iterable[LeftoverKind]) -> dict[LeftoverKind, dict[Path, int]]:
    """Return what of each kind lies there that no process has open, and its bytes."""
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
    """Return bytes of memory or disk that each takes: Open MPI's files are longer than what they hold."""
    found = {}
    for path in kind.folder.resolve().glob(kind.pattern):
        with suppress(OSError):
            if LEFTOVER_NAME.fullmatch(path.name) and _is_own(path):
                held = [file.lstat() for file in (path.rglob("*") if path.is_dir() else (path,))]
                found[path] = sum(status.st_blocks * BLOCK for status in held if stat.S_ISREG(status.st_mode))
    return found


def _is_own(path: Path) -> bool:
    """Return whether it is a file or a folder of this user's, and no link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))


def _write_removal(kind: LeftoverKind, found: list[Path]) -> str:
    """Return what removes them. A pattern would also take what running jobs have, so a few are named one by one."""
    if len(found) <= 3:
        return shlex.join(["rm", *["-r"][: found[0].is_dir()], *map(str, found)])
    own = ["find", str(kind.folder), "-maxdepth", "1", "-user", str(os.geteuid()), "-name", kind.pattern]
    return shlex.join([*own, "-exec", "rm", "-r", "{}", "+"])


def _list_open_files() -> Iterator[str]:
    """Yield files that processes of this user have open or mapped. Who makes one opens it, maps it, and then closes
    it."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    yield os.readlink(link)
            for line in (process / "maps").read_text(errors="replace").splitlines():
                yield line.split(maxsplit=5)[-1]

"""What of this machine keeps a job from starting, or ends it in the words of an MPI alone: asked before it starts by
`mpips run` and its like, and by `mpips doctor`.

What is sure to fail is refused. What may do well is said once the job has failed.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from launch.mpirun import NAMES, Launcher, LauncherError

SHARED = Path("/dev/shm")
MIB = 1 << 20
SHARED_OF_RANK = 5.2 * MIB  # what a rank of MPICH takes in /dev/shm; it does with less where it looks for room first
SHARED_OF_OPEN_MPI = 16 * MIB  # below which it warns
LEAST_SHARED = 1.0 * MIB  # with less a rank of MPICH ends by SIGBUS
FILES = {"openmpi": (24, 4), "mpich": (36, 4), "intel": (36, 4)}  # open in a process: some, and more for each rank
PROCESSES = {"openmpi": (4, 2), "mpich": (3, 2), "intel": (3, 2)}  # mpirun's, with threads, and more for each rank
SIOCGIFFLAGS, IFF_UP, REQUEST = 0x8913, 1, struct.Struct("16sH22x")


class Hindrance(NamedTuple):
    """What is in the way of a job: a name for it, what was found, what to do, and whether the job is sure to fail."""

    name: str
    found: str
    cure: str
    sure: bool = True

    def __str__(self) -> str:
        return f"{self.found}: {self.cure}"


def hindrances(launcher: Launcher, ranks: int, environment: Mapping[str, str] = os.environ) -> list[Hindrance]:
    """Return what is in the way of a job of `launcher` with `ranks` ranks on this machine; what is sure comes first."""
    found = [*_files(launcher, ranks), *_processes(launcher, ranks)]
    if launcher.flavour == "openmpi":
        found += [*_temporary(environment), *_network()]
    if ranks:
        found += _shared(launcher, ranks)
    return sorted(found, key=lambda one: not one.sure)


def check(launcher: Launcher, ranks: int) -> str:
    """Return what may be in the way of a job with `ranks` ranks here, to be said once it has failed; "" for nothing.

    Raises:
        LauncherError: The job is sure to fail.
    """
    found = hindrances(launcher, ranks)
    if found and found[0].sure:
        raise LauncherError(str(found[0]))
    return str(found[0]) if found else ""


def interfaces() -> list[str]:
    """Return the names of the network interfaces that are up, as the kernel tells this process."""
    up = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, REQUEST.pack(name.encode(), 0))
                if REQUEST.unpack(answer)[1] & IFF_UP:
                    up.append(name)
    return up


def _shared(launcher: Launcher, ranks: int) -> Iterator[Hindrance]:
    """Room in /dev/shm, in which ranks meet: a write beyond it ends one by SIGBUS. Open MPI's look for room first, and
    meet in its folder for files where nothing can be written there."""
    open_mpi = launcher.flavour == "openmpi"
    cure = "give it more (docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm)"
    mpi = NAMES[launcher.flavour]
    if not os.access(SHARED, os.W_OK | os.X_OK):
        if open_mpi:
            return
        yield Hindrance(str(SHARED), f"nothing can be written to {SHARED}, in which ranks of {mpi} meet",
                        "mount it for writing (docker run without --read-only, or with --tmpfs /dev/shm)")  # fmt: skip
        return
    held = os.statvfs(SHARED)
    free = held.f_bavail * held.f_frsize
    needed = SHARED_OF_OPEN_MPI if open_mpi else ranks * SHARED_OF_RANK
    if held.f_blocks and free < needed:  # no blocks: a file system that does not count them
        found = f"{SHARED} has {free / MIB:.1f} MiB free, and {ranks} ranks of {mpi} want {needed / MIB:.0f} MiB there"
        yield Hindrance(str(SHARED), found, cure, sure=not open_mpi and free <= ranks * LEAST_SHARED)


def _temporary(environment: Mapping[str, str]) -> Iterator[Hindrance]:
    """The folder in which Open MPI's mpirun makes one of its own."""
    folder = environment.get("TMPDIR") or "/tmp"
    there = Path(folder)
    while not there.exists() and there != there.parent:  # mpirun makes what is not there
        there = there.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=there))
    except OSError as error:
        found = f"Open MPI needs a folder for files, and nothing can be written to {folder} ({error.strerror})"
        yield Hindrance("temporary files", found, "export TMPDIR=DIR, with a folder of yours")


def _network() -> Iterator[Hindrance]:
    """An interface by which Open MPI's processes reach each other, on one machine, too."""
    if not interfaces():
        found = "no network interface is up, and Open MPI's ranks find each other by one, also on one machine"
        yield Hindrance("network", found, "ip link set lo up, or use MPICH, which needs none on one machine")


def _files(launcher: Launcher, ranks: int) -> Iterator[Hindrance]:
    most, (own, each) = resource.getrlimit(resource.RLIMIT_NOFILE)[0], FILES[launcher.flavour]
    needed = own + each * ranks
    if most != resource.RLIM_INFINITY and most < needed:
        found = f"a process may have {most} files open (ulimit -n), and {ranks} ranks need some {needed}"
        yield Hindrance("open files", found, "raise it (ulimit -n 1024)", sure=most < own)


def _processes(launcher: Launcher, ranks: int) -> Iterator[Hindrance]:
    """Processes and threads that this user may have. Root may have any number."""
    most, (own, each) = resource.getrlimit(resource.RLIMIT_NPROC)[0], PROCESSES[launcher.flavour]
    if most == resource.RLIM_INFINITY or not os.geteuid():
        return
    needed, there = own + each * ranks, _threads_of(os.getuid())
    if there + needed > most:
        have = f"you may have {most} processes and threads (ulimit -u), and have {there}"
        found = f"{have}; {ranks} ranks need {needed} more"
        yield Hindrance("processes", found, "raise it, or end some")


def _threads_of(user: int) -> int:
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, StopIteration, ValueError):
            if process.stat().st_uid == user:
                lines = (process / "status").read_text().splitlines()
                count += next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))
    return count

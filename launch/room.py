"""How many ranks this machine can hold. Cores are no bound, as ranks may share them; processes and memory are."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from launch.command import Job, LauncherError, Machine

RANK_BYTES = 10 << 20  # no rank has less of its own once MPI is started: Open MPI's have 11 MiB, MPICH's 16
START_SECONDS = 0.6  # of a core, until a rank has started Python, NumPy and MPI
LONG_SECONDS = 20.0  # to start all; who waits longer may take the job for one that hangs
ALLOCATIONS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "PE_HOSTFILE")
HOST_WORDS = ("host", "hosts", "hostfile", "machinefile", "f", "rankfile", "configfile", "app")


class Room(NamedTuple):
    """The most ranks that fit, and what bounds them."""

    ranks: int
    why: str


def here() -> Room:
    """The room of this machine, from its kernel's own figures."""
    return min([*_processes(), _memory()])


def check(job: Job, room: Room, environment: Mapping[str, str]) -> None:
    """LauncherError where more ranks than fit are to start on this machine; other hosts know their own."""
    ranks = _ranks_here(job, environment)
    if ranks > room.ranks:
        raise LauncherError(f"{ranks} ranks cannot start on this machine: {room.why}; ask for at most {room.ranks}")


def crowd(job: Job, machine: Machine, environment: Mapping[str, str]) -> str | None:
    """What to say where so many ranks share the cores of this machine that starting alone takes long; else None."""
    ranks = _ranks_here(job, environment)
    seconds = ranks * START_SECONDS / machine.cores
    if seconds < LONG_SECONDS:
        return None
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    return (
        f"mpips: {ranks} ranks share {cores}: starting them takes some {seconds:.0f} s, and whatever they do together "
        f"takes long, too; ask for fewer, or spread them over more machines"
    )


def _ranks_here(job: Job, environment: Mapping[str, str]) -> int:
    """The ranks of the job that are sure to start on this machine; mpirun itself may know of an allocation."""
    if job.hosts:
        return sum(block.ranks for block in job.hosts if block.host in ("localhost", socket.gethostname()))
    if any(name in environment for name in ALLOCATIONS) or any(word.lstrip("-") in HOST_WORDS for word in job.extra):
        return 0
    return job.ranks


def _processes() -> Iterator[Room]:
    """A rank is a process, at least."""
    from collectives.machine.memory import number_in  # `mpips --help` does without

    pids = number_in("/proc/sys/kernel/pid_max")
    if pids is not None:
        yield Room(pids, f"its kernel has room for {pids} processes (kernel.pid_max)")
    mine = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if mine != resource.RLIM_INFINITY and os.geteuid():  # root has no such limit
        yield Room(mine, f"you may have {mine} processes there (ulimit -u)")


def _memory() -> Room:
    from collectives.machine.memory import total

    held = total()
    return Room(
        held // RANK_BYTES,
        f"each takes {RANK_BYTES >> 20} MiB of memory and more, and there are {held / 2**30:.1f} GiB",
    )

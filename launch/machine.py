"""The machine that starts a job: its cores and rights, how many ranks it can hold, what each rank needs to be fast.

Cores are no bound, as ranks may share them; processes and memory are.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from launch.mpirun import Flavour, Job, Launcher, LauncherError, Machine, lacks_scheduler

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
RANK_BYTES = 10 << 20  # no rank has less of its own once MPI is started: Open MPI's have 11 MiB, MPICH's 16
ON_LOOPBACK: dict[Flavour, dict[str, str]] = {
    "openmpi": {"OMPI_MCA_btl_tcp_if_include": "127.0.0.0/8"},
    "mpich": {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"},
    "intel": {"FI_TCP_IFACE": "lo"},
}
UP = 1  # of an interface's flags
EXCLUDES = "OMPI_MCA_btl_tcp_if_exclude"  # which Open MPI takes in place of its first
START_SECONDS = 0.6  # of a core, until a rank has started Python, NumPy and MPI
LONG_SECONDS = 20.0  # to start all; who waits longer may take the job for one that hangs


class Capacity(NamedTuple):
    """The most ranks that fit, and what bounds them."""

    ranks: int
    why: str


def this_machine() -> Machine:
    """The machine this process runs on; cores are those this process may use."""
    from collectives.machine import addresses, cores  # `mpips --help` does without

    folder = Path("/sys/class/infiniband")
    infiniband = folder.is_dir() and any(folder.iterdir())
    root, cut_off = os.geteuid() == 0, lacks_scheduler(os.environ)
    return Machine(cores.usable(), root, infiniband, addresses.fixed(), cut_off)


def settings(ranks: int, machine: Machine, environment: Mapping[str, str]) -> dict[str, str]:
    """What each of the ranks of a host needs to compute and to copy well, but for what the user set."""
    from collectives.machine.caches import long_copies  # `mpips --help` does without

    return {**threads(ranks, machine, environment), **long_copies(environment)}


def threads(ranks: int, machine: Machine, environment: Mapping[str, str]) -> dict[str, str]:
    """Compute threads of each rank: the cores shared out, so that ranks do not fight, or what the user set."""
    given = {name: environment[name] for name in THREADS if name in environment}
    return given or {"OMP_NUM_THREADS": str(max(1, machine.cores // ranks))}


def loopback(job: Job, launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """What lets no other machine reach the TCP of ranks that are all on this one, but for what the user set."""
    settings = ON_LOOPBACK[launcher.flavour]
    names = (*settings, EXCLUDES)
    named = any(name in environment or name.removeprefix("OMPI_MCA_") in job.extra for name in names)
    elsewhere = job.hosts or job.interface or job.ranks_here(environment) < job.ranks
    return {} if named or elsewhere or not _is_up("lo") else dict(settings)


def _is_up(interface: str) -> bool:
    try:
        return bool(int(Path("/sys/class/net", interface, "flags").read_text(), 16) & UP)
    except OSError:
        return False


def room() -> Capacity:
    """The room of this machine, from its kernel's own figures."""
    return min([*_processes(), _memory()])


def check_room(job: Job, environment: Mapping[str, str] = os.environ, held: Capacity | None = None) -> None:
    """LauncherError where more ranks than fit are to start on this machine; other hosts know their own."""
    ranks, held = job.ranks_here(environment), held or room()
    if ranks > held.ranks:
        raise LauncherError(f"{ranks} ranks cannot start on this machine: {held.why}; ask for at most {held.ranks}")


def crowd(job: Job, machine: Machine, environment: Mapping[str, str]) -> str | None:
    """What to say where so many ranks share the cores of this machine that starting alone takes long; else None."""
    ranks = job.ranks_here(environment)
    seconds = ranks * START_SECONDS / machine.cores
    if seconds < LONG_SECONDS:
        return None
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    return (
        f"mpips: {ranks} ranks share {cores}: starting them takes some {seconds:.0f} s, and whatever they do together "
        f"takes long, too; ask for fewer, or spread them over more machines"
    )


def _processes() -> Iterator[Capacity]:
    """A rank is a process, at least."""
    from collectives.machine.memory import number_in  # `mpips --help` does without

    pids = number_in("/proc/sys/kernel/pid_max")
    if pids is not None:
        yield Capacity(pids, f"its kernel has room for {pids} processes (kernel.pid_max)")
    mine = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if mine != resource.RLIM_INFINITY and os.geteuid():  # root has no such limit
        yield Capacity(mine, f"you may have {mine} processes there (ulimit -u)")


def _memory() -> Capacity:
    from collectives.machine.memory import total

    held = total()
    why = f"each takes {RANK_BYTES >> 20} MiB of memory and more, and there are {held / 2**30:.1f} GiB"
    return Capacity(held // RANK_BYTES, why)

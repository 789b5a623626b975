"""An MPI job across the hosts of a lab: the command that starts it, and the end of all that it leaves behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.hosts import Placed
from launch.lab.files import AGENT, FOLDER
from launch.lab.plan import MANAGEMENT_NETWORK
from launch.mpirun import Job, Launcher, Machine, build

TIMEOUT = "MPIPS_TIMEOUT_SECONDS"
MPICH_TIMEOUT = "60"
MOST_LOOKS, LOOK_SECONDS = 100, 0.01
MARK_VARIABLE = "LAB_JOB_OF_MPIPS"  # no MPIPS_*: those are options of a store, which refuses what it does not know


def place(hosts: Sequence[str], ranks: int, per_host: int) -> tuple[Placed, ...]:
    """``per_host`` consecutive ranks on each host in turn. ValueError where the hosts do not suffice."""
    needed = -(-ranks // per_host)
    if needed > len(hosts):
        raise ValueError(
            f"{ranks} ranks with {per_host} on each host need {needed} hosts, the lab has {len(hosts)}: "
            f"use -n {len(hosts) * per_host} or less, or --per-host {-(-ranks // len(hosts))}"
        )
    counts = [min(per_host, ranks - place * per_host) for place in range(needed)]
    return tuple(Placed(host, count) for host, count in zip(hosts, counts))


def command(
    launcher: Launcher,
    hosts: Sequence[str],
    ranks: int,
    program: Sequence[str],
    *,
    per_host: int = 1,
    cores: int = 1,
    environment: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The argv that starts ``program`` on ``ranks`` ranks, called from the lab's outer namespaces.

    ``cores`` are the machine's, which all hosts share. Data goes by the vips, the launcher's own traffic by management.
    """
    placed = place(hosts, ranks, per_host)
    open_mpi = launcher.flavour == "openmpi"
    settings = agent_settings() if open_mpi else _hydra_settings()
    job = Job(
        ranks=ranks,
        program=tuple(program),
        environment=environment or {},
        hosts=placed,
        interface="vip0" if open_mpi else None,
        extra=(*settings, *extra),
    )
    return build(launcher, job, Machine(cores=cores // len(hosts), root=True))


def defaults(launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a job that its caller's ``environment`` does not set. MPICH does not notice that a host is gone, so
    there waits of mpips end after `MPICH_TIMEOUT` seconds."""
    return {} if launcher.flavour == "openmpi" or TIMEOUT in environment else {TIMEOUT: MPICH_TIMEOUT}


def agent_settings() -> tuple[str, ...]:
    """One daemon a host through the agent; nothing left in the machine's /tmp."""
    values = {"plm_ssh_agent": AGENT, "prte_if_include": MANAGEMENT_NETWORK, "prte_tmpdir_base": FOLDER}
    return tuple(word for name, value in values.items() for word in ("--prtemca", name, value))


def _hydra_settings() -> tuple[str, ...]:
    """Data by libfabric's tcp over the vip: a build with UCX, left alone, crosses the management network."""
    launcher = ("-launcher", "ssh", "-launcher-exec", AGENT, "-iface", "m0")
    values = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "vip0"}
    return (*launcher, *(word for name, value in values.items() for word in ("-genv", name, value)))


def enter(keeper: int, argv: Sequence[str], *, folder: str, user: int) -> list[str]:
    """The argv that runs ``argv`` in the outer namespaces of the lab whose keeper is process ``keeper``.

    It ends when the caller does. ``user`` is the caller's id: an ordinary user's lab has a user namespace too.
    """
    own = [] if user == 0 else ["--user", "--preserve-credentials"]
    namespaces = [*own, "--pid", "--net", "--uts", "--mount"]
    inside = ["sh", "-c", 'cd "$0" && exec "$@"', folder, "setpriv", "--pdeathsig", "TERM", *argv]
    return ["nsenter", "--target", str(keeper), *namespaces, *inside]


def end_all(job: str) -> int:
    """Kill every process whose environment says that it is of ``job``; how many there were. It looks until it has found
    none twice: a process that starts another program has no environment for a moment."""
    mark = f"{MARK_VARIABLE}={job}".encode()
    ended: set[int] = set()
    quiet = 0
    for _ in range(MOST_LOOKS):
        killed = {process for process in _processes() if _killed(process, mark)}
        ended |= killed
        quiet = 0 if killed else quiet + 1
        if quiet == 2:
            break
        time.sleep(LOOK_SECONDS)
    return len(ended)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _killed(process: int, mark: bytes) -> bool:
    """Kill it if it is of the job; whether it is."""
    try:
        if mark not in Path("/proc", str(process), "environ").read_bytes().split(b"\0"):
            return False
        os.kill(process, signal.SIGKILL)
    except OSError:  # it has ended, or is another user's
        return False
    return True

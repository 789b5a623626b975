"""An MPI job across the hosts of a lab: the command that starts it, and the end of all that it leaves behind.

It starts by three small files in the keeper's private memory file system: hosts, host file, launch agent.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from mpips.collectives.machine import find_carriers
from mpips.launch.hosts import Placed
from mpips.launch.lab import kernel
from mpips.launch.lab.layout import LAUNCHER_ADDRESS, MANAGEMENT_NETWORK, LabPlan
from mpips.launch.mpirun import Flavour, Job, Launcher, Machine, build

TIMEOUT = "MPIPS_TIMEOUT_SECONDS"
MPICH_TIMEOUT = "60"
MOST_LOOKS, LOOK_SECONDS = 100, 0.01
MARK_VARIABLE = "LAB_JOB_OF_MPIPS"  # no MPIPS_*: those are options of a store, which refuses what it does not know


def place_on_hosts(hosts: Sequence[str], ranks: int, per_host: int) -> tuple[Placed, ...]:
    """``per_host`` consecutive ranks on each host in turn. ValueError where the hosts do not suffice."""
    needed = -(-ranks // per_host)
    if needed > len(hosts):
        raise ValueError(
            f"{ranks} ranks with {per_host} on each host need {needed} hosts, the lab has {len(hosts)}: "
            f"use -n {len(hosts) * per_host} or less, or --per-host {-(-ranks // len(hosts))}"
        )
    counts = [min(per_host, ranks - place * per_host) for place in range(needed)]
    return tuple(Placed(host, count) for host, count in zip(hosts, counts))


def build_job(
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
    """Return the argv that starts ``program`` on ``ranks`` ranks, called from the lab's outer namespaces.

    ``cores`` are the machine's, which all hosts share. Data goes by the vips, the launcher's own traffic by management.
    """
    job = Job(
        ranks,
        tuple(program),
        environment or {},
        place_on_hosts(hosts, ranks, per_host),
        interface="vip0" if launcher.flavour == "openmpi" else None,
        extra=(*launcher_settings(launcher.flavour), *extra),
    )
    return build(launcher, job, Machine(cores=cores // len(hosts), root=True))


def defaults(launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables of a job that its caller's ``environment`` does not set. MPICH does not notice that a host is
    gone, so there waits of mpips end after `MPICH_TIMEOUT` seconds."""
    return {} if launcher.flavour == "openmpi" or TIMEOUT in environment else {TIMEOUT: MPICH_TIMEOUT}


def launcher_settings(flavour: Flavour) -> tuple[str, ...]:
    """Return the words for an mpirun that starts a job on the hosts of a lab."""
    return agent_settings() if flavour == "openmpi" else _hydra_settings()


def agent_settings() -> tuple[str, ...]:
    """Return one daemon a host through the agent; nothing left in the machine's /tmp."""
    values = {"plm_ssh_agent": AGENT, "prte_if_include": MANAGEMENT_NETWORK, "prte_tmpdir_base": SHARED_FOLDER}
    return tuple(word for name, value in values.items() for word in ("--prtemca", name, value))


def _hydra_settings() -> tuple[str, ...]:
    """Data by libfabric's tcp over the vip: a build with UCX, left alone, crosses the management network."""
    launcher = ("-launcher", "ssh", "-launcher-exec", AGENT, "-iface", "m0")
    values = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "vip0"}
    return (*launcher, *(word for name, value in values.items() for word in ("-genv", name, value)))


def build_entry(keeper: int, argv: Sequence[str], *, folder: str, user: int) -> list[str]:
    """Return the argv that runs ``argv`` in the outer namespaces of the lab whose keeper is process ``keeper``.

    It ends when the caller does. ``user`` is the caller's id: an ordinary user's lab has a user namespace too.
    """
    own = [] if user == 0 else ["--user", "--preserve-credentials"]
    namespaces = [*own, "--pid", "--net", "--uts", "--mount"]
    inside = ["sh", "-c", 'cd "$0" && exec "$@"', folder, "setpriv", "--pdeathsig", "TERM", *argv]
    return ["nsenter", "--target", str(keeper), *namespaces, *inside]


def end_all(job: str) -> int:
    """Kill every process whose environment says that it is of ``job``; how many there were. It looks until it has found
    none twice: a process that starts another program has no environment for a moment."""
    ended: set[int] = set()
    quiet = 0
    for _ in range(MOST_LOOKS):
        killed = set()
        for process in find_carriers(f"{MARK_VARIABLE}={job}"):
            with suppress(OSError):  # it has ended, or is another user's
                os.kill(process, signal.SIGKILL)
                killed.add(process)
        ended |= killed
        quiet = 0 if killed else quiet + 1
        if quiet == 2:
            break
        time.sleep(LOOK_SECONDS)
    return len(ended)


SHARED_FOLDER = "/dev/shm"  # its own file system for the keeper and for every host, as on machines that share no memory
HOSTS_FILE = f"{SHARED_FOLDER}/hosts"
AGENT = f"{SHARED_FOLDER}/agent"


def format_hosts(plan: LabPlan) -> str:
    """``/etc/hosts`` of every host: names lead to management addresses, as on a cluster whose data network is apart."""
    lines = ["127.0.0.1 localhost", f"{LAUNCHER_ADDRESS} launcher"]
    return "\n".join(lines + [f"{host.management} {host.name}" for host in plan.hosts]) + "\n"


def format_agent(plan: LabPlan, processes: list[int]) -> str:
    """Return a script called as ssh would be, ``agent [options] HOST COMMAND...``, that runs COMMAND in HOST's
    namespaces."""
    cases = "\n".join(
        f"    {host.name}|{host.management}) process={process} ;;" for host, process in zip(plan.hosts, processes)
    )
    return f"""#!/bin/sh
# Called as ssh is. Options of ssh (-x, -l USER, ...) mean nothing here.
while :; do
    case "$1" in
    -l|-p|-o) shift 2 ;;
    -*) shift ;;
    *) break ;;
    esac
done
host=$1
shift
case "$host" in
{cases}
    *) echo "no host $host in this lab" >&2; exit 1 ;;
esac
here=$(pwd)
exec nsenter --target "$process" --net --uts --mount sh -c 'cd "$0" && eval "$1"' "$here" "$*"
"""


def write_hosts(plan: LabPlan) -> None:
    """Write `HOSTS_FILE`, read it as ``/etc/hosts`` from now on, and make room for `AGENT`."""
    with open(HOSTS_FILE, "w") as file:
        file.write(format_hosts(plan))
    with open(AGENT, "w"):
        os.chmod(AGENT, 0o755)
    kernel.mount(HOSTS_FILE, "/etc/hosts", "", kernel.MS_BIND)


def write_agent(plan: LabPlan, processes: list[int]) -> None:
    """Fill `AGENT`, for the keeper and the hosts alike."""
    with open(AGENT, "w") as file:
        file.write(format_agent(plan, processes))


def make_own_folder() -> None:
    """Give this host a `SHARED_FOLDER` of its own with `AGENT`: a host's MPI daemon starts other hosts' daemons."""
    agent = os.open(AGENT, os.O_RDONLY)
    kernel.mount_virtual("tmpfs", SHARED_FOLDER)
    with open(AGENT, "w"):
        kernel.mount(f"/proc/self/fd/{agent}", AGENT, "", kernel.MS_BIND)
    os.close(agent)

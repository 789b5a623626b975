"""Start an MPI job across the hosts of a lab, and kill the processes that it leaves.

The job needs two small files in the keeper's private /dev/shm: an /etc/hosts for all hosts, and the launch agent, a
script that mpirun calls in place of ssh.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from mpips.collectives.machine import find_processes_with
from mpips.launch.hosts import RankBlock
from mpips.launch.lab import kernel
from mpips.launch.lab.layout import LAUNCHER_ADDRESS, MANAGEMENT_NETWORK, LabPlan
from mpips.launch.mpirun import Flavour, Job, Launcher, Machine, build

TIMEOUT = "MPIPS_TIMEOUT_SECONDS"
MPICH_TIMEOUT = "60"
MOST_LOOKS = 100
LOOK_SECONDS = 0.01
# The environment variable that marks the processes of a job. Its name must not begin with MPIPS_, because a store
# refuses unknown variables that do.
MARK_VARIABLE = "LAB_JOB_OF_MPIPS"


def place_on_hosts(hosts: Sequence[str], ranks: int, per_host: int) -> tuple[RankBlock, ...]:
    """Place consecutive ranks on hosts, `per_host` on each. Raises ValueError if there are too few hosts."""
    needed = -(-ranks // per_host)
    if needed > len(hosts):
        raise ValueError(
            f"{ranks} ranks with {per_host} on each host need {needed} hosts, the lab has {len(hosts)}: "
            f"use -n {len(hosts) * per_host} or less, or --per-host {-(-ranks // len(hosts))}"
        )
    counts = [min(per_host, ranks - host * per_host) for host in range(needed)]
    return tuple(RankBlock(host, count) for host, count in zip(hosts, counts))


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
    """Return the command that starts an MPI job in a lab. It must be run in the namespaces of the keeper.

    The data of MPI go to the vips of the hosts (see `layout`), and mpirun's own traffic over the management network.

    Args:
        launcher: The mpirun.
        hosts: The names of all hosts of the lab.
        ranks: Number of ranks.
        program: The command that each rank runs.
        per_host: Ranks on each host.
        cores: Number of cores of this machine, which all hosts share.
        environment: Variables to set for all ranks.
        extra: Further arguments for mpirun.

    Raises:
        ValueError: There are too few hosts.
    """
    job = Job(
        ranks,
        tuple(program),
        environment or {},
        place_on_hosts(hosts, ranks, per_host),
        interface="vip0" if launcher.flavour == "openmpi" else None,
        extra=(*launcher_options(launcher.flavour), *extra),
    )
    return build(launcher, job, Machine(cores=cores // len(hosts), root=True))


def choose_variables(launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to set for a job, except those that `environment` has already.

    MPICH does not notice that a host has died. So with MPICH the waits of mpips end after `MPICH_TIMEOUT` seconds.
    """
    return {} if launcher.flavour == "openmpi" or TIMEOUT in environment else {TIMEOUT: MPICH_TIMEOUT}


def launcher_options(flavour: Flavour) -> tuple[str, ...]:
    """Return the options with which mpirun starts a job on the hosts of a lab."""
    return open_mpi_options() if flavour == "openmpi" else _hydra_options()


def open_mpi_options() -> tuple[str, ...]:
    """Return the options with which Open MPI starts its daemons through the agent, and does not write to /tmp."""
    values = {"plm_ssh_agent": AGENT, "prte_if_include": MANAGEMENT_NETWORK, "prte_tmpdir_base": SHARED_FOLDER}
    return tuple(word for name, value in values.items() for word in ("--prtemca", name, value))


def _hydra_options() -> tuple[str, ...]:
    """Return the options with which MPICH starts its daemons through the agent and sends data over the vips.

    The data use the tcp provider of libfabric. Without these options an MPICH that is built with UCX would send them
    over the management network.
    """
    launcher = ("-launcher", "ssh", "-launcher-exec", AGENT, "-iface", "m0")
    values = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "vip0"}
    return (*launcher, *(word for name, value in values.items() for word in ("-genv", name, value)))


def build_entry(keeper: int, argv: Sequence[str], *, folder: str, user: int) -> list[str]:
    """Return the command that runs `argv` in the namespaces of a lab's keeper.

    `argv` gets SIGTERM when the process that runs the command ends.

    Args:
        keeper: The pid of the keeper.
        argv: The command.
        folder: The working directory.
        user: The caller's user id. The lab of an ordinary user has a user namespace, which must be entered too.
    """
    user_namespace = [] if user == 0 else ["--user", "--preserve-credentials"]
    namespaces = [*user_namespace, "--pid", "--net", "--uts", "--mount"]
    inside = ["sh", "-c", 'cd "$0" && exec "$@"', folder, "setpriv", "--pdeathsig", "TERM", *argv]
    return ["nsenter", "--target", str(keeper), *namespaces, *inside]


def end_all(job: str) -> int:
    """Kill every process that has `job` in its `MARK_VARIABLE`. Return how many there were.

    A process in the middle of exec has no environment for a moment, and is not found. So this ends only when two
    searches in a row have found no process.
    """
    ended: set[int] = set()
    quiet = 0
    for _ in range(MOST_LOOKS):
        killed = set()
        for process in find_processes_with(f"{MARK_VARIABLE}={job}"):
            # kill fails if the process has ended in the meantime, or if another user owns it.
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
                killed.add(process)
        ended |= killed
        quiet = 0 if killed else quiet + 1
        if quiet == 2:
            break
        time.sleep(LOOK_SECONDS)
    return len(ended)


# The keeper and each host mount their own file system here, because real hosts do not share memory.
SHARED_FOLDER = "/dev/shm"
HOSTS_FILE = f"{SHARED_FOLDER}/hosts"
AGENT = f"{SHARED_FOLDER}/agent"


def format_hosts(plan: LabPlan) -> str:
    """Return the text of /etc/hosts for all hosts.

    The names of hosts stand for their management addresses, as on a cluster with a separate network for data.
    """
    lines = ["127.0.0.1 localhost", f"{LAUNCHER_ADDRESS} launcher"]
    return "\n".join(lines + [f"{host.management} {host.name}" for host in plan.hosts]) + "\n"


def format_agent(plan: LabPlan, processes: list[int]) -> str:
    """Return a shell script that mpirun calls as it would call ssh: `agent [options] HOST COMMAND...`.

    The script runs COMMAND in the namespaces of HOST. `processes[i]` is the pid of the process of host i.
    """
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
    """Write `HOSTS_FILE` and mount it as /etc/hosts. Make an empty `AGENT`, which `write_agent` fills later.

    The agent is written in two steps, because the hosts mount the file when they start, and its text needs their pids.
    """
    with open(HOSTS_FILE, "w") as file:
        file.write(format_hosts(plan))
    with open(AGENT, "w"):
        os.chmod(AGENT, 0o755)
    kernel.mount(HOSTS_FILE, "/etc/hosts", "", kernel.MS_BIND)


def write_agent(plan: LabPlan, processes: list[int]) -> None:
    """Write the script of `AGENT`. All hosts see it, because they have mounted the same file."""
    with open(AGENT, "w") as file:
        file.write(format_agent(plan, processes))


def make_own_folder() -> None:
    """Give this host its own `SHARED_FOLDER`, with `AGENT` in it.

    The host needs the agent, because its MPI daemon may start the daemons of other hosts.
    """
    agent = os.open(AGENT, os.O_RDONLY)
    kernel.mount_virtual("tmpfs", SHARED_FOLDER)
    with open(AGENT, "w"):
        kernel.mount(f"/proc/self/fd/{agent}", AGENT, "", kernel.MS_BIND)
    os.close(agent)

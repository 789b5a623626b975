"""Start an MPI job across the hosts of a lab, and kill the processes that the job leaves behind.

The job needs two small files, which are in the private /dev/shm of the keeper, the process that owns the lab. One is
mounted as /etc/hosts on all hosts. The other file is the launch agent, a script that mpirun calls instead of ssh.
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
# refuses unknown variables whose names begin with MPIPS_.
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
    """Return the command that starts an MPI job in a lab. The command must run in the namespaces of the keeper.

    MPI sends its data to the hosts' virtual addresses (`vip`, see `layout`). mpirun's own traffic uses the management
    network.

    Args:
        launcher: The mpirun.
        hosts: The names of all hosts of the lab.
        ranks: Number of ranks.
        program: The command that each rank runs.
        per_host: Ranks on each host.
        cores: Number of cores of this machine. All hosts share them.
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
    """Return the environment variables to set for a job, except variables that `environment` already has.

    MPICH does not notice that a host has died. So with MPICH, mpips stops waiting after `MPICH_TIMEOUT` seconds.
    """
    return {} if launcher.flavour == "openmpi" or TIMEOUT in environment else {TIMEOUT: MPICH_TIMEOUT}


def launcher_options(flavour: Flavour) -> tuple[str, ...]:
    """Return the options that mpirun needs to start a job on the hosts of a lab."""
    return open_mpi_options() if flavour == "openmpi" else _hydra_options()


def open_mpi_options() -> tuple[str, ...]:
    """Return the options that make Open MPI start its daemons through the agent, and keep it from writing to /tmp."""
    values = {"plm_ssh_agent": AGENT, "prte_if_include": MANAGEMENT_NETWORK, "prte_tmpdir_base": SHARED_FOLDER}
    return tuple(word for name, value in values.items() for word in ("--prtemca", name, value))


def _hydra_options() -> tuple[str, ...]:
    """Return the options that make MPICH start its daemons through the agent, and send data to virtual addresses.

    The data go through the tcp provider of libfabric. Without these options an MPICH that is built with UCX would send
    the data over the management network.
    """
    launcher = ("-launcher", "ssh", "-launcher-exec", AGENT, "-iface", "m0")
    values = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "vip0"}
    return (*launcher, *(word for name, value in values.items() for word in ("-genv", name, value)))


def build_entry(keeper: int, argv: Sequence[str], *, folder: str, user: int) -> list[str]:
    """Return a command that enters the namespaces of a lab's keeper and runs `argv` in them.

    When the process that runs the returned command ends, the program in `argv` gets SIGTERM.

    Args:
        keeper: The pid of the keeper.
        argv: The program to run and its arguments.
        folder: The working directory.
        user: The caller's user id. An ordinary user's lab also has a user namespace to enter.
    """
    user_namespace = [] if user == 0 else ["--user", "--preserve-credentials"]
    namespaces = [*user_namespace, "--pid", "--net", "--uts", "--mount"]
    inside = ["sh", "-c", 'cd "$0" && exec "$@"', folder, "setpriv", "--pdeathsig", "TERM", *argv]
    return ["nsenter", "--target", str(keeper), *namespaces, *inside]


def end_all(job: str) -> int:
    """Kill every process whose environment variable `MARK_VARIABLE` is `job`. Return the number of killed processes.

    While a process calls exec it has no environment for a moment, and a search does not find it. So this function
    searches until two searches in a row have found no process, but at most `MOST_LOOKS` times.
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


# The keeper and each host mount a file system of their own at this path, because real hosts do not share memory.
SHARED_FOLDER = "/dev/shm"
HOSTS_FILE = f"{SHARED_FOLDER}/hosts"
AGENT = f"{SHARED_FOLDER}/agent"


def format_hosts(plan: LabPlan) -> str:
    """Return the text of /etc/hosts for all hosts.

    The name of a host stands for its management address, as on a cluster with a separate network for data.
    """
    lines = ["127.0.0.1 localhost", f"{LAUNCHER_ADDRESS} launcher"]
    return "\n".join(lines + [f"{host.management} {host.name}" for host in plan.hosts]) + "\n"


def format_agent(plan: LabPlan, processes: list[int]) -> str:
    """Return a shell script that mpirun calls as it would call ssh: `agent [options] HOST COMMAND...`.

    The script runs COMMAND in the namespaces of HOST. `processes[i]` is the pid of the process that holds the
    namespaces of host i.
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

    The agent is written in two steps: the hosts mount the file when they start, and the text of the script contains the
    pids of the started hosts.
    """
    with open(HOSTS_FILE, "w") as file:
        file.write(format_hosts(plan))
    with open(AGENT, "w"):
        os.chmod(AGENT, 0o755)
    kernel.mount(HOSTS_FILE, "/etc/hosts", "", kernel.MS_BIND)


def write_agent(plan: LabPlan, processes: list[int]) -> None:
    """Write the agent script to the file `AGENT`. All hosts see the script, because they have mounted this file."""
    with open(AGENT, "w") as file:
        file.write(format_agent(plan, processes))


def make_own_folder() -> None:
    """Give this host its own `SHARED_FOLDER`, and mount the file `AGENT` in it.

    The host needs the agent, because its MPI daemon may start the daemons of other hosts.
    """
    agent = os.open(AGENT, os.O_RDONLY)
    kernel.mount_virtual("tmpfs", SHARED_FOLDER)
    with open(AGENT, "w"):
        kernel.mount(f"/proc/self/fd/{agent}", AGENT, "", kernel.MS_BIND)
    os.close(agent)

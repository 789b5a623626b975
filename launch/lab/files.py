"""The three small files of a lab, in the keeper's private memory file system: hosts, host file, launch agent."""

from __future__ import annotations

import os

from launch.lab import kernel
from launch.lab.plan import LAUNCHER_ADDRESS, LabPlan

FOLDER = "/dev/shm"  # its own file system for the keeper and for every host, as on machines that share no memory
HOSTS = f"{FOLDER}/hosts"
AGENT = f"{FOLDER}/agent"


def hosts_text(plan: LabPlan) -> str:
    """``/etc/hosts`` of every host: names lead to management addresses, as on a cluster whose data network is apart."""
    lines = ["127.0.0.1 localhost", f"{LAUNCHER_ADDRESS} launcher"]
    return "\n".join(lines + [f"{host.management} {host.name}" for host in plan.hosts]) + "\n"


def agent_text(plan: LabPlan, processes: list[int]) -> str:
    """A script called as ssh would be, ``agent [options] HOST COMMAND...``, that runs COMMAND in HOST's namespaces."""
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
    """Write `HOSTS`, read it as ``/etc/hosts`` from now on, and make room for `AGENT`."""
    with open(HOSTS, "w") as file:
        file.write(hosts_text(plan))
    with open(AGENT, "w"):
        os.chmod(AGENT, 0o755)
    kernel.mount(HOSTS, "/etc/hosts", "", kernel.MS_BIND)


def write_agent(plan: LabPlan, processes: list[int]) -> None:
    """Fill `AGENT`, for the keeper and the hosts alike."""
    with open(AGENT, "w") as file:
        file.write(agent_text(plan, processes))


def own_folder() -> None:
    """Give this host a `FOLDER` of its own, with `AGENT` in it: a host's MPI daemon starts other hosts' daemons."""
    agent = os.open(AGENT, os.O_RDONLY)
    kernel.mount_virtual("tmpfs", FOLDER)
    with open(AGENT, "w"):
        kernel.mount(f"/proc/self/fd/{agent}", AGENT, "", kernel.MS_BIND)
    os.close(agent)

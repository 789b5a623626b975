"""Whether hosts of a lab live, and the network between them carries; what is said of a host that died.

The keeper asks here; a few small files are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.lab.plan import LabNic, LabPlan

NETSTAT = "TcpExt:"
GIVEN_UP = "TCPAbortOnTimeout"


def crossed(plan: LabPlan, hosts: int) -> list[tuple[str, LabNic]]:
    """(host, NIC) of all that traffic between the first ``hosts`` hosts crosses, those of relaying hosts included."""
    owners = {nic.address: (host, nic) for host in plan.hosts for nic in host.nics}
    found = {}
    for source in plan.hosts[:hosts]:
        for target in plan.hosts[:hosts]:
            at = source
            while at is not target:
                route = next(route for route in at.routes if route.vip == target.vip)
                leaves = next(nic for nic in at.nics if nic.name == route.nic)
                found[at.name, leaves.name] = leaves
                at, arrives = owners[route.gateway]
                found[at.name, arrives.name] = arrives
    return [(host, nic) for (host, _), nic in sorted(found.items())]


def unplugged(port: str, links: Path = Path("/sys/class/net")) -> bool:
    """Whether no frame passes the switch port: it, or the NIC at the other end of its cable, is down or gone."""
    try:
        return (links / port / "carrier").read_text().strip() != "1"
    except OSError:  # a port that is down itself refuses to be read
        return True


def given_up(process: int, processes: Path = Path("/proc")) -> int:
    """How many connections TCP has given up for want of an answer, in the network namespace of ``process``."""
    try:
        text = (processes / str(process) / "net" / "netstat").read_text()
    except OSError:  # the host is dead
        return 0
    names, values = (line.split() for line in text.splitlines() if line.startswith(NETSTAT))
    return int(values[names.index(GIVEN_UP)])


def lives(process: int) -> bool:
    """Whether a host is there: its own ``process``."""
    return Path(f"/proc/{process}/ns/net").exists()


def died(lab: str, hosts: Sequence[str]) -> str:
    """The sentence about hosts whose own process has ended."""
    return f"host {', '.join(hosts)} died: `mpips lab down --name {lab}` ends the lab, `mpips lab up` makes another"

"""What the hosts of a job say about their networks: NICs with their addresses, and routes. Asked once, before the job.

    mpirun -n 1 --host h0 python -m launch.network : -n 1 --host h1 ...

One process a host prints a line of JSON; it needs `ip` (iproute2) there and no MPI.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Interface, IPv4Network
from typing import Any, NamedTuple

from launch.command import Job, Launcher, LauncherError, Machine, build
from launch.hosts import Placed

MARK = "mpips-network "
LIMIT = 60.0  # seconds


class Route(NamedTuple):
    """Packets for `to` leave by `nic`, by way of `via` where that is not None."""

    to: IPv4Network
    via: str | None
    nic: str


class Report(NamedTuple):
    """One host: IPv4 addresses with their subnets by NIC, and its routes."""

    host: str
    nics: Mapping[str, tuple[IPv4Interface, ...]]
    routes: tuple[Route, ...]

    def nic_to(self, address: str) -> tuple[str, str | None] | None:
        """(NIC, gateway or None) by which this host reaches `address`: by the longest prefix, as the kernel does."""
        matching = [route for route in self.routes if IPv4Network(address).subnet_of(route.to)]
        best = max(matching, key=lambda route: route.to.prefixlen, default=None)
        return (best.nic, best.via) if best else None


def parse(host: str, addresses: Sequence[Mapping[str, Any]], routes: Sequence[Mapping[str, Any]]) -> Report:
    """A report from the output of `ip -j -4 address` and `ip -j -4 route`."""
    nics = {
        str(nic["ifname"]): tuple(IPv4Interface(f"{a['local']}/{a['prefixlen']}") for a in nic.get("addr_info", ()))
        for nic in addresses
        if nic
    }
    known = [
        Route(IPv4Network("0.0.0.0/0" if r["dst"] == "default" else r["dst"]), r.get("gateway"), r["dev"])
        for r in routes
        if "dev" in r
    ]
    return Report(host, nics, tuple(known))


def ask(launcher: Launcher, hosts: Sequence[str], machine: Machine, extra: Sequence[str] = ()) -> list[Report]:
    """The reports of `hosts`, in their order. Blocking, at most `LIMIT` s; LauncherError where a host is silent."""
    environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    placed = tuple(Placed(host, 1) for host in hosts)
    program = (sys.executable, "-m", "launch.network", *hosts)
    job = Job(len(hosts), program, environment, placed, extra=tuple(extra))
    try:
        done = subprocess.run(build(launcher, job, machine), capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        raise LauncherError(f"the hosts did not answer within {LIMIT:g} s: can mpirun reach them all?") from error
    lines = [line[len(MARK) :] for line in done.stdout.splitlines() if line.startswith(MARK)]
    said = {
        report["host"]: parse(report["host"], report["addresses"], report["routes"])
        for report in map(json.loads, lines)
    }
    silent = [host for host in hosts if host not in said]
    if silent:
        why = next((line for line in done.stderr.splitlines() if line.strip(" -")), "no error was printed")
        raise LauncherError(f"no word from {', '.join(silent)} about their networks: {why.strip()}")
    return [said[host] for host in hosts]


def here() -> Report:
    """The report of this machine; LauncherError without `ip`."""
    try:
        return parse(socket.gethostname(), _ip("address"), _ip("route"))
    except FileNotFoundError as error:
        raise LauncherError("a look at this machine's addresses takes the command ip (package iproute2)") from error


def main() -> None:
    """Prints this host's report; arguments are the hosts' names in the job, of which this one's is chosen by rank."""
    rank = int(
        next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK") if name in os.environ)
    )
    name = sys.argv[1 + rank] if len(sys.argv) > 1 + rank else socket.gethostname()
    addresses, routes = (_ip(subject) for subject in ("address", "route"))
    line = MARK + json.dumps({"host": name, "addresses": addresses, "routes": routes}) + "\n"
    os.write(1, line.encode())


def _ip(subject: str) -> list[dict[str, Any]]:
    done = subprocess.run(["ip", "-j", "-4", subject], capture_output=True, text=True, timeout=20, check=True)
    return list(json.loads(done.stdout or "[]"))


if __name__ == "__main__":
    main()

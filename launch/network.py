"""What the hosts of a job say about their networks: NICs, addresses, routes; and whether `--interface` is there.

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

from launch.hosts import Placed
from launch.mpirun import Job, Launcher, LauncherError, Machine, build, environment_of_job

MARK = "mpips-network "
LIMIT = 60.0  # seconds


class Route(NamedTuple):
    """Packets for `to` leave by `nic`, by way of `via` where that is not None."""

    to: IPv4Network
    via: str | None
    nic: str


class HostReport(NamedTuple):
    """One host: IPv4 addresses with their subnets by NIC, and its routes."""

    host: str
    nics: Mapping[str, tuple[IPv4Interface, ...]]
    routes: tuple[Route, ...]

    def nic_to(self, address: str) -> tuple[str, str | None] | None:
        """(NIC, gateway or None) by which this host reaches `address`: by the longest prefix, as the kernel does."""
        matching = [route for route in self.routes if IPv4Network(address).subnet_of(route.to)]
        best = max(matching, key=lambda route: route.to.prefixlen, default=None)
        return (best.nic, best.via) if best else None

    def has(self, word: str | IPv4Network) -> bool:
        """Has it this NIC, or an address in this subnet?"""
        if isinstance(word, str):
            return word in self.nics
        return any(address.ip in word for addresses in self.nics.values() for address in addresses)

    def absence(self, word: str | IPv4Network) -> str:
        """What to say where it has not."""
        if isinstance(word, str):
            return f"{self.host} has no interface {word!r} with an IPv4 address: it has {', '.join(self.nics)}"
        there = ", ".join(f"{address} ({name})" for name, addresses in self.nics.items() for address in addresses)
        return f"{self.host} has no IPv4 address in the subnet {word}: it has {there}"


def parse(host: str, addresses: Sequence[Mapping[str, Any]], routes: Sequence[Mapping[str, Any]]) -> HostReport:
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
    return HostReport(host, nics, tuple(known))


def ask(launcher: Launcher, hosts: Sequence[str], machine: Machine, extra: Sequence[str] = ()) -> list[HostReport]:
    """The reports of `hosts`, in their order. Blocking, at most `LIMIT` s; LauncherError where a host is silent."""
    environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    placed = tuple(Placed(host, 1) for host in hosts)
    program = (sys.executable, "-P", "-m", "launch.network", *hosts)
    job = Job(len(hosts), program, environment, placed, extra=tuple(extra))
    argv = build(launcher, job, machine)
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT, check=False,
            env=environment_of_job(os.environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise LauncherError(f"the hosts did not answer within {LIMIT:g} s: can mpirun reach them all?") from error
    lines = (json.loads(line[len(MARK) :]) for line in done.stdout.splitlines() if line.startswith(MARK))
    said = {line["host"]: parse(line["host"], line["addresses"], line["routes"]) for line in lines}
    silent = [host for host in hosts if host not in said]
    if silent:
        why = next((line for line in done.stderr.splitlines() if line.strip(" -")), "no error was printed")
        raise LauncherError(f"no word from {', '.join(silent)} about their networks: {why.strip()}")
    return [said[host] for host in hosts]


def here() -> HostReport:
    """The report of this machine; LauncherError without `ip`."""
    try:
        return parse(socket.gethostname(), _ip("address"), _ip("route"))
    except FileNotFoundError as error:
        raise LauncherError("a look at this machine's addresses takes the command ip (package iproute2)") from error


def check_interface(
    interface: str, launcher: Launcher, hosts: Sequence[Placed], machine: Machine, extra: Sequence[str] = ()
) -> None:
    """LauncherError, with those there are, where no machine of the job can have this interface.

    A subnet, as 10.0.0.0/8, stands for the interfaces with an address in it. One that is here passes. One that is not
    may be on the hosts: they are asked.
    """
    names = [name for _, name in socket.if_nameindex()]
    words = [_subnet(word) if "/" in word else word for word in interface.split(",")]
    lacking = [word for word in words if isinstance(word, IPv4Network) or word not in names]
    if any(isinstance(word, IPv4Network) for word in lacking):
        report = here()
        lacking = [word for word in lacking if not report.has(word)]
        if lacking and not hosts:
            raise LauncherError(report.absence(lacking[0]))
    if lacking and not hosts:
        raise LauncherError(f"there is no network interface {lacking[0]!r} here: there are {', '.join(names)}")
    for report in ask(launcher, list(dict.fromkeys(b.host for b in hosts)), machine, extra) if lacking else ():
        if missing := [word for word in lacking if not report.has(word)]:
            raise LauncherError(report.absence(missing[0]))


def _subnet(word: str) -> IPv4Network:
    try:
        return IPv4Network(word, strict=False)
    except ValueError as error:
        raise LauncherError(f"--interface {word!r} is no IPv4 subnet: write it as 10.0.0.0/8") from error


def main() -> None:
    """Prints this host's report; arguments are the hosts' names in the job, of which this one's is chosen by rank."""
    variables = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    rank = int(next(os.environ[name] for name in variables if name in os.environ))
    name = sys.argv[1 + rank] if len(sys.argv) > 1 + rank else socket.gethostname()
    report = {"host": name, "addresses": _ip("address"), "routes": _ip("route")}
    os.write(1, f"{MARK}{json.dumps(report)}\n".encode())


def _ip(subject: str) -> list[dict[str, Any]]:
    done = subprocess.run(["ip", "-j", "-4", subject], capture_output=True, text=True, timeout=20, check=True)
    return list(json.loads(done.stdout or "[]"))


if __name__ == "__main__":
    main()

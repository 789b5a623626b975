"""Networks of a job's hosts: the NICs, addresses and routes that they report, `--interface`, and `--topology`.

In BCube(n, k) two hosts share a switch of level l if and only if their addresses differ in digit l alone. So if the
subnets of level l are left out, the hosts fall into n groups between which there is no connection. Each group is one
value of digit l. Hosts sorted by these digits have addresses that are the digits of their ranks.

    mpirun -n 1 --host h0 python -m launch.network : -n 1 --host h1 ...

prints a line of JSON from each host. Hosts need the command `ip` (iproute2), but no MPI.
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

from mpips.collectives.simulator.topology import BCube, FatTree, host_at, parse
from mpips.launch.hosts import Host, Placed
from mpips.launch.mpirun import Job, Launcher, LauncherError, Machine, ask, build
from mpips.store.options import Options
from mpips.store.world import launched_as


class MappingError(ValueError):
    """The hosts or the job do not fit the topology."""


def place_in_topology(
    wanted: str,
    nics: Sequence[str],
    interface: str | None,
    options: Options,
    hosts: Sequence[Host],
    launcher: Launcher,
    machine: Machine,
    extra: Sequence[str] = (),
) -> tuple[Placed, ...]:
    """Place the workers of a job on hosts, in the order of the hosts' addresses in a topology.

    Starts a process on each host to read its network, and blocks until all have answered.

    Args:
        wanted: The topology, such as "bcube:3,2".
        nics: The NIC of each level, level 0 first.
        interface: The interface with the address that MPI uses. Required for BCube of more than one level.
        options: The roles of the job. It must not have servers or spares.
        hosts: The hosts, in any order.
        launcher: The mpirun that starts the processes.
        machine: The properties of this machine.
        extra: Further words for mpirun.

    Returns:
        A block of ranks for each host.

    Raises:
        MappingError: The job, the hosts or their networks do not fit the topology. If routes are missing, the message
            has the commands that add them.
        LauncherError: A host does not answer.
        ValueError: `wanted` is not a topology.
    """
    topology = parse(wanted)
    if not hosts or not all(nics):
        raise MappingError("--topology needs --hostfile, and --nics with the NIC of each level")
    if options.servers:
        raise MappingError(f"--topology places workers only: with servers={options.servers} use --hostfile alone")
    if options.spares > 0:
        raise MappingError(f"--topology places workers only: with spares={options.spares} use --hostfile alone")
    if options.workers % topology.hosts:
        raise MappingError(f"workers={options.workers} is no multiple of the {topology.hosts} hosts of {topology.name}")
    ordered = order_hosts(topology, ask_hosts(launcher, [host.name for host in hosts], machine, extra), nics)
    if isinstance(topology, BCube) and topology.k > 1:
        if interface is None:
            raise MappingError(f"{topology.name} needs --interface: where each host has the address that MPI uses")
        if commands := find_missing_routes(topology, ordered, nics, interface):
            raise MappingError(
                "traffic would not keep to its levels; as root, run on each host\n" + "\n".join(commands)
            )
    return tuple(Placed(report.host, options.workers // topology.hosts) for report in ordered)


def order_hosts(topology: BCube | FatTree, reports: Sequence[HostReport], nics: Sequence[str]) -> list[HostReport]:
    """Sort the reports of hosts by the hosts' addresses in the topology. `nics`: the NIC of each level, level 0 first.

    The first host gets address 0. Subnets do not tell the switches of a fat-tree apart, so its hosts keep the order in
    which they are given: pod, then edge switch, then slot. Raises MappingError if the networks do not fit the topology.
    """
    if len(reports) != topology.hosts:
        raise MappingError(f"{topology.name} has {topology.hosts} hosts, the host file {len(reports)}")
    if len(nics) != topology.levels:
        named = f"{len(nics)} are named: {', '.join(nics)}"
        raise MappingError(f"{topology.name} has {topology.levels} NICs a host, {named}")
    subnets = [
        [_address_of(report, nic, f"the NIC of level {level}").network for report in reports]
        for level, nic in enumerate(nics)
    ]
    if isinstance(topology, FatTree):
        return list(reports)
    for level, networks in enumerate(subnets):
        for network in networks:
            members = [report.host for report, other in zip(reports, networks) if other == network]
            if len(members) != topology.n:
                raise MappingError(
                    f"subnet {network} of level {level} holds {len(members)} hosts ({', '.join(members)}), "
                    f"a switch of {topology.name} has {topology.n}"
                )
    digits = [_find_digits(topology, level, subnets, reports) for level in range(topology.k)]
    found: dict[int, HostReport] = {}
    for place, report in enumerate(reports):
        host = host_at(topology, tuple(digits[level][place] for level in reversed(range(topology.k))))
        if host in found:
            raise MappingError(f"{report.host} and {found[host].host} have the same address in {topology.name}")
        found[host] = report
    return [found[host] for host in range(topology.hosts)]


def _address_of(report: HostReport, nic: str, what: str) -> IPv4Interface:
    addresses = report.nics.get(nic)
    if addresses is None:
        raise MappingError(f"{report.host} has no {nic} ({what}); it has {', '.join(report.nics)}")
    if not addresses:
        raise MappingError(f"{nic} of {report.host} ({what}) has no IPv4 address")
    return addresses[0]


def _find_digits(
    topology: BCube, level: int, subnets: Sequence[Sequence[IPv4Network]], reports: Sequence[HostReport]
) -> list[int]:
    """Return digit `level` of each host's address.

    It is the number of the group that the host is in when the subnets of that level are left out.
    """
    group = list(range(len(reports)))
    for other, networks in enumerate(subnets):
        for network in set(networks) if other != level else ():
            joined = {group[place] for place, n in enumerate(networks) if n == network}
            group = [min(joined) if g in joined else g for g in group]
    names = {g: number for number, g in enumerate(dict.fromkeys(group))}
    if len(names) != topology.n:
        raise MappingError(
            f"without their NICs of level {level} the hosts fall into {len(names)} groups, "
            f"{topology.name} has {topology.n}: subnets of different levels join hosts that share no switch"
        )
    return [names[g] for g in group]


def find_missing_routes(
    topology: BCube, ordered: Sequence[HostReport], nics: Sequence[str], interface: str
) -> list[str]:
    """Return the commands, each with its host, that add the routes which BCube needs and the hosts do not have.

    A host must reach the address of another host on `interface` by the NIC of the highest level in which the two
    addresses differ, through the neighbour that has the other host's digit there. Returns an empty list if all routes
    are right. Raises MappingError if a host has no address on `interface`.
    """
    commands = []
    vips = [str(_address_of(report, interface, "MPI's address").ip) for report in ordered]
    for host, report in enumerate(ordered):
        for target, vip in enumerate(vips):
            if target == host:
                continue
            level, neighbour = topology.next_hop(host, target)
            gateway = str(_address_of(ordered[neighbour], nics[level], f"the NIC of level {level}").ip)
            if report.nic_to(vip) not in ((nics[level], gateway), (nics[level], None)):
                commands.append(f"{report.host}: ip route replace {vip}/32 via {gateway} dev {nics[level]}")
    return commands


# begins the line of JSON, because mpirun and ssh may print other lines
MARK = "mpips-network "
# seconds for all hosts to answer
LIMIT = 60.0


class IpRoute(NamedTuple):
    """A route of a host: packets to the subnet `to` leave through `nic`, to the gateway `via` if that is not None."""

    to: IPv4Network
    via: str | None
    nic: str


class HostReport(NamedTuple):
    """The network of one host."""

    host: str
    # NIC -> its IPv4 addresses, each with its subnet
    nics: Mapping[str, tuple[IPv4Interface, ...]]
    routes: tuple[IpRoute, ...]

    def nic_to(self, address: str) -> tuple[str, str | None] | None:
        """Return the NIC and the gateway (or None) by which this host reaches `address`; None if it has no route.

        The route with the longest prefix wins, as in the kernel.
        """
        matching = [route for route in self.routes if IPv4Network(address).subnet_of(route.to)]
        best = max(matching, key=lambda route: route.to.prefixlen, default=None)
        return (best.nic, best.via) if best else None

    def has(self, word: str | IPv4Network) -> bool:
        """True if the host has this NIC, or an address in this subnet."""
        if isinstance(word, str):
            return word in self.nics
        return any(address.ip in word for addresses in self.nics.values() for address in addresses)

    def absence(self, word: str | IPv4Network) -> str:
        """Return the sentence that says that the host does not have this NIC or an address in this subnet."""
        if isinstance(word, str):
            return f"{self.host} has no interface {word!r} with an IPv4 address: it has {', '.join(self.nics)}"
        there = ", ".join(f"{address} ({name})" for name, addresses in self.nics.items() for address in addresses)
        return f"{self.host} has no IPv4 address in the subnet {word}: it has {there}"


def parse_report(host: str, addresses: Sequence[Mapping[str, Any]], routes: Sequence[Mapping[str, Any]]) -> HostReport:
    """Return the report of a host from the parsed output of `ip -j -4 address` and `ip -j -4 route`."""
    nics = {
        str(nic["ifname"]): tuple(IPv4Interface(f"{a['local']}/{a['prefixlen']}") for a in nic.get("addr_info", ()))
        for nic in addresses
        if nic
    }
    known = [
        IpRoute(IPv4Network("0.0.0.0/0" if r["dst"] == "default" else r["dst"]), r.get("gateway"), r["dev"])
        for r in routes
        if "dev" in r
    ]
    return HostReport(host, nics, tuple(known))


def ask_hosts(
    launcher: Launcher, hosts: Sequence[str], machine: Machine, extra: Sequence[str] = ()
) -> list[HostReport]:
    """Start a process on each host that reports its network, and return the reports in the order of `hosts`.

    Blocks for at most `LIMIT` seconds. Raises LauncherError if a host does not answer.
    """
    environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    placed = tuple(Placed(host, 1) for host in hosts)
    program = (sys.executable, "-P", "-m", "mpips.launch.network", *hosts)
    job = Job(len(hosts), program, environment, placed, extra=tuple(extra))
    argv = build(launcher, job, machine)
    try:
        done = ask(argv, LIMIT)
    except subprocess.TimeoutExpired as error:
        raise LauncherError(f"the hosts did not answer within {LIMIT:g} s: can mpirun reach them all?") from error
    lines = (json.loads(line[len(MARK) :]) for line in done.stdout.splitlines() if line.startswith(MARK))
    said = {line["host"]: parse_report(line["host"], line["addresses"], line["routes"]) for line in lines}
    silent = [host for host in hosts if host not in said]
    if silent:
        why = next((line for line in done.stderr.splitlines() if line.strip(" -")), "no error was printed")
        raise LauncherError(f"no word from {', '.join(silent)} about their networks: {why.strip()}")
    return [said[host] for host in hosts]


def report_here() -> HostReport:
    """Return the report of this machine. Raises LauncherError if the command `ip` is missing."""
    try:
        return parse_report(socket.gethostname(), _ip("address"), _ip("route"))
    except FileNotFoundError as error:
        raise LauncherError("a look at this machine's addresses takes the command ip (package iproute2)") from error


def check_interface(
    interface: str, launcher: Launcher, hosts: Sequence[Placed], machine: Machine, extra: Sequence[str] = ()
) -> None:
    """Check that the machines of the job have the network interfaces that --interface names, separated by commas.

    A subnet, such as 10.0.0.0/8, stands for the interfaces with an address in it. An interface that this machine has is
    not looked for on the hosts. For any other one the hosts are asked, which blocks (see `ask_hosts`).

    Raises:
        LauncherError: An interface is missing. The message lists those that the machine has.
    """
    names = [name for _, name in socket.if_nameindex()]
    words: list[str | IPv4Network] = []
    for word in interface.split(","):
        try:
            words.append(IPv4Network(word, strict=False) if "/" in word else word)
        except ValueError as error:
            raise LauncherError(f"--interface {word!r} is no IPv4 subnet: write it as 10.0.0.0/8") from error
    lacking = [word for word in words if isinstance(word, IPv4Network) or word not in names]
    if any(isinstance(word, IPv4Network) for word in lacking):
        report = report_here()
        lacking = [word for word in lacking if not report.has(word)]
        if lacking and not hosts:
            raise LauncherError(report.absence(lacking[0]))
    if lacking and not hosts:
        raise LauncherError(f"there is no network interface {lacking[0]!r} here: there are {', '.join(names)}")
    for report in ask_hosts(launcher, list(dict.fromkeys(b.host for b in hosts)), machine, extra) if lacking else ():
        if missing := [word for word in lacking if not report.has(word)]:
            raise LauncherError(report.absence(missing[0]))


def main() -> None:
    """Print this host's report. Arguments: the name of each host in the job; the rank selects the name of this host."""
    rank, _ = launched_as(os.environ) or (0, 1)
    name = sys.argv[1 + rank] if len(sys.argv) > 1 + rank else socket.gethostname()
    report = {"host": name, "addresses": _ip("address"), "routes": _ip("route")}
    os.write(1, f"{MARK}{json.dumps(report)}\n".encode())


def _ip(subject: str) -> list[dict[str, Any]]:
    done = subprocess.run(["ip", "-j", "-4", subject], capture_output=True, text=True, timeout=20, check=True)
    return list(json.loads(done.stdout or "[]"))


if __name__ == "__main__":
    main()

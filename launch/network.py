"""Examine the networks of a job's hosts, for the options `--interface` and `--topology` of `mpips run`.

BCube(n, k) gives each host an address of k digits, each below n. Two hosts share a switch of level l if and only if
their addresses differ only in digit l. `--topology` finds the digits from the subnets. If the subnets of level l are
left out, the hosts form n groups that are not connected with each other. All hosts of a group have the same digit l.
Ranks are then numbered in the order of the hosts' addresses.

    mpirun -n 1 --host h0 python -m launch.network : -n 1 --host h1 ...

prints the network of each host as a line of JSON. The hosts need the command `ip` (iproute2), and the program that they
run does not start MPI.
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
from mpips.launch.hosts import Host, RankBlock
from mpips.launch.mpirun import Job, Launcher, LauncherError, Machine, build, run_tool
from mpips.store.options import Options
from mpips.store.world import launched_as


class MappingError(ValueError):
    """The hosts or the job do not fit the topology."""


def place_in_topology(
    text: str,
    nics: Sequence[str],
    interface: str | None,
    options: Options,
    hosts: Sequence[Host],
    launcher: Launcher,
    machine: Machine,
    extra: Sequence[str] = (),
) -> tuple[RankBlock, ...]:
    """Place the workers of a job on hosts, in the order of the hosts' addresses in a topology.

    Starts a process on each host. The process reports the host's network. Blocks until all hosts have answered.

    Args:
        text: The topology, such as "bcube:3,2".
        nics: The NIC of each level, level 0 first.
        interface: The interface with the address that MPI uses. Required for a BCube with more than one level.
        options: The options of the job. The job must not have servers or spares.
        hosts: The hosts, in any order.
        launcher: The mpirun that starts the processes.
        machine: The properties of this machine.
        extra: Further arguments for mpirun.

    Returns:
        A block of ranks for each host.

    Raises:
        MappingError: The job, the hosts or their networks do not fit the topology. If routes are missing, the message
            lists the commands that add the routes.
        LauncherError: A host does not answer.
        ValueError: `text` is not a topology.
    """
    topology = parse(text)
    if not hosts or not all(nics):
        raise MappingError("--topology needs --hostfile, and --nics with the NIC of each level")
    if options.servers:
        raise MappingError(f"--topology places workers only: with servers={options.servers} use --hostfile alone")
    if options.spares > 0:
        raise MappingError(f"--topology places workers only: with spares={options.spares} use --hostfile alone")
    if options.workers % topology.hosts:
        raise MappingError(
            f"workers={options.workers} is not a multiple of the {topology.hosts} hosts of {topology.name}"
        )
    ordered = order_hosts(topology, ask_hosts(launcher, [host.name for host in hosts], machine, extra), nics)
    if isinstance(topology, BCube) and topology.k > 1:
        if interface is None:
            raise MappingError(f"{topology.name} needs --interface: where each host has the address that MPI uses")
        if commands := find_missing_routes(topology, ordered, nics, interface):
            raise MappingError(
                "traffic would not keep to its levels; as root, run on each host\n" + "\n".join(commands)
            )
    return tuple(RankBlock(report.host, options.workers // topology.hosts) for report in ordered)


def order_hosts(topology: BCube | FatTree, reports: Sequence[HostReport], nics: Sequence[str]) -> list[HostReport]:
    """Sort the reports of hosts by the hosts' addresses in the topology.

    The first host gets address 0. In a fat-tree all switches are in one subnet, so the subnets do not show the
    addresses of the hosts. The hosts of a fat-tree keep their order, so the caller must give them sorted by pod, then
    by edge switch, then by slot.

    Args:
        topology: The topology.
        reports: The networks of the hosts.
        nics: The NIC of each level, level 0 first.

    Raises:
        MappingError: The networks do not fit the topology.
    """
    if len(reports) != topology.hosts:
        raise MappingError(f"{topology.name} has {topology.hosts} hosts, the host file {len(reports)}")
    if len(nics) != topology.levels:
        named = f"{len(nics)} are named: {', '.join(nics)}"
        raise MappingError(f"{topology.name} has {topology.levels} NICs a host, {named}")
    subnets = [
        [_find_address(report, nic, f"the NIC of level {level}").network for report in reports]
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
    by_address: dict[int, HostReport] = {}
    for index, report in enumerate(reports):
        address = host_at(topology, tuple(digits[level][index] for level in reversed(range(topology.k))))
        if address in by_address:
            other = by_address[address].host
            raise MappingError(f"{report.host} and {other} have the same address in {topology.name}")
        by_address[address] = report
    return [by_address[address] for address in range(topology.hosts)]


def _find_address(report: HostReport, nic: str, purpose: str) -> IPv4Interface:
    addresses = report.nics.get(nic)
    if addresses is None:
        raise MappingError(f"{report.host} has no {nic} ({purpose}); it has {', '.join(report.nics)}")
    if not addresses:
        raise MappingError(f"{nic} of {report.host} ({purpose}) has no IPv4 address")
    return addresses[0]


def _find_digits(
    topology: BCube, level: int, subnets: Sequence[Sequence[IPv4Network]], reports: Sequence[HostReport]
) -> list[int]:
    """Return digit `level` of each host's address.

    If the subnets of this level are left out, the hosts form groups of connected hosts. The digit of a host is the
    number of its group.
    """
    group = list(range(len(reports)))
    for other, networks in enumerate(subnets):
        for network in set(networks) if other != level else ():
            joined = {group[host] for host, n in enumerate(networks) if n == network}
            group = [min(joined) if g in joined else g for g in group]
    numbers = {g: number for number, g in enumerate(dict.fromkeys(group))}
    if len(numbers) != topology.n:
        raise MappingError(
            f"without their NICs of level {level} the hosts fall into {len(numbers)} groups, "
            f"{topology.name} has {topology.n}: subnets of different levels join hosts that share no switch"
        )
    return [numbers[g] for g in group]


def find_missing_routes(
    topology: BCube, ordered: Sequence[HostReport], nics: Sequence[str], interface: str
) -> list[str]:
    """Return the commands that add the routes which BCube needs and the hosts do not have.

    Each command begins with the name of the host on which it must run. A route to a target host uses the NIC of the
    highest level in which the addresses of the two hosts differ. It goes through the neighbour that has the target's
    digit at this level.

    Args:
        topology: The topology.
        ordered: The reports of the hosts, in the order of their addresses.
        nics: The NIC of each level, level 0 first.
        interface: The interface with the address that MPI uses. The routes lead to these addresses.

    Raises:
        MappingError: A host has no address on `interface`.
    """
    commands = []
    vips = [str(_find_address(report, interface, "MPI's address").ip) for report in ordered]
    for host, report in enumerate(ordered):
        for target, vip in enumerate(vips):
            if target == host:
                continue
            level, neighbour = topology.next_hop(host, target)
            gateway = str(_find_address(ordered[neighbour], nics[level], f"the NIC of level {level}").ip)
            if report.find_route(vip) not in ((nics[level], gateway), (nics[level], None)):
                commands.append(f"{report.host}: ip route replace {vip}/32 via {gateway} dev {nics[level]}")
    return commands


# The beginning of a report line. It distinguishes reports from other lines that mpirun and ssh may print.
MARK = "mpips-network "
# seconds that the hosts may take to answer
LIMIT = 60.0


class IpRoute(NamedTuple):
    """An entry of a host's routing table."""

    # the subnet to which this route leads
    to: IPv4Network
    # the address of the gateway; None if the target is in the subnet of the NIC
    via: str | None
    # the NIC through which packets leave
    nic: str


class HostReport(NamedTuple):
    """The network of one host."""

    host: str
    # NIC -> its IPv4 addresses, each with its subnet
    nics: Mapping[str, tuple[IPv4Interface, ...]]
    routes: tuple[IpRoute, ...]

    def find_route(self, address: str) -> tuple[str, str | None] | None:
        """Return the NIC and the gateway through which this host reaches `address`, or None if no route leads there.

        The gateway is None if the address is in the subnet of the NIC. As in the kernel, the route with the longest
        prefix counts.
        """
        matching = [route for route in self.routes if IPv4Network(address).subnet_of(route.to)]
        best = max(matching, key=lambda route: route.to.prefixlen, default=None)
        return (best.nic, best.via) if best else None

    def has(self, interface: str | IPv4Network) -> bool:
        """True if the host has this NIC, or an address in this subnet."""
        if isinstance(interface, str):
            return interface in self.nics
        return any(address.ip in interface for addresses in self.nics.values() for address in addresses)

    def describe_missing(self, interface: str | IPv4Network) -> str:
        """Return the error message for a NIC or subnet that the host lacks. The message lists what the host has."""
        if isinstance(interface, str):
            return f"{self.host} has no interface {interface!r} with an IPv4 address: it has {', '.join(self.nics)}"
        own = ", ".join(f"{address} ({name})" for name, addresses in self.nics.items() for address in addresses)
        return f"{self.host} has no IPv4 address in the subnet {interface}: it has {own}"


def parse_report(host: str, addresses: Sequence[Mapping[str, Any]], routes: Sequence[Mapping[str, Any]]) -> HostReport:
    """Return the report of a host from the parsed output of `ip -j -4 address` and `ip -j -4 route`."""
    nics = {
        str(nic["ifname"]): tuple(IPv4Interface(f"{a['local']}/{a['prefixlen']}") for a in nic.get("addr_info", ()))
        for nic in addresses
        if nic
    }
    parsed = [
        IpRoute(IPv4Network("0.0.0.0/0" if r["dst"] == "default" else r["dst"]), r.get("gateway"), r["dev"])
        for r in routes
        if "dev" in r
    ]
    return HostReport(host, nics, tuple(parsed))


def ask_hosts(
    launcher: Launcher, hosts: Sequence[str], machine: Machine, extra: Sequence[str] = ()
) -> list[HostReport]:
    """Start a process on each host to report the host's network. Return the reports in the order of `hosts`.

    Blocks for at most `LIMIT` seconds. Raises LauncherError if a host does not answer.
    """
    environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    placed = tuple(RankBlock(host, 1) for host in hosts)
    program = (sys.executable, "-P", "-m", "mpips.launch.network", *hosts)
    job = Job(len(hosts), program, environment, placed, extra=tuple(extra))
    argv = build(launcher, job, machine)
    try:
        done = run_tool(argv, LIMIT)
    except subprocess.TimeoutExpired as error:
        raise LauncherError(f"the hosts did not answer within {LIMIT:g} s: can mpirun reach them all?") from error
    lines = (json.loads(line[len(MARK) :]) for line in done.stdout.splitlines() if line.startswith(MARK))
    reports = {line["host"]: parse_report(line["host"], line["addresses"], line["routes"]) for line in lines}
    silent = [host for host in hosts if host not in reports]
    if silent:
        why = next((line for line in done.stderr.splitlines() if line.strip(" -")), "no error was printed")
        raise LauncherError(f"no answer from {', '.join(silent)} about their networks: {why.strip()}")
    return [reports[host] for host in hosts]


def report_this_host() -> HostReport:
    """Return the report of this machine. Raises LauncherError if the command `ip` is missing."""
    try:
        return parse_report(socket.gethostname(), _run_ip("address"), _run_ip("route"))
    except FileNotFoundError as error:
        raise LauncherError("to read this machine's addresses takes the command ip (package iproute2)") from error


def check_interface(
    interface: str, launcher: Launcher, hosts: Sequence[RankBlock], machine: Machine, extra: Sequence[str] = ()
) -> None:
    """Check that the machines of the job have the network interfaces that --interface names.

    If this machine has an interface, the check assumes that all hosts have it. For any other interface this function
    asks the hosts, and blocks until they have answered (see `ask_hosts`).

    Args:
        interface: The value of --interface: names of interfaces, or subnets such as 10.0.0.0/8, separated by commas. A
            subnet stands for the interfaces with an address in the subnet.
        launcher: The mpirun that starts a process on each host.
        hosts: The hosts of the job. If this is empty, the job runs on this machine.
        machine: The properties of this machine.
        extra: Further arguments for mpirun.

    Raises:
        LauncherError: An interface is missing. The message lists the interfaces that the machine has.
    """
    names = [name for _, name in socket.if_nameindex()]
    interfaces: list[str | IPv4Network] = []
    for text in interface.split(","):
        try:
            interfaces.append(IPv4Network(text, strict=False) if "/" in text else text)
        except ValueError as error:
            raise LauncherError(f"--interface {text!r} is not an IPv4 subnet: write it as 10.0.0.0/8") from error
    missing = [each for each in interfaces if isinstance(each, IPv4Network) or each not in names]
    if any(isinstance(each, IPv4Network) for each in missing):
        report = report_this_host()
        missing = [each for each in missing if not report.has(each)]
        if missing and not hosts:
            raise LauncherError(report.describe_missing(missing[0]))
    if missing and not hosts:
        raise LauncherError(f"there is no network interface {missing[0]!r} here: there are {', '.join(names)}")
    for report in ask_hosts(launcher, list(dict.fromkeys(b.host for b in hosts)), machine, extra) if missing else ():
        if missing_there := [each for each in missing if not report.has(each)]:
            raise LauncherError(report.describe_missing(missing_there[0]))


def main() -> None:
    """Print this host's report. The arguments are the names of all hosts, and the rank's number selects its own."""
    rank, _ = launched_as(os.environ) or (0, 1)
    name = sys.argv[1 + rank] if len(sys.argv) > 1 + rank else socket.gethostname()
    report = {"host": name, "addresses": _run_ip("address"), "routes": _run_ip("route")}
    os.write(1, f"{MARK}{json.dumps(report)}\n".encode())


def _run_ip(subject: str) -> list[dict[str, Any]]:
    done = subprocess.run(["ip", "-j", "-4", subject], capture_output=True, text=True, timeout=20, check=True)
    return list(json.loads(done.stdout or "[]"))


if __name__ == "__main__":
    main()

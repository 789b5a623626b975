"""`mpips run --topology`: hosts in the order of their addresses in it, so that rank digits are addresses.

In BCube(n, k) two hosts share a switch of level l if and only if their addresses differ in digit l alone. So with the
subnets of level l left out, the hosts fall into n groups that share no switch: these are the values of digit l.
All is pure but `place_in`, which asks the hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Interface, IPv4Network
from typing import NamedTuple

from collectives.simulator.topology import BCube, FatTree, host_at, parse
from launch.hosts import Host, Placed
from launch.mpirun import Launcher, Machine
from launch.network import HostReport, ask
from mpips.store.options import Options


class MappingError(ValueError):
    """Hosts that do not form the topology."""


class TopologyRequest(NamedTuple):
    """A topology as `simulator.topology.parse` reads it, each level's NIC, and the interface of MPI's addresses."""

    topology: str
    nics: tuple[str, ...]
    interface: str | None


def place_in(
    wanted: TopologyRequest,
    options: Options,
    hosts: Sequence[Host],
    launcher: Launcher,
    machine: Machine,
    extra: Sequence[str] = (),
) -> tuple[Placed, ...]:
    """Blocks of ranks on hosts, in the order of addresses. Blocking: starts one process a host to look at its network.

    ValueError (MappingError) where the job, the hosts or their networks do not fit the topology, with the commands
    that would mend routes; LauncherError where hosts do not answer.
    """
    topology = parse(wanted.topology)
    if not hosts or not all(wanted.nics):
        raise MappingError("--topology needs --hostfile, and --nics with the NIC of each level")
    if options.servers:
        raise MappingError(f"--topology places workers only: with servers={options.servers} use --hostfile alone")
    if options.spares > 0:
        raise MappingError(f"--topology places workers only: with spares={options.spares} use --hostfile alone")
    if options.workers % topology.hosts:
        raise MappingError(f"workers={options.workers} is no multiple of the {topology.hosts} hosts of {topology.name}")
    ordered = order(topology, ask(launcher, [host.name for host in hosts], machine, extra), wanted.nics)
    if isinstance(topology, BCube) and topology.k > 1:
        if wanted.interface is None:
            raise MappingError(f"{topology.name} needs --interface: where each host has the address that MPI uses")
        if commands := missing_routes(topology, ordered, wanted.nics, wanted.interface):
            raise MappingError(
                "traffic would not keep to its levels; as root, run on each host\n" + "\n".join(commands)
            )
    return tuple(Placed(report.host, options.workers // topology.hosts) for report in ordered)


def order(topology: BCube | FatTree, reports: Sequence[HostReport], nics: Sequence[str]) -> list[HostReport]:
    """Reports in the order of addresses; `nics` names the NIC of each level, level 0 first.

    The first host gets address 0. A fat-tree's switches cannot be told from subnets, so its hosts keep the order in
    which they are given: pod, then edge switch, then slot. Raises MappingError.
    """
    if len(reports) != topology.hosts:
        raise MappingError(f"{topology.name} has {topology.hosts} hosts, the host file {len(reports)}")
    if len(nics) != topology.levels:
        named = f"{len(nics)} are named: {', '.join(nics)}"
        raise MappingError(f"{topology.name} has {topology.levels} NICs a host, {named}")
    subnets = [[_subnet(report, nic, level) for report in reports] for level, nic in enumerate(nics)]
    if isinstance(topology, FatTree):
        return list(reports)
    for level, networks in enumerate(subnets):
        _check_sizes(topology, level, networks, reports)
    digits = [_digits(topology, level, subnets, reports) for level in range(topology.k)]
    found: dict[int, HostReport] = {}
    for place, report in enumerate(reports):
        host = host_at(topology, tuple(digits[level][place] for level in reversed(range(topology.k))))
        if host in found:
            raise MappingError(f"{report.host} and {found[host].host} have the same address in {topology.name}")
        found[host] = report
    return [found[host] for host in range(topology.hosts)]


def _subnet(report: HostReport, nic: str, level: int) -> IPv4Network:
    return _address(report, nic, f"the NIC of level {level}").network


def _address(report: HostReport, nic: str, what: str) -> IPv4Interface:
    addresses = report.nics.get(nic)
    if addresses is None:
        raise MappingError(f"{report.host} has no {nic} ({what}); it has {', '.join(report.nics)}")
    if not addresses:
        raise MappingError(f"{nic} of {report.host} ({what}) has no IPv4 address")
    return addresses[0]


def _check_sizes(topology: BCube, level: int, networks: Sequence[IPv4Network], reports: Sequence[HostReport]) -> None:
    for network in networks:
        members = [report.host for report, other in zip(reports, networks) if other == network]
        if len(members) != topology.n:
            raise MappingError(
                f"subnet {network} of level {level} holds {len(members)} hosts ({', '.join(members)}), "
                f"a switch of {topology.name} has {topology.n}"
            )


def _digits(
    topology: BCube, level: int, subnets: Sequence[Sequence[IPv4Network]], reports: Sequence[HostReport]
) -> list[int]:
    """Digit `level` of every host: the number of its group when the subnets of that level are left out."""
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


def missing_routes(topology: BCube, ordered: Sequence[HostReport], nics: Sequence[str], interface: str) -> list[str]:
    """Commands, each with its host, for every address on `interface` that a host does not reach by the right NIC.

    Right is the NIC of the highest level in which the addresses differ, by way of the neighbour who has that digit.
    Empty where all traffic already runs so. Raises MappingError where a host has no address on `interface`.
    """
    commands = []
    vips = [str(_address(report, interface, "MPI's address").ip) for report in ordered]
    for host, report in enumerate(ordered):
        for target, vip in enumerate(vips):
            if target == host:
                continue
            level, neighbour = topology.next_hop(host, target)
            gateway = str(_address(ordered[neighbour], nics[level], f"the NIC of level {level}").ip)
            if report.nic_to(vip) not in ((nics[level], gateway), (nics[level], None)):
                commands.append(f"{report.host}: ip route replace {vip}/32 via {gateway} dev {nics[level]}")
    return commands

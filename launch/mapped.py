"""`mpips run --topology`: hosts are asked about their networks, ordered by address, and share the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from collectives.simulator.topology import BCube, parse
from launch.command import Launcher, Machine
from launch.hosts import Host, Placed
from launch.mapping import MappingError, missing_routes, order
from launch.network import ask
from mpips.options import Options


class Wanted(NamedTuple):
    """A topology as `simulator.topology.parse` reads it, each level's NIC, and the interface of MPI's addresses."""

    topology: str
    nics: tuple[str, ...]
    interface: str | None


def placed(
    wanted: Wanted,
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

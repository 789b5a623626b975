"""From a topology to a plan of what the kernel must be told: hosts, NICs, addresses, routes, switches, rates. Pure.

Every host has data NICs ``d0 .. d(k-1)``, one a level, each in the subnet of its switch; an unshaped management NIC
``m0``; and one address of its own, the *vip*, on ``vip0``, by which MPI knows it. A /32 route per other vip chooses
the NIC, and the neighbour that relays where two hosts share no switch (BCube, in dimension order). Switches are bridges
that neither learn nor flood: the forwarding tables and the neighbours' link addresses are written down here, so that
no frame travels but the job's own, and byte counters can be held against theory.

The keeper imports this, and no NumPy: a process with threads may not make a user namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpips.collectives.simulator.topology import Topology

MOST_HOSTS = 250
MOST_RATE = 2**32  # bytes a second: the rate limiter holds it in 32 bits
MTU = 9000  # at 1500 the cores, not the links, are the bottleneck
BURST = 32 * 1024  # bytes a link may send at once, so that a late timer costs nothing up to 2.6 ms at 100 Mbit/s
QUEUE = 4 * 1024 * 1024  # bytes a link may queue: the windows of 30 senders to one host, at 100 Mbit/s
WINDOW = (128 * 1024, 512 * 1024)  # least and most bytes of a connection under way; in between
WINDOW_SECONDS = 0.01  # what a link carries in this time: with less in its queue, senders share a link evenly

MANAGEMENT_NETWORK = "10.255.0.0/16"
LAUNCHER_ADDRESS = "10.255.255.1"


class LabNic(NamedTuple):
    """One data NIC of a host, and the switch port at the other end of its cable."""

    name: str
    level: int
    address: str  # in dotted form; the subnet is a /24
    mac: str
    rate: int  # bits per second, each direction
    switch: str
    port: str


class LabRoute(NamedTuple):
    """A host's way to another host's vip: through ``gateway``, which has the link address ``mac`` and an address in
    the subnet of ``nic``."""

    vip: str
    gateway: str
    mac: str
    nic: str


class LabHost(NamedTuple):
    """One emulated machine."""

    name: str
    vip: str
    management: str
    nics: tuple[LabNic, ...]
    routes: tuple[LabRoute, ...]


class Trunk(NamedTuple):
    """A cable between two switches."""

    first: str
    first_port: str
    second: str
    second_port: str
    rate: int


class LabPlan(NamedTuple):
    """All that `launch.lab.links` needs."""

    topology: str
    hosts: tuple[LabHost, ...]
    switches: tuple[str, ...]
    trunks: tuple[Trunk, ...]
    forwards: tuple[tuple[str, str, str], ...]
    """The switches' forwarding tables: (switch, port by which frames leave, link address to which they go)."""


def lay_out(topology: Topology) -> LabPlan:
    """Return the plan for a topology (`simulator.topology`) (rates in bytes/s); ValueError where it is too large."""
    if topology.hosts > MOST_HOSTS:
        raise ValueError(f"{topology.name} has {topology.hosts} hosts: a lab has at most {MOST_HOSTS}")
    if len(topology.switches) > MOST_HOSTS:
        raise ValueError(f"{topology.name} has {len(topology.switches)} switches: a lab has at most {MOST_HOSTS}")
    fastest = max(link.rate for link in topology.links)
    if fastest >= MOST_RATE:
        raise ValueError(f"{topology.name} has links of {8e-9 * fastest:g} Gbit/s: a lab's are below 34 Gbit/s")
    nics = _nics(topology)
    first_hops, forwards = _follow_routes(topology, nics)

    vips = [f"10.0.0.{number + 1}" for number in range(topology.hosts)]
    hosts = []
    for number, vip in enumerate(vips):
        own = tuple(nics[number, level] for level in range(topology.levels))
        others = (other for other in range(topology.hosts) if other != number)
        routes = tuple(LabRoute(vips[other], *first_hops[number, other]) for other in others)
        hosts.append(LabHost(f"h{number}", vip, f"10.255.0.{number + 1}", own, routes))
    switches = set(topology.switches)
    trunks = [
        Trunk(a, trunk_port(a, b), b, trunk_port(b, a), round(8 * rate))
        for a, b, _, rate in topology.links
        if a in switches and b in switches and a < b
    ]
    return LabPlan(topology.name, tuple(hosts), tuple(topology.switches), tuple(trunks), forwards)


def _nics(topology: Topology) -> dict[tuple[int, int], LabNic]:
    """Return the NIC of every (host, level); switches joined by trunks share a subnet."""
    subnets = _subnets(topology)
    rates = {(link.source, link.target): link.rate for link in topology.links}
    made = {}
    for host, level, number in topology.nics:
        switch = topology.switches[number]
        address = f"10.{16 + level}.{subnets[switch]}.{host + 1}"
        mac = f"02:6d:00:{level:02x}:{subnets[switch]:02x}:{host + 1:02x}"
        rate = round(8 * rates[f"h{host}", switch])
        made[host, level] = LabNic(f"d{level}", level, address, mac, rate, switch, f"h{host}d{level}")
    return made


def _subnets(topology: Topology) -> dict[str, int]:
    """Return a number for every switch, the same for switches that a cable joins."""
    number = {switch: place for place, switch in enumerate(topology.switches)}
    joined = True
    while joined:
        joined = False
        for link in topology.links:
            if link.source in number and link.target in number and number[link.source] != number[link.target]:
                number[link.source] = number[link.target] = min(number[link.source], number[link.target])
                joined = True
    return number


def trunk_port(switch: str, other: str) -> str:
    """Return the port of ``switch`` that leads to the switch ``other``."""
    return f"{switch}.{other}"


def _follow_routes(
    topology: Topology, nics: dict[tuple[int, int], LabNic]
) -> tuple[dict[tuple[int, int], tuple[str, str, str]], tuple[tuple[str, str, str], ...]]:
    """Walk the route of every pair: (gateway, its link address, NIC) of the first hop, and what the switches on the way
    must know."""
    from mpips.collectives.simulator.topology import hop_links  # NumPy, which the keeper must not have

    hops: dict[tuple[int, int], tuple[str, str, str]] = {}
    tables: dict[tuple[str, str], str] = {}
    for source in range(topology.hosts):
        for target in range(topology.hosts):
            if source == target:
                continue
            path = [topology.links[link] for link in hop_links(topology, source, target)]
            end = next(place for place, link in enumerate(path) if link.target not in topology.switches)
            arrival = nics[int(path[end].target[1:]), path[end].level]
            hops[source, target] = (arrival.address, arrival.mac, f"d{path[0].level}")
            for link in path[1 : end + 1]:
                port = arrival.port if link is path[end] else trunk_port(link.source, link.target)
                if tables.setdefault((link.source, arrival.mac), port) != port:
                    raise ValueError(f"{topology.name}: switch {link.source} has two ways to {arrival.address}")
    return hops, tuple((switch, port, mac) for (switch, mac), port in sorted(tables.items()))


def window(plan: LabPlan) -> int:
    """Return bytes that one connection of the lab may have under way."""
    fastest = max(nic.rate for host in plan.hosts for nic in host.nics)
    return min(max(WINDOW[0], round(WINDOW_SECONDS * fastest / 8)), WINDOW[1])


def find_crossed_nics(plan: LabPlan, hosts: int) -> list[tuple[str, LabNic]]:
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

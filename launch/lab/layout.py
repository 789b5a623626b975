"""From a topology to what the kernel must be told: hosts, NICs, addresses, routes, switches, rates. Pure.

Every host has data NICs ``d0 .. d(k-1)``, one a level, each in the subnet of its switch; an unshaped management NIC
``m0``; and one address of its own, the *vip*, on ``vip0``, by which MPI knows it. A /32 route per other vip chooses
the NIC, and the neighbour that relays where two hosts share no switch (BCube, in dimension order). Switches are bridges
that neither learn nor flood: the forwarding tables and the neighbours' link addresses are written down here, so that
no frame travels but the job's own, and byte counters can be held against theory.
"""

from __future__ import annotations

from collectives.simulator.topology import Topology, hop_links
from launch.lab.plan import ForwardingEntry, LabHost, LabNic, LabPlan, LabRoute, Trunk

MOST_HOSTS = 250
MOST_RATE = 2**32  # bytes a second: the rate limiter holds it in 32 bits


def lay_out(topology: Topology) -> LabPlan:
    """The plan for a topology (`simulator.topology`) (rates in bytes/s); ValueError where it is too large."""
    if topology.hosts > MOST_HOSTS:
        raise ValueError(f"{topology.name} has {topology.hosts} hosts: a lab has at most {MOST_HOSTS}")
    if len(topology.switches) > MOST_HOSTS:
        raise ValueError(f"{topology.name} has {len(topology.switches)} switches: a lab has at most {MOST_HOSTS}")
    fastest = max(link.rate for link in topology.links)
    if fastest >= MOST_RATE:
        raise ValueError(f"{topology.name} has links of {8e-9 * fastest:g} Gbit/s: a lab's are below 34 Gbit/s")
    nics = _nics(topology)
    first_hops, forwards = _follow_routes(topology, nics)

    def host(number: int) -> LabHost:
        own = tuple(nics[number, level] for level in range(topology.levels))
        others = (other for other in range(topology.hosts) if other != number)
        routes = tuple(LabRoute(_vip(other), *first_hops[number, other]) for other in others)
        return LabHost(f"h{number}", _vip(number), f"10.255.0.{number + 1}", own, routes)

    hosts = tuple(map(host, range(topology.hosts)))
    return LabPlan(topology.name, hosts, tuple(topology.switches), _trunks(topology), forwards)


def _vip(host: int) -> str:
    return f"10.0.0.{host + 1}"


def _nics(topology: Topology) -> dict[tuple[int, int], LabNic]:
    """The NIC of every (host, level); switches joined by trunks share a subnet."""
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
    """A number for every switch, the same for switches that a cable joins."""
    number = {switch: place for place, switch in enumerate(topology.switches)}
    joined = True
    while joined:
        joined = False
        for link in topology.links:
            if link.source in number and link.target in number and number[link.source] != number[link.target]:
                number[link.source] = number[link.target] = min(number[link.source], number[link.target])
                joined = True
    return number


def _trunks(topology: Topology) -> tuple[Trunk, ...]:
    switches = set(topology.switches)
    between = [link for link in topology.links if link.source in switches and link.target in switches]
    once = [link for link in between if link.source < link.target]
    return tuple(Trunk(a, trunk_port(a, b), b, trunk_port(b, a), round(8 * rate)) for a, b, _, rate in once)


def trunk_port(switch: str, other: str) -> str:
    """The port of ``switch`` that leads to the switch ``other``."""
    return f"{switch}.{other}"


def _follow_routes(
    topology: Topology, nics: dict[tuple[int, int], LabNic]
) -> tuple[dict[tuple[int, int], tuple[str, str, str]], tuple[ForwardingEntry, ...]]:
    """Walk the route of every pair: (gateway, its link address, NIC) of the first hop, and what the switches on the way
    must know."""
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
    return hops, tuple(ForwardingEntry(switch, port, mac) for (switch, mac), port in sorted(tables.items()))

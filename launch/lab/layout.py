"""Turn a topology into the plan of a lab: hosts, NICs, addresses, routes, switches and rates. All functions are pure.

In a topology with k levels each host is connected to k switches, one of each level. So each host has k data NICs, `d0`
to `d(k-1)`, each in the subnet of its switch. Each host also has a management NIC `m0` without a rate limit. On its
interface `vip0` the host has a *vip* (virtual IP address), which belongs to no NIC. MPI uses the vips. Each host has a
/32 route to the vip of every other host. The route chooses the NIC. If the two hosts share no switch, the route also
chooses the neighbour that relays the packets, because in BCube hosts relay packets.

Switches are bridges that neither learn addresses nor flood frames. Instead the plan has the switches' forwarding
tables, and the MAC addresses of each host's neighbours. So the network carries only frames of the job, and the byte
counters can be compared with theory.

The keeper, the process that owns a lab, imports this module. So the module must not import NumPy: NumPy starts threads,
and a process with threads cannot make a user namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpips.collectives.simulator.topology import Topology

MOST_HOSTS = 250
# The rate limiter (tbf) stores a rate, in bytes per second, in 32 bits.
MOST_RATE = 2**32
# The size of a packet in bytes. With the usual 1500 bytes, the machine's cores would be the bottleneck instead of the
# links.
MTU = 9000
# Bytes that a link may send at once. At 100 Mbit/s they take 2.6 ms, so a timer that is less than 2.6 ms late costs no
# throughput.
BURST = 32 * 1024
# Bytes that a link may queue. At 100 Mbit/s this is enough for the windows of 30 senders to one host.
QUEUE = 4 * 1024 * 1024
# A TCP connection may have as many bytes in flight as a link carries in WINDOW_SECONDS, within these two limits. The
# window keeps queues short, so that senders share a link evenly.
WINDOW = (128 * 1024, 512 * 1024)
WINDOW_SECONDS = 0.01

MANAGEMENT_NETWORK = "10.255.0.0/16"
LAUNCHER_ADDRESS = "10.255.255.1"


class LabNic(NamedTuple):
    """One data NIC of a host, and the switch port at the other end of its cable."""

    name: str
    level: int
    # the IPv4 address; its subnet is a /24
    address: str
    mac: str
    # bits per second in each direction
    rate: int
    switch: str
    port: str


class LabRoute(NamedTuple):
    """A host's route to the vip of another host."""

    vip: str
    # the IPv4 address of the next host on the way, in the subnet of `nic`
    gateway: str
    # MAC address of the gateway
    mac: str
    nic: str


class LabHost(NamedTuple):
    """One emulated machine."""

    name: str
    # the address that MPI uses
    vip: str
    # the address in the management network
    management: str
    nics: tuple[LabNic, ...]
    routes: tuple[LabRoute, ...]


class Trunk(NamedTuple):
    """A cable between two switches."""

    first: str
    first_port: str
    second: str
    second_port: str
    # bits per second in each direction
    rate: int


class LabPlan(NamedTuple):
    """The plan of a lab, which `launch.lab.links` builds."""

    topology: str
    hosts: tuple[LabHost, ...]
    switches: tuple[str, ...]
    trunks: tuple[Trunk, ...]
    # entries of the forwarding tables: (switch, port through which frames leave, MAC address of the receiver)
    forwards: tuple[tuple[str, str, str], ...]


def lay_out(topology: Topology) -> LabPlan:
    """Return the plan of a lab with this topology. Raises ValueError if the topology is too large or too fast."""
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
        own_nics = tuple(nics[number, level] for level in range(topology.levels))
        others = (other for other in range(topology.hosts) if other != number)
        routes = tuple(LabRoute(vips[other], *first_hops[number, other]) for other in others)
        hosts.append(LabHost(f"h{number}", vip, f"10.255.0.{number + 1}", own_nics, routes))
    switches = set(topology.switches)
    trunks = [
        Trunk(a, trunk_port(a, b), b, trunk_port(b, a), round(8 * rate))
        for a, b, _, rate in topology.links
        if a in switches and b in switches and a < b
    ]
    return LabPlan(topology.name, tuple(hosts), tuple(topology.switches), tuple(trunks), forwards)


def _nics(topology: Topology) -> dict[tuple[int, int], LabNic]:
    """Return a dict of the data NICs of all hosts: (host number, level) -> NIC."""
    subnets = _subnets(topology)
    rates = {(link.source, link.target): link.rate for link in topology.links}
    lab_nics = {}
    for host, level, number in topology.nics:
        switch = topology.switches[number]
        address = f"10.{16 + level}.{subnets[switch]}.{host + 1}"
        mac = f"02:6d:00:{level:02x}:{subnets[switch]:02x}:{host + 1:02x}"
        rate = round(8 * rates[f"h{host}", switch])
        lab_nics[host, level] = LabNic(f"d{level}", level, address, mac, rate, switch, f"h{host}d{level}")
    return lab_nics


def _subnets(topology: Topology) -> dict[str, int]:
    """Return a dict: switch -> number of its subnet. Switches that are connected by a cable share a subnet."""
    number = {switch: index for index, switch in enumerate(topology.switches)}
    joined = True
    while joined:
        joined = False
        for link in topology.links:
            if link.source in number and link.target in number and number[link.source] != number[link.target]:
                number[link.source] = number[link.target] = min(number[link.source], number[link.target])
                joined = True
    return number


def trunk_port(switch: str, other: str) -> str:
    """Return the name of the port of `switch` that leads to the switch `other`."""
    return f"{switch}.{other}"


def _follow_routes(
    topology: Topology, nics: dict[tuple[int, int], LabNic]
) -> tuple[dict[tuple[int, int], tuple[str, str, str]], tuple[tuple[str, str, str], ...]]:
    """Follow the route between every pair of hosts.

    Returns:
        A dict of the first hops: (source, target) -> (IPv4 address of the gateway, its MAC address, the source's NIC).
        The second value is `LabPlan.forwards`, the forwarding tables of the switches on the routes.
    """
    # Imported late, because the simulator imports NumPy (see the docstring of this module).
    from mpips.collectives.simulator.topology import hop_links

    hops: dict[tuple[int, int], tuple[str, str, str]] = {}
    tables: dict[tuple[str, str], str] = {}
    for source in range(topology.hosts):
        for target in range(topology.hosts):
            if source == target:
                continue
            path = [topology.links[link] for link in hop_links(topology, source, target)]
            end = next(index for index, link in enumerate(path) if link.target not in topology.switches)
            arrival = nics[int(path[end].target[1:]), path[end].level]
            hops[source, target] = (arrival.address, arrival.mac, f"d{path[0].level}")
            for link in path[1 : end + 1]:
                port = arrival.port if link is path[end] else trunk_port(link.source, link.target)
                if tables.setdefault((link.source, arrival.mac), port) != port:
                    raise ValueError(f"{topology.name}: switch {link.source} has two ways to {arrival.address}")
    return hops, tuple((switch, port, mac) for (switch, mac), port in sorted(tables.items()))


def choose_window(plan: LabPlan) -> int:
    """Return how many bytes a TCP connection in the lab may have in flight."""
    fastest = max(nic.rate for host in plan.hosts for nic in host.nics)
    return min(max(WINDOW[0], round(WINDOW_SECONDS * fastest / 8)), WINDOW[1])


def find_crossed_nics(plan: LabPlan, hosts: int) -> list[tuple[str, LabNic]]:
    """Return the (host, NIC) pairs that carry traffic between the first `hosts` hosts.

    NICs of other hosts that only relay this traffic are included.
    """
    owners = {nic.address: (host, nic) for host in plan.hosts for nic in host.nics}
    crossed = {}
    for source in plan.hosts[:hosts]:
        for target in plan.hosts[:hosts]:
            at = source
            while at is not target:
                route = next(route for route in at.routes if route.vip == target.vip)
                leaves = next(nic for nic in at.nics if nic.name == route.nic)
                crossed[at.name, leaves.name] = leaves
                at, arrives = owners[route.gateway]
                crossed[at.name, arrives.name] = arrives
    return [(host, nic) for (host, _), nic in sorted(crossed.items())]

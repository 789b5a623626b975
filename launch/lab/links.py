"""Build the emulated network of a lab: bridges, cables, routes, and rate limits (tbf).

Needs pyroute2. Only the keeper, the process that owns a lab, uses this module. The bridges are in the keeper's own
network namespace, the *outer* namespace. Each host has its own process, which holds the namespaces of the host.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.rtnl import ndmsg

from mpips.launch.lab import kernel
from mpips.launch.lab.layout import BURST, LAUNCHER_ADDRESS, MTU, QUEUE, LabHost, LabPlan

MANAGEMENT_BRIDGE = "m0"

# Settings of the kernel. They make measurements comparable to a real network (docs/reference/lab.md has the reasons),
# and make TCP notice a dead peer.
SETTINGS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/conf/default/send_redirects": "0",
    "net/ipv4/conf/all/accept_redirects": "0",
    "net/ipv4/conf/default/accept_redirects": "0",
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    # TCP closes a connection if the other side has not answered for about 13 s.
    "net/ipv4/tcp_retries2": "5",
    "net/ipv4/tcp_syn_retries": "3",
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}


class Links:
    """Configures the network interfaces of one namespace, through a netlink socket.

    Callers identify an interface by its name.
    """

    def __init__(self) -> None:
        self.netlink = IPRoute()
        self._indices: dict[str, int] = {}

    def index(self, name: str) -> int:
        """Return the kernel's number of an interface."""
        if name not in self._indices:
            self._indices[name] = self.netlink.link_lookup(ifname=name)[0]
        return self._indices[name]

    def set(self, name: str, **settings: Any) -> None:
        self.netlink.link("set", index=self.index(name), **settings)

    def add_bridge(self, name: str) -> None:
        self.netlink.link("add", ifname=name, kind="bridge", br_mcast_snooping=0)
        self.set(name, mtu=MTU, state="up")

    def add_address(self, name: str, address: str, prefix: int) -> None:
        self.netlink.addr("add", index=self.index(name), address=address, prefixlen=prefix)

    def shape(self, name: str, rate: int) -> None:
        """Limit the rate at which an interface sends to `rate` bits per second."""
        self.netlink.tc("replace", "tbf", self.index(name), rate=rate // 8, burst=BURST, limit=QUEUE)

    def plug(self, port: str, bridge: str, *, quiet: bool) -> None:
        """Make `port` a port of `bridge`. A quiet port neither learns addresses nor floods frames."""
        self.set(port, master=self.index(bridge), mtu=MTU, state="up")
        if quiet:
            flags = {"learning": 0, "unicast_flood": 0, "mcast_flood": 0, "bcast_flood": 0}
            self.netlink.brport("set", index=self.index(port), **flags)

    def forward(self, port: str, mac: str) -> None:
        """Add a permanent entry to the forwarding table of a bridge: it sends frames for `mac` through `port`."""
        state = ndmsg.states["noarp"] | ndmsg.states["reachable"]
        self.netlink.fdb("append", ifindex=self.index(port), lladdr=mac, state=state, flags=ndmsg.flags["master"])


def read_counters(links: Links) -> dict[str, dict[str, int]]:
    """Return the counters of a host's interfaces.

    A dict maps each interface to its bytes "sent" and "received", its packets "dropped", and "up" (0 or 1).
    """
    counters = {}
    for link in links.netlink.get_links():
        stats = link.get_attr("IFLA_STATS64")
        moved = {"sent": stats["tx_bytes"], "received": stats["rx_bytes"], "dropped": stats["tx_dropped"]}
        counters[link.get_attr("IFLA_IFNAME")] = moved | {"up": link["flags"] & 1}
    return counters


@contextmanager
def network_namespace(process: int) -> Iterator[None]:
    """Context manager that moves this process into the network namespace of `process`.

    Sockets that are opened in the block stay in that namespace.
    """
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    target = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
    try:
        kernel.enter(target, kernel.NEW_NET)
        yield
    finally:
        kernel.enter(own, kernel.NEW_NET)
        os.close(own)
        os.close(target)


def apply_settings(window: int) -> None:
    """Apply `SETTINGS` to this process's network namespace, and let each TCP connection have `window` bytes in flight.

    Settings that this kernel does not have are left out.
    """
    buffers = f"4096 {min(window, 131072)} {window}"
    for name, value in {**SETTINGS, "net/ipv4/tcp_rmem": buffers, "net/ipv4/tcp_wmem": buffers}.items():
        path = f"/proc/sys/{name}"
        if os.path.exists(path):
            with open(path, "w") as file:
                file.write(value)


def build(plan: LabPlan, processes: list[int]) -> tuple[Links, list[Links]]:
    """Build the network of a lab. `processes[i]` is the pid of the process that holds the namespaces of host i.

    Returns:
        A `Links` for the outer namespace, and a list with a `Links` for each host.
    """
    outer = Links()
    outer.set("lo", state="up")
    for bridge in (MANAGEMENT_BRIDGE, *plan.switches):
        outer.add_bridge(bridge)
    outer.add_address(MANAGEMENT_BRIDGE, LAUNCHER_ADDRESS, 16)
    hosts = []
    for host, process in zip(plan.hosts, processes, strict=True):
        with network_namespace(process):
            hosts.append(Links())
        _cable(outer, host, process)
        _configure(hosts[-1], host)
    for trunk in plan.trunks:
        outer.netlink.link("add", ifname=trunk.first_port, kind="veth", peer={"ifname": trunk.second_port})
        for port, switch in ((trunk.first_port, trunk.first), (trunk.second_port, trunk.second)):
            outer.plug(port, switch, quiet=True)
            outer.shape(port, trunk.rate)
    for _, port, mac in plan.forwards:
        outer.forward(port, mac)
    return outer, hosts


def _cable(outer: Links, host: LabHost, process: int) -> None:
    """Connect each NIC of a host with its switch, and limit the rate of the switch's port.

    `_configure` limits the rate of the NIC itself.
    """
    for nic in host.nics:
        peer = {"ifname": nic.name, "net_ns_pid": process, "address": nic.mac}
        outer.netlink.link("add", ifname=nic.port, kind="veth", peer=peer)
        outer.plug(nic.port, nic.switch, quiet=True)
        outer.shape(nic.port, nic.rate)
    port = f"{host.name}m0"
    outer.netlink.link("add", ifname=port, kind="veth", peer={"ifname": "m0", "net_ns_pid": process})
    outer.plug(port, MANAGEMENT_BRIDGE, quiet=False)


def _configure(links: Links, host: LabHost) -> None:
    """Set the addresses, neighbours, routes and rates of a host."""
    links.set("lo", state="up")
    # The vip belongs to a bridge without ports. An interface of kind "dummy" would serve as well, but some kernels do
    # not have this kind.
    links.add_bridge("vip0")
    links.add_address("vip0", host.vip, 32)
    links.set("m0", mtu=MTU, state="up")
    links.add_address("m0", host.management, 16)
    for nic in host.nics:
        # Send single frames. The kernel would bundle up to 64 KiB, which takes 5 ms at each hop at 100 Mbit/s.
        links.set(nic.name, mtu=MTU, gso_max_segs=1, state="up")
        links.add_address(nic.name, nic.address, 24)
        links.shape(nic.name, nic.rate)
    add_neighbours_and_routes(links, host, [nic.name for nic in host.nics])


def add_neighbours_and_routes(links: Links, host: LabHost, nics: Collection[str]) -> None:
    """Add the neighbours and routes that use the given NICs of a host. These NICs must be up.

    When a NIC goes down, the kernel forgets the NIC's neighbours and routes.
    """
    routes = [each for each in host.routes if each.nic in nics]
    for gateway, mac, nic in {(each.gateway, each.mac, each.nic) for each in routes}:
        links.netlink.neigh("replace", dst=gateway, lladdr=mac, ifindex=links.index(nic), state="permanent")
    for route in routes:
        where = {"gateway": route.gateway, "oif": links.index(route.nic), "prefsrc": host.vip}
        links.netlink.route("replace", dst=f"{route.vip}/32", **where)

"""The emulated network: bridges, cables, routes, and the rate limit (tbf) that keeps a NIC at its 100 Mbit/s.

Needs pyroute2. The caller is the keeper: it sits in the outer namespaces (bridges, launcher) and has one pausing
process per host.
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

# What decides whether figures are honest (docs/reference/lab.md says why), and whether a dead peer is noticed.
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
    "net/ipv4/tcp_retries2": "5",  # about 13 s without an answer, then the connection is dead
    "net/ipv4/tcp_syn_retries": "3",
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}


class Links:
    """One namespace's netlink socket, links addressed by name."""

    def __init__(self) -> None:
        self.netlink = IPRoute()
        self._indices: dict[str, int] = {}

    def index(self, name: str) -> int:
        """Return the number the kernel gave to the link ``name``."""
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
        """Let ``name`` send at most ``rate`` bits per second, from now on."""
        self.netlink.tc("replace", "tbf", self.index(name), rate=rate // 8, burst=BURST, limit=QUEUE)

    def plug(self, port: str, bridge: str, *, quiet: bool) -> None:
        """Make ``port`` a port of ``bridge``; a quiet one neither learns nor floods."""
        self.set(port, master=self.index(bridge), mtu=MTU, state="up")
        if quiet:
            flags = {"learning": 0, "unicast_flood": 0, "mcast_flood": 0, "bcast_flood": 0}
            self.netlink.brport("set", index=self.index(port), **flags)

    def forward(self, port: str, mac: str) -> None:
        """Let the bridge of ``port`` send frames for ``mac`` out by it, for good."""
        state = ndmsg.states["noarp"] | ndmsg.states["reachable"]
        self.netlink.fdb("append", ifindex=self.index(port), lladdr=mac, state=state, flags=ndmsg.flags["master"])


def counters(links: Links) -> dict[str, dict[str, int]]:
    """Return bytes through every link of a host, what its shaping queue dropped, and whether it is up."""
    found = {}
    for link in links.netlink.get_links():
        stats = link.get_attr("IFLA_STATS64")
        moved = {"sent": stats["tx_bytes"], "received": stats["rx_bytes"], "dropped": stats["tx_dropped"]}
        found[link.get_attr("IFLA_IFNAME")] = moved | {"up": link["flags"] & 1}
    return found


@contextmanager
def inside(process: int) -> Iterator[None]:
    """Be in the network namespace of ``process`` for a while (sockets opened there stay there)."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
    try:
        kernel.enter(there, kernel.NEW_NET)
        yield
    finally:
        kernel.enter(here, kernel.NEW_NET)
        os.close(here)
        os.close(there)


def apply_settings(window: int) -> None:
    """Write `SETTINGS` for this process's network namespace, leaving out what this kernel does not have; a connection
    may have `window` bytes under way."""
    buffers = f"4096 {min(window, 131072)} {window}"
    for name, value in {**SETTINGS, "net/ipv4/tcp_rmem": buffers, "net/ipv4/tcp_wmem": buffers}.items():
        path = f"/proc/sys/{name}"
        if os.path.exists(path):
            with open(path, "w") as file:
                file.write(value)


def build(plan: LabPlan, processes: list[int]) -> tuple[Links, list[Links]]:
    """Build the network; ``processes[i]`` holds those of host i. Returns the outer namespace's socket and theirs."""
    outer = Links()
    outer.set("lo", state="up")
    for bridge in (MANAGEMENT_BRIDGE, *plan.switches):
        outer.add_bridge(bridge)
    outer.add_address(MANAGEMENT_BRIDGE, LAUNCHER_ADDRESS, 16)
    hosts = []
    for host, process in zip(plan.hosts, processes, strict=True):
        with inside(process):
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
    """Plug every NIC of ``host`` into its switch, the switch's end shaped too."""
    for nic in host.nics:
        peer = {"ifname": nic.name, "net_ns_pid": process, "address": nic.mac}
        outer.netlink.link("add", ifname=nic.port, kind="veth", peer=peer)
        outer.plug(nic.port, nic.switch, quiet=True)
        outer.shape(nic.port, nic.rate)
    port = f"{host.name}m0"
    outer.netlink.link("add", ifname=port, kind="veth", peer={"ifname": "m0", "net_ns_pid": process})
    outer.plug(port, MANAGEMENT_BRIDGE, quiet=False)


def _configure(links: Links, host: LabHost) -> None:
    """Set addresses, neighbours, routes and rates, from inside the host."""
    links.set("lo", state="up")
    links.add_bridge("vip0")  # no ports: a place for the vip (this and other kernels lack "dummy")
    links.add_address("vip0", host.vip, 32)
    links.set("m0", mtu=MTU, state="up")
    links.add_address("m0", host.management, 16)
    for nic in host.nics:
        # one frame at a time: a 64 KiB bundle would wait 5 ms at every hop, at 100 Mbit/s
        links.set(nic.name, mtu=MTU, gso_max_segs=1, state="up")
        links.add_address(nic.name, nic.address, 24)
        links.shape(nic.name, nic.rate)
    add_neighbours_and_routes(links, host, [nic.name for nic in host.nics])


def add_neighbours_and_routes(links: Links, host: LabHost, nics: Collection[str]) -> None:
    """Add what the kernel forgets when a NIC goes down, for ``nics``, which must be up."""
    routes = [each for each in host.routes if each.nic in nics]
    for gateway, mac, nic in {(each.gateway, each.mac, each.nic) for each in routes}:
        links.netlink.neigh("replace", dst=gateway, lladdr=mac, ifindex=links.index(nic), state="permanent")
    for route in routes:
        where = {"gateway": route.gateway, "oif": links.index(route.nic), "prefsrc": host.vip}
        links.netlink.route("replace", dst=f"{route.vip}/32", **where)

"""The records of a plan: what the kernel must be told to emulate a cluster. `launch.lab.layout` fills them in.

The keeper imports this and no NumPy: a process with threads may not make a user namespace.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

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
    """How a host reaches another host's vip: through ``gateway``, which has the link address ``mac`` and an address in
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


class ForwardingEntry(NamedTuple):
    """A line of a switch's forwarding table: frames for ``mac`` leave by ``port``."""

    switch: str
    port: str
    mac: str


class LabPlan(NamedTuple):
    """All that `launch.lab.network` needs."""

    topology: str
    hosts: tuple[LabHost, ...]
    switches: tuple[str, ...]
    trunks: tuple[Trunk, ...]
    forwards: tuple[ForwardingEntry, ...]


def encode(plan: LabPlan) -> str:
    """The plan as one line of JSON."""
    return msgspec.json.encode(plan).decode()


def decode(text: str) -> LabPlan:
    """The plan that `encode` wrote."""
    return msgspec.json.decode(text, type=LabPlan)


def window(plan: LabPlan) -> int:
    """Bytes that one connection of the lab may have under way."""
    fastest = max(nic.rate for host in plan.hosts for nic in host.nics)
    return min(max(WINDOW[0], round(WINDOW_SECONDS * fastest / 8)), WINDOW[1])

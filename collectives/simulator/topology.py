"""Networks (star, fat-tree, BCube): their hosts, switches and links, and the links that a message crosses.

    star(n)       n hosts on one switch. A star also models any network that never blocks.
    fattree(k)    k^3/4 hosts under k-port switches in three layers: k pods, each with k/2 edge switches and k/2
                  aggregation switches, and (k/2)^2 core switches (Al-Fares, Loukissas, Vahdat, 2008).
    bcube(n, k)   n^k hosts with k NICs each. By its NIC of level l, a host shares a switch with the n-1 hosts whose
                  addresses differ only in digit l (Guo et al., 2009; BML paper, section 3.1). star(n) has the links of
                  bcube(n, 1).

The objects serve the simulator (links and routes), the launcher (the address of a rank) and the emulated cluster (the
switch of each NIC). Hosts have the numbers 0 .. hosts-1, and switches 0 .. len(switches)-1. Links also have numbers,
and a direction: a cable is two links, one for each direction. Methods that take an `Index` accept an int or an array.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.schedule.model import NOBODY, Index, where

# bytes a second of a 10 Gbit/s link; the default rate
TEN_GIGABIT = 1.25e9
MOST_HOSTS = 1 << 20


class Nic(NamedTuple):
    """A network card: its host, its level (0 if hosts have only one card), and the switch to which it is connected."""

    host: int
    level: int
    switch: int


class NetworkLink(NamedTuple):
    """One direction of a cable, with its rate in bytes a second. Each end is a host, such as "h3", or a switch."""

    source: str
    target: str
    level: int
    rate: float


@dataclass(frozen=True)
class BCube:
    """The network BCube(n, k), which has n^k hosts, or a star, which is BCube(n, 1) under another name.

    Attributes:
        n: The number of ports of each switch. In a star, which has only one switch, this is also the number of hosts.
        k: The number of levels. Each host has a NIC for each level. A star has one level.
        rate: The rate of every link in bytes a second, or a tuple with the rate of each level.
        shape: "bcube" or "star". It decides only what the network is called. Make stars by `star`.
    """

    n: int
    k: int
    rate: float | tuple[float, ...] = TEN_GIGABIT
    shape: str = "bcube"

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise ValueError(f"bcube:{self.n},{self.k}: needs n >= 1 ports and k >= 1 levels")
        if isinstance(self.rate, tuple) and len(self.rate) != self.k:
            raise ValueError(f"{self.name} has {self.k} levels, but {len(self.rate)} rates are given")

    @property
    def name(self) -> str:
        return f"star:{self.n}" if self.shape == "star" else f"bcube:{self.n},{self.k}"

    @property
    def radices(self) -> tuple[int, ...]:
        return (self.n,) * self.k

    @property
    def hosts(self) -> int:
        return self.n**self.k

    @property
    def levels(self) -> int:
        return self.k

    @cached_property
    def switches(self) -> tuple[str, ...]:
        return tuple(f"s{level}-{i}" for level in range(self.k) for i in range(self.n ** (self.k - 1)))

    @cached_property
    def nics(self) -> tuple[Nic, ...]:
        return tuple(Nic(h, level, self.switch(h, level)) for h in range(self.hosts) for level in range(self.k))

    @cached_property
    def links(self) -> tuple[NetworkLink, ...]:
        rates = self._rates
        up = [NetworkLink(f"h{nic.host}", self.switches[nic.switch], nic.level, rates[nic.level]) for nic in self.nics]
        return tuple(up + [NetworkLink(link.target, link.source, link.level, link.rate) for link in up])

    @property
    def link_rates(self) -> NDArray[np.float64]:
        return np.tile(np.array(self._rates, dtype=np.float64), 2 * self.hosts)

    def switch(self, host: Index, level: int) -> Index:
        """Return the number of the switch of a host's NIC at a level.

        Switches of lower levels come first. Within a level, the number is the host's address without the digit of that
        level.
        """
        above, below = host // self.n ** (level + 1), host % self.n**level
        return level * self.n ** (self.k - 1) + above * self.n**level + below

    def next_hop(self, host: int, target: int) -> tuple[int, int]:
        """Return the level and the neighbour to which a host sends a message for `target`.

        Each hop corrects one digit of the address, from the highest level down. The neighbour is either `target` itself
        or a relay.
        """
        for level in reversed(range(self.k)):
            own_digit, target_digit = self._digit(host, level), self._digit(target, level)
            if own_digit != target_digit:
                return level, host + (target_digit - own_digit) * self.n**level
        raise ValueError(f"host {host} needs no hop to itself")

    def route(self, source: Index, target: Index) -> tuple[Index, ...]:
        links: list[Index] = []
        at = source
        for level in reversed(range(self.k)):
            step = (self._digit(target, level) - self._digit(at, level)) * self.n**level
            after = at + step
            links.append(where(step != 0, at * self.k + level, NOBODY))
            links.append(where(step != 0, (self.hosts + after) * self.k + level, NOBODY))
            at = after
        return tuple(links)

    @property
    def _rates(self) -> tuple[float, ...]:
        return self.rate if isinstance(self.rate, tuple) else (self.rate,) * self.k

    def _digit(self, host: Index, level: int) -> Index:
        return host // self.n**level % self.n


@dataclass(frozen=True)
class FatTree:
    """A fat-tree of k-port switches. Link levels: 0 host-edge, 1 edge-aggregation, 2 aggregation-core.

    A message climbs only as far as it must. The target's slot selects the aggregation switch, and the target's edge
    switch selects the core, as in the two-level tables of the fat-tree paper. So all-to-all traffic loads every link
    alike.

    Attributes:
        k: The number of ports of each switch.
        rate: The rate of every link in bytes a second.
    """

    k: int
    rate: float = TEN_GIGABIT

    def __post_init__(self) -> None:
        if self.k < 2 or self.k % 2:
            raise ValueError(f"fattree:{self.k}: the number of ports must be even and at least 2")

    @property
    def name(self) -> str:
        return f"fattree:{self.k}"

    @property
    def radices(self) -> tuple[int, ...]:
        return (self.k, self.k // 2, self.k // 2)

    @property
    def hosts(self) -> int:
        return self.k**3 // 4

    @property
    def levels(self) -> int:
        return 1

    @cached_property
    def switches(self) -> tuple[str, ...]:
        half = self.k // 2
        inside = [(pod, i) for pod in range(self.k) for i in range(half)]
        edges, aggregations = ([f"{kind}{pod}-{i}" for pod, i in inside] for kind in ("e", "a"))
        return tuple(edges + aggregations + [f"c{i}-{j}" for i in range(half) for j in range(half)])

    @cached_property
    def nics(self) -> tuple[Nic, ...]:
        return tuple(Nic(host, 0, host // (self.k // 2)) for host in range(self.hosts))

    @cached_property
    def links(self) -> tuple[NetworkLink, ...]:
        half = self.k // 2
        cables = [(f"h{nic.host}", self.switches[nic.switch], 0) for nic in self.nics]
        pods = [(pod, i, j) for pod in range(self.k) for i in range(half) for j in range(half)]
        cables += [(f"e{pod}-{i}", f"a{pod}-{j}", 1) for pod, i, j in pods]
        cables += [(f"a{pod}-{i}", f"c{i}-{j}", 2) for pod, i, j in pods]
        up = [NetworkLink(source, target, level, self.rate) for source, target, level in cables]
        return tuple(up + [NetworkLink(link.target, link.source, link.level, link.rate) for link in up])

    @property
    def link_rates(self) -> NDArray[np.float64]:
        return np.full(6 * self.hosts, self.rate)

    def route(self, source: Index, target: Index) -> tuple[Index, ...]:
        half, hosts = self.k // 2, self.hosts
        pod, slot, edge = target // half // half, target % half, target // half % half
        # far: source and target have different edge switches; farther: they are in different pods
        far = source // half != target // half
        farther = source // half // half != pod
        up_edge, down_edge = source // half * half + slot, target // half * half + slot
        up_core, down_core = (source // half // half * half + slot) * half + edge, (pod * half + slot) * half + edge
        differ = source != target
        return (
            where(differ, source, NOBODY),
            where(far, hosts + up_edge, NOBODY),
            where(farther, 2 * hosts + up_core, NOBODY),
            where(farther, 5 * hosts + down_core, NOBODY),
            where(far, 4 * hosts + down_edge, NOBODY),
            where(differ, 3 * hosts + target, NOBODY),
        )


# A network. Both classes have these members:
#   name                    the name that `parse` reads, for example "bcube:3,2"
#   hosts                   the number of hosts
#   radices                 the radix of each digit of an address, most significant digit first
#   levels                  the number of NICs of each host
#   nics                    all NICs, sorted by host, then by level
#   switches                the names of the switches
#   links                   the links, in the order of their numbers
#   link_rates              the rate of each link in bytes a second
#   route(source, target)   the links from one host to another, in order. Shorter routes have NOBODY in place of links.
Topology: TypeAlias = BCube | FatTree


def address(topology: Topology, host: int) -> tuple[int, ...]:
    """Return the address of a host: digits (v_{k-1}, ..., v_0) in a BCube, (pod, edge, slot) in a fat-tree."""
    digits = []
    for radix in reversed(topology.radices):
        host, digit = divmod(host, radix)
        digits.append(digit)
    return tuple(reversed(digits))


def host_at(topology: Topology, digits: tuple[int, ...]) -> int:
    """Return the host with this address. The inverse of `address`."""
    host = 0
    for radix, digit in zip(topology.radices, digits, strict=True):
        host = host * radix + digit
    return host


def hop_links(topology: Topology, source: int, target: int) -> list[int]:
    """Return the numbers of the links from one host to another."""
    return [int(link) for link in topology.route(source, target) if link != NOBODY]


def star(n: int, rate: float = TEN_GIGABIT) -> BCube:
    """Return a network of n hosts with one NIC each, on one switch that never blocks."""
    return BCube(n, 1, rate, "star")


RATES = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def parse_rate(text: str) -> float:
    """Return the bytes a second of a rate such as "100mbit" or "1.5gbit".

    Raises:
        ValueError: The text is not a rate. The error says how to write one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    if not match or float(match[1]) == 0:
        raise ValueError(f"unknown rate {text!r}: write a number and kbit, mbit or gbit, as 100mbit")
    return float(match[1]) * RATES[match[2]] / 8


def parse(text: str, rate: float = TEN_GIGABIT) -> Topology:
    """Return the network that a text such as "star:9", "bcube:3,2" or "fattree:4" describes.

    Args:
        text: The network, as text.
        rate: The rate of every link in bytes a second.

    Raises:
        ValueError: The text is not a network, or the network has more than `MOST_HOSTS` hosts. The error says how to
            write a network.
    """
    kind, _, rest = text.strip().lower().partition(":")
    numbers = [int(part) if part.strip().isdecimal() else -1 for part in rest.split(",")]
    if (kind, len(numbers)) not in (("star", 1), ("fattree", 1), ("bcube", 2)) or min(numbers) < 1:
        raise ValueError(
            f"unknown topology {text!r}: write star:HOSTS, bcube:PORTS,LEVELS or fattree:PORTS, in whole numbers from "
            "1 on (as bcube:3,2)"
        )
    makers: dict[str, Callable[..., Topology]] = {"star": star, "fattree": FatTree, "bcube": BCube}
    network = makers[kind](*numbers, rate)
    if max(numbers) > MOST_HOSTS or network.hosts > MOST_HOSTS:
        raise ValueError(f"topology {text!r} is too large: at most {MOST_HOSTS:,} hosts")
    return network

"""Hosts in any order are put in the order of their addresses, from what they say about their networks."""

from __future__ import annotations

import random
from ipaddress import IPv4Interface, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.simulator.topology import BCube, FatTree, address, star
from launch.lab.layout import lay_out
from launch.network import HostReport, IpRoute, MappingError, find_missing_routes, order_hosts, parse_report


def reports(topology: BCube) -> list[HostReport]:
    """What the hosts of a lab of this topology would say, in the order of addresses."""
    made = []
    for host in lay_out(topology).hosts:
        nics = {nic.name: (IPv4Interface(f"{nic.address}/24"),) for nic in host.nics}
        nics["vip0"] = (IPv4Interface(f"{host.vip}/32"),)
        routes = [IpRoute(IPv4Network(f"{route.vip}/32"), route.gateway, route.nic) for route in host.routes]
        made.append(HostReport(host.name, nics, (*routes, IpRoute(IPv4Network("0.0.0.0/0"), "10.255.0.1", "m0"))))
    return made


@pytest.mark.slow
@given(st.sampled_from([(2, 1), (2, 2), (3, 2), (2, 3), (4, 2)]), st.integers(0, 1000))
def test_rank_digits_are_addresses(shape: tuple[int, int], seed: int) -> None:
    topology = BCube(*shape)
    shuffled = reports(topology)
    random.Random(seed).shuffle(shuffled)
    nics = [f"d{level}" for level in range(topology.k)]
    ordered = order_hosts(topology, shuffled, nics)
    assert ordered[0].host == shuffled[0].host
    subnets = {report.host: [report.nics[nic][0].network for nic in nics] for report in ordered}
    for a in range(topology.hosts):
        for b in range(topology.hosts):
            differ = [x != y for x, y in zip(address(topology, a), address(topology, b))][::-1]
            for level in range(topology.k):
                shared = subnets[ordered[a].host][level] == subnets[ordered[b].host][level]
                assert shared == (not any(differ[:level] + differ[level + 1 :]))


@pytest.mark.parametrize("topology", [BCube(2, 2), BCube(3, 2), BCube(2, 3)])
def test_routes_of_a_lab_keep_to_their_levels(topology: BCube) -> None:
    nics = [f"d{level}" for level in range(topology.k)]
    assert find_missing_routes(topology, reports(topology), nics, "vip0") == []


def test_a_route_that_strays_is_mended() -> None:
    topology = BCube(2, 2)
    hosts = reports(topology)
    strayed = tuple(route for route in hosts[0].routes if str(route.to) != "10.0.0.2/32")
    hosts[0] = hosts[0]._replace(routes=strayed)
    (command,) = find_missing_routes(topology, hosts, ["d0", "d1"], "vip0")
    gateway = hosts[1].nics["d0"][0].ip
    assert command == f"h0: ip route replace 10.0.0.2/32 via {gateway} dev d0"


@pytest.mark.parametrize(
    ("hosts", "nics", "words"),
    [
        (reports(BCube(2, 2))[:3], ["d0", "d1"], "has 4 hosts, the host file 3"),
        (reports(BCube(2, 2)), ["d0"], "has 2 NICs a host, 1 are named"),
        (reports(BCube(2, 2)), ["d0", "eth7"], "h0 has no eth7"),
        (reports(BCube(2, 2)), ["d0", "d0"], "have the same address"),
        (reports(star(4)), ["d0", "vip0"], "of level 0 holds 4 hosts"),
    ],
)
def test_hosts_that_do_not_fit(hosts: list[HostReport], nics: list[str], words: str) -> None:
    with pytest.raises(MappingError, match=words):
        order_hosts(BCube(2, 2), hosts, nics)


def test_stars_and_fat_trees() -> None:
    assert [report.host for report in order_hosts(star(3), reports(star(3)), ["d0"])] == ["h0", "h1", "h2"]
    hosts = reports(star(2))
    assert order_hosts(FatTree(2), hosts, ["d0"]) == hosts


def test_what_ip_prints_is_read() -> None:
    addresses = [
        {"ifname": "lo", "addr_info": [{"local": "127.0.0.1", "prefixlen": 8}]},
        {"ifname": "eth0", "addr_info": []},
        {},
    ]
    routes = [{"dst": "default", "gateway": "10.0.0.1", "dev": "eth0"}, {"dst": "10.1.0.0/16", "dev": "eth1"}]
    report = parse_report("h", addresses, routes)
    assert report.nics == {"lo": (IPv4Interface("127.0.0.1/8"),), "eth0": ()}
    assert report.find_route("10.1.2.3") == ("eth1", None)
    assert report.find_route("8.8.8.8") == ("eth0", "10.0.0.1")

"""Networks: counts of the papers, routes that join up, addresses."""

import numpy as np
import pytest

from collectives.schedule.model import NOBODY
from collectives.simulator.topology import BCube, FatTree, address, hop_links, host_at, parse, star

NETWORKS = [star(1), star(5), BCube(3, 2), BCube(2, 3), FatTree(2), FatTree(4), FatTree(6)]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_routes_lead_from_host_to_host_over_links_that_join(network):
    hosts = np.arange(network.hosts)
    for source in hosts:
        for target in hosts:
            links = [network.links[i] for i in hop_links(network, int(source), int(target))]
            ends = [f"h{source}", *(link.target for link in links)]
            assert [link.source for link in links] == ends[:-1]
            assert ends[-1] == f"h{target}"
        together = network.route(np.full_like(hosts, source), hosts)
        for target in hosts:
            assert [int(link[target]) for link in together] == [
                int(link) for link in network.route(int(source), int(target))
            ]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_addresses_number_the_hosts(network):
    digits = [address(network, host) for host in range(network.hosts)]
    assert digits == sorted(set(digits))
    assert [host_at(network, d) for d in digits] == list(range(network.hosts))


@pytest.mark.parametrize(
    ("network", "hosts", "switches", "nics"),
    [
        (star(9), 9, 1, 9),
        (BCube(3, 2), 9, 6, 18),
        (BCube(4, 2), 16, 8, 32),
        (FatTree(4), 16, 20, 16),
        (BCube(2, 3), 8, 12, 24),
    ],
)
def test_counts(network, hosts, switches, nics):
    """BML paper, section 3.1: BCube has k n^(k-1) switches, a fat-tree 5N/n of n ports."""
    assert (network.hosts, len(network.switches), len(network.nics)) == (hosts, switches, nics)
    assert len(network.links) == len(network.link_rates)
    assert len({(link.source, link.target) for link in network.links}) == len(network.links)


def test_bcube_joins_hosts_that_differ_in_one_digit():
    network = BCube(3, 2)
    for nic in network.nics:
        others = [host for host in range(network.hosts) if network.switch(host, nic.level) == nic.switch]
        assert len(others) == 3
        mine = address(network, nic.host)
        for other in set(others) - {nic.host}:
            theirs = address(network, other)
            assert [i for i in range(2) if mine[i] != theirs[i]] == [1 - nic.level]
            assert len(hop_links(network, nic.host, other)) == 2


def test_bcube_relays_are_the_hosts_on_the_route():
    network = BCube(3, 3)
    for target in range(1, 27):
        at, hosts = 0, []
        while at != target:
            level, at = network.next_hop(at, target)
            hosts.append((level, f"h{at}"))
        route = [network.links[i] for i in hop_links(network, 0, target)]
        assert hosts == [(link.level, link.target) for link in route[1::2]]
    with pytest.raises(ValueError, match="no hop to itself"):
        network.next_hop(4, 4)


def test_fattree_messages_climb_only_as_far_as_they_must():
    network = FatTree(4)
    assert [len(hop_links(network, 0, target)) for target in (0, 1, 2, 4)] == [0, 2, 4, 6]


def test_fattree_spreads_all_to_all_traffic_evenly():
    network = FatTree(4)
    load = np.zeros(len(network.links))
    hosts = np.arange(network.hosts)
    for shift in range(1, network.hosts):
        for link in network.route(hosts, (hosts + shift) % network.hosts):
            np.add.at(load, link[link != NOBODY], 1)
    assert load.max() == network.hosts - 1


def test_rates():
    assert set(star(3, 1e6).link_rates) == {1e6}
    levels = BCube(2, 2, (1e6, 2e6))
    assert [link.rate for link in levels.links] == list(levels.link_rates)
    assert all(link.rate == (1e6, 2e6)[link.level] for link in levels.links)


@pytest.mark.parametrize("text", ["star:9", "bcube:3,2", "fattree:4"])
def test_names_are_read_back(text):
    assert parse(text).name == text
    assert parse(text.upper(), rate=5.0).link_rates[0] == 5.0


@pytest.mark.parametrize("text", ["", "star", "star:0", "bcube:3", "bcube:3,2,1", "ring:4", "fattree:3", "fattree:x"])
def test_what_is_no_topology_is_refused(text):
    with pytest.raises(ValueError, match=r"write star:HOSTS|must be even"):
        parse(text)
    with pytest.raises(ValueError, match="2 levels, but 3 rates"):
        BCube(2, 2, (1.0, 1.0, 1.0))

"""The plan of a lab, walked as frames would go: every host reaches every other by the links the topology names."""

from __future__ import annotations

import pytest

from collectives.simulator.topology import Topology, bcube, hop_links, parse
from launch.lab.layout import LabHost, LabPlan, decode, encode, lay_out, window

NAMES = ["star:1", "star:2", "star:9", "bcube:3,2", "bcube:2,3", "bcube:4,1", "fattree:2", "fattree:4"]


@pytest.fixture(params=NAMES)
def topology(request: pytest.FixtureRequest) -> Topology:
    return parse(request.param, 12.5e6)


def ports(plan: LabPlan) -> dict[str, tuple[str, str]]:
    """What is at the other end of each switch port: (host, NIC) or (switch, "")."""
    ends = {nic.port: (host.name, nic.name) for host in plan.hosts for nic in host.nics}
    for trunk in plan.trunks:
        ends[trunk.first_port] = (trunk.second, "")
        ends[trunk.second_port] = (trunk.first, "")
    return ends


def walk(plan: LabPlan, source: LabHost, target: LabHost) -> list[tuple[str, str]]:
    """The (from, to) of every cable that a packet crosses, as the plan's routes and tables lead it."""
    hosts = {host.name: host for host in plan.hosts}
    ends, table = ports(plan), {(line.switch, line.mac): line.port for line in plan.forwards}
    at, crossed = source, []
    while at is not target:
        route = next(route for route in at.routes if route.vip == target.vip)
        mac = route.mac
        place = next(nic.switch for nic in at.nics if nic.name == route.nic)
        crossed.append((at.name, place))
        while place not in hosts:
            before, (place, nic) = place, ends[table[place, mac]]
            crossed.append((before, place))
            assert len(crossed) < 100, "a loop"
        at = hosts[place]
        arrived = next(n for n in at.nics if n.name == nic)
        assert (arrived.mac, arrived.address) == (mac, route.gateway)
    return crossed


def test_packets_take_the_links_of_the_topology(topology: Topology) -> None:
    plan = lay_out(topology)
    for i, source in enumerate(plan.hosts):
        for j, target in enumerate(plan.hosts):
            links = [topology.links[number] for number in hop_links(topology, i, j)]
            assert walk(plan, source, target) == [(link.source, link.target) for link in links]


def test_every_nic_and_trunk_of_the_topology_is_there_at_its_rate(topology: Topology) -> None:
    plan = lay_out(topology)
    assert len(plan.hosts) == topology.hosts
    assert set(plan.switches) == set(topology.switches)
    assert [(n.level, n.switch) for h in plan.hosts for n in h.nics] == [
        (nic.level, topology.switches[nic.switch]) for nic in topology.nics
    ]
    assert {n.rate for h in plan.hosts for n in h.nics} | {t.rate for t in plan.trunks} == {100_000_000}
    assert 2 * (len(plan.trunks) + len(topology.nics)) == len(topology.links)


@pytest.mark.parametrize(("rate", "expected"), [(1e6, 128 * 1024), (25e6, 250_000), (1e9, 512 * 1024)])
def test_connections_have_under_way_what_a_link_carries_in_ten_milliseconds(rate: float, expected: int) -> None:
    assert window(lay_out(parse("star:2", rate))) == expected


def test_levels_have_their_own_rates() -> None:
    plan = lay_out(bcube(2, 2, (12.5e6, 25e6)))
    assert [nic.rate for nic in plan.hosts[0].nics] == [100_000_000, 200_000_000]


def test_addresses_and_names_are_unique_and_legal(topology: Topology) -> None:
    plan = lay_out(topology)
    nics = [nic for host in plan.hosts for nic in host.nics]
    addresses = [nic.address for nic in nics] + [a for host in plan.hosts for a in (host.vip, host.management)]
    assert len(set(addresses)) == len(addresses)
    assert len({nic.mac for nic in nics}) == len(nics)
    names = [*ports(plan), *plan.switches, *(f"{host.name}m0" for host in plan.hosts)]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 15  # the kernel's limit
    assert not any("_" in host.name for host in plan.hosts)  # host names may not hold it


def test_hosts_on_one_switch_share_a_subnet_and_a_hosts_nics_do_not(topology: Topology) -> None:
    plan = lay_out(topology)
    subnets: dict[str, set[str]] = {}
    for host in plan.hosts:
        own = [nic.address.rsplit(".", 1)[0] for nic in host.nics]
        assert len(set(own)) == len(own)
        for nic, subnet in zip(host.nics, own):
            subnets.setdefault(nic.switch, set()).add(subnet)
    assert all(len(found) == 1 for found in subnets.values())


def test_a_plan_survives_the_way_to_the_keeper(topology: Topology) -> None:
    plan = lay_out(topology)
    assert decode(encode(plan)) == plan


@pytest.mark.parametrize("name, what", [("star:251", "251 hosts"), ("bcube:2,7", "448 switches")])
def test_what_is_too_large_is_refused_with_its_size(name: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        lay_out(parse(name))


def test_a_rate_that_the_limiter_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="40 Gbit/s"):
        lay_out(parse("star:2", 5e9))

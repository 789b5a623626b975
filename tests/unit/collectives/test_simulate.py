"""The simulator against the closed forms, against BML's figure 5, and at 65,536 servers."""

import numpy as np
import pytest

from collectives.schedule import bcube as exchange
from collectives.schedule.catalog import build, serves
from collectives.simulator.cost import TERMS, Costs, LinkCost, closed_form
from collectives.simulator.simulate import simulate
from collectives.simulator.topology import bcube, fattree, star

NONE = LinkCost(0.0, 0.0)
ALPHA = 7e-6
FORMS = [*TERMS, ("allreduce", "multi_ring")]


@pytest.mark.parametrize(("kind", "name"), FORMS)
@pytest.mark.parametrize(("rate", "gamma"), [(1e9, 0.0), (1e9, 3e-10), (2e10, 3e-10)])
def test_every_closed_form_is_what_the_simulator_finds(kind, name, rate, gamma):
    for p in range(1, 17):
        if serves(kind, name, p):
            continue
        nbytes = 4 * 720720 * p  # whole elements in every chunk of every lane
        network = bcube(*exchange.shape(p), rate) if name == "bcube" else star(p, rate)
        found = simulate(build(kind, name, p), network, nbytes, ALPHA, gamma).seconds
        assert found == pytest.approx(
            closed_form(kind, name, p, nbytes, Costs(LinkCost(ALPHA, 1 / rate), NONE, gamma)), rel=1e-9
        )


@pytest.mark.parametrize("rings", [1, 2, 3, 5])
@pytest.mark.parametrize("gamma", [0.0, 1e-10, 9.9e-10, 2e-9, 1e-8])
def test_rings_in_turn_hide_their_sums(rings, gamma):
    name, nbytes = f"multi_ring(rings={rings})", 4 * 7 * 60_000
    found = simulate(build("allreduce", name, 7), star(7, 1e9), nbytes, 0.0, gamma).seconds
    assert found == pytest.approx(
        closed_form("allreduce", name, 7, nbytes, Costs(LinkCost(0.0, 1e-9), NONE, gamma)), rel=1e-9
    )
    assert found <= simulate(build("allreduce", "ring", 7), star(7, 1e9), nbytes, 0.0, gamma).seconds * (1 + 1e-9)


@pytest.mark.parametrize("between", ["ring", "halving_doubling", "direct"])
def test_hierarchical_uses_memory_inside_and_the_network_between(between):
    near = LinkCost(1e-6, 1e-10)
    name, nbytes = f"hierarchical(local=4,between={between})", 4 * 48 * 1000
    found = simulate(build("allreduce", name, 16), star(4, 1e9), nbytes, ALPHA, 2e-10, near).seconds
    # the four local ranks share the host's one link, so between hosts all of n crosses it
    inside = 6 * near.alpha + nbytes * 0.75 * (2 * near.beta + 2e-10)
    outside = (
        closed_form("allreduce", between, 4, nbytes, Costs(LinkCost(ALPHA, 1e-9), NONE, 0.0))
        + 0.75 * nbytes / 4 * 2e-10
    )
    assert found == pytest.approx(inside + outside, rel=1e-9)


@pytest.mark.parametrize(("n", "ports"), [(4, 4), (32, 16)])
def test_figure_5_of_bml(n, ports):
    """16 servers are BCube(4,2) and Fat-Tree(4), 1024 servers BCube(32,2) and Fat-Tree(16)."""
    servers, nbytes = n * n, 4 * 2 * n**4
    cube, tree = bcube(n, 2, 1e9), fattree(ports, 1e9)
    direct, bml = build("allreduce", "direct", servers), build("allreduce", "bcube", servers, n=n, k=2)
    alike = exchange.over("allreduce", tree.radices[::-1], 1, "bml-like")
    one = nbytes / 1e9
    ps_tree = simulate(direct, tree, nbytes).seconds
    bml_cube = simulate(bml, cube, nbytes).seconds
    ps_cube = simulate(direct, cube, nbytes).seconds
    assert ps_tree == pytest.approx(2 * (servers - 1) / servers * one)
    assert bml_cube == pytest.approx(ps_tree / 2)  # 1/k
    assert simulate(alike, tree, nbytes).seconds == pytest.approx(ps_tree)
    assert ps_cube / bml_cube == pytest.approx(2, rel=0.05 if n == 32 else 0.25)


def test_bml_on_one_switch_takes_as_long_as_the_parameter_server():
    nbytes = 4 * 2 * 81
    bml, direct = (simulate(build("allreduce", name, 9), star(9), nbytes).seconds for name in ("bcube", "direct"))
    assert bml == pytest.approx(direct)


def test_every_nic_carries_what_the_paper_says():
    nbytes = 4 * 2 * 81
    run = simulate(build("allreduce", "bcube", 9), bcube(3, 2), nbytes)
    np.testing.assert_allclose(run.link_bytes, 2 * (9 - 1) / (2 * 9) * nbytes)


def test_relays_carry_the_traffic_of_others():
    """All-to-all on BCube: each level's links take (n-1)/n of the vector a phase, relayed bytes included."""
    nbytes = 4 * 9 * 10
    run = simulate(build("allreduce", "direct", 9), bcube(3, 2), nbytes)
    np.testing.assert_allclose(run.link_bytes, 2 * 2 / 3 * nbytes)


@pytest.mark.full
def test_65536_servers_run_bml_in_seconds():
    reports = []
    nbytes = 4 * 4 * 65536 * 100
    run = simulate(build("allreduce", "bcube", 65536, n=16, k=4), bcube(16, 4), nbytes, progress=reports.append)
    assert run.seconds == pytest.approx(2 * 65535 / (4 * 65536) * nbytes / 1.25e9)
    assert reports == [(i + 1) / 8 for i in range(8)]


def test_no_bytes_cost_only_the_startups():
    assert simulate(build("allreduce", "ring", 4), star(4), 0, ALPHA).seconds == pytest.approx(6 * ALPHA)
    assert simulate(build("allreduce", "ring", 1), star(1), 100, ALPHA).seconds == 0


def test_ranks_that_do_not_fill_the_hosts_are_refused():
    with pytest.raises(ValueError, match="must be a multiple of 4 hosts"):
        simulate(build("allreduce", "ring", 6), star(4), 100)

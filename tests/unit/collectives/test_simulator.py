"""The simulator: the fit of costs, closed forms, BML's figure 5, 65,536 servers, `mpips sim`."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from collectives.schedule import bcube as exchange
from collectives.schedule.catalog import build, serves
from collectives.simulator.__main__ import command
from collectives.simulator.cost import TERMS, Costs, LinkCost, closed_form, fit
from collectives.simulator.simulate import figure5, predict, schedule_on, simulate, simulate_on_job
from collectives.simulator.topology import BCube, FatTree, star

SIZES = 2.0 ** np.arange(3, 27)
ONE = Costs(LinkCost(1.0, 0.0), LinkCost(0.0, 0.0), 0.0)


@given(alpha=st.floats(1e-7, 1e-3), beta=st.floats(1e-11, 1e-6))
def test_a_fit_finds_the_line_it_was_given(alpha, beta):
    found = fit([(size, alpha + size * beta) for size in SIZES])
    assert found == pytest.approx((alpha, beta), rel=1e-3)


@given(st.integers(0, 23), st.floats(3, 100), st.integers(0, 10**6))
def test_one_bad_point_and_noise_move_it_little(bad, factor, seed):
    noise = 1 + 0.02 * np.random.default_rng(seed).standard_normal(len(SIZES))
    times = (5e-6 + SIZES * 2e-10) * noise
    times[bad] *= factor
    assert fit(list(zip(SIZES, times))) == pytest.approx((5e-6, 2e-10), rel=0.1)


def test_neither_number_is_negative():
    assert fit([(1e6, 1e-3), (2e6, 3e-3)]).alpha == 0
    falling = fit([(8, 2e-6), (1e6, 1e-6)])
    assert falling.beta == 0
    assert 1e-6 <= falling.alpha <= 2e-6


@pytest.mark.parametrize("points", [[], [(8, 1e-6)], [(8, 1e-6), (8, 2e-6)]])
def test_a_fit_needs_two_sizes(points):
    with pytest.raises(ValueError, match="two sizes"):
        fit(points)


def test_mg_wfbp_startup_of_the_ring():
    """Section 7 of the project's facts: 2(N-1) alpha = 90.52, 271.56, 633.64 us at N = 2, 4, 8 on 10GbE."""
    costs = Costs(LinkCost(45.26e-6, 0.0), LinkCost(0.0, 0.0), 0.0)
    found = [closed_form("allreduce", "ring", p, 4e6, costs) for p in (2, 4, 8)]
    assert found == pytest.approx([90.52e-6, 271.56e-6, 633.64e-6])


def test_hierarchical_uses_both_kinds_of_links():
    costs = Costs(far=LinkCost(10.0, 0.0), near=LinkCost(1.0, 0.0), gamma=0.0)
    assert closed_form("allreduce", "hierarchical(local=4,between=halving_doubling)", 16, 1e6, costs) == 2 * 3 + 4 * 10


@pytest.mark.parametrize(("kind", "name"), [("alltoall", "ring"), ("allreduce", "rong")])
def test_what_has_no_closed_form_is_refused(kind, name):
    with pytest.raises(ValueError, match="choose one of"):
        closed_form(kind, name, 4, 1.0, ONE)


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
        network = BCube(*exchange.shape(p), rate) if name == "bcube" else star(p, rate)
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


def test_bml_on_one_switch_takes_as_long_as_the_parameter_server():
    nbytes = 4 * 2 * 81
    bml, direct = (simulate(build("allreduce", name, 9), star(9), nbytes).seconds for name in ("bcube", "direct"))
    assert bml == pytest.approx(direct)


def test_every_nic_carries_what_the_paper_says():
    nbytes = 4 * 2 * 81
    run = simulate(build("allreduce", "bcube", 9), BCube(3, 2), nbytes)
    np.testing.assert_allclose(run.link_bytes, 2 * (9 - 1) / (2 * 9) * nbytes)


def test_relays_carry_the_traffic_of_others():
    """All-to-all on BCube: each level's links take (n-1)/n of the vector a phase, relayed bytes included."""
    nbytes = 4 * 9 * 10
    run = simulate(build("allreduce", "direct", 9), BCube(3, 2), nbytes)
    np.testing.assert_allclose(run.link_bytes, 2 * 2 / 3 * nbytes)


@pytest.mark.full
def test_65536_servers_run_bml_in_seconds():
    reports = []
    nbytes = 4 * 4 * 65536 * 100
    run = simulate(build("allreduce", "bcube", 65536, n=16, k=4), BCube(16, 4), nbytes, progress=reports.append)
    assert run.seconds == pytest.approx(2 * 65535 / (4 * 65536) * nbytes / 1.25e9)
    assert reports == [(i + 1) / 8 for i in range(8)]


def test_ranks_that_do_not_fill_the_hosts_are_refused():
    with pytest.raises(ValueError, match="must be a multiple of 4 hosts"):
        simulate(build("allreduce", "ring", 6), star(4), 100)


def run(*words):
    return CliRunner().invoke(command, words)


def test_a_row_for_each_algorithm_and_size(tmp_path):
    path = tmp_path / "rows.json"
    words = ["--topology", "star:4", "--algorithm", "ring", "--algorithm", "bcube", "--bytes", "1MiB,4MiB"]
    result = run(*words, "--rate", "1gbit", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())
    assert [(row["algorithm"], row["bytes"]) for row in rows] == [
        ("ring", 2**20),
        ("ring", 2**22),
        ("bcube(n=2,k=2)", 2**20),
        ("bcube(n=2,k=2)", 2**22),
    ]
    assert rows[0]["seconds"] == pytest.approx(1.5 * 2**20 / 125e6)
    assert rows[0]["closed_form"] == pytest.approx(rows[0]["seconds"])
    assert rows[2]["closed_form"] is None  # one wire for two lanes
    assert "1 MiB" in result.output


def test_beta_is_the_reciprocal_of_the_rate(tmp_path):
    path = tmp_path / "rows.json"
    assert (
        run(
            "--topology", "star:2", "--algorithm", "ring", "--bytes", "4KB", "--beta", "1e-6", "--json", str(path)
        ).exit_code
        == 0
    )
    assert json.loads(path.read_text())[0]["seconds"] == pytest.approx(4e-3)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--topology", "ring:4"], "unknown topology"),
        (["--algorithm", "rong"], "choose one of"),
        (["--algorithm", "ring(over=messages)"], "ring has no parameter 'over'"),
        (["--bytes", "lots"], "is not a size"),
        (["--rate", "fast"], "unknown rate"),
        (["--topology", "star:6"], "bcube needs p = n^k"),
        (["--bytes", "1e30"], "--bytes: '1e30' is not a size"),
        (["--bytes", "9999999999GB"], "--bytes: '9999999999GB' is above 1e+18 bytes"),
        (["--figure5", "--bytes", "9" * 400], "is above 1e+18 bytes"),
        (["--topology", "star:²"], "--topology: unknown topology"),
        (["--topology", "star:1000000000"], "--topology: topology 'star:1000000000' is too large: at most 1,048,576"),
        (["--topology", "bcube:1000000,4"], "is too large: at most 1,048,576 hosts"),
        (["--topology", "bcube:9,99999999999"], "is too large: at most 1,048,576 hosts"),
        (["--topology", "fattree:1000000"], "is too large: at most 1,048,576 hosts"),
        (["--per-host", "1000000"], "--per-host 1000000 on 9 hosts: at most 1,048,576 ranks"),
        (["--alpha", "1e308"], "a time too large to compute"),
        (["--beta", "1e300"], "a time too large to compute"),
    ],
)
def test_what_it_cannot_do_it_says(words, sentence):
    result = run(*words)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())


@pytest.mark.slow
def test_figure_5_and_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    picture, bars, rows = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "b.json"
    assert run("--bytes", "1MB:16MB", "--plot", str(picture)).exit_code == 0
    result = run("--figure5", "--bytes", "12.5MB", "--plot", str(bars), "--json", str(rows))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes()[:4] == bars.read_bytes()[:4] == b"\x89PNG"
    assert len(json.loads(rows.read_text())) == 8


@pytest.mark.slow
@pytest.mark.parametrize("figure", [(), ("--figure5",)])
def test_results_that_cannot_be_written_are_one_sentence(full_disk, figure):
    done = run("--bytes", "1MB", *figure, "--json", full_disk)
    assert done.exit_code == 1
    assert f"Error: --json {full_disk} cannot be written: No space left on device\n" in done.output


@pytest.mark.slow
def test_figure_5_agrees_with_the_text_of_the_paper():
    for row, said in figure5(548_000_000, 5e9):
        relayed = row.topology.startswith("bcube") and row.algorithm == "direct"  # "it will double": 1.6 at 16 servers
        assert row.seconds == pytest.approx(said, rel=0.2 if relayed else 1e-3)


def test_the_schedule_suits_the_network():
    assert schedule_on(BCube(2, 4), "allreduce", "bcube").name == "bcube(n=2,k=4)"
    assert len(schedule_on(FatTree(4), "allreduce", "bcube").lanes) == 1
    assert schedule_on(star(3), "allreduce", "hierarchical", per_host=4).name == "hierarchical(local=4,between=ring)"
    assert predict(star(3), "allreduce", "ring", 1200, per_host=2).closed_form is None


COSTS = Costs(far=LinkCost(1e-4, 1e-8), near=LinkCost(1e-6, 1e-10), gamma=2e-10)


@pytest.mark.parametrize("name", ["ring", "direct", "halving_doubling", "multi_ring", "bcube"])
def test_a_job_on_one_node_costs_memory_and_on_many_the_network(name):
    nbytes = 4 * 480_000
    near = simulate_on_job("allreduce", name, nbytes, 4, 1, COSTS)
    far = simulate_on_job("allreduce", name, nbytes, 4, 4, COSTS)
    if name != "bcube":  # whose closed form has two wires
        assert near == pytest.approx(closed_form("allreduce", name, 4, nbytes, COSTS._replace(far=COSTS.near)))
        assert far == pytest.approx(closed_form("allreduce", name, 4, nbytes, COSTS))
    assert near < simulate_on_job("allreduce", name, nbytes, 4, 2, COSTS)
    assert near < far


def test_hierarchical_takes_the_jobs_nodes():
    inside = 2 * 1e-6 + 4e6 * (1e-10 + 0.5 * 2e-10)
    between = 2 * 1e-4 + 4e6 * 1e-8 + 1e6 * 2e-10  # two ranks share the wire, each adds a half of its half
    assert simulate_on_job("allreduce", "hierarchical", 4_000_000, 4, 2, COSTS) == pytest.approx(inside + between)


@pytest.mark.parametrize(("algorithm", "p"), [("native", 4), ("ring", 5)])
def test_what_is_no_schedule_or_no_job_of_equal_nodes_is_refused(algorithm, p):
    with pytest.raises(ValueError, match=r"choose one of|same number"):
        simulate_on_job("allreduce", algorithm, 100, p, 2, COSTS)


@pytest.mark.parametrize("columns", ["20", "80"])
def test_no_number_and_no_name_is_cut(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = run("--topology", "star:9", "--algorithms", "ring,direct", "--bytes", "548MB", "--rate", "1mbit")
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.output
    for words in ("direct", "548 MB", "7,793,777.778", "974.222"):
        assert words in result.output

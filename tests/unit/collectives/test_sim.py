"""`mpips sim`: what it prints and writes, and what it refuses."""

import json

import pytest
from click.testing import CliRunner

from collectives.simulator.command import command
from collectives.simulator.cost import Costs, LinkCost, closed_form
from collectives.simulator.simulate import figure5, predict, schedule_on
from collectives.simulator.topology import bcube, fattree, star
from collectives.tuner.table import simulate_on_job


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
        (["--bytes", "lots"], "is no size"),
        (["--rate", "fast"], "unknown rate"),
        (["--topology", "star:6"], "bcube needs p = n^k"),
        (["--bytes", "1e30"], "--bytes: '1e30' is no size"),
        (["--bytes", "9999999999GB"], "--bytes: '9999999999GB' is above 1e+18 bytes"),
        (["--figure5", "--bytes", "9" * 400], "is above 1e+18 bytes"),
        (["--topology", "star:²"], "--topology: unknown topology"),
        (["--topology", "star:1000000000"], "--topology: topology 'star:1000000000' is too large: at most 1,048,576"),
        (["--topology", "bcube:1000000,4"], "is too large: at most 1,048,576 hosts"),
        (["--topology", "bcube:9,99999999999"], "is too large: at most 1,048,576 hosts"),
        (["--topology", "fattree:1000000"], "is too large: at most 1,048,576 hosts"),
        (["--per-host", "1000000"], "--per-host 1000000 on 9 hosts: at most 1,048,576 ranks"),
        (["--alpha", "1e308"], "a time beyond all numbers"),
        (["--beta", "1e300"], "a time beyond all numbers"),
    ],
)
def test_what_it_cannot_do_it_says(words, sentence):
    result = run(*words)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())


def test_figure_5_and_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    picture, bars, rows = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "b.json"
    assert run("--bytes", "1MB:16MB", "--plot", str(picture)).exit_code == 0
    result = run("--figure5", "--bytes", "12.5MB", "--plot", str(bars), "--json", str(rows))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes()[:4] == bars.read_bytes()[:4] == b"\x89PNG"
    assert len(json.loads(rows.read_text())) == 8


@pytest.mark.parametrize("figure", [(), ("--figure5",)])
def test_results_that_cannot_be_written_are_one_sentence(full_disk, figure):
    done = run("--bytes", "1MB", *figure, "--json", full_disk)
    assert done.exit_code == 1
    assert f"Error: --json {full_disk} cannot be written: No space left on device\n" in done.output


def test_figure_5_agrees_with_the_text_of_the_paper():
    for row, said in figure5(548_000_000, 5e9):
        relayed = row.topology.startswith("bcube") and row.algorithm == "direct"  # "it will double": 1.6 at 16 servers
        assert row.seconds == pytest.approx(said, rel=0.2 if relayed else 1e-3)


def test_the_schedule_suits_the_network():
    assert schedule_on(bcube(2, 4), "allreduce", "bcube").name == "bcube(n=2,k=4)"
    assert len(schedule_on(fattree(4), "allreduce", "bcube").lanes) == 1
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

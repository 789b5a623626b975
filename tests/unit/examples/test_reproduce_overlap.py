"""The reproductions of MG-WFBP and iBatch: simulated anywhere, measured where a lab can be had; what they conclude.

Jobs for the benchmark: sizes of layers from what startups are to weigh, as a paper's network has it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given

from examples.reproduce.overlap import __main__ as overlap
from examples.reproduce.overlap import measured as settings
from examples.reproduce.overlap.gap import command as gap
from examples.reproduce.overlap.mg_wfbp import communication
from examples.reproduce.overlap.networks import MODELS, blocks, googlenet
from examples.reproduce.overlap.rivals import PARTITIONS, backward, forward, ibatch
from examples.reproduce.overlap.simulated import command as reproduce
from mpips.overlap import Problem, makespan
from mpips.overlap.problem import from_ends, message_times
from tests.unit.mpips.overlap.problems import check_cover, partitions, problems


@pytest.mark.slow
@pytest.mark.parametrize("paper", ["mg-wfbp", "ibatch"])
def test_without_a_lab_the_reason_is_said(paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    monkeypatch.setattr(overlap, "find_missing", lambda: ["the kernel has no tbf"])
    result = CliRunner().invoke(overlap.command, [paper, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "not measured" in result.output
    assert "the kernel has no tbf" in result.output
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".png"}


def test_the_summary_compares_with_the_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"layerwise": (1.1, 1.2), "single": (1.0, 1.0), "merged": (0.5, 0.5)}
    rows = [
        {"pushes": "dense", "strategy": name, "predicted_s": predicted, "measured_s": measured}
        for name, (predicted, measured) in times.items()
    ]
    overlap.summary({"strategies": rows})
    said = capsys.readouterr().out
    assert "predictions within 9.1%" in said
    assert "dense: merged is 2.40 times as fast as layerwise" in said
    assert "dense: merged is 2.00 times as fast as single" in said


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_startups_are_the_share_that_was_asked_for(share: float) -> None:
    startup_s, per_byte_s = 5e-3, 1.4e-7
    kilobytes = settings.choose_kilobytes(startup_s, per_byte_s, share)
    assert startup_s / (startup_s + 1024 * kilobytes * per_byte_s) == pytest.approx(share)


def test_messages_weigh_more_on_more_nodes_and_with_fewer_images() -> None:
    few, many, small = (communication("resnet50", *words) for words in ((8, 32), (64, 32), (8, 16)))
    assert many[0] == pytest.approx(9 * few[0])  # startups grow with N - 1
    assert few[1] < many[1] < few[1] * 8 / 7  # bytes with (N - 1) / N
    assert small == pytest.approx([2 * few[0], 2 * few[1]])


@pytest.mark.parametrize(
    "name, parameters, tensors, products",
    [
        ("googlenet", 13_378_280, 128, 1.59e9),
        ("inception-v3", 27_161_264, 292, 5.73e9),
        ("resnet50", 25_557_032, 161, 4.1e9),
        ("vgg19", 143_667_240, 38, 19.6e9),
    ],
)
def test_networks_weigh_what_papers_state(name: str, parameters: int, tensors: int, products: float) -> None:
    table = MODELS[name]()
    assert (table.parameters, table.tensors) == (parameters, tensors)
    assert table.flops / 2 == pytest.approx(products, rel=0.01)
    whole = blocks(table)
    assert (whole.parameters, whole.tensors, whole.flops) == (table.parameters, table.tensors, table.flops)


def test_networks_of_the_papers_differ_where_they_say() -> None:
    small, large = MODELS["vgg19"](), MODELS["vgg19-22k"]()
    assert small.layers[:-1] == large.layers[:-1]
    assert round(large.parameters / 1e6) == 229
    assert max(layer.parameters for layer in small.layers) == 102_764_544
    assert len(blocks(googlenet(heads=False)).layers) == 12  # iBatch, figure 4


@pytest.mark.slow
@given(problems())
def test_rivals_are_partitions_too(problem: Problem) -> None:
    least = makespan(problem, PARTITIONS["optimal"](problem))
    for name, partition in PARTITIONS.items():
        assert makespan(problem, check_cover(partition(problem), problem.layers)) >= least * (1 - 1e-12), name


@given(problems())
def test_ibatch_batches_overlap_as_equation_5_asks_wherever_possible(problem: Problem) -> None:
    """Algorithm 1: a batch after the second could not be shorter and still exceed the compute before it."""
    if problem.layers < 2:
        return
    groups = forward(problem)
    times = message_times(problem, groups)
    for k in range(1, len(groups) - 1):
        before = problem.compute[groups[k - 1][0] - 1 : groups[k - 1][1]].sum()
        assert times[k] > before or times[k] == pytest.approx(before)
        first, last = groups[k]
        if last > first:
            shorter = message_times(problem, from_ends([first - 1, last - 1, problem.layers]))[1] if first > 1 else 0
            assert shorter <= before * (1 + 1e-9)


@given(problems())
def test_ibatch_takes_the_better_of_its_two_algorithms(problem: Problem) -> None:
    if problem.layers < 2:
        assert ibatch(problem) == ((1, 1),)
        return
    both = [makespan(problem, check_cover(f(problem), problem.layers)) for f in (forward, backward)]
    assert makespan(problem, ibatch(problem)) == min(both)


def test_ibatch_time_is_equation_4_where_equation_5_holds() -> None:
    problem = Problem.of([2, 1, 1, 1, 3, 1], 0.5, [0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
    for groups in partitions(problem.layers):
        times = message_times(problem, groups)
        compute = [problem.compute[first - 1 : last].sum() for first, last in groups]
        if all(times[k + 1] > compute[k] for k in range(len(groups) - 1)):
            assert makespan(problem, groups) == pytest.approx(times.sum() + compute[-1])


def test_a_table_of_no_problems_is_refused() -> None:
    result = CliRunner().invoke(gap, ["--count", "0"])
    assert result.exit_code == 2
    assert "--count" in result.output


@pytest.mark.parametrize("paper, ours", [("mg-wfbp", "MG-WFBP"), ("ibatch", "iBatch")])
def test_reproductions(tmp_path: Path, paper: str, ours: str) -> None:
    result = CliRunner().invoke(reproduce, [paper, "--json", str(tmp_path / "f.json")])
    assert result.exit_code == 0, result.output
    points = json.loads((tmp_path / "f.json").read_text())["points"]
    times = {(p["model"], p["nodes"], p["strategy"]): p["iteration_s"] for p in points}
    for (model, nodes, strategy), seconds in times.items():
        assert times[model, nodes, "optimal"] <= seconds * (1 + 1e-12), strategy
    assert any(strategy == ours for *_, strategy in times)


@pytest.mark.slow
def test_table_of_losses(tmp_path: Path) -> None:
    result = CliRunner().invoke(gap, ["--count", "20", "--json", str(tmp_path / "g.json")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "g.json").read_text())["losses"]
    assert all(-1e-9 < row["median"] <= row["worst"] for row in rows)
    assert all(row["worst"] < 1e-9 for row in rows if row["strategy"] == "optimal")

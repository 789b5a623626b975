"""`mpips plan`, the reproductions and the table of losses, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from examples.reproduce.overlap.gap import command as gap
from examples.reproduce.overlap.simulated import command as reproduce
from mpips.overlap import STRATEGIES, load_profile, profile_to_dict, save_profile
from mpips.overlap.__main__ import command, parse_nodes

from .problems import random_profile


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    save_profile(random_profile(2, 15), tmp_path / "profile.json")
    return tmp_path / "profile.json"


def plan(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, list(words))
    return result.exit_code, result.output


def test_json_of_all_strategies(profile_file: Path, tmp_path: Path) -> None:
    code, output = plan(str(profile_file), "--nodes", "4:64", "--json", str(tmp_path / "out.json"))
    assert code == 0, output
    rows = json.loads((tmp_path / "out.json").read_text())
    assert {(row["strategy"], row["nodes"]) for row in rows} == {(s, n) for s in STRATEGIES for n in (4, 8, 16, 32, 64)}
    for row in rows:
        assert [layer for first, last in row["groups"] for layer in range(first, last + 1)] == list(range(1, 16))
        best = min(r["iteration_s"] for r in rows if r["nodes"] == row["nodes"])
        if row["strategy"] == "optimal":
            assert row["iteration_s"] == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("direction", ["push", "pull", "both"])
@pytest.mark.parametrize("link", ["shared", "duplex"])
def test_directions(profile_file: Path, tmp_path: Path, direction: str, link: str) -> None:
    out = tmp_path / "out.json"
    words = ["--nodes", "8", "--direction", direction, "--link", link, "--json", str(out)]
    code, output = plan(str(profile_file), *words)
    assert code == 0, output
    times = {row["strategy"]: row["iteration_s"] for row in json.loads(out.read_text())}
    chains = {name: seconds for name, seconds in times.items() if name != "joint"}
    assert times["optimal"] == pytest.approx(min(chains.values()), rel=1e-12)
    if direction == "both":
        assert times["joint"] <= times["optimal"] * (1 + 1e-12)


def test_one_strategy_with_pictures(profile_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    png, trace = tmp_path / "p.png", tmp_path / "t.json"
    code, output = plan(str(profile_file), "--nodes", "8", "--strategy", "merged", "--strategy", "optimal",
                        "--plot", str(png), "--trace", str(trace))
    assert code == 0, output
    assert "merged" in output
    assert "layerwise" not in output
    assert png.stat().st_size > 1000
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize("option", ["--json", "--trace", "--save-profile"])
def test_a_file_that_cannot_be_written_is_one_sentence(profile_file: Path, full_disk: str, option: str) -> None:
    result = CliRunner().invoke(command, [str(profile_file), "--nodes", "4", option, full_disk])
    assert result.exit_code == 1
    assert f"Error: {option} {full_disk} cannot be written: No space left on device\n" in result.output


def test_a_picture_that_cannot_be_written_is_one_sentence(
    profile_file: Path, full_disk: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    picture = tmp_path / "plan.png"
    picture.symlink_to(full_disk)
    result = CliRunner().invoke(command, [str(profile_file), "--nodes", "4", "--plot", str(picture)])
    assert result.exit_code == 1
    assert f"Error: --plot {picture} cannot be written: No space left on device\n" in result.output


def test_built_in_model_saves_its_profile(tmp_path: Path) -> None:
    code, output = plan("--model", "lenet5", "--nodes", "4", "--save-profile", str(tmp_path / "p.json"))
    assert code == 0, output
    assert sum(layer.parameters for layer in load_profile(tmp_path / "p.json").layers) == 3_274_634


def test_measured_network_without_its_size_is_said(tmp_path: Path) -> None:
    data = profile_to_dict(random_profile(2, 5)) | {"network": {"a": 1e-4, "b": 1e-9}}
    (tmp_path / "p.json").write_text(json.dumps(data))
    code, output = plan(str(tmp_path / "p.json"), "--nodes", "4:8")
    assert code == 0
    assert "does not say on how many nodes" in output
    code, output = plan(str(tmp_path / "p.json"))
    assert code == 0
    assert "note" not in output


@pytest.mark.parametrize("network, nodes, words", [
    ({"a": 1e-4, "b": 1e-9}, 1, "measured on 1 node"),
    ({"a": 1e-4, "b": 1e-9, "collective": "servers"}, 4, "a push to servers"),
    ({"a": 1e-4, "b": 1e-9}, 4, "an allreduce that need not be a ring"),
])  # fmt: skip
def test_what_no_other_size_follows_from_is_planned_as_measured(
    tmp_path: Path, network: dict[str, float | str], nodes: int, words: str
) -> None:
    data = profile_to_dict(random_profile(2, 5)) | {"network": network, "nodes": nodes}
    (tmp_path / "p.json").write_text(json.dumps(data))
    code, output = plan(str(tmp_path / "p.json"), "--nodes", "8:64")
    assert code == 2
    assert words in output
    assert plan(str(tmp_path / "p.json"))[0] == plan(str(tmp_path / "p.json"), "--nodes", str(nodes))[0] == 0


def test_a_measured_ring_is_planned_on_other_sizes(tmp_path: Path) -> None:
    data = profile_to_dict(random_profile(2, 5)) | {"nodes": 4}
    (tmp_path / "p.json").write_text(json.dumps(data | {"network": {"a": 1e-4, "b": 1e-9, "collective": "ring"}}))
    code, output = plan(str(tmp_path / "p.json"), "--nodes", "8:64", "--json", str(tmp_path / "out.json"))
    assert code == 0, output
    assert {row["nodes"] for row in json.loads((tmp_path / "out.json").read_text())} == {8, 16, 32, 64}


def test_servers_of_an_unknown_size_are_refused_other_sizes_in_one_sentence(tmp_path: Path) -> None:
    network = {"a": 1e-4, "b": 1e-9, "collective": "servers"}
    (tmp_path / "p.json").write_text(json.dumps(profile_to_dict(random_profile(2, 5)) | {"network": network}))
    code, output = plan(str(tmp_path / "p.json"), "--nodes", "8")
    assert code == 2
    assert output.startswith("Error: network: a and b are those of a push to servers")
    assert "None" not in output
    assert output.count("\n") == 1
    assert plan(str(tmp_path / "p.json"))[0] == 0


@pytest.mark.parametrize("rate", ["inf", "nan", "0"])
def test_a_rate_is_finite(rate: str) -> None:
    code, output = plan("--model", "lenet5", "--rate", rate)
    assert code == 2
    assert "--rate" in output


@pytest.mark.parametrize("option", ["--rate", "--batch"])
def test_options_of_built_in_networks_are_refused_with_a_profile(profile_file: Path, option: str) -> None:
    code, output = plan(str(profile_file), option, "3")
    assert code == 2
    assert f"{option} goes with --model" in output


def test_a_table_of_no_problems_is_refused() -> None:
    result = CliRunner().invoke(gap, ["--count", "0"])
    assert result.exit_code == 2
    assert "--count" in result.output


def test_errors_are_sentences(profile_file: Path) -> None:
    assert plan()[0] != 0
    code, output = plan(str(profile_file), "--nodes", "zero")
    assert code != 0
    assert "4:64" in output
    profile_file.write_text(profile_file.read_text().replace('"startup_s"', '"startups"'))
    code, output = plan(str(profile_file))
    assert code == 2
    assert "startups" in output
    assert "Traceback" not in output


NOTHING = {"layers": [{"name": "a", "parameters": 0, "forward_s": 0, "backward_s": 0}],
           "network": {"a": 0, "b": 0}, "startup_s": 0, "bandwidth_Bps": 1}  # fmt: skip


@pytest.mark.parametrize(
    "content, words",
    [
        (b"layers: none", "not JSON"),
        (b"\x89PNG\xff", "not a text file"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "a profile is a JSON object"),
        (json.dumps(NOTHING).encode(), "nothing to plan"),
        (json.dumps(NOTHING | {"nodes": True}).encode(), "nodes is True"),
        (json.dumps(NOTHING | {"startup_s": 10**400}).encode(), "startup_s"),
    ],
)
def test_no_profile_is_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "p.json").write_bytes(content)
    code, output = plan(str(tmp_path / "p.json"))
    assert code == 2
    assert words in output
    assert "p.json" in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    "text, sizes",
    [("8", (8,)), ("4:64", (4, 8, 16, 32, 64)), ("3:20", (3, 6, 12)), ("4:12:4", (4, 8, 12)), ("2,5", (2, 5))],
)
def test_nodes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_nodes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "8:4", "-1:4", "a", "4:8:0"])
def test_bad_nodes(text: str) -> None:
    with pytest.raises(ValueError):
        parse_nodes(text)


@pytest.mark.parametrize("paper, ours", [("mg-wfbp", "MG-WFBP"), ("ibatch", "iBatch")])
def test_reproductions(tmp_path: Path, paper: str, ours: str) -> None:
    result = CliRunner().invoke(reproduce, [paper, "--json", str(tmp_path / "f.json")])
    assert result.exit_code == 0, result.output
    points = json.loads((tmp_path / "f.json").read_text())["points"]
    times = {(p["model"], p["nodes"], p["strategy"]): p["iteration_s"] for p in points}
    for (model, nodes, strategy), seconds in times.items():
        assert times[model, nodes, "optimal"] <= seconds * (1 + 1e-12), strategy
    assert any(strategy == ours for *_, strategy in times)


def test_table_of_losses(tmp_path: Path) -> None:
    result = CliRunner().invoke(gap, ["--count", "20", "--json", str(tmp_path / "g.json")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "g.json").read_text())["losses"]
    assert all(-1e-9 < row["median"] <= row["worst"] for row in rows)
    assert all(row["worst"] < 1e-9 for row in rows if row["strategy"] == "optimal")

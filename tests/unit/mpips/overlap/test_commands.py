"""`mpips plan`, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

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


@pytest.mark.slow
def test_one_strategy_with_pictures(profile_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    png, trace = tmp_path / "p.png", tmp_path / "t.json"
    code, output = plan(
        str(profile_file),
        "--nodes",
        "8",
        "--strategy",
        "merged",
        "--strategy",
        "optimal",
        "--plot",
        str(png),
        "--trace",
        str(trace),
    )
    assert code == 0, output
    assert "merged" in output
    assert "layerwise" not in output
    assert png.stat().st_size > 1000
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--json", "--trace", "--save-profile", "--plot"])
def test_a_file_that_cannot_be_written_is_one_sentence(
    profile_file: Path, full_disk: str, tmp_path: Path, option: str
) -> None:
    file = tmp_path / "full.png"
    file.symlink_to(full_disk)
    if option == "--plot":
        pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    result = CliRunner().invoke(command, [str(profile_file), "--nodes", "4", option, str(file)])
    assert result.exit_code == 1
    assert f"Error: {option} {file} cannot be written: No space left on device\n" in result.output


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


@pytest.mark.parametrize(
    "network, nodes, words",
    [
        ({"a": 1e-4, "b": 1e-9}, 1, "measured on 1 node"),
        (
            {"a": 1e-4, "b": 1e-9, "collective": "servers"},
            None,
            "Error: network: a and b are those of a push to servers",
        ),
        ({"a": 1e-4, "b": 1e-9, "collective": "servers"}, 4, "a push to servers"),
        ({"a": 1e-4, "b": 1e-9}, 4, "an allreduce that need not be a ring"),
    ],
)
def test_what_no_other_size_follows_from_is_planned_as_measured(
    tmp_path: Path, network: dict[str, float | str], nodes: int | None, words: str
) -> None:
    data = profile_to_dict(random_profile(2, 5)) | {"network": network} | ({"nodes": nodes} if nodes else {})
    (tmp_path / "p.json").write_text(json.dumps(data))
    code, output = plan(str(tmp_path / "p.json"), "--nodes", "8:64")
    assert code == 2
    assert words in output
    assert "None" not in output
    assert output.count("\n") == 1
    again = ["--nodes", str(nodes)] if nodes else []
    assert plan(str(tmp_path / "p.json"))[0] == plan(str(tmp_path / "p.json"), *again)[0] == 0


def test_a_measured_ring_is_planned_on_other_sizes(tmp_path: Path) -> None:
    data = profile_to_dict(random_profile(2, 5)) | {"nodes": 4}
    (tmp_path / "p.json").write_text(json.dumps(data | {"network": {"a": 1e-4, "b": 1e-9, "collective": "ring"}}))
    code, output = plan(str(tmp_path / "p.json"), "--nodes", "8:64", "--json", str(tmp_path / "out.json"))
    assert code == 0, output
    assert {row["nodes"] for row in json.loads((tmp_path / "out.json").read_text())} == {8, 16, 32, 64}


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--model", "lenet5", "--rate", "inf"], "--rate"),
        (["--model", "lenet5", "--rate", "nan"], "--rate"),
        (["--model", "lenet5", "--rate", "0"], "--rate"),
        (["PROFILE", "--rate", "3"], "--rate goes with --model"),
        (["PROFILE", "--batch", "3"], "--batch goes with --model"),
        (["PROFILE", "--nodes", "zero"], "4:64"),
        ([], "give either a PROFILE.json or --model"),
    ],
)
def test_options_that_cannot_be_are_refused(profile_file: Path, words: list[str], sentence: str) -> None:
    code, output = plan(*[word.replace("PROFILE", str(profile_file)) for word in words])
    assert code == 2
    assert sentence in output


NOTHING = {
    "layers": [{"name": "a", "parameters": 0, "forward_s": 0, "backward_s": 0}],
    "network": {"a": 0, "b": 0},
    "startup_s": 0,
    "bandwidth_Bps": 1,
}


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
        (json.dumps(NOTHING | {"startups": 1}).encode(), "startups"),
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

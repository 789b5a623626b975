"""The reproductions of MG-WFBP and iBatch: simulated anywhere, measured where a lab can be had; what they conclude.

Jobs for the benchmark: sizes of layers from what startups are to weigh, as a paper's network has it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from examples.reproduce.overlap import __main__ as overlap
from examples.reproduce.overlap import measured as settings
from examples.reproduce.overlap.mg_wfbp import communication


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
    rows = [{"pushes": "dense", "strategy": name, "predicted_s": predicted, "measured_s": measured}
            for name, (predicted, measured) in times.items()]
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

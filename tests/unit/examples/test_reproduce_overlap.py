"""The reproductions of MG-WFBP and iBatch: simulated anywhere, measured where a lab can be had; what they conclude."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from examples.reproduce.overlap import __main__ as overlap


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

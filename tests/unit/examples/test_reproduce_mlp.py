"""The reproduction of the MLPs writes what it has computed, and says where it has computed nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from examples.reproduce.mlp import __main__ as mlp
from examples.reproduce.mlp import grids as mlp_grids
from mpips.mlp.mesh import factorings


def as_many_times_as_fast(link: object, measure: bool, quick: bool) -> list[mlp.Point]:
    """All points, without computing: P ranks take 1/P of the time."""
    wanted = {(width, *grid) for width in mlp.WIDTHS for p in mlp.PROCESSES for grid in factorings(p)}
    return [mlp.Point(width, batch, model, 1 / (batch * model), None) for width, batch, model in sorted(wanted)]


@pytest.mark.slow
def test_json_and_picture_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(mlp, "points", as_many_times_as_fast)
    numbers, picture = tmp_path / "mlp.json", tmp_path / "mlp.png"
    done = CliRunner().invoke(mlp.command, ["--predict-only", "--json", str(numbers), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert json.loads(numbers.read_text())["predicted"]["figure 5, 32x1"] == 32
    assert picture.stat().st_size > 1000


def test_where_no_data_are_found_nothing_has_been_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_grids, "ran", lambda processes, directory: [])
    done = CliRunner().invoke(mlp_grids.command, [])
    assert done.exit_code == 1
    assert "no data set was found: install scikit-learn" in done.output


def test_a_grid_that_is_off_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"processes": 2, "grid": "2x1", "data": "digits", "dtype": "float64", "widths": "odd", "split": "pairs"}
    for difference, code in ((1e-12, 0), (1e-3, 1), (float("nan"), 1)):
        rows = [row | {"difference": difference}, row | {"dtype": "float32", "difference": 0.0}]
        monkeypatch.setattr(mlp_grids, "ran", lambda ranks, directory, rows=rows: rows)
        done = CliRunner().invoke(mlp_grids.command, ["--ranks", "2"])
        assert done.exit_code == code, done.output
        assert f"{code} off" in done.output


@pytest.mark.parametrize("words", [["--ranks", "two"], ["-n", "0"], ["--ranks", "1,,2"]])
def test_numbers_of_ranks_are_numbers(words: list[str]) -> None:
    done = CliRunner().invoke(mlp_grids.command, words)
    assert done.exit_code == 2
    assert "must be numbers of at least 1 with commas between" in " ".join(done.output.split())

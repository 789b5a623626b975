"""The BML reproduction without a lab: the paper's formulas, its figure 5, and the gains of figures 6 and 7."""

from __future__ import annotations

from typing import Any

import pytest

from examples.reproduce.bml import __main__ as bml
from examples.reproduce.bml.tables import show

RATE = 12.5e6


@pytest.fixture(scope="module")
def figure5() -> list[dict[str, Any]]:
    """Simulated once."""
    return bml.figure5()


@pytest.mark.parametrize("nbytes", bml.SIZES)
def test_without_latency_and_adding_the_simulator_gives_the_papers_times(nbytes: int) -> None:
    for topology, algorithm in (bml.SERVER, bml.BML):
        run = bml.predict(topology, algorithm, nbytes, RATE, gamma=0.0)
        assert run.seconds == pytest.approx(bml.bound(topology, nbytes, RATE), rel=1e-4)
    assert bml.bound(bml.BCUBE, nbytes, RATE) == pytest.approx(bml.bound(bml.STAR, nbytes, RATE) / 2)


def test_jobs_gain_what_the_paper_says_and_more_with_smaller_batches() -> None:
    rows = bml.jobs({}, RATE)
    for model in bml.MODELS:
        gains = [row["predicted_gain"] for row in rows if row["model"] == model.name]
        assert gains == sorted(gains, reverse=True)
        assert gains[-1] == pytest.approx(model.least, abs=0.01)
        assert max(gains) < model.most


def test_counted_bytes_are_held_against_the_schedule_nic_by_nic() -> None:
    run = bml.predict(bml.STAR, "ring", bml.MIB, RATE)
    expected = 16 / 9 * bml.MIB
    counted = [{"d0": [round(expected), round(expected)]} for _ in range(9)]
    rows = bml.nics(bml.STAR, run, counted)
    assert [(row["host"], row["nic"]) for row in rows] == [(f"h{host}", "d0") for host in range(9)]
    assert all(theory == pytest.approx(expected, rel=1e-4) for row in rows for _, theory in (row["out"], row["in"]))
    assert max(row["difference"] for row in rows) < 1e-4
    counted[4]["d0"][1] = round(1.05 * expected)
    off = [row["difference"] for row in bml.nics(bml.STAR, run, counted)]
    assert off[4] == pytest.approx(0.05, abs=1e-3)
    assert max(off[:4] + off[5:]) < 1e-4


def test_figure_5_has_the_papers_value_and_where_it_is_rough(figure5: list[dict[str, Any]]) -> None:
    for row in figure5:
        if row["case"] == "PS on BCube":  # the paper doubles BML's; pairs under one switch of n servers need one hop
            n = {16: 4, 1024: 32}[row["servers"]]
            assert row["paper"] == pytest.approx(2 * (1 - 1 / row["servers"]))
            assert row["gst"] == pytest.approx(2 * (n - 1) / n, rel=1e-3)
        else:
            assert row["gst"] == pytest.approx(row["paper"], rel=1e-3)


def test_the_papers_end_points_stand_beside_the_gains() -> None:
    rows = [row for row in bml.jobs({}, RATE) if row["model"] == "VGG-19"]
    assert [row["paper_gain"] for row in rows] == [0.521, None, None, 0.292]


def test_the_tables_of_a_simulation_have_the_papers_columns(
    capsys: pytest.CaptureFixture[str], figure5: list[dict[str, Any]]
) -> None:
    empty: dict[str, list[Any]] = {"exchanges": [], "ratios": [], "native": []}
    show({**empty, "models": bml.models(), "jobs": bml.jobs({}, RATE), "figure5": figure5})
    said = capsys.readouterr().out
    for words in ("paper: gain", "56.4 %", "drawn", "GST in units of T_F", "1.938"):
        assert words in said

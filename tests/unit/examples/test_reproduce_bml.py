"""The BML reproduction without a lab: the paper's formulas, its figure 5, and the gains of figures 6 and 7."""

from __future__ import annotations

import pytest

from examples.reproduce import bml

RATE = 12.5e6


@pytest.mark.parametrize("nbytes", bml.SIZES)
def test_without_latency_and_adding_the_simulator_gives_the_papers_times(nbytes: int) -> None:
    for topology, algorithm in (bml.SERVER, bml.BML):
        run = bml.predict(topology, algorithm, nbytes, RATE, gamma=0.0)
        assert run.seconds == pytest.approx(bml.bound(topology, nbytes, RATE), rel=1e-4)
    assert bml.bound(bml.BCUBE, nbytes, RATE) == pytest.approx(bml.bound(bml.STAR, nbytes, RATE) / 2)


def test_figure_5_needs_both_the_network_and_the_algorithm() -> None:
    rows = bml.figure5()
    assert [row["servers"] for row in rows] == [16] * 4 + [1024] * 4
    for servers in (16, 1024):
        gst = {row["case"]: row["gst"] for row in rows if row["servers"] == servers}
        theory = 2 * (servers - 1) / servers
        assert gst["PS on Fat-Tree"] == pytest.approx(theory, rel=1e-3)
        assert gst["BML on Fat-Tree"] == pytest.approx(theory, rel=1e-3)
        assert gst["BML on BCube"] == pytest.approx(theory / 2, rel=1e-3)
        assert gst["BML on BCube"] < gst["PS on BCube"] < gst["PS on Fat-Tree"]


def test_jobs_gain_what_the_paper_says_and_more_with_smaller_batches() -> None:
    rows = bml.jobs({}, RATE)
    for model in bml.MODELS:
        gains = [row["predicted_gain"] for row in rows if row["model"] == model.name]
        assert gains == sorted(gains, reverse=True)
        assert gains[-1] == pytest.approx(model.least, abs=0.01)
        assert max(gains) < model.most


def test_counted_bytes_are_held_against_the_schedule() -> None:
    run = bml.predict(bml.STAR, "ring", bml.MIB, RATE)
    expected = 16 / 9 * bml.MIB
    exact = [{"d0": [round(expected), round(expected)]} for _ in range(9)]
    assert bml._worst_nic(bml.STAR, run, exact) < 1e-4
    exact[4]["d0"][1] = round(1.05 * expected)
    assert bml._worst_nic(bml.STAR, run, exact) == pytest.approx(0.05, abs=1e-3)

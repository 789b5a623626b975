"""Jobs for the benchmark: sizes of layers from what startups are to weigh, as a paper's network has it."""

from __future__ import annotations

import pytest

from examples.reproduce.overlap import measured as settings
from examples.reproduce.overlap.mg_wfbp import communication


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

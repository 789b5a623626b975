"""Timelines of one direction, the hidden share, the picture and the trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpips.overlap import Problem, Task, draw, hidden_share, save_chrome, timeline

from .problems import random_profile


def test_push_by_hand() -> None:
    """MG-WFBP, Eq. 6, 7: layers 3, 2, 1 are ready at 3, 5, 6; messages of 2 and 3.5."""
    tasks = timeline.push(Problem.of([1, 2, 3], 1.0, [1.5, 1.0, 1.0]), ((1, 2), (3, 3)))
    pushes = [task for task in tasks if task.kind == "push"]
    assert [(t.first, t.last, t.start, t.end) for t in pushes] == [(3, 3, 3.0, 5.0), (1, 2, 6.0, 9.5)]
    assert [(t.first, t.end) for t in tasks if t.kind == "backward"] == [(3, 3.0), (2, 5.0), (1, 6.0)]
    assert hidden_share(tasks) == pytest.approx(2.0 / 5.5)


def test_pull_by_hand() -> None:
    """iBatch, figure 4c: batches arrive at 2 and 5; layer 3 waits for the second."""
    tasks = timeline.pull(Problem.of([1, 1, 2], 1.0, [0.5, 0.5, 2.0]), ((1, 2), (3, 3)))
    pulls = [task for task in tasks if task.kind == "pull"]
    assert [(t.first, t.last, t.start, t.end) for t in pulls] == [(1, 2, 0.0, 2.0), (3, 3, 2.0, 5.0)]
    assert [(t.start, t.end) for t in tasks if t.kind == "forward"] == [(2.0, 3.0), (3.0, 4.0), (5.0, 7.0)]


def test_iterations_add_the_other_pass() -> None:
    profile = random_profile(5, 6)
    whole = ((1, 6),)
    push = profile.push(8)
    pushed = timeline.push_iteration(profile, whole, 8)
    assert timeline.end(pushed) == pytest.approx(
        profile.forward_s + profile.backward_s + push.startup + push.transfer.sum()
    )
    pull = profile.pull()
    pulled = timeline.pull_iteration(profile, whole, 8)
    assert timeline.end(pulled) == pytest.approx(
        profile.forward_s + profile.backward_s + pull.startup + pull.transfer.sum()
    )


def test_hidden_share_counts_overlapping_compute_once() -> None:
    tasks = [
        Task("forward", 1, 1, 0.0, 2.0, timeline.COMPUTE),
        Task("forward", 2, 2, 1.0, 3.0, timeline.COMPUTE),
        Task("pull", 1, 2, 2.5, 4.5, timeline.SEND),
    ]
    assert hidden_share(tasks) == pytest.approx(0.25)
    assert hidden_share(tasks[:2]) == 1.0


def test_trace_holds_every_task(tmp_path: Path) -> None:
    profile = random_profile(1, 4)
    tasks = timeline.push_iteration(profile, ((1, 2), (3, 4)), 4)
    names = [layer.name for layer in profile.layers]
    save_chrome({"plan": tasks}, tmp_path / "t.json", names)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert len(bars) == len(tasks)
    for event, task in zip(bars, tasks):
        assert event["dur"] == pytest.approx(1e6 * task.seconds)
        assert event["args"]["layers"] == names[task.first - 1 : task.last]


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    draw({"a": timeline.push_iteration(random_profile(1, 4), ((1, 4),), 4)}, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")

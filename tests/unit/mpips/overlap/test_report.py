"""What a job says of its overlap, from given clocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpips.overlap.exchange import STEPS, EndedMessage, Recorder, sent_tasks
from mpips.overlap.timeline import COMPUTE, Task

PUSHED, PULLED = ((1, 1), (2, 2)), ((1, 2),)


def layers(begin: float) -> list[Task]:
    """Two layers of a second each, forward, then backward."""
    kinds = (("forward", 1), ("forward", 2), ("backward", 2), ("backward", 1))
    return [
        Task(kind, layer, layer, begin + i, begin + i + 1, COMPUTE)  # type: ignore[arg-type]
        for i, (kind, layer) in enumerate(kinds)
    ]


def test_messages_beside_this_step_and_the_next_one_are_hidden() -> None:
    recorder = Recorder()
    recorder.step(
        4.0,
        layers(10.0),
        [
            ("push", 2, 2, EndedMessage(13.0, 13.5)),
            ("push", 1, 1, EndedMessage(14.0, 14.5)),
            ("pull", 1, 2, EndedMessage(14.5, 15.5)),
        ],
    )
    recorder.waited(1.0)
    recorder.step(7.0, layers(15.0), [("push", 1, 2, EndedMessage(19.0, 20.0, done=False))])
    report = recorder.report("merged", PUSHED, PULLED, 0, None)
    assert report.iterations == 1  # the second one's push is under way
    assert report.measured_s == 6.0
    assert report.hidden == pytest.approx((0.5 + 0.5) / 2.0)
    assert [task.start for task in report.tasks][:2] == [0.0, 1.0]
    assert sum(task.kind == "forward" for task in report.tasks) == 3  # the next step's first layer is beside the pull


def test_a_prediction_stands_beside_and_is_said(tmp_path: Path) -> None:
    recorder = Recorder()
    for number in range(STEPS + 9):
        begin = 10.0 * number
        recorder.step(4.0, layers(begin), [("push", 1, 2, EndedMessage(begin + 4, begin + 5))])
    predicted = [*layers(0.0), Task("push", 1, 2, 3.0, 5.0, "network")]
    report = recorder.report("single", ((1, 2),), (), 0, predicted)
    assert report.hidden == 0.0
    assert (report.predicted_s, report.predicted_hidden) == (5.0, 0.5)
    for words in ("overlap single", "4 s an iteration", "0% of the communication hidden", "predicted 5 s", "1 group "):
        assert words in str(report)
    assert json.loads(json.dumps(report.row()))["predicted_s"] == 5.0
    report.save_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(report.tasks) == 5
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    report.save_picture(tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_without_overlap_nothing_is_hidden() -> None:
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="call step or fit first"):
        recorder.report("none", ((1, 3),), (), 0, None)
    recorder.blocking(3, 5.0, 7.0, 8.0)
    report = recorder.report("none", ((1, 3),), (), 0, None)
    assert (report.measured_s, report.hidden, report.predicted_s) == (3.0, 0.0, None)
    assert "not predicted" in str(report)


def test_a_message_counts_from_where_it_stopped_waiting_for_another() -> None:
    sent = [
        ("push", 3, 3, EndedMessage(1.0, 3.0)),
        ("pull", 3, 3, EndedMessage(1.0, 5.0)),
        ("push", 2, 2, EndedMessage(2.0, 4.0)),
        ("pull", 2, 2, EndedMessage(2.0, 6.0)),
        ("push", 1, 1, EndedMessage(7.0, 8.0)),
    ]
    tasks = [(task.kind, task.start, task.end) for task in sent_tasks(sent, begin=1.0)]
    assert tasks == [("push", 0.0, 2.0), ("pull", 2.0, 4.0), ("push", 2.0, 3.0), ("pull", 4.0, 5.0), ("push", 6.0, 7.0)]

"""What was sent, as tasks of a timeline."""

from __future__ import annotations

from mpips.overlap.exchange import Ended, sent_tasks


def test_a_message_counts_from_where_it_stopped_waiting_for_another() -> None:
    sent = [("push", 3, 3, Ended(1.0, 3.0)), ("pull", 3, 3, Ended(1.0, 5.0)), ("push", 2, 2, Ended(2.0, 4.0)),
            ("pull", 2, 2, Ended(2.0, 6.0)), ("push", 1, 1, Ended(7.0, 8.0))]  # fmt: skip
    tasks = [(task.kind, task.start, task.end) for task in sent_tasks(sent, begin=1.0)]  # type: ignore[arg-type]
    assert tasks == [("push", 0.0, 2.0), ("pull", 2.0, 4.0), ("push", 2.0, 3.0), ("pull", 4.0, 5.0), ("push", 6.0, 7.0)]

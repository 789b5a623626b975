"""Seconds by phase, and how much of the communication was hidden."""

import pytest

from mpips.mlp import parallel as clock
from mpips.mlp.parallel import Clock, exposed, hidden


@pytest.fixture
def at(monkeypatch):
    """Sets the time of day."""
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])

    def go(seconds):
        now[0] = seconds

    return go


def test_what_computation_did_not_wait_for_is_hidden(at):
    mine = Clock()
    at(1.0)
    mine.sent()
    at(2.0)
    mine.sent()  # two under way at once count once
    at(4.0)
    mine.arrived()
    at(5.0)
    mine.arrived()
    mine.add("backward", 4.5)
    at(7.0)
    mine.sent()  # waited for from the start
    at(8.0)
    mine.arrived()
    mine.add("forward", 7.0)
    assert mine.under_way == 5.0
    assert exposed(mine.seconds) == 1.5
    assert hidden(mine.seconds, mine.under_way) == pytest.approx(0.7)


def test_nothing_is_hidden_where_nothing_moves():
    mine = Clock()
    assert hidden(mine.seconds, mine.under_way) is None

"""Workers that wait for one another: when none can go on, and what is said then."""

from __future__ import annotations

from mpips.talk import Waits, stuck, verdict


def waits(rank, rounds, meeting=0, meetings=0, **needs):
    return Waits(f"rank {rank}: pull of keys {list(needs)}", needs, meeting, rounds, meetings)


def test_two_orders_of_two_keys():
    both = {0: waits(0, {"a": 1, "b": 0}, a=1), 1: waits(1, {"a": 0, "b": 1}, b=1)}
    assert stuck(both)
    assert "rank 0: pull of keys ['a'] (round 1); rank 1: pull of keys ['b'] (round 1)" in verdict(both)


def test_who_has_pushed_is_not_waited_for():
    assert not stuck({0: waits(0, {"a": 1, "b": 0}, a=1), 1: waits(1, {"a": 1, "b": 1}, b=1)})
    assert not stuck({0: waits(0, {"a": 1}, a=1), 1: waits(1, {"a": 1}, a=1)})


def test_all_must_be_stuck_for_any_to_be():
    """Rank 2 waits for what all have pushed: it will go on."""
    three = {0: waits(0, {"a": 1, "b": 0}, a=1), 1: waits(1, {"a": 0, "b": 1}, b=1), 2: waits(2, {"a": 0, "c": 1})}
    assert not stuck(three)
    three[2] = waits(2, {"a": 0, "b": 0, "c": 1}, c=1)
    assert stuck(three)


def test_a_meeting_is_waited_for_too():
    assert stuck({0: waits(0, {"a": 0}, meeting=3, meetings=3), 1: waits(1, {"a": 1}, meetings=2, a=1)})
    assert not stuck({0: waits(0, {"a": 1}, meeting=3, meetings=3), 1: waits(1, {"a": 1}, meetings=2, a=1)})
    assert not stuck({0: waits(0, {}, meeting=3, meetings=3), 1: waits(1, {}, meeting=3, meetings=3)})

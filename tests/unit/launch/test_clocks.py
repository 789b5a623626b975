"""Clocks that go wrong in known ways, asked over a link whose ways there and back differ."""

from __future__ import annotations

import random

import pytest

from launch.observe.clocks import HostClock, measure


class Link:
    """A reference clock that goes on as it is asked, and another clock with a shift and a drift behind a link."""

    def __init__(self, shift: int, drift: float) -> None:
        self._shift, self._drift, self._random = shift, drift, random.Random(7)
        self.now = 10**15

    def other(self, at: int) -> int:
        return at + self._shift + round((at - 10**15) * self._drift)

    def ask(self) -> int:
        self.now += self._random.randrange(20_000, 400_000)
        answer = self.other(self.now)
        self.now += self._random.randrange(20_000, 90_000)
        return answer

    def clock(self) -> int:
        return self.now


@pytest.mark.parametrize("shift", [-(10**18), 0, 3 * 10**14])
@pytest.mark.parametrize("drift", [0.0, 100e-6, -400e-6])
def test_times_are_right_within_the_stated_error(shift: int, drift: float) -> None:
    link = Link(shift, drift)
    offsets = []
    for _ in range(3):
        offsets.append(measure(link.ask, link.clock))
        link.now += 30 * 10**9
    clock, first, last = HostClock(offsets), 10**15 - 10**9, link.now
    error = clock.error_ns(link.other(first), link.other(last))
    for at in range(first, last, 10**9 // 7):
        assert abs(clock.to_reference(link.other(at)) - at) <= error
    assert error < 100_000 + abs(drift) * 31e9 + 500e-6 * 31e9


def test_the_quickest_exchange_counts() -> None:
    link = Link(10**12, 0.0)
    assert measure(link.ask, link.clock).error_ns < 100_000, "the middle one takes 265 us, of which a half is 132"


def test_a_slow_link_is_asked_less_often() -> None:
    link = Link(0, 0.0)
    asked = []

    def ask() -> int:
        link.now += 10**8
        asked.append(link.now)
        return link.ask()

    assert measure(ask, link.clock).error_ns >= 5 * 10**7
    assert len(asked) == 5

"""The one wait loop, and how long it lasts: `collectives.fabric.wait`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from collectives import CollectiveError, StallError
from collectives import clock as clocks
from collectives.fabric import wait
from collectives.fabric.wait import Limits, drive


class Generation:
    """One that lives, unless `ends` seconds have been waited for."""

    nap_after = 0.02

    def __init__(self, limits: Limits = Limits(), late: tuple[int, ...] = (), ends: float = 1e9) -> None:  # noqa: B008
        self.limits, self._late, self._ends = limits, late, ends
        self.looks: list[float] = []

    def look(self, waited: float) -> None:
        self.looks.append(waited)
        if waited >= self._ends:
            raise CollectiveError("the generation has ended")

    def late(self) -> tuple[int, ...]:
        return self._late


@pytest.fixture
def clock(monkeypatch):
    """A clock that a yield moves by 10 us, and a sleep by as long as it lasts. Counts both."""
    made = SimpleNamespace(now=5.0, used=0.0, yields=0, naps=[])

    def give_way():
        made.yields += 1
        made.now += 1e-5

    def sleep(seconds):
        made.naps.append(seconds)
        made.now += seconds

    monkeypatch.setattr(wait, "os", SimpleNamespace(sched_yield=give_way))
    fake = SimpleNamespace(monotonic=lambda: made.now, process_time=lambda: made.used, sleep=sleep)
    monkeypatch.setattr(wait, "time", fake)
    monkeypatch.setattr(clocks, "time", fake)
    return made


def until_time(clock, seconds):
    """Steps that end then, and that cost a little themselves."""
    start = clock.now
    while clock.now < start + seconds:
        clock.now += 1e-6
        yield


def test_a_short_wait_gives_way_to_nobody_and_asks_nobody(clock):
    generation = Generation()
    drive(iter([None] * 10), generation, "a wait")
    assert not clock.yields and not clock.naps and not generation.looks


def test_after_some_steps_it_gives_way_then_it_naps(clock):
    generation = Generation()
    drive(until_time(clock, 1.0), generation, "a wait")
    assert 1000 < clock.yields < 2100
    assert clock.naps and max(clock.naps) <= 3e-4 and min(clock.naps) >= 1e-4
    assert generation.looks == sorted(generation.looks)


def test_a_crowded_rank_gives_way_sooner(clock):
    drive(iter([None] * 10), Generation(), "a wait", spins=1)
    assert clock.yields == 9


def test_it_looks_for_the_end_of_the_generation_often_enough(clock):
    generation = Generation()
    drive(until_time(clock, 2.0), generation, "a wait")
    gaps = [after - before for before, after in itertools.pairwise(generation.looks)]
    assert max(gaps) < 0.01


def test_what_the_generation_raises_ends_the_wait(clock):
    with pytest.raises(CollectiveError, match="the generation has ended"):
        drive(iter(lambda: None, 0), Generation(ends=0.5), "a wait")
    assert clock.now < 5.6


def test_it_warns_once_and_says_who_has_not_come(clock):
    generation = Generation(Limits(1, 0), (2, 5))
    with pytest.warns(RuntimeWarning) as told:
        drive(until_time(clock, 5.0), generation, "allreduce of 3")
    assert len(told) == 1
    assert str(told[0].message).startswith("allreduce of 3 has waited for 1 s: ranks 2, 5 have not come")


@pytest.mark.parametrize("late, words", [((3,), ": rank 3 has not come; for longer"), ((), "for 2 s; for longer")])
def test_it_raises_after_the_limit_with_the_limit(clock, late, words):
    with pytest.raises(StallError, match="a wait has waited for 2 s") as error:
        drive(iter(lambda: None, 0), Generation(Limits(60, 2), late), "a wait")
    assert error.match(words)
    assert 6.9 < clock.now < 7.1


@pytest.mark.slow
def test_no_limit_is_no_limit(clock):
    with pytest.warns(RuntimeWarning):
        drive(until_time(clock, 1000.0), Generation(Limits(60, 0)), "a wait")


def test_seconds_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("MPIPS_STALL_SECONDS", "2.5")
    monkeypatch.delenv("MPIPS_TIMEOUT_SECONDS", raising=False)
    assert wait.read_limits() == (2.5, 300)


@pytest.mark.parametrize("name", ["MPIPS_STALL_SECONDS", "MPIPS_TIMEOUT_SECONDS"])
def test_what_is_no_number_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "5x")
    with pytest.raises(ValueError, match=f"{name} is '5x': set a number of seconds"):
        wait.read_limits()


def test_time_in_which_the_process_was_stopped_is_not_waited_for(clock):
    generation = Generation(Limits(1, 2), (1,))

    def steps():
        for number in range(3000):
            clock.now += 3600 if number == 1000 else 0
            yield

    began = clock.now
    drive(steps(), generation, "a wait")
    assert clock.now - began > 3600 and max(generation.looks) < 1
    with pytest.warns(RuntimeWarning), pytest.raises(StallError, match="waited for 2 s: rank 1 has not come"):
        drive(iter(lambda: None, 0), generation, "a wait")

"""What counts for a limit, and what does not: `collectives.clock`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from collectives import clock as clocks
from collectives.clock import GAP_SECONDS, GRACE_SECONDS, Clock


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that have passed, and that this process has computed."""
    made = SimpleNamespace(now=7.0, used=3.0)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic=lambda: made.now, process_time=lambda: made.used))
    return made


def look(machine: SimpleNamespace, clock: Clock, seconds: float, every: float = 0.005, busy: float = 0.1) -> float:
    """Let time pass, and look at the clock as waits do; what it has counted meanwhile."""
    before = clock.seconds()
    for _ in range(round(seconds / every)):
        machine.now += every
        machine.used += busy * every
        clock.seconds()
    return clock.seconds() - before


def stop(machine: SimpleNamespace, clock: Clock, seconds: float) -> float:
    """Let time pass in which the process does nothing at all; what the clock counts of it."""
    before = clock.seconds()
    machine.now += seconds
    return clock.seconds() - before


@pytest.mark.parametrize("every", [0.001, 0.1, 1.5])
def test_all_counts_while_the_process_runs_on_crowded_cores_too(machine, every):
    assert look(machine, Clock(), 30.0, every) == pytest.approx(30, rel=1e-3)


@pytest.mark.parametrize("seconds", [3.0, 12.0, 3600.0, 1e6])
def test_the_time_in_which_it_was_stopped_does_not(machine, seconds):
    clock = Clock()
    assert stop(machine, clock, seconds) == 0
    look(machine, clock, GRACE_SECONDS + 2 * GAP_SECONDS)
    assert stop(machine, clock, seconds) < 0.02  # what it has computed since it was last asked


def test_after_it_the_clock_runs_slowly_for_a_while_as_others_may_not_run_yet(machine):
    clock = Clock()
    stop(machine, clock, 60)
    assert look(machine, clock, GRACE_SECONDS) < GRACE_SECONDS / 5
    assert look(machine, clock, 5) == pytest.approx(5, abs=0.1)


def test_what_it_computes_between_two_looks_counts(machine):
    clock = Clock()
    assert look(machine, clock, 60, every=6, busy=1.0) == pytest.approx(60)
    assert look(machine, clock, 60, every=6, busy=16.0) == pytest.approx(60)  # in several threads
    look(machine, clock, 5)
    assert look(machine, clock, 100, every=100, busy=0.3) == pytest.approx(30, abs=0.1)  # stopped for the rest


@pytest.mark.parametrize("every", [2.5, 30.0])
def test_a_wait_that_blocks_again_and_again_has_an_end(machine, every):
    """Nothing tells it from a process that was stopped, but that it never looks regularly between."""
    assert look(machine, Clock(), 300, every, busy=0.0) > 0.85 * 300 - every - GRACE_SECONDS

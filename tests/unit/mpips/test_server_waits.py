"""Who waits for whom at a server: long waits, workers that leave or give up, readers, workers that run ahead."""

from __future__ import annotations

import numpy as np
import pytest

from mpips.optimizers import SGD, Add
from mpips.sources import Elements
from mpips.unit import Unit
from tests.unit.mpips.machine import WORKERS, Arriving, Growing, Machine


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_contribution_that_is_withdrawn_is_never_read(asynchronous):
    machine = Machine(workers=2, asynchronous=asynchronous, staleness=0)
    machine.state.set_optimizer(Add())
    held = Arriving(np.full(10, 100, "f4"), [0])
    machine.push(0, 1)
    machine.push(0, held)
    machine.refuse(0, "rank 0: no", 2)
    assert held.dropped
    held.there[0] = 3
    machine.refuse(0, "too late", 2)
    machine.push(1, 10)
    assert machine.work() == [11] * 10
    machine.push(1, 20)
    assert machine.work() == [31 if asynchronous else 11] * 10
    machine.refuse(0, "it has ended", 1)
    for worker in range(2):
        machine.push(worker, 1)
    assert machine.work() == [33 if asynchronous else 13] * 10
    assert machine.heard("FAILED") == ([] if asynchronous else [(worker, "rank 0: no") for worker in (1, 0)])


@pytest.mark.parametrize("worker, kept", [(0, True), (1, False)])
def test_what_has_begun_to_count_is_withdrawn_only_where_the_rest_of_it_does_not_come(worker, kept):
    machine = Machine(workers=2)
    arriving = Arriving(np.full(10, 10, "f4"), [1])
    machine.push(0, 1)
    machine.push(1, arriving)
    assert machine.work() == [11] * 4 + [0] * 6
    machine.refuse(worker, "given up")
    arriving.there[0] = 3
    assert machine.work() == ([11] * 10 if kept else [11] * 4 + [0] * 6)
    assert machine.heard("FAILED") == ([] if kept else [(1, "given up"), (0, "given up")])
    machine.push(0, 2)
    machine.push(1, 20)
    assert machine.work() == [22] * 10


def test_what_has_begun_to_count_in_an_asynchronous_store_is_finished():
    machine = Machine(workers=2, asynchronous=True)
    machine.state.set_optimizer(Add())
    there = [1]
    machine.push(0, Growing(np.full(10, 1, "f4"), there))
    assert machine.work() == [1] * 4 + [0] * 6
    machine.push(1, 10)
    machine.refuse(0, "given up", 1)
    machine.refuse(1, "given up", 1)
    there[0] = 3
    assert machine.work() == [1] * 10


@pytest.mark.parametrize("forgotten", [False, True])
def test_nothing_is_received_for_what_is_given_up(forgotten):
    machine = Machine(workers=2, asynchronous=not forgotten)
    machine.unit.stored = np.zeros(10, np.int32)
    machine.state.set_optimizer(SGD())
    sources = [Arriving(np.ones(10, np.int32), [1]) for _ in range(2)]
    for source in sources:
        machine.push(0, source)
    if forgotten:
        machine.state.forget([0])
    else:
        machine.work()
        assert ["needs float weights, not int32" in text for _, text in machine.heard("FAILED")] == [True, True]
    assert all(source.dropped for source in sources)


def test_a_worker_that_left_fails_what_waits_for_it():
    machine = Machine()
    machine.push(0, 1)
    machine.said += machine.state.left(1)
    assert [worker for worker, text in machine.heard("FAILED") if "rank 1, which has left" in text] == [2, 0]


def test_a_long_wait_warns_once_and_then_fails():
    machine = Machine(stall_seconds=1, timeout_seconds=3)
    machine.push(0, 1, clock=10)
    for clock in (10.5, 11.5, 12):
        machine.said += machine.state.tick(clock)
    assert [worker for worker, _ in machine.heard("WARNING")] == [0]
    assert "key 'w'" in machine.heard("WARNING")[0][1] and "ranks [1, 2]" in machine.heard("WARNING")[0][1]
    machine.said += machine.state.tick(13.5)
    assert all(reply.timed_out for reply in machine.said if reply.what == "FAILED")
    assert len(machine.heard("FAILED")) == WORKERS


def test_keys_that_wait_for_the_same_workers_are_warned_of_together():
    machine = Machine(stall_seconds=1)
    for number, name in enumerate("xyz", 1):
        unit = Unit(number, name, np.zeros(10, np.float32), [0] * (1 + WORKERS), range(WORKERS), 4, 1)
        machine.state.create(unit)
    for number, workers in enumerate([[0], [0, 2], [0], [0]]):
        for worker in workers:
            machine.state.pushed(number, worker, Elements(np.ones(10, np.float32)), 0, 10.0)
    machine.said = machine.state.tick(11.5) + machine.state.tick(12.5)
    one, three = "ranks [1]; ranks [0, 2] have pushed", "ranks [1, 2]; ranks [0] have pushed"
    assert machine.heard("WARNING") == [
        (0, f"key 'w' (and 2 more keys): round 1 has waited 1.5 s for {three}"),
        (0, f"key 'x': round 1 has waited 1.5 s for {one}"),
        (2, f"key 'x': round 1 has waited 1.5 s for {one}"),
    ]


def test_a_round_that_has_begun_to_count_is_not_given_up():
    machine = Machine(stall_seconds=1, timeout_seconds=3)
    there = [2]
    for worker in range(WORKERS):
        machine.push(worker, Growing(np.ones(10, np.float32), there))
    assert machine.work() == [3] * 8 + [0] * 2
    assert machine.state.tick(100.0) == []
    there[0] = 3
    assert machine.work() == [3] * 10


def test_a_round_waits_from_the_end_of_the_one_before():
    machine = Machine(workers=2, stall_seconds=1, timeout_seconds=3)
    machine.push(0, 1, clock=10.0)
    machine.push(0, 1, clock=10.1)
    machine.said += machine.state.tick(12.5)
    machine.push(1, 1, clock=12.9)
    machine.work()
    machine.said += machine.state.tick(13.2)
    assert len(machine.heard("WARNING")) == 1 and not machine.heard("FAILED")
    machine.said += machine.state.tick(14.5)
    assert len(machine.heard("WARNING")) == 2 and not machine.heard("FAILED")
    machine.said += machine.state.tick(16.5)
    assert len(machine.heard("FAILED")) == 2


def test_readers_hold_updates_back():
    machine = Machine(workers=1)
    machine.push(0, 1)
    machine.work()
    machine.said += machine.state.pulled(0, 0, 1)
    assert machine.heard("GRANT") == [(0, "")]
    machine.push(0, 2)
    assert machine.work() == [1] * 10
    machine.state.released(0, 0)
    assert machine.work() == [2] * 10


def abandoned_pull(abandon):
    """A machine where worker 0 was too far ahead to read, and gave that up."""
    machine = Machine(workers=2, asynchronous=True, staleness=0)
    machine.state.set_optimizer(Add())
    machine.push(0, 1)
    machine.work()
    machine.said += machine.state.pulled(0, 0, 1)
    assert not machine.heard("GRANT")
    machine.said += abandon(machine.state)
    return machine


@pytest.mark.parametrize("granted_first", [False, True])
def test_a_pull_that_is_given_up_holds_nobody_back(granted_first):
    machine = abandoned_pull(lambda state: [] if granted_first else state.released(0, 0))
    machine.push(1, 10)
    assert machine.work() == [11] * 10
    if granted_first:
        machine.said += machine.state.released(0, 0)
    assert machine.heard("GRANT") == [(0, "")]  # each question has one answer
    for worker in range(2):
        machine.push(worker, 1)
    assert machine.work() == [13] * 10


def test_a_worker_that_leaves_reads_no_more():
    machine = abandoned_pull(lambda state: state.left(0))
    machine.push(1, 10)
    assert machine.work() == [11] * 10
    machine.push(1, 10)
    assert machine.work() == [21] * 10
    assert not machine.heard("GRANT")


def test_a_reader_that_leaves_lets_the_others_go_on():
    machine = Machine(workers=2, asynchronous=True)
    machine.state.set_optimizer(Add())
    machine.said += machine.state.pulled(0, 0, 0)
    machine.push(1, 10)
    assert machine.work() == [0] * 10
    machine.said += machine.state.left(0)
    assert machine.work() == [10] * 10


def test_a_pull_waits_for_the_workers_own_pushes():
    machine = Machine(workers=2, asynchronous=True)
    machine.state.set_optimizer(Add())
    machine.push(0, 1)
    machine.said += machine.state.pulled(0, 0, 1)
    assert not machine.heard("GRANT")
    machine.work()
    assert machine.heard("GRANT") == [(0, "")]


def test_asynchronous_pushes_count_at_once_within_the_staleness():
    machine = Machine(workers=2, asynchronous=True, staleness=1)
    machine.state.set_optimizer(Add())
    for _ in range(4):
        machine.push(0, 1)
    assert machine.work() == [2] * 10  # worker 1 has done nothing: the third push would be two ahead
    machine.push(1, 10)
    assert machine.work() == [13] * 10
    machine.said += machine.state.left(1)
    assert machine.work() == [14] * 10

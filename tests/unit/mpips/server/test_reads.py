"""Who may read a unit of a server, and whom readers hold back."""

from __future__ import annotations

from mpips.optimizers import Add
from tests.unit.mpips.server.machine import Machine


def test_readers_hold_updates_back():
    machine = Machine(workers=1)
    machine.push(0, 1)
    machine.work()
    machine.pull(0, 1)
    assert machine.heard("GRANT") == [(0, "")]
    machine.push(0, 2)
    assert machine.work() == [1] * 10
    machine.state.released(0, 0)
    assert machine.work() == [2] * 10


def test_a_pull_waits_for_the_workers_own_pushes():
    machine = Machine(workers=2, asynchronous=True, optimizer=Add())
    machine.push(0, 1)
    machine.pull(0, 1)
    assert not machine.heard("GRANT")
    machine.work()
    assert machine.heard("GRANT") == [(0, "")]


def test_a_pull_waits_for_workers_that_are_too_far_behind():
    machine = Machine(workers=2, asynchronous=True, staleness=0, optimizer=Add())
    machine.push(0, 1)
    machine.work()
    machine.pull(0, 1)
    assert not machine.heard("GRANT")
    machine.push(1, 10)
    assert machine.work() == [11] * 10
    assert machine.heard("GRANT") == [(0, "")]


def test_a_worker_that_leaves_reads_no_more():
    machine = Machine(workers=2, asynchronous=True, staleness=0, optimizer=Add())
    machine.push(0, 1)
    machine.work()
    machine.pull(0, 1)
    machine.said += machine.state.left(0)
    for total in (11, 21):
        machine.push(1, 10)
        assert machine.work() == [total] * 10
    assert not machine.heard("GRANT")


def test_a_reader_that_leaves_lets_the_others_go_on():
    machine = Machine(workers=2, asynchronous=True, optimizer=Add())
    machine.pull(0, 0)
    machine.push(1, 10)
    assert machine.work() == [0] * 10
    machine.said += machine.state.left(0)
    assert machine.work() == [10] * 10


def test_no_reader_of_an_generation_that_is_over_holds_the_next_one_back():
    machine = Machine(workers=1)
    machine.pull(0, 0)
    machine.push(0, 1)
    assert machine.work() == [0] * 10
    assert machine.end() == [1] * 10  # its round was complete
    machine.push(0, 2)
    assert machine.work() == [2] * 10

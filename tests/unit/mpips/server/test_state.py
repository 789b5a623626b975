"""Units of a server between events: whose turn it is, who may read, and asynchronous updates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import CollectiveError
from mpips.optimizers import SGD, Add
from mpips.store.server.sources import Elements
from mpips.store.server.state import TURNS, SynchronousState
from mpips.store.server.unit import Unit
from tests.unit.mpips.server.machine import Growing, Machine


class Words(list):
    """Those of a unit; tells when its rounds end."""

    def __init__(self, number, order):
        super().__init__([0, 0])
        self.number, self.order = number, order

    def __setitem__(self, index, value):
        super().__setitem__(index, value)
        if index == 0:
            self.order.append(self.number)


def turns(sizes, priorities, late=()):
    """In which order a server ends the rounds of units, and how many by each step; those `late` are there last."""
    state, order, steps, filled = SynchronousState(), [], [], [0]
    for number, (size, priority) in enumerate(zip(sizes, priorities)):
        unit = Unit(number, number, np.zeros(size, np.float32), Words(number, order), range(1), size, 1)
        state.create(unit)
        array = np.ones(size, np.float32)
        source = Growing(array, filled) if number in late else Elements(array)
        state.pushed(unit, 0, source, priority, 0.0)
    while len(order) < len(sizes):
        before = len(order)
        if not state.work()[0]:
            assert len(order) == len(sizes) - len(late)
            filled[0] = 1
        steps.append(len(order) - before)
    return order, steps


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=20))
def test_units_are_summed_by_priority(priorities):
    order, _ = turns([3] * len(priorities), priorities)
    assert order == sorted(range(len(priorities)), key=lambda number: -priorities[number])


@given(st.lists(st.sampled_from([3, 100_000]), min_size=1, max_size=30))
def test_a_server_listens_after_long_sums(sizes):
    order, steps = turns(sizes, [0] * len(sizes))
    assert order == list(range(len(sizes)))
    at = 0
    for count in steps:
        assert 1 <= count <= TURNS and 100_000 not in sizes[at : at + count - 1]
        at += count


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_units_that_cannot_go_on_block_none(count, late):
    order, _ = turns([3] * count, [0] * count, late & set(range(count)))
    assert sorted(order) == list(range(count))


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


def test_readers_end_with_their_generation():
    machine = Machine(workers=1)
    machine.pull(0, 0)
    machine.push(0, 1)
    assert machine.work() == [0] * 10
    assert machine.end() == [1] * 10  # its round was complete
    machine.push(0, 2)
    assert machine.work() == [2] * 10


def test_word_0_is_odd_during_an_update():
    machine, seen = Machine(asynchronous=True, block=10), []

    class Watched(Add):
        def update(self, weights, gradient, state, step):
            seen.append(machine.unit.words[0])
            super().update(weights, gradient, state, step)
            seen.append(machine.unit.words[0])

    machine.state.set_optimizer(Watched())
    for number in range(3):
        before = machine.unit.words[0]
        machine.push(1, 1)
        assert machine.work() == [number + 1] * 10
        assert all(word % 2 and word > before for word in seen[-2:])
        assert machine.unit.words[0] > max(seen) and not machine.unit.words[0] % 2
        assert machine.unit.words[2] == number + 1


def test_word_0_of_several_blocks_counts_no_updates():
    machine = Machine(asynchronous=True, optimizer=Add())  # it would tell who fills an outbox that a block was read
    there = [0]
    machine.push(1, Growing(np.ones(10, np.float32), there))
    for there[0] in (1, 2, 3):
        machine.work()
        assert machine.unit.words[0] == 0
    assert list(machine.unit.stored) == [1] * 10


@pytest.mark.parametrize("good", [0, 1])
def test_a_failed_asynchronous_update_ends_the_generation(good):
    machine = Machine(asynchronous=True, optimizer=SGD(1.0, momentum=0.5))

    class Broken(Elements):
        def part(self, block, start, stop):
            if block == good:
                raise ValueError("no elements")
            return super().part(block, start, stop)

    machine.push(0, -1)
    machine.work()
    machine.push(0, Broken(np.full(10, -1, np.float32)))
    with pytest.raises(CollectiveError, match="key 'w': the server could not apply what was pushed: no elements"):
        machine.work()
    machine.end()
    assert machine.unit.torn == bool(good)
    assert machine.unit.words[1] == machine.unit.done[0] == 1 and not machine.unit.words[0] % 2
    if not good:
        machine.push(0, 0)
        assert machine.work() == [1.5] * 10  # the momentum of one update, as if the other had not been tried


def test_asynchronous_pushes_count_within_the_staleness():
    machine = Machine(workers=2, asynchronous=True, staleness=1, optimizer=Add())
    for _ in range(4):
        machine.push(0, 1)
    assert machine.work() == [2] * 10  # worker 1 has done nothing: the third push would be two ahead
    machine.push(1, 10)
    assert machine.work() == [13] * 10
    machine.said += machine.state.left(1)
    assert machine.work() == [14] * 10


def test_who_waits_for_all_holds_nobody_back():
    machine = Machine(workers=2, asynchronous=True, staleness=0, optimizer=Add())
    for _ in range(3):
        machine.push(0, 1)
    machine.pull(0, 3)
    assert machine.work() == [1] * 10 and not machine.heard("GRANT")
    machine.said += machine.state.meets(1)
    assert machine.work() == [3] * 10 and machine.heard("GRANT") == [(0, "")]
    machine.state.released(0, 0)
    machine.said += machine.state.meets(0)
    machine.state.all_met()
    for total in (4, 4):  # counted anew: the second push would be one ahead of what worker 1 has done since
        machine.push(0, 1)
        assert machine.work() == [total] * 10


def test_only_begun_updates_are_finished_at_the_end():
    machine = Machine(workers=2, asynchronous=True, optimizer=Add(), staleness=0)
    machine.push(0, 1)
    machine.push(0, 100)  # too far ahead
    assert machine.end() == [1] * 10 and not machine.unit.torn
    machine.push(0, 10)
    assert machine.work() == [1] * 10  # it still is one ahead
    machine.push(1, 10)
    assert machine.work() == [21] * 10
    assert machine.unit.words[1:] == [2, 1]

"""Which unit of a server gets its turn, and what its readers see of an asynchronous update."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.optimizers import Add
from mpips.server_state import TURNS, ServerState
from mpips.sources import Elements
from mpips.unit import Unit
from tests.unit.mpips.machine import Growing, Machine


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
    state, order, steps, filled = ServerState(range(1), False), [], [], [0]
    for number, (size, priority) in enumerate(zip(sizes, priorities)):
        state.create(Unit(number, number, np.zeros(size, np.float32), Words(number, order), range(1), size, 1))
        array = np.ones(size, np.float32)
        source = Growing(array, filled) if number in late else Elements(array)
        state.pushed(number, 0, source, priority, 0.0)
    while len(order) < len(sizes):
        before = len(order)
        if not state.work()[0]:
            assert len(order) == len(sizes) - len(late)
            filled[0] = 1
        steps.append(len(order) - before)
    return order, steps


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=20))
def test_units_are_summed_by_priority_and_of_equal_ones_as_they_came(priorities):
    order, _ = turns([3] * len(priorities), priorities)
    assert order == sorted(range(len(priorities)), key=lambda number: -priorities[number])


@given(st.lists(st.sampled_from([3, 100_000]), min_size=1, max_size=30))
def test_a_server_listens_again_after_a_long_sum_or_some_short_ones(sizes):
    order, steps = turns(sizes, [0] * len(sizes))
    assert order == list(range(len(sizes)))
    at = 0
    for count in steps:
        assert 1 <= count <= TURNS and 100_000 not in sizes[at : at + count - 1]
        at += count


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_units_that_cannot_go_on_keep_no_other_from_it(count, late):
    order, _ = turns([3] * count, [0] * count, late & set(range(count)))
    assert sorted(order) == list(range(count))


def test_word_0_is_odd_while_an_update_is_being_written_and_another_one_after_it():
    machine, seen = Machine(asynchronous=True, block=10), []

    class Watched(Add):
        def update(self, weight, gradient, state, step):
            seen.append(machine.unit.words[0])
            super().update(weight, gradient, state, step)
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
    machine = Machine(asynchronous=True)  # it would tell who fills an outbox that a block of it has been read
    machine.state.set_optimizer(Add())
    there = [0]
    machine.push(1, Growing(np.ones(10, np.float32), there))
    for there[0] in (1, 2, 3):
        machine.work()
        assert machine.unit.words[0] == 0
    assert list(machine.unit.stored) == [1] * 10


@pytest.mark.parametrize("blocks_before", [0, 1])
def test_who_sees_that_a_failed_update_is_over_has_been_told_of_it(blocks_before):
    machine = Machine(asynchronous=True)
    machine.state.set_optimizer(Add())

    class Broken(Elements):
        def part(self, block, start, stop):
            if block == blocks_before:
                raise ValueError("no elements")
            return super().part(block, start, stop)

    machine.push(0, Broken(np.ones(10, np.float32)))
    while not machine.said:
        machine.said += machine.state.work()[1]
        assert machine.unit.words[1] == 0
    assert [worker for worker, text in machine.heard("FAILED") if "no elements" in text] == [0]
    machine.work()
    assert machine.unit.words[1] == 1 and not machine.unit.words[0] % 2
    machine.push(0, 1)
    machine.work()
    assert machine.unit.words[1] == 2 and machine.unit.stored[-1] == 1

"""Which unit of a server gets its turn, and what its readers see of an asynchronous update."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.optimizers import Add
from mpips.server_state import ServerState
from mpips.sources import Elements
from mpips.unit import Unit
from tests.unit.mpips.machine import Growing, Machine


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=8))
def test_units_are_summed_by_priority_and_of_equal_ones_as_they_came(priorities):
    state = ServerState(range(1), False)
    units = [
        Unit(number, number, np.zeros(3, np.float32), [0, 0], range(1), 3, 1) for number in range(len(priorities))
    ]
    for unit, priority in zip(units, priorities):
        state.create(unit)
        state.pushed(unit.number, 0, Elements(np.ones(3, np.float32)), priority, 0.0)
    order = []
    for _ in units:
        state.work()
        order += [unit.number for unit in units if unit.round and unit.number not in order]
    assert order == sorted(range(len(units)), key=lambda number: -priorities[number])


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

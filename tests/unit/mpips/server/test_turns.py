"""Which unit of a server gets its turn."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpips.store.server.sources import Elements
from mpips.store.server.state import TURNS, SynchronousState
from mpips.store.server.unit import Unit
from tests.unit.mpips.server.machine import Growing


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

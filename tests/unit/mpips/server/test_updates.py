"""Asynchronous updates of a server, event by event, without MPI."""

from __future__ import annotations

import numpy as np
import pytest

from collectives import CollectiveError
from mpips.optimizers import SGD, Add
from mpips.store.server.sources import Elements
from tests.unit.mpips.server.machine import Growing, Machine


def test_word_0_is_odd_while_an_update_is_being_written_and_another_one_after_it():
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
def test_an_update_that_fails_ends_the_generation_and_is_torn_where_blocks_were_applied(good):
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


def test_asynchronous_pushes_count_at_once_within_the_staleness():
    machine = Machine(workers=2, asynchronous=True, staleness=1, optimizer=Add())
    for _ in range(4):
        machine.push(0, 1)
    assert machine.work() == [2] * 10  # worker 1 has done nothing: the third push would be two ahead
    machine.push(1, 10)
    assert machine.work() == [13] * 10
    machine.said += machine.state.left(1)
    assert machine.work() == [14] * 10


def test_what_has_begun_is_finished_at_the_end_of_an_generation_and_the_rest_is_dropped():
    machine = Machine(workers=2, asynchronous=True, optimizer=Add(), staleness=0)
    machine.push(0, 1)
    machine.push(0, 100)  # too far ahead
    assert machine.end() == [1] * 10 and not machine.unit.torn
    machine.push(0, 10)
    assert machine.work() == [1] * 10  # it still is one ahead
    machine.push(1, 10)
    assert machine.work() == [21] * 10
    assert machine.unit.words[1:] == [2, 1]

"""What a server says only once its mirror has it, without MPI."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.mpips.server.machine import WORKERS, Machine


class Slow:
    """A mirror that has what `arrive` says."""

    def __init__(self):
        self.due, self.gone, self.seen = [], [], []

    @property
    def quiet(self):
        return not self.due

    def changed(self, unit):
        unit.mirrored = False
        self.due.append(unit)
        self.seen.append(unit.stored.copy())

    def forget(self, units):
        self.gone += units

    def arrive(self):
        for unit in self.due:
            unit.mirrored = True
        self.due = []


@pytest.mark.parametrize("block", [4, 10])
def test_a_round_is_told_when_the_mirror_has_it(block):
    mirror = Slow()
    machine = Machine(block=block, remote=[2], mirror=mirror)
    machine.pull(2, 1)
    for worker in range(WORKERS):
        machine.push(worker, 1)
    assert machine.work() == [3] * 10 and mirror.seen[0].tolist() == [3] * 10
    assert machine.unit.words[0] < machine.unit.blocks and machine.unit.words[1:] == [0] * WORKERS and not machine.said
    for worker in range(WORKERS):
        machine.push(worker, 2)
    assert machine.work() == [3] * 10  # nothing is written meanwhile
    assert not machine.state.quiet
    mirror.arrive()
    machine.work()
    assert [reply.what for reply in machine.said] == ["CONSUMED", "GRANT"]
    assert machine.unit.round == 1 and machine.unit.words[1:] == [1] * WORKERS
    machine.state.released(0, 2)
    assert machine.work() == [6] * 10
    mirror.arrive()
    machine.work()
    assert machine.unit.round == 2 and machine.state.quiet


def test_a_push_counts_when_the_mirror_has_it():
    mirror = Slow()
    machine = Machine(block=10, asynchronous=True, remote=[0], mirror=mirror)
    machine.push(0, 1)
    machine.pull(0, 1)
    machine.push(1, 2)
    assert machine.work() == [1] * 10 and machine.unit.words[0] % 2 == 1 and not machine.said
    mirror.arrive()
    machine.work()
    assert [reply.what for reply in machine.said] == ["CONSUMED", "GRANT"]
    assert machine.unit.words == [2, 1, 0, 0]
    machine.state.released(0, 0)
    assert machine.work() == [2] * 10
    mirror.arrive()
    machine.work()
    assert machine.unit.words == [4, 1, 1, 0]


def test_other_units_go_on():
    mirror = Slow()
    machine = Machine(mirror=mirror)
    other = type(machine.unit)(1, "v", np.zeros(10, np.float32), [0] * (1 + WORKERS), range(WORKERS), 4, 1)
    machine.state.create(other)
    for unit in (machine.unit, other):
        for worker in range(WORKERS):
            machine.push(worker, 1, unit=unit)
    machine.work()
    assert mirror.due == [machine.unit, other]
    other.mirrored = True
    machine.work()
    assert (machine.unit.round, other.round) == (0, 1)


def test_when_the_generation_is_over_nobody_waits_for_a_mirror():
    mirror = Slow()
    machine = Machine(mirror=mirror)
    for worker in range(WORKERS):
        machine.push(worker, 1)
    machine.work()
    mirror.arrive()  # as `Mirror.stop` does
    assert machine.end() == [3] * 10 and machine.unit.round == 1


def test_a_mirror_hears_of_what_is_forgotten_and_of_optimizers():
    mirror = Slow()
    machine = Machine(mirror=mirror)
    machine.state.set_optimizer(None)
    assert mirror.due == [machine.unit]
    machine.state.forget([0])
    assert mirror.gone == [machine.unit]

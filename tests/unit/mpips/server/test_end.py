"""What a server keeps when a generation ends: complete rounds, or units that say that they are torn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import CollectiveError
from mpips.optimizers import SGD, Add
from mpips.store.server.sources import Elements
from tests.unit.mpips.server.machine import WORKERS, Arriving, Growing, Machine


def test_a_complete_round_is_finished_at_the_end():
    machine = Machine()
    for worker in range(WORKERS):
        machine.push(worker, worker + 1)
    assert machine.end() == [6] * 10
    assert machine.unit.words == [3, 1, 1, 1] and machine.unit.round == 1 and not machine.unit.torn


@pytest.mark.parametrize("optimizer", [None, SGD(1.0, momentum=0.5)])
def test_a_round_that_is_not_complete_has_never_been(optimizer):
    machine = Machine(optimizer=optimizer)
    for worker in range(WORKERS):
        machine.push(worker, 1)
    before = machine.work()
    for worker in (0, 2):
        machine.push(worker, 100)
    machine.push(0, 1000)
    assert machine.end() == before
    assert machine.unit.words == [3, 1, 1, 1] and not machine.unit.torn
    for worker in range(WORKERS):
        machine.push(worker, 1)
    assert machine.work() == ([3] * 10 if optimizer is None else [-7.5] * 10)
    assert machine.unit.words == [6, 2, 2, 2]


@pytest.mark.parametrize("kind", [Growing, Arriving])
def test_a_half_applied_round_tears_a_unit(kind):
    machine, there = Machine(), [2]
    sources = [kind(np.ones(10, np.float32), there) for _ in range(WORKERS)]
    for worker, source in enumerate(sources):
        machine.push(worker, source)
    machine.work()
    assert machine.unit.words[0] == 2
    assert machine.end() == [3] * 8 + [0] * 2
    assert machine.unit.torn and machine.unit.words == [0, 0, 0, 0]
    assert kind is Growing or all(source.dropped for source in sources)
    for worker in range(WORKERS):
        machine.push(worker, 1)
    assert machine.work() == [3] * 10 and not machine.unit.torn


def test_an_optimizer_does_not_mend_what_is_torn():
    machine, there = Machine(optimizer=Add()), [1]
    for worker in range(WORKERS):
        machine.push(worker, Growing(np.ones(10, np.float32), there))
    machine.work()
    machine.end()
    for worker in range(WORKERS):
        machine.push(worker, 1)
    machine.work()
    assert machine.unit.torn


def test_what_is_filled_after_the_end_is_finished():
    machine, there = Machine(), [1]
    for worker in range(WORKERS):
        machine.push(worker, Growing(np.ones(10, np.float32), there))
    machine.work()
    assert machine.state.finish() is False and machine.state.ready
    there[0] = 3
    assert machine.end() == [3] * 10 and not machine.unit.torn


class Failing(SGD):
    """Raises in the update of the block that begins so."""

    error: Exception = ValueError("no")

    def update(self, weights, gradient, state, step):
        if gradient[0] == 2 * WORKERS:
            raise self.error
        super().update(weights, gradient, state, step)


BUILT_IN, OWN = "mpips.optimizers.sgd", "train"


@pytest.mark.parametrize(
    "block, error, module, torn",
    [
        (0, ValueError("no"), BUILT_IN, False),
        (0, KeyError("no"), BUILT_IN, True),
        (1, ValueError("no"), BUILT_IN, True),
        (0, ValueError("no"), OWN, True),  # nobody knows what it has changed before
    ],
)
def test_a_failed_update_tears_what_it_changed(monkeypatch, block, error, module, torn):
    monkeypatch.setattr(Failing, "error", error)
    monkeypatch.setattr(Failing, "__module__", module)
    machine = Machine(optimizer=Failing(1.0, momentum=0.5))
    values = np.ones(10, np.float32)
    values[4 * block] = 2
    for worker in range(WORKERS):
        machine.push(worker, Elements(values))
    with pytest.raises(CollectiveError, match=r"key 'w': the server could not apply what was pushed: .*no"):
        machine.work()
    machine.end()
    assert machine.unit.torn == torn and machine.unit.round == 0
    if not torn:
        assert machine.unit.step == 0


@pytest.mark.slow
@given(st.lists(st.integers(0, WORKERS - 1), max_size=12), st.integers(0, 12), st.booleans())
def test_rounds_count_on_after_any_end(pushes, cut, coded):
    machine, counts = Machine(), [0] * WORKERS
    for number, worker in enumerate(pushes):
        if number == cut:
            machine.work()
        machine.push(worker, 1)
        counts[worker] += 1
    machine.end()
    complete = min(counts)
    assert machine.unit.round == complete and machine.unit.words == [3 * complete] + [complete] * WORKERS
    for worker in range(WORKERS):
        machine.push(worker, 5)
    assert machine.work() == [5 * WORKERS] * 10
    assert machine.state.quiet

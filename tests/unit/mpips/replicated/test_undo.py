"""A replica of a store that survives deaths can be put back by one round, and again."""

import numpy as np
import pytest

from mpips import RowSparse, optimizers
from mpips.store.keys.key import Key
from mpips.store.recovery.undo import Version
from mpips.store.replicated.replica import SurvivingReplica

OPTIMIZERS = [None, ("sgd", {"learning_rate": 0.5}), ("sgd", {"learning_rate": 0.5, "momentum": 0.9}), ("adam", {})]


def replica(chosen):
    optimizer = None if chosen is None else optimizers.create(chosen[0], **chosen[1])
    return SurvivingReplica(Key("w", (7, 1), np.dtype(np.float32)), np.arange(7, dtype=np.float32), optimizer, np.empty)


def push(one, number):
    """A round, by the way of `Fast.push`."""
    if one.optimizer is not None:
        one.prepare()
    total = one.room()
    total[...] = np.sin(np.arange(7) * number)
    one.take_sum(total)


def held(version):
    return version.round, version.step, [array.tobytes() for array in version.arrays]


@pytest.mark.parametrize("chosen", OPTIMIZERS)
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_it_can_be_put_back_by_a_round_and_goes_on_as_if_it_had_not_been(chosen, rounds):
    one, other = replica(chosen), replica(chosen)
    for number in range(1, rounds):
        push(one, number)
    one.prepare()
    before = held(one.now())
    push(one, rounds)
    after = held(one.now())
    assert [version.round for version in one.versions()] == [rounds, rounds - 1]
    for _ in range(2):
        one.become_version(one.versions()[1])
        assert held(one.now()) == before
        one.become_version(one.versions()[1])
        assert held(one.now()) == after
    one.become_version(one.versions()[1])
    for number in range(rounds, rounds + 3):
        push(one, number)
    for number in range(1, rounds + 3):
        push(other, number)
    assert held(one.now()) == held(other.now())
    assert held(one.versions()[1]) == held(other.versions()[1])


def test_what_is_under_way_in_the_free_array_takes_the_way_back():
    one = replica(None)
    push(one, 1)
    assert len(one.versions()) == 2
    one.room()
    assert [version.round for version in one.versions()] == [1]


@pytest.mark.parametrize("chosen", OPTIMIZERS)
def test_a_round_of_rows_can_be_undone(chosen):
    one = replica(chosen)
    one.prepare()
    before = held(one.now())
    one.take_rows(RowSparse(np.array([1, 3]), np.ones((2, 1), np.float32), (7, 1)))
    assert held(one.now()) != before
    one.become_version(one.versions()[1])
    assert held(one.now()) == before


def test_an_update_that_breaks_off_is_undone():
    class Broken:
        def init(self, weights):
            return []

        def update(self, weights, gradient, state, step):
            weights[:2] = 5
            raise KeyboardInterrupt

    one = replica(None)
    one.optimizer = Broken()
    one.prepare()
    before = held(one.now())
    with pytest.raises(KeyboardInterrupt):
        one.take_sum(np.ones(7, np.float32))
    assert one.updating and [version.round for version in one.versions()] == [0]
    one.become_version(one.versions()[0])
    assert held(one.now()) == before and not one.updating


@pytest.mark.parametrize("chosen", OPTIMIZERS)
def test_it_becomes_another_workers_and_keeps_what_it_was(chosen):
    one, other = replica(chosen), replica(chosen)
    push(one, 1)
    push(other, 1)
    was = held(one.now())
    push(other, 2)
    there = other.now()
    one.become_version(Version(there.round, there.step, [array.copy() for array in there.arrays]))
    assert held(one.now()) == held(other.now())
    assert held(one.versions()[1]) == was
    push(one, 3)
    push(other, 3)
    assert held(one.now()) == held(other.now()) and held(one.versions()[1]) == held(other.versions()[1])


def test_there_is_no_way_back_over_another_optimizer():
    one = replica(OPTIMIZERS[1])
    push(one, 1)
    one.set_optimizer(optimizers.create("adam"))
    assert [version.round for version in one.versions()] == [1]

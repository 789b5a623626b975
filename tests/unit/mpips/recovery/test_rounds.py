"""At which round keys stand again."""

import pytest

from mpips.store.recovery.plan import choose


@pytest.mark.parametrize(
    ("available", "rounds", "step"),
    [
        pytest.param({}, {}, 0, id="no keys"),
        pytest.param({"a": {3}, "b": {3}}, {"a": 3, "b": 3}, 3, id="all alike"),
        pytest.param({"a": {4, 3}, "b": {3, 2}}, {"a": 3, "b": 3}, 3, id="one is undone"),
        pytest.param({"a": {4, 3}, "b": {4}}, {"a": 4, "b": 4}, 4, id="all have come through"),
        pytest.param({"a": {4}, "b": {3}}, {"a": 4, "b": 3}, None, id="one cannot be undone"),
        pytest.param({"a": {9, 8}, "b": {4, 3}}, {"a": 9, "b": 4}, None, id="pushed at another rate"),
        pytest.param({"a": {9, 8}, "b": {0}}, {"a": 9, "b": 0}, 9, id="one that is never pushed"),
        pytest.param({"a": {1, 0}, "b": {0}}, {"a": 0, "b": 0}, 0, id="the first round has broken off"),
    ],
)
def test_all_keys_stand_at_the_newest_round_that_all_can(available, rounds, step):
    assert choose(available, True) == (rounds, step)


def test_keys_of_an_asynchronous_store_stand_each_at_its_own():
    assert choose({"a": {4, 3}, "b": {3, 2}}, False) == ({"a": 4, "b": 3}, None)

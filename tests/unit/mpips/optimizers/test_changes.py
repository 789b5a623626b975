"""Numbers that change while the state stays, and optimizers by group of keys."""

from __future__ import annotations

import numpy as np
import pytest

from mpips.optimizers import SGD, Adam, Add, Constant, Elastic1, Groups, Warmup, changed, decode_numbers, encode_numbers


class Never:
    """A schedule that has no number."""

    def __repr__(self):
        return "Never()"

    def at(self, step):
        return float("nan")


def test_a_change_keeps_the_other_numbers():
    before = SGD(0.1, momentum=0.9, weight_decay=0.01, rescale=0.25)
    assert changed(before, learning_rate=0.01) == SGD(0.01, momentum=0.9, weight_decay=0.01, rescale=0.25)
    assert changed(before, learning_rate=Warmup(0.1, 5), rescale=-1).rescale == -1
    assert before.learning_rate == 0.1
    assert changed(Adam(), beta1=0.9, learning_rate=0.5) == Adam(0.5)  # beta1 is what it was


@pytest.mark.parametrize(
    "optimizer, numbers, error, words",
    [
        (SGD(), {"lr": 0.1}, TypeError, ["SGD", "lr", "learning_rate"]),
        (SGD(), {}, TypeError, ["no number", "learning_rate"]),
        (SGD(), {"learning_rate": -1}, ValueError, ["learning_rate", "-1"]),
        (SGD(), {"learning_rate": "fast"}, ValueError, ["learning_rate", "fast"]),
        (SGD(), {"learning_rate": Never()}, ValueError, ["Never", "step 1", "no finite number"]),
        (SGD(), {"momentum": 0.9}, ValueError, ["momentum=0.9", "set_optimizer", "anew"]),
        (SGD(momentum=0.9), {"momentum": 0}, ValueError, ["momentum=0", "set_optimizer"]),
        (Adam(), {"beta1": 0.8}, ValueError, ["beta1", "set_optimizer"]),
        (Add(), {"learning_rate": 1}, TypeError, ["Add", "rescale"]),
        (Elastic1(), {"alpha": 2}, ValueError, ["alpha"]),
    ],
)
def test_a_change_that_cannot_be_is_a_sentence(optimizer, numbers, error, words):
    with pytest.raises(error) as caught:
        changed(optimizer, **numbers)
    assert all(word in str(caught.value) for word in words)


def test_numbers_travel_as_data():
    numbers = {"learning_rate": Warmup(0.1, 5), "rescale": np.float32(0.5), "nesterov": True}
    assert decode_numbers(encode_numbers(numbers)) == numbers


def test_a_key_has_the_default_or_one_of_its_own():
    groups = Groups()
    assert not groups and groups.of("w") is None
    groups.set(SGD(0.1), keys=["embedding", 3])
    assert groups and groups.of("w") is None and groups.of(3) == SGD(0.1)
    groups.set(Adam())
    assert groups.of("embedding") == groups.of("w") == Adam()  # without keys it is for all
    groups.set(SGD(0.1), keys=["embedding"])
    assert groups.of("embedding") == SGD(0.1) and groups.of("w") == Adam()
    groups.forget(["embedding", "never there"])
    assert groups.of("embedding") == Adam()


def test_numbers_of_all_keys_or_some():
    groups = Groups(SGD(0.1, momentum=0.9), {"embedding": Adam(0.5)})
    groups.update({"learning_rate": 0.2})
    assert groups.of("w") == SGD(0.2, momentum=0.9) and groups.of("embedding") == Adam(0.2)
    groups.update({"learning_rate": Constant(0.3)}, keys=["b"])
    assert groups.of("b") == SGD(Constant(0.3), momentum=0.9) and groups.of("w") == SGD(0.2, momentum=0.9)


@pytest.mark.parametrize(
    "numbers, keys, error, words",
    [
        ({"learning_rate": -1}, None, ValueError, ["learning_rate"]),
        ({"momentum": 0.5}, None, TypeError, ["Adam", "momentum"]),
        ({"momentum": 0.5}, ["w", "embedding"], TypeError, ["Adam", "momentum"]),
        ({"learning_rate": 1, "speed": 2}, ["w"], TypeError, ["speed"]),
    ],
)
def test_a_change_that_one_group_cannot_take_changes_none(numbers, keys, error, words):
    groups = Groups(SGD(0.1, momentum=0.9), {"embedding": Adam(0.5)})
    with pytest.raises(error) as caught:
        groups.update(numbers, keys)
    assert all(word in str(caught.value) for word in words)
    assert groups.of("w") == SGD(0.1, momentum=0.9) and groups.of("embedding") == Adam(0.5)


def test_without_an_optimizer_there_is_nothing_to_change():
    with pytest.raises(ValueError, match="set_optimizer"):
        Groups().update({"learning_rate": 0.1})
    with pytest.raises(ValueError, match=r"'b' has no optimizer.*set_optimizer"):
        Groups(None, {"w": SGD()}).update({"learning_rate": 0.1}, keys=["w", "b"])

"""Optimizers of a user's own, known by name; and what is no optimizer, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from mpips import optimizers
from mpips.optimizers import SGD, Groups, Warmup, changed, initial
from tests.pages import ROOT, blocks

from .lion import Lion, Polynomial


@optimizers.register
@dataclass(frozen=True)
class Clip:
    """An option that is by itself infinite."""

    clip: object = float("inf")

    def init(self, weights):
        return []

    def update(self, weights, gradient, state, step):
        weights -= gradient


def test_an_optimizer_of_ones_own_is_one_as_any():
    assert optimizers.create("lion", beta1=0.8) == Lion(beta1=0.8)
    for sent in (Lion(), Lion(0.5, weight_decay=0.1), Lion(Warmup(0.1, 5)), Lion(Polynomial(0.1, 7))):
        assert optimizers.decode(optimizers.encode(sent)) == sent
    assert changed(Lion(), learning_rate=1.0) == Lion(1.0)
    groups = Groups(Lion())
    groups.update({"learning_rate": Polynomial(0.1, 5)})
    assert groups.of("w") == Lion(Polynomial(0.1, 5))


def test_one_without_an_equation_learns_as_its_page_says():
    (program,) = [block for block in blocks(ROOT / "docs/how-to/own-optimizer.md") if "class HalfMomentum" in block]
    try:
        exec(compile(program, "program", "exec", dont_inherit=True), {"__name__": "program"})
        optimizer = optimizers.create("halfmomentum", learning_rate=0.1, momentum=0.5)
        weights = np.ones(10, np.float32)
        state = initial(optimizer, weights)
        for step in range(1, 40):
            optimizer.update(weights, 2 * weights, state, step)
    finally:
        optimizers.OPTIMIZERS.pop("halfmomentum", None)
    assert state[0].dtype == np.float16
    assert abs(weights).max() < 1e-3


def test_the_parts_of_the_built_in_ones_serve_ones_own():
    """`Equation` and `check` for an optimizer in cache-sized blocks and in 16 bits."""

    @optimizers.register
    @dataclass(frozen=True)
    class SignSGD(optimizers.Equation):
        learning_rate: optimizers.Number = 0.01

        def __post_init__(self):
            optimizers.check(self, scheduled=["learning_rate"], at_least_zero=["learning_rate"])

        def numbers(self, step):
            return (optimizers.at(self.learning_rate, step),)

        def equation(self, w, g, state, numbers):
            return w - np.sign(g) * numbers[0], ()

    try:
        w = np.zeros(300_000, np.float16)
        optimizers.create("signsgd", learning_rate=0.5).update(w, np.full(300_000, 3, np.float16), (), 1)
        np.testing.assert_array_equal(w, -0.5)
        with pytest.raises(ValueError, match="learning_rate"):
            SignSGD(learning_rate=-1)
    finally:
        del optimizers.OPTIMIZERS["signsgd"]


def test_numbers_that_cannot_update_are_refused_before_any_server_hears_of_them():
    with pytest.raises(ValueError, match=r"Lion\(learning_rate='fast'.* cannot update two weights: AttributeError: "):
        optimizers.create("lion", learning_rate="fast")


def test_another_class_of_that_name_on_a_server_is_told():
    sent = msgspec.msgpack.encode({"name": "lion", "options": {"warmth": 1.0}})
    with pytest.raises(ValueError, match="registered here as 'lion' is another one: Lion has no option warmth"):
        optimizers.decode(sent)


def test_a_name_that_a_server_does_not_know_is_a_sentence():
    for data in (
        {"name": "lyon", "options": {}},
        {"name": "sgd", "options": {"learning_rate": {"schedule": "lyon", "options": {}}}},
    ):
        with pytest.raises(ValueError, match=r"'lyon' is not known here: register it .* before mpips\.create"):
            optimizers.decode(msgspec.msgpack.encode(data))


class Bare:
    def init(self, weights): ...

    def update(self, weights, gradient, state, step): ...


@dataclass(frozen=True)
class Unregistered(Lion):
    pass


@dataclass
class Thawed(Lion.__base__):
    rate: float = 0.1


@dataclass(frozen=True)
class Nothing:
    rate: float = 0.1


@pytest.mark.parametrize(
    "kind, words",
    [
        (Bare, ["Bare", "@dataclass(frozen=True)"]),
        (Thawed, ["Thawed", "frozen=True"]),
        (Nothing, ["Nothing", "init(weights)", "update(weights, gradient, state, step)"]),
        (SGD(), ["frozen=True"]),
        ("lion", ["lion"]),
    ],
)
def test_what_cannot_be_registered_is_told_why(kind, words):
    with pytest.raises(TypeError) as caught:
        optimizers.register(kind)
    assert all(word in str(caught.value) for word in words)


def test_a_name_is_one_class():
    assert optimizers.register(Lion) is Lion  # again: nothing new
    with pytest.raises(ValueError, match=r"'lion' is that of .*\.Lion"):
        optimizers.register(dataclass(frozen=True)(type("Lion", (Bare,), {"__module__": "mine"})))


def test_a_programs_own_class_takes_the_name_of_a_built_in(monkeypatch):
    """And neither is taken for the other: on servers, from checkpoints, or on another worker."""
    built_in = SGD(0.1)
    before = optimizers.encode(built_in)
    monkeypatch.setitem(optimizers.OPTIMIZERS, "sgd", SGD)
    own = optimizers.register(dataclass(frozen=True)(type("SGD", (Lion,), {"__module__": "mine"})))
    mine = optimizers.create("sgd")
    assert type(mine) is own and type(optimizers.decode(optimizers.encode(mine))) is own
    assert optimizers.decode(optimizers.encode(built_in)) == optimizers.decode(before) == built_in
    assert optimizers.describe(mine) != optimizers.describe(built_in)
    monkeypatch.setitem(optimizers.OPTIMIZERS, "sgd", SGD)
    with pytest.raises(ValueError, match="'sgd' is not known here: register it"):
        optimizers.decode(msgspec.msgpack.encode({"name": "sgd", "options": {}, "own": True}))


def test_a_schedule_keeps_its_name():
    with pytest.raises(ValueError, match=r"'warmup' is that of mpips\.optimizers"):
        optimizers.register(dataclass(frozen=True)(type("Warmup", (Polynomial,), {"__module__": "mine"})))


class Torch:
    """As torch.optim.SGD, whose repr has eleven lines."""

    def __repr__(self):
        return "SGD (\nParameter Group 0\n    dampening: 0\n)"


Torch.__name__ = Torch.__qualname__ = "SGD"
Torch.__module__ = "torch.optim.sgd"


@pytest.mark.parametrize(
    "given, error, words",
    [
        (Torch(), ValueError, ["torch.optim.sgd.SGD is no optimizer of mpips", "adam"]),
        (SGD, TypeError, ["SGD(...)", "class"]),
        (Unregistered(), TypeError, ["Unregistered", "@mpips.optimizers.register"]),
        (Bare(), ValueError, ["Bare"]),
        (3, ValueError, ["3", "adam"]),
    ],
)
def test_what_is_no_optimizer_is_a_short_sentence(given, error, words):
    with pytest.raises(error) as caught:
        optimizers.create(given)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 240


def test_an_option_that_cannot_travel_is_named():
    with pytest.raises(TypeError, match=r"not a .*ndarray"):
        optimizers.create(Lion(weight_decay=np.zeros(3)))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), np.float32(np.inf), (1.0, float("-inf")), 1 << 70])
def test_a_number_that_no_checkpoint_holds_is_refused(value):
    with pytest.raises(ValueError, match="option clip="):
        optimizers.create("clip", clip=value)
    with pytest.raises(ValueError, match="option clip="):
        optimizers.encode_numbers({"clip": value})
    with pytest.raises(ValueError, match="option clip=inf: give a finite number"):
        optimizers.create("clip")
    assert optimizers.create("clip", clip=None).clip is None


def test_a_number_too_large_for_a_float_is_refused():
    with pytest.raises(ValueError, match="learning_rate=100"):
        optimizers.create("sgd", learning_rate=10**400)


def test_state_of_another_size_is_named():
    class Short(Bare):
        def init(self, weights):
            return [np.zeros(2)]

    with pytest.raises(ValueError, match=r"Short.init gave \(2,\) for weights \(3,\)"):
        initial(Short(), np.zeros(3))

"""Schedules: their values step by step, and updates under them bit for bit those of a serial run with these rates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips import optimizers
from mpips.optimizers import SGD, AdaGrad, Adam, AdamW, Chained, Constant, Cosine, RMSProp, StepDecay, Warmup

CHAIN = Chained((Warmup(0.1, 3), StepDecay(0.1, every=2, factor=0.5), Constant(0.01)), until=(3, 7))


@pytest.mark.parametrize(
    "schedule, rates",
    [
        (Constant(0.25), [0.25, 0.25, 0.25]),
        (StepDecay(1.0, every=2, factor=0.5), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        (StepDecay(1.0, every=1), [1, 0.1, 0.01]),
        (Cosine(1.0, steps=4, end=0.5), [1, 0.5 + 0.25 * (1 + math.sqrt(0.5)), 0.75, 0.5732233, 0.5, 0.5, 0.5]),
        (Warmup(1.0, steps=4), [0.25, 0.5, 0.75, 1, 1, 1]),
        (Warmup(1.0, steps=2, start=0.5), [0.75, 1, 1]),
        (CHAIN, [0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1, 0.05, 0.05, 0.01, 0.01]),
        (Chained((Constant(0.5),), until=()), [0.5, 0.5]),
    ],
)
def test_rates_step_by_step(schedule, rates):
    np.testing.assert_allclose([schedule.at(step) for step in range(1, len(rates) + 1)], rates, rtol=1e-6)


@given(rate=st.floats(0, 10), end=st.floats(0, 10), steps=st.integers(1, 50), step=st.integers(1, 100))
def test_a_cosine_and_a_warm_up_stay_between_their_ends(rate, end, steps, step):
    low, high = min(rate, end), max(rate, end)
    for value in (Cosine(rate, steps, end).at(step), Warmup(rate, steps, end).at(step)):
        assert low - 1e-9 <= value <= high + 1e-9
    assert Warmup(rate, steps, end).at(steps) == rate
    assert Cosine(rate, steps, end).at(1) == pytest.approx(rate)


def test_numbers_of_other_kinds_are_taken():
    assert Cosine(np.float32(0.5), np.int64(3)) == Cosine(0.5, 3)
    assert Chained([Constant(1), Constant(2)], until=[np.int32(5)]) == Chained((Constant(1.0), Constant(2.0)), (5,))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Constant(-1), ["Constant", "rate=-1", ">= 0"]),
        (lambda: StepDecay(0.1, every=0), ["StepDecay", "every=0"]),
        (lambda: StepDecay(0.1, every=2.5), ["every=2.5", "whole"]),
        (lambda: StepDecay(0.1, every=2, factor=float("inf")), ["factor=inf"]),
        (lambda: Cosine("fast", 10), ["Cosine", "'fast'"]),
        (lambda: Warmup(0.1, steps=True), ["steps=True"]),
        (lambda: Chained((Constant(1), 0.5), until=(3,)), ["Constant(0.1)", "0.5"]),
        (lambda: Chained((Constant(1), Constant), until=(3,)), ["Chained"]),
        (lambda: Chained((Constant(1), Constant(2)), until=()), ["2 schedules"]),
        (lambda: Chained((Constant(1), Constant(2), Constant(3)), until=(5, 5)), ["ascending"]),
        (lambda: Chained(Constant(1), until=(5,)), ["tuple"]),
        (lambda: SGD(momentum=Constant(0.5)), ["momentum", "finite number"]),
        (lambda: SGD(learning_rate=Constant), ["learning_rate"]),
    ],
)
def test_a_wrong_number_is_named(make, words):
    with pytest.raises(ValueError) as caught:
        make()
    assert all(word in str(caught.value) for word in words)


def test_a_rate_that_is_not_finite_is_an_error_that_names_the_step():
    growing = SGD(StepDecay(1.0, every=1, factor=10.0))
    weights, gradient = np.zeros(2), np.ones(2)
    growing.update(weights, gradient, growing.init(weights), 300)
    before = weights.copy()
    with pytest.raises(ValueError, match=r"StepDecay\(.*factor=10.0\) gives inf at step 400"):
        growing.update(weights, gradient, growing.init(weights), 400)
    assert (weights == before).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda rate: SGD(rate, momentum=0.9, weight_decay=0.01),
        lambda rate: SGD(rate, momentum=0.9, nesterov=True),
        lambda rate: AdaGrad(rate),
        lambda rate: RMSProp(rate),
        lambda rate: Adam(rate),
        lambda rate: AdamW(rate),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_an_update_under_a_schedule_is_bitwise_one_with_the_same_rates(make, dtype):
    rng = np.random.default_rng(1)
    start, gradients = rng.normal(size=500).astype(dtype), [rng.normal(size=500).astype(dtype) for _ in range(10)]
    scheduled, by_hand = start.copy(), start.copy()
    state, state_by_hand = make(CHAIN).init(scheduled), make(0.1).init(by_hand)
    for step, gradient in enumerate(gradients, start=1):
        make(CHAIN).update(scheduled, gradient, state, step)
        make(CHAIN.at(step)).update(by_hand, gradient, state_by_hand, step)
    np.testing.assert_array_equal(scheduled, by_hand)
    for one, other in zip(state, state_by_hand):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("schedule", [Constant(0.5), StepDecay(1, 2), Cosine(1, 5, 0.1), Warmup(1, 5), CHAIN], ids=repr)
def test_a_schedule_travels_with_its_optimizer(schedule):
    sent = SGD(schedule, momentum=0.5)
    assert optimizers.decode(optimizers.encode(sent)) == sent
    assert optimizers.decode_numbers(optimizers.encode_numbers({"learning_rate": schedule})) == {
        "learning_rate": schedule
    }

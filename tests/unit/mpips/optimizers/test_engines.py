"""An equation gives the same bits by NumPy and by a compiled kernel, for built-in optimizers and for one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.kernels import engine
from mpips import optimizers
from mpips.optimizers import SGD, AdaGrad, Adam, AdamW, Add, Elastic1, RMSProp, equation
from mpips.optimizers.trace import Tape, Untraceable

pytest.importorskip("numba")
if engine.status().engine != "numba":
    pytest.skip(engine.status().reason, allow_module_level=True)

DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "float64", "float16", "bfloat16")}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 6e-8, 65504.0, -65504.0, 3e38, np.inf, -np.inf, np.nan, 1e-20]


@dataclass(frozen=True)
class Lion(optimizers.Equation):
    slots: ClassVar[int] = 1
    rate: float = 0.1

    def equation(self, w, g, state, numbers):
        direction = np.sign(state[0] * 0.9 + g * (1 - 0.9))
        return w - direction * self.rate, (state[0] * 0.99 + g * 0.01,)


@dataclass(frozen=True)
class Clipped(optimizers.Equation):
    """Choices by element, states that change places, a result that is an input."""

    slots: ClassVar[int] = 3

    def numbers(self, step):
        return (1 / step,)

    def equation(self, w, g, state, numbers):
        a, b, c = state
        d = np.where((g > 0) & (w <= 1), np.where(g > 0.5, 0.5, g), abs(g) - w**2)
        return np.where(d < w, w + d * numbers[0], b), (b, np.where(a > c, a, d), c)


@dataclass(frozen=True)
class Signs(optimizers.Equation):
    """The sign of a zero, and what is a number."""

    def equation(self, w, g, state, numbers):
        fine = np.isfinite(g) & ~np.isnan(w) ^ (g > 1)
        return np.where(fine, np.sign(g) / np.sign(w), -np.sign(w)), ()


@dataclass(frozen=True)
class Prox(optimizers.Equation):
    """Which zero is the larger one is the processor's choice: no kernel makes it."""

    def equation(self, w, g, state, numbers):
        return np.sign(w) * np.maximum(abs(w) - 0.5, 0), ()


@dataclass(frozen=True)
class Powers(optimizers.Equation):
    """NumPy's exp is not LLVM's."""

    def equation(self, w, g, state, numbers):
        return w * np.exp(-abs(g)) + g**3, ()


@dataclass(frozen=True)
class Looking(optimizers.Equation):
    """Asks whether values are true."""

    slots: ClassVar[int] = 1

    def equation(self, w, g, state, numbers):
        w = np.array(w)
        w[g > 0] = 2
        return w, (state[0] + (1 if (g > 0).any() else 0),)


ALL = [
    SGD(learning_rate=0.1),
    SGD(learning_rate=0.1, weight_decay=0.01),
    SGD(learning_rate=0.1, rescale=0.3),
    SGD(learning_rate=0.1, momentum=0.9, weight_decay=0.01, rescale=0.25),
    SGD(learning_rate=0.1, momentum=0.9),
    SGD(learning_rate=optimizers.StepDecay(0.1, 2), momentum=0.9, nesterov=True, weight_decay=0.01),
    AdaGrad(),
    AdaGrad(learning_rate=0.1, weight_decay=0.01, rescale=0.5),
    RMSProp(),
    RMSProp(learning_rate=0.1, decay=0.9, rescale=2.0, weight_decay=0.1),
    Adam(),
    Adam(learning_rate=0.1, beta1=0.8, beta2=0.9, weight_decay=0.01, rescale=0.5),
    AdamW(),
    AdamW(learning_rate=0.1, weight_decay=0, rescale=0.5),
    Elastic1(alpha=0.3, rescale=0.5),
    Elastic1(),
    Add(rescale=2),
    Lion(),
    Clipped(),
    Signs(),
    Powers(),
    Prox(),
    Looking(),
]
COMPILED, LEFT = ALL[:-3], ALL[-3:]
FULL_SGD, FULL_ADAM = ALL[3], ALL[11]
UNLIKE = [FULL_SGD, FULL_ADAM, Lion(), Clipped(), Signs()]
"""They have all operations, numbers and states among them, and so stand for all in dtypes but float32."""


def counts(optimizer):
    """How many gradients are summed. Each number is another kernel, which takes half a second to compile."""
    if optimizer in (FULL_ADAM, *LEFT):
        return (1, 3, 8, 10)
    return (1, 3) if optimizer in UNLIKE else (3,)


CASES = [
    (optimizer, name) for name in DTYPES for optimizer in ALL if name == "float32" or optimizer in (*UNLIKE, *LEFT)
]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """All kernels are there before any test."""
    for optimizer, name in CASES:
        for parts in counts(optimizer):
            optimizer.prepare(DTYPES[name], parts)
    engine.load_all()


def same(a, b):
    """Whether arrays have the same bits; any NaN is like any other."""
    wide = [np.asarray(one, np.float64) for one in (a, b)]
    return (np.isnan(wide[0]) == np.isnan(wide[1])).all() and (
        np.array_equal(a.view(f"u{a.itemsize}")[~np.isnan(wide[0])], b.view(f"u{b.itemsize}")[~np.isnan(wide[1])])
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, dtype", CASES, ids=repr)
@settings(max_examples=12)
@given(data=st.data(), n=st.integers(2, 400), seed=st.integers(0, 999))
def test_both_engines_give_the_same_bits(optimizer, dtype, data, n, seed):
    rng, dtype, parts = np.random.default_rng(seed), DTYPES[dtype], data.draw(st.sampled_from(counts(optimizer)))
    special = np.array(data.draw(st.lists(st.sampled_from(SPECIAL), max_size=20)) or [0.5])
    w, *gradients = (rng.normal(size=n).astype(dtype) for _ in range(parts + 1))
    with np.errstate(all="ignore"):
        for array in (w, *gradients):
            places = rng.integers(n, size=special.size)
            array[places] = special.astype(dtype)
        other, state = w.copy(), optimizer.init(w)
        there = [array.copy() for array in state]
        for step in (1, 2):
            optimizer.update_by_sum(w, gradients, state, step)
            with engine.numpy_only():
                optimizer.update_by_sum(other, gradients, there, step)
    assert same(w, other)
    assert all(map(same, state, there))


@pytest.mark.parametrize("optimizer", COMPILED, ids=repr)
def test_those_of_rounded_operations_are_compiled(optimizer):
    kernel = optimizer.prepare(np.dtype(np.float32), 3)
    assert kernel.call is not None, kernel.failure


def test_others_are_left_to_numpy():
    assert Powers().prepare(np.dtype(np.float32)) is None
    with pytest.raises(Untraceable):
        Tape(Looking().equation, 1, 0)


def test_arrays_that_a_kernel_cannot_take_go_to_numpy():
    memory = np.zeros(4 * 101 + 1, np.uint8)
    w = memory[1:].view(np.float32)
    Add().update(w, np.ones(101, np.float32), (), 1)
    assert (w == 1).all()


def test_more_gradients_than_a_kernel_takes_are_added_from_first_to_last():
    gradients = list(np.random.default_rng(0).normal(size=(equation.MOST_PARTS + 3, 50)).astype(np.float32))
    w, total = np.zeros(50, np.float32), gradients[0].copy()
    for gradient in gradients[1:]:
        total += gradient
    Add().update_by_sum(w, gradients, (), 1)
    assert (w == total).all()


def test_an_equation_that_gives_back_too_little_is_told():
    @dataclass(frozen=True)
    class Short(optimizers.Equation):
        slots: ClassVar[int] = 1

        def equation(self, w, g, state, numbers):
            return w - g, ()

    with pytest.raises(TypeError, match=r"gives back \(weight, \(1 arrays of state\)\)"):
        Short().update(np.ones(2), np.ones(2), [np.zeros(2)], 1)


def test_numbers_that_change_in_number_are_told():
    @dataclass(frozen=True)
    class Changing(optimizers.Equation):
        def numbers(self, step):
            return (0.5,) if step == 3 else (0.5, 2.0)

        def equation(self, w, g, state, numbers):
            return w - g * numbers[0] * numbers[-1], ()

    w = np.ones(100, np.float32)
    for step in (1, 2):
        Changing().update(w, w.copy(), (), step)
    before = w.copy()
    with pytest.raises(ValueError, match=r"Changing\.numbers gives 1 numbers in step 3 and 2 in step 1"):
        Changing().update(w, w.copy(), (), 3)
    assert (w == before).all()


def test_an_equation_that_asks_whether_a_weight_is_positive_is_refused_at_once():
    @optimizers.register
    @dataclass(frozen=True)
    class Asking(optimizers.Equation):
        def equation(self, w, g, state, numbers):
            return (w - g if w > 0 else w), ()

    try:
        with pytest.raises(ValueError, match=r"cannot update two weights: .* ambiguous"):
            optimizers.create("asking")
    finally:
        del optimizers.OPTIMIZERS["asking"]

"""Optimizers that divide by a running size of the gradient: AdaGrad, RMSProp, Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from mpips.optimizers.base import Number, Numbers, State, at, by_blocks, check, decayed, scaled, zeros


class Squares(NamedTuple):
    """State of AdaGrad (sum of squared gradients) and RMSProp (their running mean), shape (n,)."""

    squares: np.ndarray


class Moments(NamedTuple):
    """State of Adam: the two moments as decaying sums, shape (n,) each.

    They are the usual moments divided by 1 - beta1 and 1 - beta2: three passes over memory fewer in every update.
    """

    first: np.ndarray
    second: np.ndarray


@dataclass(frozen=True)
class AdaGrad:
    """AdaGrad (Duchi, Hazan, Singer 2011) as in PyTorch: with d = rescale * gradient + weight_decay * w,

    squares = squares + d^2;  w = w - learning_rate * d / (sqrt(squares) + epsilon).
    """

    learning_rate: Number = 0.01
    weight_decay: float = 0.0
    rescale: float = 1.0
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        check(self, scheduled=["learning_rate"], at_least_zero=["learning_rate", "weight_decay", "epsilon"])

    def init(self, weights: np.ndarray) -> State:
        """Return the sum of squares, zeros."""
        return Squares(*zeros(weights, 1))

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        numbers = at(self.learning_rate, step), self.epsilon
        by_blocks(self._block, weights, gradient, state, slots=1, step=step, numbers=numbers)

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        d = decayed(w, g, self.rescale, self.weight_decay, scratch)
        (squares,) = state
        np.multiply(d, d, out=scratch)
        np.add(squares, scratch, out=squares)
        _step(w, d, squares, scratch, *numbers)


@dataclass(frozen=True)
class RMSProp:
    """RMSProp (Tieleman, Hinton 2012) as in PyTorch: with d = rescale * gradient + weight_decay * w,

    squares = decay * squares + (1 - decay) * d^2;  w = w - learning_rate * d / (sqrt(squares) + epsilon).
    """

    learning_rate: Number = 0.01
    weight_decay: float = 0.0
    rescale: float = 1.0
    decay: float = 0.99
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check(
            self, scheduled=["learning_rate"], below_one=["decay"],
            at_least_zero=["learning_rate", "weight_decay", "epsilon"],
        )  # fmt: skip

    def init(self, weights: np.ndarray) -> State:
        """Return the mean of squares, zeros."""
        return Squares(*zeros(weights, 1))

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        numbers = self.decay, 1 - self.decay, at(self.learning_rate, step), self.epsilon
        by_blocks(self._block, weights, gradient, state, slots=1, step=step, numbers=numbers)

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        d = decayed(w, g, self.rescale, self.weight_decay, scratch)
        (squares,) = state
        decay, rest, rate, epsilon = numbers
        np.multiply(squares, decay, out=squares)
        np.multiply(d, d, out=scratch)
        np.multiply(scratch, rest, out=scratch)
        np.add(squares, scratch, out=squares)
        _step(w, d, squares, scratch, rate, epsilon)


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma, Ba 2015) as in PyTorch: with d = rescale * gradient + weight_decay * w, at step t from 1,

    m = beta1 * m + (1 - beta1) * d;  v = beta2 * v + (1 - beta2) * d^2;
    w = w - learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon).
    """

    fixed: ClassVar[Sequence[str]] = ("beta1", "beta2")
    learning_rate: Number = 0.001
    weight_decay: float = 0.0
    rescale: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check(
            self, scheduled=["learning_rate"], below_one=["beta1", "beta2"],
            at_least_zero=["learning_rate", "weight_decay", "epsilon"],
        )  # fmt: skip

    def init(self, weights: np.ndarray) -> State:
        """Return the two moments, zeros."""
        return Moments(*zeros(weights, 2))

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        by_blocks(self._block, weights, gradient, state, slots=2, step=step, numbers=_numbers(self, step))

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        _step_adam(w, decayed(w, g, self.rescale, self.weight_decay, scratch), state, scratch, numbers)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019) as in PyTorch:

    w = w * (1 - learning_rate * weight_decay), then Adam's update with d = rescale * gradient.
    """

    weight_decay: float = 0.01

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        if self.weight_decay:
            np.multiply(w, numbers[-1], out=w)
        _step_adam(w, scaled(g, self.rescale), state, scratch, numbers)


def _step(
    w: np.ndarray, d: np.ndarray, squares: np.ndarray, scratch: np.ndarray, rate: np.ndarray, epsilon: np.ndarray
) -> None:
    np.sqrt(squares, out=scratch)
    np.add(scratch, epsilon, out=scratch)
    np.divide(d, scratch, out=scratch)
    np.multiply(scratch, rate, out=scratch)
    np.subtract(w, scratch, out=w)


def _numbers(record: Adam, step: int) -> tuple[float, ...]:
    """Return the numbers of a step. With first = m / (1 - beta1) and second = v / (1 - beta2), all factors end in one
    rate and one epsilon."""
    learning_rate = at(record.learning_rate, step)
    step = max(step, 1)  # what is below 1 is refused with the arrays
    size = math.sqrt((1 - record.beta2) / (1 - record.beta2**step))
    rate = learning_rate * (1 - record.beta1) / (1 - record.beta1**step) / size
    return record.beta1, record.beta2, rate, record.epsilon / size, 1 - learning_rate * record.weight_decay


def _step_adam(w: np.ndarray, d: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
    first, second = state
    beta1, beta2, rate, epsilon, _ = numbers
    np.multiply(first, beta1, out=first)
    np.add(first, d, out=first)
    np.multiply(d, d, out=scratch)
    np.multiply(second, beta2, out=second)
    np.add(second, scratch, out=second)
    _step(w, first, second, scratch, rate, epsilon)

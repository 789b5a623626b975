"""Adam and AdamW."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from mpips.optimizers.base import Scaled, State, at_least_zero, below_one, scaled_gradient


class Moments(NamedTuple):
    """State of Adam: the two moments as decaying sums, shape (n,) each.

    They are the usual moments divided by 1 - beta1 and 1 - beta2: three passes over memory fewer in every update.
    """

    first: np.ndarray
    second: np.ndarray


class _Coefficients(NamedTuple):
    rate: float
    epsilon: float


@dataclass(frozen=True)
class Adam(Scaled):
    """Adam (Kingma, Ba 2015) as in PyTorch: with d = rescale * gradient + weight_decay * w, at step t from 1,

    m = beta1 * m + (1 - beta1) * d;  v = beta2 * v + (1 - beta2) * d^2;
    w = w - learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon).
    """

    slots: ClassVar[int] = 2
    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one(self, "beta1", "beta2")
        at_least_zero(self, "epsilon")

    def _state(self, arrays: tuple[np.ndarray, ...]) -> State:
        return Moments(*arrays)

    def _coefficients(self, step: int) -> _Coefficients:
        # With first = m / (1 - beta1) and second = v / (1 - beta2), all factors end in one rate and one epsilon.
        size = math.sqrt((1 - self.beta2) / (1 - self.beta2**step))
        rate = self.learning_rate * (1 - self.beta1) / (1 - self.beta1**step) / size
        return _Coefficients(rate, self.epsilon / size)

    def _block(
        self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, coefficients: _Coefficients
    ) -> None:
        first, second = state
        np.multiply(first, self.beta1, out=first)
        np.add(first, g, out=first)
        np.multiply(g, g, out=scratch)
        np.multiply(second, self.beta2, out=second)
        np.add(second, scratch, out=second)
        np.sqrt(second, out=scratch)
        np.add(scratch, coefficients.epsilon, out=scratch)
        np.divide(first, scratch, out=scratch)
        np.multiply(scratch, coefficients.rate, out=scratch)
        np.subtract(w, scratch, out=w)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019) as in PyTorch:

    w = w * (1 - learning_rate * weight_decay), then Adam's update with d = rescale * gradient.
    """

    weight_decay: float = 0.01

    def _gradient(self, weights: np.ndarray, gradient: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return scaled_gradient(weights, gradient, dtype, self.rescale, 0.0)

    def _block(
        self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, coefficients: _Coefficients
    ) -> None:
        if self.weight_decay:
            np.multiply(w, 1 - self.learning_rate * self.weight_decay, out=w)
        super()._block(w, g, state, scratch, coefficients)

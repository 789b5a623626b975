"""Adam and AdamW."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from mpips.optimizers.base import Numbers, Scaled, State, at_least_zero, below_one, scaled


class Moments(NamedTuple):
    """State of Adam: the two moments as decaying sums, shape (n,) each.

    They are the usual moments divided by 1 - beta1 and 1 - beta2: three passes over memory fewer in every update.
    """

    first: np.ndarray
    second: np.ndarray


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

    def _numbers(self, step: int) -> tuple[float, ...]:
        # With first = m / (1 - beta1) and second = v / (1 - beta2), all factors end in one rate and one epsilon.
        size = math.sqrt((1 - self.beta2) / (1 - self.beta2**step))
        rate = self.learning_rate * (1 - self.beta1) / (1 - self.beta1**step) / size
        return self.beta1, self.beta2, rate, self.epsilon / size, 1 - self.learning_rate * self.weight_decay

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        self._step(w, self._scaled(w, g, scratch), state, scratch, numbers)

    def _step(self, w: np.ndarray, d: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        first, second = state
        beta1, beta2, rate, epsilon, _ = numbers
        np.multiply(first, beta1, out=first)
        np.add(first, d, out=first)
        np.multiply(d, d, out=scratch)
        np.multiply(second, beta2, out=second)
        np.add(second, scratch, out=second)
        np.sqrt(second, out=scratch)
        np.add(scratch, epsilon, out=scratch)
        np.divide(first, scratch, out=scratch)
        np.multiply(scratch, rate, out=scratch)
        np.subtract(w, scratch, out=w)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019) as in PyTorch:

    w = w * (1 - learning_rate * weight_decay), then Adam's update with d = rescale * gradient.
    """

    weight_decay: float = 0.01

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        if self.weight_decay:
            np.multiply(w, numbers[-1], out=w)
        self._step(w, scaled(g, self.rescale), state, scratch, numbers)

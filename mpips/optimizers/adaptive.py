"""Optimizers that divide by a running mean or sum of squared gradients: AdaGrad, RMSProp, Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpips.optimizers.base import Number, Updated, Value, Values, at, check
from mpips.optimizers.equation import Equation
from mpips.optimizers.sgd import decayed, scaled


@dataclass(frozen=True)
class AdaGrad(Equation):
    """AdaGrad (Duchi, Hazan, Singer 2011).

    The update is the same as in PyTorch:

        d = rescale * gradient + weight_decay * w
        squares = squares + d^2
        w = w - learning_rate * d / (sqrt(squares) + epsilon)
    """

    slots: ClassVar[int] = 1
    learning_rate: Number = 0.01
    weight_decay: float = 0.0
    rescale: float = 1.0
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        check(self, scheduled=["learning_rate"], at_least_zero=["learning_rate", "weight_decay", "epsilon"])

    def numbers(self, step: int) -> Sequence[float]:
        return (at(self.learning_rate, step),)

    def equation(self, w: Value, g: Value, state: Values, numbers: Values) -> Updated:
        d, (rate,) = decayed(w, g, self.rescale, self.weight_decay), numbers
        squares = state[0] + d * d
        return w - d / (np.sqrt(squares) + self.epsilon) * rate, (squares,)


@dataclass(frozen=True)
class RMSProp(Equation):
    """RMSProp (Tieleman, Hinton 2012).

    The update is the same as in PyTorch:

        d = rescale * gradient + weight_decay * w
        squares = decay * squares + (1 - decay) * d^2
        w = w - learning_rate * d / (sqrt(squares) + epsilon)
    """

    slots: ClassVar[int] = 1
    learning_rate: Number = 0.01
    weight_decay: float = 0.0
    rescale: float = 1.0
    decay: float = 0.99
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check(
            self,
            scheduled=["learning_rate"],
            below_one=["decay"],
            at_least_zero=["learning_rate", "weight_decay", "epsilon"],
        )

    def numbers(self, step: int) -> Sequence[float]:
        return (at(self.learning_rate, step),)

    def equation(self, w: Value, g: Value, state: Values, numbers: Values) -> Updated:
        d, (rate,) = decayed(w, g, self.rescale, self.weight_decay), numbers
        squares = state[0] * self.decay + d * d * (1 - self.decay)
        return w - d / (np.sqrt(squares) + self.epsilon) * rate, (squares,)


@dataclass(frozen=True)
class Adam(Equation):
    """Adam (Kingma, Ba 2015), as in PyTorch. At step t, counted from 1:

        d = rescale * gradient + weight_decay * w
        m = beta1 * m + (1 - beta1) * d
        v = beta2 * v + (1 - beta2) * d^2
        w = w - learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

    The arrays of state hold m / (1 - beta1) and v / (1 - beta2). All factors of a step then combine into one rate and
    one epsilon, so an element takes fewer operations. Because the state depends on beta1 and beta2, these two cannot
    change while the state stays (`fixed`).
    """

    fixed: ClassVar[Sequence[str]] = ("beta1", "beta2")
    slots: ClassVar[int] = 2
    learning_rate: Number = 0.001
    weight_decay: float = 0.0
    rescale: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check(
            self,
            scheduled=["learning_rate"],
            below_one=["beta1", "beta2"],
            at_least_zero=["learning_rate", "weight_decay", "epsilon"],
        )

    def numbers(self, step: int) -> Sequence[float]:
        learning_rate = at(self.learning_rate, step)
        size = math.sqrt((1 - self.beta2) / (1 - self.beta2**step))
        rate = learning_rate * (1 - self.beta1) / (1 - self.beta1**step) / size
        return rate, self.epsilon / size, 1 - learning_rate * self.weight_decay

    def equation(self, w: Value, g: Value, state: Values, numbers: Values) -> Updated:
        return self._adapted(w, decayed(w, g, self.rescale, self.weight_decay), state, numbers)

    def _adapted(self, w: Value, d: Value, state: Values, numbers: Values) -> Updated:
        rate, epsilon, _ = numbers
        first = state[0] * self.beta1 + d
        second = state[1] * self.beta2 + d * d
        return w - first / (np.sqrt(second) + epsilon) * rate, (first, second)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019), as in PyTorch.

    First w = w * (1 - learning_rate * weight_decay), then Adam's update with d = rescale * gradient.
    """

    weight_decay: float = 0.01

    def equation(self, w: Value, g: Value, state: Values, numbers: Values) -> Updated:
        kept = w * numbers[2] if self.weight_decay else w
        return self._adapted(kept, scaled(g, self.rescale), state, numbers)

"""Optimizers that divide by a running size of the gradient: AdaGrad and RMSProp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from mpips.optimizers.base import Numbers, Scaled, State, at_least_zero, below_one


class Squares(NamedTuple):
    """State of AdaGrad (sum of squared gradients) and RMSProp (their running mean), shape (n,)."""

    squares: np.ndarray


@dataclass(frozen=True)
class AdaGrad(Scaled):
    """AdaGrad (Duchi, Hazan, Singer 2011) as in PyTorch: with d = rescale * gradient + weight_decay * w,

    squares = squares + d^2;  w = w - learning_rate * d / (sqrt(squares) + epsilon).
    """

    slots: ClassVar[int] = 1
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_zero(self, "epsilon")

    def _state(self, arrays: tuple[np.ndarray, ...]) -> State:
        return Squares(*arrays)

    def _numbers(self, step: int) -> tuple[float, ...]:
        return self.learning_rate, self.epsilon

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        d = self._scaled(w, g, scratch)
        (squares,) = state
        np.multiply(d, d, out=scratch)
        np.add(squares, scratch, out=squares)
        _step(w, d, squares, scratch, *numbers)


@dataclass(frozen=True)
class RMSProp(Scaled):
    """RMSProp (Tieleman, Hinton 2012) as in PyTorch: with d = rescale * gradient + weight_decay * w,

    squares = decay * squares + (1 - decay) * d^2;  w = w - learning_rate * d / (sqrt(squares) + epsilon).
    """

    slots: ClassVar[int] = 1
    decay: float = 0.99
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one(self, "decay")
        at_least_zero(self, "epsilon")

    def _state(self, arrays: tuple[np.ndarray, ...]) -> State:
        return Squares(*arrays)

    def _numbers(self, step: int) -> tuple[float, ...]:
        return self.decay, 1 - self.decay, self.learning_rate, self.epsilon

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        d = self._scaled(w, g, scratch)
        (squares,) = state
        decay, rest, rate, epsilon = numbers
        np.multiply(squares, decay, out=squares)
        np.multiply(d, d, out=scratch)
        np.multiply(scratch, rest, out=scratch)
        np.add(squares, scratch, out=squares)
        _step(w, d, squares, scratch, rate, epsilon)


def _step(
    w: np.ndarray, d: np.ndarray, squares: np.ndarray, scratch: np.ndarray, rate: np.ndarray, epsilon: np.ndarray
) -> None:
    np.sqrt(squares, out=scratch)
    np.add(scratch, epsilon, out=scratch)
    np.divide(d, scratch, out=scratch)
    np.multiply(scratch, rate, out=scratch)
    np.subtract(w, scratch, out=w)

"""Optimizers that divide by a running size of the gradient: AdaGrad and RMSProp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpips.optimizers.base import Number, Numbers, State, at, by_blocks, check, decayed, zeros


class Squares(NamedTuple):
    """State of AdaGrad (sum of squared gradients) and RMSProp (their running mean), shape (n,)."""

    squares: np.ndarray


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
        """The sum of squares, zeros."""
        return Squares(*zeros(weights, 1))

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        """One update in place; see `mpips.optimizers.Optimizer`."""
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
        """The mean of squares, zeros."""
        return Squares(*zeros(weights, 1))

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        """One update in place; see `mpips.optimizers.Optimizer`."""
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


def _step(
    w: np.ndarray, d: np.ndarray, squares: np.ndarray, scratch: np.ndarray, rate: np.ndarray, epsilon: np.ndarray
) -> None:
    np.sqrt(squares, out=scratch)
    np.add(scratch, epsilon, out=scratch)
    np.divide(d, scratch, out=scratch)
    np.multiply(scratch, rate, out=scratch)
    np.subtract(w, scratch, out=w)

"""Optimizers that divide by a running size of the gradient: AdaGrad and RMSProp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpips.optimizers.base import Scaled, State, at_least_zero, below_one


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

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, coefficients: Any) -> None:
        (squares,) = state
        np.multiply(g, g, out=scratch)
        np.add(squares, scratch, out=squares)
        _step(w, g, squares, scratch, self.learning_rate, self.epsilon)


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

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, coefficients: Any) -> None:
        (squares,) = state
        np.multiply(squares, self.decay, out=squares)
        np.multiply(g, g, out=scratch)
        np.multiply(scratch, 1 - self.decay, out=scratch)
        np.add(squares, scratch, out=squares)
        _step(w, g, squares, scratch, self.learning_rate, self.epsilon)


def _step(
    w: np.ndarray, g: np.ndarray, squares: np.ndarray, scratch: np.ndarray, learning_rate: float, epsilon: float
) -> None:
    np.sqrt(squares, out=scratch)
    np.add(scratch, epsilon, out=scratch)
    np.divide(g, scratch, out=scratch)
    np.multiply(scratch, learning_rate, out=scratch)
    np.subtract(w, scratch, out=w)

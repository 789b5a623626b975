"""Stochastic gradient descent with the equation of momentum, and plain accumulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpips.optimizers.base import Number, Numbers, State, at, by_blocks, check, decayed, zeros


class Momentum(NamedTuple):
    """State of SGD with momentum: the velocity, shape (n,)."""

    velocity: np.ndarray


@dataclass(frozen=True)
class SGD:
    """SGD as in PyTorch (dampening 0): with d = rescale * gradient + weight_decay * w,

    velocity = momentum * velocity + d;  w = w - learning_rate * (velocity, or d + momentum * velocity with `nesterov`).

    Without momentum, w = w - learning_rate * d (MXNET-MPI, equation 1), and there is no state. `rescale` is usually
    1 / mini-batch size, or 1 / workers: pushes arrive summed.
    """

    learning_rate: Number = 0.01
    weight_decay: float = 0.0
    rescale: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check(
            self, scheduled=["learning_rate"], at_least_zero=["learning_rate", "weight_decay"], below_one=["momentum"]
        )  # fmt: skip
        if self.nesterov and self.momentum == 0:
            raise ValueError("SGD(nesterov=True) needs momentum > 0")

    def init(self, weights: np.ndarray) -> State:
        """Return the velocity, zeros; nothing without momentum."""
        return Momentum(*zeros(weights, 1)) if self.momentum else zeros(weights, 0)

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        numbers = at(self.learning_rate, step), self.momentum
        by_blocks(self._block, weights, gradient, state, slots=1 if self.momentum else 0, step=step, numbers=numbers)

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        d = decayed(w, g, self.rescale, self.weight_decay, scratch)
        rate, momentum = numbers
        if not self.momentum:
            np.multiply(d, rate, out=scratch)
            np.subtract(w, scratch, out=w)
            return
        (velocity,) = state
        np.multiply(velocity, momentum, out=velocity)
        np.add(velocity, d, out=velocity)
        if self.nesterov:
            np.multiply(velocity, momentum, out=scratch)
            np.add(scratch, d, out=scratch)
            np.multiply(scratch, rate, out=scratch)
        else:
            np.multiply(velocity, rate, out=scratch)
        np.subtract(w, scratch, out=w)


@dataclass(frozen=True)
class Add:
    """w = w + rescale * pushed: after any pushes in any order the value is the start plus their scaled sum."""

    rescale: float = 1.0

    def __post_init__(self) -> None:
        check(self)

    def init(self, weights: np.ndarray) -> State:
        """Return no state."""
        return zeros(weights, 0)

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        by_blocks(self._block, weights, gradient, state, slots=0, step=step)

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        np.multiply(g, self.rescale, out=scratch)
        np.add(w, scratch, out=w)

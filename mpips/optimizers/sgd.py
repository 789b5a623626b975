"""Stochastic gradient descent with momentum, and plain accumulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpips.optimizers.base import Numbers, Optimizer, Scaled, State, below_one


class Momentum(NamedTuple):
    """State of SGD with momentum: the velocity, shape (n,)."""

    velocity: np.ndarray


@dataclass(frozen=True)
class SGD(Scaled):
    """SGD as in PyTorch (dampening 0): with d = rescale * gradient + weight_decay * w,

    velocity = momentum * velocity + d;  w = w - learning_rate * (velocity, or d + momentum * velocity with `nesterov`).

    Without momentum, w = w - learning_rate * d (MXNET-MPI, equation 1), and there is no state.
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one(self, "momentum")
        if self.nesterov and self.momentum == 0:
            raise ValueError("SGD(nesterov=True) needs momentum > 0")

    def _slots(self) -> int:
        return 1 if self.momentum else 0

    def _state(self, arrays: tuple[np.ndarray, ...]) -> State:
        return Momentum(*arrays) if arrays else arrays

    def _numbers(self, step: int) -> tuple[float, ...]:
        return self.learning_rate, self.momentum

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        d = self._scaled(w, g, scratch)
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
class Add(Optimizer):
    """w = w + rescale * pushed: after any pushes in any order the value is the start plus their scaled sum."""

    rescale: float = 1.0

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        np.multiply(g, self.rescale, out=scratch)
        np.add(w, scratch, out=w)

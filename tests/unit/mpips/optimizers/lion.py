"""An optimizer without an equation, and a schedule, as docs/how-to/own-optimizer.md tells to write them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpips import optimizers


@optimizers.register
@dataclass(frozen=True)
class Lion:
    """Lion (Chen et al. 2023), in plain NumPy."""

    learning_rate: float | optimizers.RateSchedule = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def init(self, weights):
        return [np.zeros_like(weights)]

    def update(self, weights, gradient, state, step):
        (momentum,) = state
        rate = optimizers.at(self.learning_rate, step)
        direction = np.sign(self.beta1 * momentum + (1 - self.beta1) * gradient)
        weights -= rate * (direction + self.weight_decay * weights)
        momentum += (1 - self.beta2) * (gradient - momentum)


@optimizers.register
@dataclass(frozen=True)
class Polynomial:
    """A schedule of one's own."""

    rate: float
    steps: int
    power: float = 2.0

    def at(self, step):
        return self.rate * (1 - min(step - 1, self.steps) / self.steps) ** self.power

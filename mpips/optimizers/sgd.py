"""Stochastic gradient descent with momentum, and plain accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpips.optimizers.base import Number, Updated, Value, Values, at, check
from mpips.optimizers.equation import Equation


def scaled(g: Value, rescale: float) -> Value:
    """Return `rescale * g`, without the multiplication if `rescale` is 1."""
    return g if rescale == 1.0 else g * rescale


def decayed(w: Value, g: Value, rescale: float, weight_decay: float) -> Value:
    """Return `rescale * g + weight_decay * w`, without the operations that would change nothing."""
    d = scaled(g, rescale)
    return d if weight_decay == 0.0 else d + w * weight_decay


@dataclass(frozen=True)
class SGD(Equation):
    """Stochastic gradient descent with momentum, as in PyTorch (with dampening 0).

        d = rescale * gradient + weight_decay * w
        velocity = momentum * velocity + d
        w = w - learning_rate * velocity

    Args:
        learning_rate: A number or a schedule.
        weight_decay: At least 0.
        rescale: The gradient's factor. Pushes arrive as a sum, so it is usually 1 / mini-batch size, or 1 / workers.
        momentum: Below 1. With 0 no state is kept, and w = w - learning_rate * d (MXNET-MPI, equation 1).
        nesterov: Use w = w - learning_rate * (d + momentum * velocity).

    >>> sgd = mpips.optimizers.SGD(0.1)
    >>> weights = np.ones(2)
    >>> sgd.update(weights, np.array([1.0, 2.0]), sgd.init(weights), step=1)
    >>> weights
    array([0.9, 0.8])
    """

    learning_rate: Number = 0.01
    weight_decay: float = 0.0
    rescale: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check(
            self, scheduled=["learning_rate"], at_least_zero=["learning_rate", "weight_decay"], below_one=["momentum"]
        )
        if self.nesterov and self.momentum == 0:
            raise ValueError("SGD(nesterov=True) needs momentum > 0")

    @property
    def slots(self) -> int:  # type: ignore[override]
        """Number of arrays of state: 1 (the velocity), or 0 without momentum."""
        return 1 if self.momentum else 0

    def numbers(self, step: int) -> Sequence[float]:
        return (at(self.learning_rate, step),)

    def equation(self, w: Value, g: Value, state: Values, numbers: Values) -> Updated:
        d, (rate,) = decayed(w, g, self.rescale, self.weight_decay), numbers
        if not self.momentum:
            return w - d * rate, ()
        velocity = state[0] * self.momentum + d
        step = velocity * self.momentum + d if self.nesterov else velocity
        return w - step * rate, (velocity,)


@dataclass(frozen=True)
class Add(Equation):
    """Plain accumulation: w = w + rescale * pushed.

    The value is always the first value plus `rescale` times the sum of all pushes, whatever their order.
    """

    rescale: float = 1.0

    def __post_init__(self) -> None:
        check(self)

    def equation(self, w: Value, g: Value, state: Values, numbers: Values) -> Updated:
        return w + g * self.rescale, ()

"""Apply any optimizer, to a sum of gradients or to a model's own arrays (`Updater`).

An `Equation` adds and updates in one pass over memory. For another optimizer NumPy adds before, into memory beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from mpips.optimizers.base import Optimizer, State
from mpips.optimizers.equation import Equation, total_of


def prepare(optimizer: Optimizer | None, dtype: np.dtype, parts: int = 1) -> None:
    """Ask for what updates weights of this dtype by the sum of `parts` gradients, so that it is there in time."""
    if isinstance(optimizer, Equation):
        optimizer.prepare(dtype, parts)


def update_by_sum(
    optimizer: Optimizer, weights: np.ndarray, parts: Sequence[np.ndarray], state: State, step: int
) -> None:  # fmt: skip
    """Update in place by the sum of gradients, added from first to last; each sum is rounded to the weights' dtype."""
    if is_fused(optimizer):
        optimizer.update_by_sum(weights, parts, state, step)
    else:
        optimizer.update(weights, total_of(parts, "gradients"), state, step)


def is_fused(optimizer: Optimizer) -> TypeGuard[Equation]:
    """Return whether its updates are those of its equation."""
    return isinstance(optimizer, Equation) and type(optimizer).update is Equation.update


class Updater:
    """An optimizer with its states and step count, for a list of arrays that it updates in place.

    `parameters`: C-contiguous float arrays of any shapes; kept, not copied. The paper's `SGD.Update(params, grads)`.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[np.ndarray]) -> None:
        for number, array in enumerate(parameters):
            if not array.flags.c_contiguous or not array.flags.writeable:
                raise ValueError(f"array {number} of shape {array.shape} must be contiguous and writable")
        self.optimizer = optimizer
        self.step = 0
        self._weights = [array.reshape(-1) for array in parameters]
        self.states = [optimizer.init(weights) for weights in self._weights]
        """The optimizer's arrays of every parameter, each (elements,): live, for checkpoints."""
        for array in parameters:
            prepare(optimizer, array.dtype)

    def update(self, gradients: Sequence[np.ndarray]) -> None:
        """Update every array with its gradient, of the same shape; for Elastic2, its centre."""
        if len(gradients) != len(self._weights):
            raise ValueError(f"{len(gradients)} gradients for {len(self._weights)} arrays")
        self.step += 1
        for weights, gradient, state in zip(self._weights, gradients, self.states):
            self.optimizer.update(weights, np.ascontiguousarray(gradient).reshape(-1), state, self.step)

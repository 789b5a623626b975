"""An optimizer at work on a model's own arrays: what a training loop that updates locally needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpips.optimizers.base import Optimizer


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

    def update(self, gradients: Sequence[np.ndarray]) -> None:
        """One update of every array with its gradient (of the same shape; for Elastic2, its centre)."""
        if len(gradients) != len(self._weights):
            raise ValueError(f"{len(gradients)} gradients for {len(self._weights)} arrays")
        self.step += 1
        for weights, gradient, state in zip(self._weights, gradients, self.states):
            self.optimizer.update(weights, np.ascontiguousarray(gradient).reshape(-1), state, self.step)

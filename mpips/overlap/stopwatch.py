"""How long the layers of a model compute, from the hooks that it calls in a step."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from .model import Hook, LayeredModel


class Stopwatch:
    """One step: when the model came to each layer, and when it went on after the hook.

    What a hook itself takes (a wait for parameters, the start of a message) is not the layer's.
    """

    def __init__(self, layers: int) -> None:
        self._came = np.zeros((2, layers))
        self._went = np.zeros((2, layers))

    def step(self, model: LayeredModel, x: np.ndarray, y: np.ndarray, before: Hook, ready: Hook) -> float:
        """`loss_and_gradients` with these hooks, clocked."""
        return model.loss_and_gradients(x, y, self._around(0, before), self._around(1, ready))

    def seconds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(forward, backward) of every layer in the last step; the loss counts to the last layer's.

        The turn at the last layer is not seen from outside: a third of it counts as forward.
        """
        (came_f, came_b), (went_f, went_b) = self._came, self._went
        turn = came_b[-1] - went_f[-1]
        forward = np.append(came_f[1:] - went_f[:-1], turn / 3)
        return forward, np.append(came_b[:-1] - went_b[1:], turn * 2 / 3)

    def clocks(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """When the model came to each layer's hooks and went on, (2, layers) each: forward, backward."""
        return self._came.copy(), self._went.copy()

    @property
    def waited(self) -> float:
        """Seconds spent in the hooks before layers: waits for parameters."""
        return float((self._went[0] - self._came[0]).sum())

    def _around(self, kind: int, hook: Hook) -> Hook:
        came, went = self._came[kind], self._went[kind]

        def clocked(layer: int) -> None:
            came[layer] = time.perf_counter()
            hook(layer)
            went[layer] = time.perf_counter()

        return clocked

"""Activations in place, and their derivatives written in terms of what they returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Activation(NamedTuple):
    """`apply(z)` overwrites z with its activation; `backward(delta, y, mask, scratch)` multiplies delta
    by the derivative at y.
    """

    apply: Callable[[np.ndarray], None]
    backward: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


def _relu(z: np.ndarray) -> None:
    np.maximum(z, 0, out=z)


def _relu_backward(delta: np.ndarray, y: np.ndarray, mask: np.ndarray, scratch: np.ndarray) -> None:
    np.greater(y, 0, out=mask)
    np.multiply(delta, mask, out=delta)


def _tanh(z: np.ndarray) -> None:
    np.tanh(z, out=z)


def _tanh_backward(delta: np.ndarray, y: np.ndarray, mask: np.ndarray, scratch: np.ndarray) -> None:
    np.square(y, out=scratch)
    np.subtract(1, scratch, out=scratch)
    np.multiply(delta, scratch, out=delta)


ACTIVATIONS = {"relu": Activation(_relu, _relu_backward), "tanh": Activation(_tanh, _tanh_backward)}

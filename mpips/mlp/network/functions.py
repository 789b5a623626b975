"""Activations and losses: what they compute in place, and their derivatives.

Everything is column-wise, (neurons, samples), as everything inside a network (the paper writes X_l in R^{d_l x B}).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


def l2(
    output: np.ndarray, target: np.ndarray, delta: np.ndarray, scratch: np.ndarray, scale: float, xp: Any = np
) -> float:
    """Sum over samples of ``1/2 |output - target|^2``; `delta` becomes its gradient times `scale`.

    `target` is (samples, outputs) or, with one output, (samples,); `scratch` is overwritten.
    """
    np.subtract(output, target.reshape(output.shape[::-1]).T, out=delta)
    np.square(delta, out=scratch)
    total = 0.5 * float(scratch.sum(dtype=np.float64))
    np.multiply(delta, delta.dtype.type(scale), out=delta)
    return total


def softmax(
    output: np.ndarray, target: np.ndarray, delta: np.ndarray, scratch: np.ndarray, scale: float, xp: Any = np
) -> float:
    """Sum over samples of the cross-entropy ``-log softmax(output)[target]``; `delta` becomes its gradient times
    `scale`.

    `target` is (samples,) of class numbers; `scratch` is overwritten; `xp` is the array module of all of them.
    """
    samples = xp.arange(output.shape[1])
    np.subtract(output, output.max(axis=0, keepdims=True) if output.size else 0, out=scratch)
    np.exp(scratch, out=delta)
    sums = delta.sum(axis=0)
    total = float((np.log(sums) - scratch[target, samples]).sum(dtype=np.float64))
    np.divide(delta, sums, out=delta)
    delta[target, samples] -= 1
    np.multiply(delta, delta.dtype.type(scale), out=delta)
    return total


class Loss(NamedTuple):
    """A loss by name, and whether its targets are class numbers."""

    function: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float, Any], float]
    classes: bool


LOSSES = {"l2": Loss(l2, classes=False), "softmax": Loss(softmax, classes=True)}

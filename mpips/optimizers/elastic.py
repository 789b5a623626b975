"""The elastic pair: the server moves its centre towards a client, the client moves towards the centre."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpips.optimizers.base import State, check
from mpips.optimizers.blocks import Numbers, by_blocks, scaled, zeros

INTERVAL = 64
"""Iterations between two exchanges of elastic averaging (MXNET-MPI, section 5)."""


@dataclass(frozen=True)
class Elastic1:
    """On the server: centre = centre + alpha * (rescale * pushed - centre) (MXNET-MPI, equation 2 and figure 8).

    What is pushed is a client's parameters. An MPI client's push arrives summed over its workers: either `rescale` is
    1 / workers of a client, or each worker pushes that share.
    """

    alpha: float = 0.5
    rescale: float = 1.0

    def __post_init__(self) -> None:
        _check(self)

    def init(self, weights: np.ndarray) -> State:
        """No state."""
        return zeros(weights, 0)

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        """The centre moves towards what was pushed, in place; see `mpips.optimizers.Optimizer`."""
        _attract(self, weights, gradient, state, step)


@dataclass(frozen=True)
class Elastic2:
    """On the client: w = w - alpha * (w - rescale * centre) (MXNET-MPI, equation 3 and figure 8).

    `update(weights, centre, (), step)`: the pulled centre takes the gradient's place.
    """

    alpha: float = 0.5
    rescale: float = 1.0

    def __post_init__(self) -> None:
        _check(self)

    def init(self, weights: np.ndarray) -> State:
        """No state."""
        return zeros(weights, 0)

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        """The weights move towards the centre, in place; see `mpips.optimizers.Optimizer`."""
        _attract(self, weights, gradient, state, step)


def _check(record: Elastic1 | Elastic2) -> None:
    check(record)
    if not 0 < record.alpha <= 1:
        raise ValueError(f"{type(record).__name__}(alpha={record.alpha}): give a number in (0, 1]")


def _attract(record: Elastic1 | Elastic2, w: np.ndarray, towards: np.ndarray, state: State, step: int) -> None:
    """w = w + alpha * (rescale * towards - w): both updates are this one."""

    def block(w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        np.subtract(scaled(g, record.rescale), w, out=scratch)
        np.multiply(scratch, numbers[0], out=scratch)
        np.add(w, scratch, out=w)

    by_blocks(block, w, towards, state, slots=0, step=step, numbers=(record.alpha,))

"""Elastic averaging, equations 2 and 3 of MXNET-MPI: the centre moves towards a client, a client towards the centre."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpips.optimizers.base import Numbers, State, by_blocks, check, scaled, zeros

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
        check(self)
        if not 0 < self.alpha <= 1:
            raise ValueError(f"{type(self).__name__}(alpha={self.alpha}): give a number in (0, 1]")

    def init(self, weights: np.ndarray) -> State:
        """Return no state."""
        return zeros(weights, 0)

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        by_blocks(self._block, weights, gradient, state, slots=0, step=step, numbers=(self.alpha,))

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        np.subtract(scaled(g, self.rescale), w, out=scratch)
        np.multiply(scratch, numbers[0], out=scratch)
        np.add(w, scratch, out=w)


@dataclass(frozen=True)
class Elastic2(Elastic1):
    """On the client: w = w - alpha * (w - rescale * centre) (MXNET-MPI, equation 3 and figure 8), the same update.

    `update(weights, centre, (), step)`: the pulled centre takes the gradient's place.
    """

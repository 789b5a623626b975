"""The elastic pair: the server moves its centre towards a client, the client moves towards the centre."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpips.optimizers.base import Optimizer, State, scaled_gradient


@dataclass(frozen=True)
class _Elastic(Optimizer):
    alpha: float = 0.5
    rescale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha <= 1:
            raise ValueError(f"{type(self).__name__}(alpha={self.alpha}): give a number in (0, 1]")

    def _gradient(self, weights: np.ndarray, gradient: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return scaled_gradient(weights, gradient, dtype, self.rescale, 0.0)

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, coefficients: Any) -> None:
        np.subtract(g, w, out=scratch)
        np.multiply(scratch, self.alpha, out=scratch)
        np.add(w, scratch, out=w)


@dataclass(frozen=True)
class Elastic1(_Elastic):
    """On the server: centre = centre + alpha * (rescale * pushed - centre) (MXNET-MPI, equation 2 and figure 8).

    What is pushed is a client's parameters; an MPI client's push arrives summed over its workers, so `rescale` is
    1 / workers of a client.
    """


@dataclass(frozen=True)
class Elastic2(_Elastic):
    """On the client: w = w - alpha * (w - rescale * centre) (MXNET-MPI, equation 3 and figure 8).

    `update(weights, centre, (), step)`: the pulled centre takes the gradient's place.
    """

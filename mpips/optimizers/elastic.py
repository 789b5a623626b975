"""Elastic averaging, equations 2 and 3 of MXNET-MPI: the centre moves towards a client, a client towards the centre."""

from __future__ import annotations

from dataclasses import dataclass

from mpips.optimizers.base import Updated, Value, Values, check
from mpips.optimizers.equation import Equation
from mpips.optimizers.sgd import scaled

INTERVAL = 64
"""Iterations between two exchanges of elastic averaging (MXNET-MPI, section 5)."""


@dataclass(frozen=True)
class Elastic1(Equation):
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

    def equation(self, w: Value, g: Value, state: Values, numbers: Values) -> Updated:
        return w + (scaled(g, self.rescale) - w) * self.alpha, ()


@dataclass(frozen=True)
class Elastic2(Elastic1):
    """On the client: w = w - alpha * (w - rescale * centre) (MXNET-MPI, equation 3 and figure 8), the same update.

    `update(weights, centre, (), step)`: the pulled centre takes the gradient's place.
    """

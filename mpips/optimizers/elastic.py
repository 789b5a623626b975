"""Elastic averaging, equations 2 and 3 of MXNET-MPI: the centre moves towards a client, a client towards the centre."""

from __future__ import annotations

from dataclasses import dataclass

from mpips.optimizers.base import Updated, Value, Values, check
from mpips.optimizers.equation import Equation
from mpips.optimizers.sgd import scaled

# iterations between two exchanges of elastic averaging (MXNET-MPI, section 5)
INTERVAL = 64


@dataclass(frozen=True)
class Elastic1(Equation):
    """The server's half of elastic averaging (MXNET-MPI, equation 2 and figure 8).

        centre = centre + alpha * (rescale * pushed - centre)

    Workers push a client's parameters. The push of an MPI client arrives summed over its workers, so either `rescale`
    is 1 / (workers of a client), or each worker pushes that share of its parameters.
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
    """The client's half of elastic averaging (MXNET-MPI, equation 3 and figure 8).

        w = w - alpha * (w - rescale * centre)

    It is the same update as Elastic1's, with the pulled centre in the gradient's place: `update(weights, centre, (),
    step)`.
    """

"""Elastic averaging (MXNET-MPI, equations 2 and 3): the servers' centre and a client's weights approach each other."""

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

    The centre is the value of a key on the servers. Workers push a client's parameters. The push of an MPI client
    arrives summed over the client's workers. So either `rescale` is 1 / (workers of a client), or each worker divides
    its parameters by the number of workers of a client before it pushes them.
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

    It updates like `Elastic1`, with the pulled centre in place of the gradient: `update(weights, centre, (), step)`.
    """

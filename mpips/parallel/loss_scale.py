"""The loss scale of mixed precision: gradients travel as float16 multiplied by it, so that small ones do not vanish.

Source: Micikevicius et al., "Mixed precision training" (2018), section 3.2, with the scale chosen as training goes: an
update whose gradients overflowed float16 is left out and the scale halved; after `GROWTH` good updates it doubles.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from .communication import Sum

START = 2.0**10
GROWTH = 2000
LEAST, MOST = 1.0, 2.0**24


class LossScale:
    """The scale, the same on all ranks of a grid. Ranks of one slice see the same sums; the slices are asked."""

    def __init__(self, model_comm: MPI.Comm) -> None:
        self.scale, self.good = START, 0
        self._bad = np.zeros(1)
        self._ask = Sum(self._bad, model_comm)

    def judge(self, gradients: np.ndarray) -> bool:
        """Take the scale out of summed gradients, in place, and adapt it; False where this update must be left out.
        Collective over the ranks of a model."""
        np.multiply(gradients, gradients.dtype.type(1 / self.scale), out=gradients)
        self._bad[0] = not np.isfinite(np.dot(gradients, gradients))
        self._ask.run()
        if self._bad[0]:
            self.scale, self.good = max(self.scale / 2, LEAST), 0
            return False
        self.good += 1
        if self.good >= GROWTH:
            self.scale, self.good = min(self.scale * 2, MOST), 0
        return True

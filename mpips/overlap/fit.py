"""The straight line through measured message times: t = startup + per_byte x bytes (MG-WFBP, Eq. 9; iBatch's T_s,
T_t)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def line(nbytes: ArrayLike, seconds: ArrayLike) -> tuple[float, float]:
    """(startup, per_byte), neither negative, with the least sum of squared *relative* errors.

    Relative, so that the smallest messages, which show the startup, count as much as the largest. ValueError unless
    there are two different sizes and all times are positive.
    """
    x, y = np.asarray(nbytes, np.float64), np.asarray(seconds, np.float64)
    if x.shape != y.shape or len(np.unique(x)) < 2 or not (y > 0).all():
        raise ValueError(f"a line needs positive times of two sizes at least, not {y} at {x} bytes")
    both, *_ = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones(len(y)), rcond=None)
    if both[0] < 0:
        return 0.0, float(1 / (x / y).mean())
    if both[1] < 0:
        return float(1 / (1 / y).mean()), 0.0
    return float(both[0]), float(both[1])

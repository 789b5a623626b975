"""The cost of messages from measured times: t = startup x messages + per_byte x bytes (MG-WFBP, Eq. 9; iBatch, Eq. 1
and 2, where N batches cost N T_s)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def costs(messages: ArrayLike, nbytes: ArrayLike, seconds: ArrayLike) -> tuple[float, float]:
    """(startup, per_byte) of runs of so many messages and bytes in all, neither negative, with the least sum of squared
    *relative* errors.

    Relative, so that short runs count as much as long ones. ValueError unless all times are positive and both costs can
    be told apart: two runs at least that differ in bytes a message.
    """
    n, x, y = (np.asarray(values, np.float64) for values in (messages, nbytes, seconds))
    if not n.shape == x.shape == y.shape or len(np.unique(x / n)) < 2 or not (y > 0).all():
        raise ValueError(f"costs need positive times of two message sizes at least, not {y} s of {n} messages of {x}")
    both, *_ = np.linalg.lstsq(np.stack([n / y, x / y], axis=1), np.ones(len(y)), rcond=None)
    if both[0] < 0:
        return 0.0, _only(x / y)
    if both[1] < 0:
        return _only(n / y), 0.0
    return float(both[0]), float(both[1])


def _only(shares: np.ndarray) -> float:
    """The cost c with the least sum of squares of 1 - c x share."""
    return float(shares.sum() / (shares * shares).sum())

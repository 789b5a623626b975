"""The alpha-beta-gamma model: what a message, a byte and an addition cost, and these numbers from measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class LinkCost(NamedTuple):
    """alpha: seconds a message; beta: seconds a byte."""

    alpha: float
    beta: float


FREE = LinkCost(0.0, 0.0)


class Costs(NamedTuple):
    """The links between nodes (far) and inside a node (near), and gamma: seconds to add a byte."""

    far: LinkCost
    near: LinkCost
    gamma: float


def fit(points: Sequence[tuple[float, float]]) -> LinkCost:
    """alpha and beta of t = alpha + b beta from measured (bytes, seconds), t > 0. The sum of the relative errors
    |model - t| / t is made least, so that 8 bytes count as much as 64 MiB and one bad point counts little; neither
    number comes out negative."""
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"a fit needs measurements of at least two sizes, but got {sorted(points)}")
    size, time = np.array(points, dtype=np.float64).T
    design = np.stack([1 / time, size / time], axis=1)  # relative: want design @ (alpha, beta) = 1
    weight = np.ones(len(time))
    for _ in range(50):  # least absolute values by reweighted least squares
        alpha, beta = _not_negative(design * weight[:, None], weight)
        weight = 1 / np.sqrt(np.maximum(np.abs(design @ (alpha, beta) - 1), 1e-6))
    return LinkCost(alpha, beta)


def _not_negative(design: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """Least squares in two unknowns, each at least 0."""
    both = np.linalg.lstsq(design, target, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [max(0.0, float(column @ target / (column @ column))) for column in design.T]
    candidates = [(alone[0], 0.0), (0.0, alone[1])]
    return min(candidates, key=lambda pair: float(np.sum((design @ pair - target) ** 2)))

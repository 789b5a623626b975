"""Predict how long each algorithm takes by a formula: the alpha-beta-gamma model, and its fit.

A message of b bytes takes alpha + b beta, adding b bytes takes b gamma. A rank sends and receives at the same time
(full duplex), starts the messages of a lane one after the other, and has one wire for all lanes, except in `bcube`,
whose k lanes have a wire each. `simulate.simulate` gives the same times step by step, on any network; the tests compare
the two.

`fit` is the project's one fit of alpha and beta: from (bytes, seconds) to a `LinkCost`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpips.collectives.schedule import bcube, halving_doubling
from mpips.collectives.schedule.model import parse


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


def closed_form(kind: str, algorithm: str, p: int, nbytes: float, costs: Costs, **parameters: Any) -> float:
    """Return the closed form of `kind` by `algorithm`, written as in the catalogue, of nbytes bytes over p ranks.

    Each rank is on a node of its own (costs.far), but in hierarchical, whose `local` ranks share one (costs.near).
    ValueError as `catalog.build`, and where there is none.
    """
    name, written = parse(algorithm)
    parameters = {**parameters, **written}
    if not has_form(kind, name):
        choices = [other for served, other in TERMS if served == kind]
        raise ValueError(f"no closed form for {kind} by {name!r}: choose one of {', '.join(choices)}")
    if name == "multi_ring":
        return _multi_ring(p, nbytes, costs, **parameters)
    if name == "hierarchical":
        return _hierarchical(p, nbytes, costs, **parameters)
    return TERMS[kind, name](p, **parameters).seconds(nbytes, costs.far, costs.gamma)


def has_form(kind: str, name: str) -> bool:
    """Return whether the algorithm of this name, without its parameters, has a closed form for `kind`."""
    return (kind, name) in TERMS or (kind == "allreduce" and name in ("multi_ring", "hierarchical"))


def fit(points: Sequence[tuple[float, float]]) -> LinkCost:
    """Return alpha and beta of t = alpha + b beta from measured (bytes, seconds), t > 0.

    The sum of the relative errors |model - t| / t is made least, so that 8 bytes count as much as 64 MiB and one bad
    point counts little; neither number comes out negative.
    """
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


class Terms(NamedTuple):
    """The counts of alpha, n beta and n gamma in a time; n is the size of the vector in bytes."""

    alpha: float
    beta: float
    gamma: float

    def __add__(self, other: tuple) -> Terms:
        return Terms(*(mine + theirs for mine, theirs in zip(self, other)))

    def seconds(self, nbytes: float, link: LinkCost, gamma: float) -> float:
        """Return the time for a vector of nbytes bytes."""
        return self.alpha * link.alpha + nbytes * (self.beta * link.beta + self.gamma * gamma)


def _floor(p: int) -> int:
    return p.bit_length() - 1


def _ceil(p: int) -> int:
    return (p - 1).bit_length()


def _part(p: int) -> float:
    return (p - 1) / p


def _folded(p: int, q: int, terms: Terms) -> Terms:
    """With the way from p ranks to q and back, where they differ."""
    return terms if p == q else terms + Terms(2, 2, 1)


def _messages(p: int) -> int:
    return sum(factor - 1 for factor in halving_doubling.factors(p))


def _halving_doubling(p: int) -> Terms:
    q = halving_doubling.core(p)
    return _folded(p, q, Terms(2 * _messages(q), 2 * _part(q), _part(q)))


def _bcube(p: int, n: int = 0, k: int = 0, depth: int = 1) -> Terms:
    n, k = bcube.shape(p, n, k)
    return Terms(2 * k * (n - 1), 2 * _part(p) / k, _part(p))


def _bcube_one_lane(p: int, n: int = 0, k: int = 0, depth: int = 1) -> Terms:
    n, k = bcube.shape(p, n, k)
    return Terms(k * (n - 1), _part(p), _part(p))


TERMS: dict[tuple[str, str], Callable[..., Terms]] = {
    ("allreduce", "ring"): lambda p: Terms(2 * (p - 1), 2 * _part(p), _part(p)),
    ("allreduce", "direct"): lambda p: Terms(2 * (p - 1), 2 * _part(p), _part(p)),
    ("allreduce", "halving_doubling"): _halving_doubling,
    ("allreduce", "recursive_doubling"): lambda p: _folded(p, 1 << _floor(p), Terms(_floor(p), _floor(p), _floor(p))),
    ("allreduce", "binomial"): lambda p: Terms(2 * _ceil(p), 2 * _ceil(p), _ceil(p)),
    ("allreduce", "bcube"): _bcube,
    ("reduce_scatter", "ring"): lambda p: Terms(p - 1, _part(p), _part(p)),
    ("reduce_scatter", "direct"): lambda p: Terms(p - 1, _part(p), _part(p)),
    ("reduce_scatter", "halving_doubling"): lambda p: Terms(_messages(p), _part(p), _part(p)),
    ("reduce_scatter", "bcube"): _bcube_one_lane,
    ("allgather", "ring"): lambda p: Terms(p - 1, _part(p), 0),
    ("allgather", "direct"): lambda p: Terms(p - 1, _part(p), 0),
    ("allgather", "halving_doubling"): lambda p: Terms(_messages(p), _part(p), 0),
    ("allgather", "bcube"): lambda p, n=0, k=0, depth=1: _bcube_one_lane(p, n, k)._replace(gamma=0),
    ("broadcast", "ring"): lambda p: Terms(_ceil(p) + p - 1, 2 * _part(p), 0),
    ("broadcast", "binomial"): lambda p: Terms(_ceil(p), _ceil(p), 0),
    ("reduce", "ring"): lambda p: Terms(_ceil(p) + p - 1, 2 * _part(p), _part(p)),
    ("reduce", "binomial"): lambda p: Terms(_ceil(p), _ceil(p), _ceil(p)),
    ("alltoall", "direct"): lambda p: Terms(p - 1, _part(p), 0),
}
"""What is left out: multi_ring, which is no sum of terms, and hierarchical, which uses two kinds of links."""


def _multi_ring(p: int, nbytes: float, costs: Costs, rings: int = 2) -> float:
    """See the head of `schedule.multi_ring`."""
    chunk = nbytes / (rings * p)
    wire, add = costs.far.alpha + chunk * costs.far.beta, chunk * costs.gamma
    if p == 1:
        return 0.0
    if rings == 1:
        return 2 * (p - 1) * wire + (p - 1) * add
    if add <= wire:
        return 2 * (p - 1) * rings * wire
    return (p - 1) * rings * add + ((p - 2) * rings + 2) * wire


def _hierarchical(p: int, nbytes: float, costs: Costs, local: int, between: str = "ring") -> float:
    inside = closed_form("allreduce", "direct", local, nbytes, costs._replace(far=costs.near))
    return inside + closed_form("allreduce", between, p // local, nbytes / local, costs)

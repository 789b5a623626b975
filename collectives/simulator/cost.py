"""Predicts the time of each algorithm by a formula of the alpha-beta-gamma model, and fits alpha and beta to times.

A message of b bytes takes alpha + b beta seconds. An addition of b bytes takes b gamma seconds. A rank sends and
receives at the same time (full duplex), and starts the messages of a lane one after another. A rank has one wire for
all lanes, except in `bcube`, where each of the k lanes has a wire of its own. `simulate.simulate` computes the times
step by step, on any network. The tests compare its times with those of the formulas.

`fit` computes alpha and beta from measured (bytes, seconds), for all parts of the project.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpips.collectives.schedule import bcube, halving_doubling
from mpips.collectives.schedule.model import parse


class LinkCost(NamedTuple):
    """The cost of messages on a link: alpha seconds for each message, and beta seconds for each byte."""

    alpha: float
    beta: float


FREE = LinkCost(0.0, 0.0)


class Costs(NamedTuple):
    """The costs of messages between nodes (far) and inside a node (near), and of additions (gamma: seconds a byte)."""

    far: LinkCost
    near: LinkCost
    gamma: float


def closed_form(kind: str, algorithm: str, p: int, nbytes: float, costs: Costs, **parameters: Any) -> float:
    """Return the seconds of a collective by its formula.

    Each rank is on a node of its own (costs.far), except in hierarchical, where `local` ranks share a node
    (costs.near).

    Args:
        kind: The collective, such as "allreduce".
        algorithm: The name, with or without parameters, as in the catalogue.
        p: The number of ranks.
        nbytes: The size of the vector in bytes.
        costs: The costs of messages and additions.
        parameters: Parameters that are not written in `algorithm`.

    Raises:
        ValueError: There is no formula for the algorithm, or its parameters do not fit p.
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
    """True if a formula exists for `kind` by the algorithm of this name (without parameters)."""
    return (kind, name) in TERMS or (kind == "allreduce" and name in ("multi_ring", "hierarchical"))


def fit(points: Sequence[tuple[float, float]]) -> LinkCost:
    """Fit alpha and beta of t = alpha + b beta to measured (bytes b, seconds t), with t > 0.

    The fit minimizes the sum of the relative errors |model - t| / t. So a point of 8 bytes counts as much as one of 64
    MiB, and a single bad point counts little. Neither alpha nor beta is ever negative.

    Raises:
        ValueError: All measurements are of one size.
    """
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"a fit needs measurements of at least two sizes, but got {sorted(points)}")
    size, time = np.array(points, dtype=np.float64).T
    # Divide both sides by the time, so that errors are relative. The aim is design @ (alpha, beta) = 1.
    design = np.stack([1 / time, size / time], axis=1)
    weight = np.ones(len(time))
    # Use iteratively reweighted least squares. Its result converges to that with the least absolute errors.
    for _ in range(50):
        alpha, beta = _not_negative(design * weight[:, None], weight)
        weight = 1 / np.sqrt(np.maximum(np.abs(design @ (alpha, beta) - 1), 1e-6))
    return LinkCost(alpha, beta)


def _not_negative(design: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """Return the least-squares solution for two unknowns that must not be negative."""
    both = np.linalg.lstsq(design, target, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [max(0.0, float(column @ target / (column @ column))) for column in design.T]
    candidates = [(alone[0], 0.0), (0.0, alone[1])]
    return min(candidates, key=lambda pair: float(np.sum((design @ pair - target) ** 2)))


class Terms(NamedTuple):
    """A time as a sum: `alpha` x alpha + `beta` x n beta + `gamma` x n gamma, for a vector of n bytes."""

    alpha: float
    beta: float
    gamma: float

    def __add__(self, other: tuple) -> Terms:
        return Terms(*(own + theirs for own, theirs in zip(self, other)))

    def seconds(self, nbytes: float, link: LinkCost, gamma: float) -> float:
        """Return the time in seconds for a vector of `nbytes` bytes."""
        return self.alpha * link.alpha + nbytes * (self.beta * link.beta + self.gamma * gamma)


def _floor(p: int) -> int:
    return p.bit_length() - 1


def _ceil(p: int) -> int:
    return (p - 1).bit_length()


def _part(p: int) -> float:
    return (p - 1) / p


def _folded(p: int, q: int, terms: Terms) -> Terms:
    """Return `terms` plus the cost of folding p ranks to q ranks and back, if p and q differ."""
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


# (kind, algorithm) -> the terms for p ranks. Two algorithms are missing: multi_ring, whose time is not a sum of such
# terms, and hierarchical, which uses two kinds of links.
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


def _multi_ring(p: int, nbytes: float, costs: Costs, rings: int = 2) -> float:
    # The docstring of schedule.multi_ring explains these formulas.
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

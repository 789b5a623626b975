"""The algorithms by name: what each can do, and its schedule.

An algorithm is named as in "ring", or with parameters as in "multi_ring(rings=4)" and "bcube(n=3,k=2)".
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from .algorithms import direct, ring
from .schedule import KINDS, Schedule


class Algorithm(Protocol):
    """What each module of `collectives.algorithms` offers."""

    STAGES: dict[str, Any]
    """The kinds it serves."""

    def build(self, kind: str, p: int, **parameters: int) -> Schedule:
        """Its schedule; ValueError where p or a parameter does not fit."""


ALGORITHMS: dict[str, Any] = {module.__name__.rpartition(".")[2]: module for module in (ring, direct)}
ROOTED = ("broadcast", "reduce")


def names(kind: str) -> tuple[str, ...]:
    """The algorithms that serve `kind`."""
    if kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}: choose one of {', '.join(KINDS)}")
    return tuple(name for name, module in ALGORITHMS.items() if kind in module.STAGES)


def build(kind: str, algorithm: str, p: int, root: int = 0, **parameters: int) -> Schedule:
    """The schedule of `algorithm` for `kind` over p ranks. `root` counts in broadcast and reduce only. ValueError with
    the reason and the choices for an unknown name, a kind that it does not serve, or a p that does not fit."""
    name, written = parse(algorithm)
    if name not in names(kind):
        known = "does not serve" if name in ALGORITHMS else "is no algorithm for"
        raise ValueError(f"{name!r} {known} {kind}: choose one of {', '.join(names(kind))}")
    if kind in ROOTED:
        parameters["root"] = root
    return ALGORITHMS[name].build(kind, p, **written, **parameters)


def parse(algorithm: str) -> tuple[str, dict[str, int]]:
    """("bcube", {"n": 3, "k": 2}) from "bcube(n=3,k=2)"."""
    match = re.fullmatch(r"(\w+)(?:\(((?:\w+=\d+,?\s*)*)\))?", algorithm.strip())
    if not match:
        raise ValueError(f"algorithm {algorithm!r} is not written as name or name(parameter=number, ...)")
    name, inside = match.groups()
    return name, {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", inside or "")}

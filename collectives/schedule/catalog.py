"""All algorithms by name: which collectives each serves, its parameters, and how its schedule is built.

An algorithm is named as in "ring", or with parameters as in "multi_ring(rings=4)", "bcube(n=3,k=2)" or
"hierarchical(local=4,between=ring)". To add one, write a file like `ring`, import it here and give it a line in
`ALGORITHMS`; docs/how-to/add-an-algorithm.md has an example.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mpips.collectives.errors import did_you_mean
from mpips.collectives.schedule import (
    bcube,
    binomial,
    direct,
    halving_doubling,
    hierarchical,
    multi_ring,
    recursive_doubling,
    ring,
)
from mpips.collectives.schedule.model import KINDS, Schedule, parse

ALGORITHMS: dict[str, ModuleType] = {
    "ring": ring,
    "multi_ring": multi_ring,
    "direct": direct,
    "halving_doubling": halving_doubling,
    "recursive_doubling": recursive_doubling,
    "binomial": binomial,
    "bcube": bcube,
    "hierarchical": hierarchical,
}
"""Each module has KINDS, the collectives it serves, and build(kind, p, **parameters), which raises ValueError where p
or a parameter does not fit. What it is made of, of another module, is given to it (`_composed`)."""
PARTS = ("single", "exchange", "tree", "inside")

ROOTED = ("broadcast", "reduce")


def names(kind: str) -> tuple[str, ...]:
    """The algorithms that serve `kind`."""
    if kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}: choose one of {', '.join(KINDS)}")
    return tuple(name for name, module in ALGORITHMS.items() if kind in module.KINDS)


def see_serves(kind: str, name: str, others: Sequence[str] = ()) -> None:
    """ValueError with the choices, `others` and what is here, where no algorithm of this name serves `kind`."""
    if name not in names(kind):
        known = "does not serve" if name in ALGORITHMS else "is no algorithm for"
        choices = [*others, *names(kind)]
        raise ValueError(f"{name!r} {known} {kind}{did_you_mean(name, choices)}: choose one of {', '.join(choices)}")


def see_named(kind: str, algorithm: str) -> None:
    """ValueError where no algorithm of this name and parameters serves `kind`, with any number of ranks."""
    name, given = parse(algorithm)
    see_serves(kind, name)
    _refuse_unknown(name, given)
    if between := given.get("between"):
        see_named(kind, str(between))


def build(kind: str, algorithm: str, p: int, root: int = 0, **parameters: Any) -> Schedule:
    """The schedule of `algorithm` for `kind` over p ranks. Parameters may be written in the name or given by keyword;
    `root` counts in broadcast and reduce only. ValueError with the reason and the choices for an unknown name or
    parameter, a kind that it does not serve, or a p that does not fit."""
    name, written = parse(algorithm)
    see_serves(kind, name)
    given = {**parameters, **written}
    _refuse_unknown(name, given)
    if kind in ROOTED:
        given["root"] = root
    if name == "hierarchical":
        return _hierarchical(kind, p, **given)
    return ALGORITHMS[name].build(kind, p, **given, **_composed(kind, name, p))


def _composed(kind: str, name: str, p: int) -> dict[str, Any]:
    """The parts of an algorithm that are another's."""
    if name == "multi_ring":
        return {"single": ring.build(kind, p)}
    if name == "halving_doubling":
        return {"exchange": bcube.over}
    if name == "ring" and kind in ROOTED:
        return {"tree": binomial.scatter if kind == "broadcast" else binomial.gather}
    return {}


def serves(kind: str, algorithm: str, p: int, **parameters: Any) -> str | None:
    """None where `build` would succeed, else its sentence."""
    try:
        build(kind, algorithm, p, **parameters)
    except ValueError as refusal:
        return str(refusal)
    return None


def _refuse_unknown(name: str, given: dict[str, Any]) -> None:
    signature = inspect.signature(ALGORITHMS[name].build)
    taken = [key for key in signature.parameters if key not in ("kind", "p", "root", *PARTS)]
    for key, value in given.items():
        if key not in taken:
            raise ValueError(f"{name} has no parameter {key!r}: it takes {', '.join(taken) or 'none'}")
        if key != "between" and not isinstance(value, int):
            raise ValueError(f"{name}({key}={value}): {key} must be a whole number")


def _hierarchical(kind: str, p: int, local: int = 0, between: str = "ring") -> Schedule:
    if local < 1 or p % local:
        raise ValueError(
            f"hierarchical(local={local}) does not fit {p} ranks: local, the ranks of each node, must divide them"
        )
    inside = direct.build("reduce_scatter", local), direct.build("allgather", local)
    return hierarchical.build(kind, p, local, build(kind, between, p // local), inside)

"""All algorithms by name: the collectives that each serves, its parameters, and the function that builds its schedule.

An algorithm is written as "ring", or with parameters as "multi_ring(rings=4)", "bcube(n=3,k=2)" or
"hierarchical(local=4,between=ring)". To add an algorithm, write a file like `ring`, import it in this module and add it
to `ALGORITHMS`; docs/how-to/add-an-algorithm.md has an example.
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

# Each module has KINDS, the collectives that it serves, and build(kind, p, **parameters), which raises ValueError if p
# or a parameter does not fit. Modules do not import each other: `_composed` passes to each the parts of other modules
# that it needs.
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
# The arguments of build() in which `_composed` and `_hierarchical` pass parts of other algorithms. Users cannot give
# these arguments.
PARTS = ("single", "exchange", "tree", "inside")

ROOTED = ("broadcast", "reduce")


def names(kind: str) -> tuple[str, ...]:
    """Return the names of the algorithms that can run the collective `kind`."""
    if kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}: choose one of {', '.join(KINDS)}")
    return tuple(name for name, module in ALGORITHMS.items() if kind in module.KINDS)


def check_serves(kind: str, name: str, others: Sequence[str] = ()) -> None:
    """Raise ValueError if no algorithm with this name serves `kind`.

    The error lists the choices: `others`, which are further allowed names, and the algorithms of the catalogue.
    """
    if name not in names(kind):
        known = "does not serve" if name in ALGORITHMS else "is not an algorithm for"
        choices = [*others, *names(kind)]
        raise ValueError(f"{name!r} {known} {kind}{did_you_mean(name, choices)}: choose one of {', '.join(choices)}")


def check_algorithm(kind: str, algorithm: str) -> None:
    """Check a name with its parameters. Raise ValueError if it does not serve `kind` or lacks one of the parameters.

    Whether the algorithm fits a number of ranks is not checked.
    """
    name, given = parse(algorithm)
    check_serves(kind, name)
    _refuse_unknown(name, given)
    if between := given.get("between"):
        check_algorithm(kind, str(between))


def build(kind: str, algorithm: str, p: int, root: int = 0, **parameters: Any) -> Schedule:
    """Build the schedule of an algorithm.

    Args:
        kind: The collective, such as "allreduce".
        algorithm: The name, with or without parameters.
        p: The number of ranks.
        root: The root; used in broadcast and reduce only.
        parameters: Parameters that are not written in `algorithm`.

    Raises:
        ValueError: The name or a parameter is unknown, or the algorithm does not serve `kind` or does not fit p. The
            error gives the reason and the choices.
    """
    name, written = parse(algorithm)
    check_serves(kind, name)
    given = {**parameters, **written}
    _refuse_unknown(name, given)
    if kind in ROOTED:
        given["root"] = root
    if name == "hierarchical":
        return _hierarchical(kind, p, **given)
    return ALGORITHMS[name].build(kind, p, **given, **_composed(kind, name, p))


def _composed(kind: str, name: str, p: int) -> dict[str, Any]:
    """Return the parts of other algorithms that the algorithm `name` needs, as arguments for its build()."""
    if name == "multi_ring":
        return {"single": ring.build(kind, p)}
    if name == "halving_doubling":
        return {"exchange": bcube.over}
    if name == "ring" and kind in ROOTED:
        return {"tree": binomial.scatter if kind == "broadcast" else binomial.gather}
    return {}


def serves(kind: str, algorithm: str, p: int, **parameters: Any) -> str | None:
    """Return None if `build` would succeed, and otherwise the text of the error that it would raise."""
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

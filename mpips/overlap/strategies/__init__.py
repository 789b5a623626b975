"""Group layers into buckets: pure functions of a Problem (one direction), or of two (`joint`), by name."""

from __future__ import annotations

from collections.abc import Callable

from mpips.overlap.problem import Groups, Problem
from mpips.overlap.strategies import baselines, ibatch, joint, merged, optimal

PARTITIONS: dict[str, Callable[[Problem], Groups]] = {
    "sequential": baselines.sequential,
    "layerwise": baselines.layerwise,
    "single": baselines.single,
    "merged": merged.partition,
    "ibatch": ibatch.partition,
    "optimal": optimal.partition,
}
"""Name -> groups of one direction."""

STRATEGIES = (*PARTITIONS, "joint")
"""The names of all, as `mpips plan --strategy` takes them."""

__all__ = ["PARTITIONS", "STRATEGIES", "joint"]

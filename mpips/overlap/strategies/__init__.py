"""One file a strategy, each a pure function of a Stage (one direction) or of two (`joint`)."""

from __future__ import annotations

from collections.abc import Callable

from ..stage import Groups, Stage
from . import ibatch, joint, layerwise, merged, optimal, sequential, single

PARTITIONS: dict[str, Callable[[Stage], Groups]] = {
    "sequential": sequential.partition,
    "layerwise": layerwise.partition,
    "single": single.partition,
    "merged": merged.partition,
    "ibatch": ibatch.partition,
    "optimal": optimal.partition,
}
"""Name -> groups of one direction."""

NAMES = (*PARTITIONS, "joint")

__all__ = ["NAMES", "PARTITIONS", "joint"]

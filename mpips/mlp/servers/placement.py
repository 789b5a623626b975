"""Which ranks are servers, and for which slices: what `Servers` are asked to be, and how slices are dealt to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpips.optimizers.elastic import INTERVAL

from mpips.mlp.agreement import TrainingError, counted
from mpips.mlp.intervals import interval, intervals

STORES = {"sync": "mpi_sync", "elastic": "mpi_async"}
"""The kind of store behind each kind of servers."""


@dataclass(frozen=True)
class ServerOptions:
    """The arguments of `Servers`; TrainingError where one is out of its range."""

    count: int
    clients: int = 1
    kind: str = "sync"
    every: int = INTERVAL
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in STORES:
            raise TrainingError(f"servers of kind {self.kind!r}: choose one of {', '.join(STORES)}")
        if self.every < 1:
            raise TrainingError(f"elastic averaging every {self.every} steps: give at least 1")
        if not (math.isfinite(self.alpha) and 0 < self.alpha <= 1):
            raise TrainingError(f"elastic averaging by alpha {self.alpha}: give more than 0 and at most 1")


def misfit(servers: int, clients: int, batch: int, model: int, ranks: int) -> str | None:
    """Why such a job does not fit its ranks; None where it does."""
    needed = clients * batch * model + servers
    if min(servers, clients, batch, model) < 1 or needed != ranks:
        return (
            f"{counted(clients, 'client')} of {batch}x{model} and {counted(servers, 'server')} need "
            f"{counted(needed, 'rank')}, the job has {ranks}; give another --ranks, --grid, --clients or --servers"
        )
    return None


def group_of(rank: int, ranks: int, servers: int, model: int) -> tuple[int, int] | None:
    """The group of slices that this rank of the job serves or speaks for, and how many servers that group has; None
    for a worker that speaks for none.

    Slices are dealt to min(model, servers) groups of neighbours, the servers (the last ranks) to the groups in order.
    """
    groups = min(model, servers)
    dealt = intervals(servers, groups)
    server, slice_ = rank - (ranks - servers), rank % model
    if server >= 0:
        group = next(g for g, (_, stop) in enumerate(dealt) if server < stop)
    elif led := [g for g in range(groups) if interval(model, groups, g)[0] == slice_]:
        group = led[0]
    else:
        return None
    return group, dealt[group][1] - dealt[group][0]

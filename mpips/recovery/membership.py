"""Who takes which place when ranks have died. Pure.

Ranks of a store are workers, then servers, then spares. A dead server's place is taken by a spare, if there is one,
then a dead worker's. A place that nobody takes vanishes: clients keep the members that are left, and clients without
any vanish, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Before(NamedTuple):
    """What the ranks of an epoch were in the one before."""

    origin: tuple[int, ...]
    """Of each rank the one that it had."""
    lost: tuple[int, ...]
    """The ranks that have died since, as they were numbered."""
    num_workers: int
    num_servers: int
    nodes: tuple[int, ...]
    """The node of every rank, by the lowest rank on it."""


class Roles(NamedTuple):
    """How many there are of each, and the workers of each client."""

    num_workers: int
    num_servers: int
    spares: int
    clients: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.num_workers + self.num_servers + self.spares


class Succession(NamedTuple):
    """Who goes on: of each new rank the old one, and what they are now."""

    origin: tuple[int, ...]
    roles: Roles


def succession(old: Roles, lost: Collection[int], nodes: Sequence[int]) -> Succession:
    """Who takes which place after the ranks of `lost` have died. `nodes`: of every old rank. A spare of the node is
    preferred. Whether the store can go on so says `refusal`."""
    spares = [rank for rank in range(old.num_workers + old.num_servers, old.size) if rank not in lost]
    holders = {place: place for place in range(old.num_workers + old.num_servers) if place not in lost}
    workers, servers = range(old.num_workers), range(old.num_workers, old.num_workers + old.num_servers)
    for place in (*servers, *workers):
        if place not in holders and spares:
            holders[place] = min(spares, key=lambda spare: (nodes[spare] != nodes[place], spare))
            spares.remove(holders[place])
    origin = [holders[place] for place in (*workers, *servers) if place in holders]
    sizes = [sum(worker in holders for worker in range(*client)) for client in old.clients]
    left = sum(server in holders for server in servers)
    return Succession((*origin, *spares), Roles(sum(sizes), left, len(spares), _intervals(sizes)))


def _intervals(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple((start, start + size) for start, size in zip(starts, sizes) if size)


def refusal(old: Roles, new: Succession) -> str:
    """Why the store cannot go on with those who are left; "" where it can."""
    roles = new.roles
    if not roles.num_workers:
        return f"all {old.num_workers} workers have died, and no spare is left"
    if old.num_servers and not roles.num_servers:
        return f"all {old.num_servers} servers have died, and no spare is left"
    if not old.num_servers and all(rank >= old.num_workers for rank in new.origin[: roles.num_workers]):
        return f"all {old.num_workers} workers have died, which alone held the values: load a checkpoint"
    return ""

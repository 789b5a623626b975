"""Decide which rank takes the place of a dead or new one, and which server mirrors which. Pure.

Ranks of a store are workers, then servers, then spares. A dead server's place is taken by a spare, if there is one,
then a dead worker's; but first, where no server is left or no worker, one of these. A place that nobody takes vanishes:
clients keep the members that are left, and clients without any vanish, too. Where the store grows, the spares that are
left become workers. A server's mirror is the next one in a ring that is on another node.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

NEW = -1
"""The place of a worker by which the store has grown."""


class Before(NamedTuple):
    """The ranks of a generation as they were in the one before."""

    origin: tuple[int, ...]
    """Of each rank the one that it had."""
    lost: tuple[int, ...]
    """The ranks that have died since, as they were numbered."""
    num_workers: int
    num_servers: int
    nodes: tuple[int, ...]
    """The node of every rank, by the lowest rank on it."""
    clients: tuple[tuple[int, int], ...]
    """The workers of each client."""
    places: tuple[int, ...]
    """Of each worker now the one whose place it has: itself, or a dead one; NEW where the store has grown by it."""

    def in_whose_place(self, worker: int, kind: str) -> range:
        """Return the workers whose pushes a worker of now goes on with; none where the store has grown by it. They are
        itself, in stores where each pushes alone, else its client."""
        place = self.places[worker]
        if place == NEW:
            return range(0)
        if kind.startswith("dist_"):
            return range(place, place + 1)
        return next(range(*client) for client in self.clients if place in range(*client))


class Roles(NamedTuple):
    """Numbers of workers, servers and spares, and the workers of each client."""

    num_workers: int
    num_servers: int
    spares: int
    clients: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.num_workers + self.num_servers + self.spares


class Succession(NamedTuple):
    """The ranks that go on: of each new rank the old one, and what they are now."""

    origin: tuple[int, ...]
    roles: Roles
    places: tuple[int, ...]
    """See `Before.places`."""


def succession(
    old: Roles, lost: Collection[int], nodes: Sequence[int], grow: bool = False, alone: bool = False
) -> Succession:
    """Return the ranks that take each place after the ranks of `lost` have died. `nodes`: of every old rank.

    A spare of the node is preferred. `refusal` tells whether the store can go on so.

    `grow`: each spare that is left becomes a worker, the last one of the smallest client (of several, of the last);
    where every worker is `alone` in its client, a client of its own.
    """
    spares = [rank for rank in range(old.num_workers + old.num_servers, old.size) if rank not in lost]
    holders = {place: place for place in range(old.num_workers + old.num_servers) if place not in lost}
    workers, servers = range(old.num_workers), range(old.num_workers, old.num_workers + old.num_servers)
    needed = [places[0] for places in (servers, workers) if places and not holders.keys() & set(places)]
    for place in (*needed, *servers, *workers):
        if place not in holders and spares:
            holders[place] = min(spares, key=lambda spare: (nodes[spare] != nodes[place], spare))
            spares.remove(holders[place])
    clients = [[(place, holders[place]) for place in range(*client) if place in holders] for client in old.clients]
    clients = [members for members in clients if members]
    while grow and spares:
        if alone:
            clients.append([])
        min(reversed(clients), key=len).append((NEW, spares.pop(0)))
    left = [holders[place] for place in servers if place in holders]
    intervals = tuple(pairwise(accumulate(map(len, clients), initial=0)))
    places, workers_now = zip(*chain(*clients)) if clients else ((), ())
    roles = Roles(len(workers_now), len(left), len(spares), intervals)
    return Succession((*workers_now, *left, *spares), roles, places)


def refusal(old: Roles, new: Succession) -> str:
    """Return why the store cannot go on with those who are left; "" where it can."""
    roles = new.roles
    if not roles.num_workers:
        return f"all {old.num_workers} workers have died, and no spare is left"
    if old.num_servers and not roles.num_servers:
        return f"all {old.num_servers} servers have died, and no spare is left"
    if not old.num_servers and all(rank >= old.num_workers for rank in new.origin[: roles.num_workers]):
        return f"all {old.num_workers} workers have died, which alone held the values: load a checkpoint"
    return ""


def mirror_of(server: int, nodes: Sequence[int]) -> int | None:
    """Return the server that keeps the copies of this one; None where all share a node. `nodes`: of each server."""
    count = len(nodes)
    following = ((server + step) % count for step in range(1, count))
    return next((other for other in following if nodes[other] != nodes[server]), None)


def refuse_mirrors(mirrors: int, spares: int, nodes: Sequence[int]) -> str:
    """Return why servers on these nodes can have no mirrors, where they are asked for; "" where they can."""
    if mirrors and spares < 0:
        return f"mirrors={mirrors} and spares={spares}: a death ends the store all the same; ask for spares=0 or more"
    if not mirrors or len(set(nodes)) > 1:
        return ""
    there = "this store has no servers"
    if nodes:
        there = f"all {len(nodes)} share one" if len(nodes) > 1 else "there is one server"
    start = "start one on another host, or leave it out"
    return f"mirrors={mirrors} needs servers on at least two nodes, but {there}: {start}"

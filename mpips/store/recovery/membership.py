"""Decide which spare takes the place of a dead rank, and which server mirrors which other server. Pure.

The first ranks of a store are workers, then come servers, then spares. A place is the position of a worker or server
before the failure. Spares take the places of dead servers first, then those of dead workers. But if all servers or all
workers have died, a spare first takes one place of that role. A place that no spare takes is dropped. Clients (groups
of workers that push together) keep the members that are left; a client without members is dropped as well. If the store
grows, the remaining spares become workers.

The servers form a ring for mirrors: a server's mirror is the next server that is on another node.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

# Value in `places` for an additional worker, that is, a spare that has become a worker but has no dead worker's place.
NEW = -1


class Before(NamedTuple):
    """The last generation of a store, and how its ranks became the ranks of this generation.

    (A generation is the life of a store until the next failure.) `origin` and `places` are indexed by the ranks of this
    generation. All other ranks in this record are ranks of the last generation.

    Attributes:
        origin: For each rank of this generation, its rank in the last generation.
        lost: The ranks that have died since the last generation began.
        num_workers: The number of workers in the last generation.
        num_servers: The number of servers in the last generation.
        nodes: For each rank, its node. A node is named by the lowest rank on it.
        clients: For each client, the range [first, stop) of its workers.
        places: For each worker of this generation, the worker whose place it has: its own former rank, or a dead
            worker. NEW for an additional worker, which has nobody's place.
    """

    origin: tuple[int, ...]
    lost: tuple[int, ...]
    num_workers: int
    num_servers: int
    nodes: tuple[int, ...]
    clients: tuple[tuple[int, int], ...]
    places: tuple[int, ...]

    @property
    def lost_servers(self) -> list[int]:
        """The servers that have died."""
        return [rank for rank in self.lost if 0 <= rank - self.num_workers < self.num_servers]

    def in_whose_place(self, worker: int, kind: str) -> range:
        """Return the workers of the last generation whose pushes `worker` continues.

        In `dist_*` stores every worker pushes for itself, so this is only the worker whose place `worker` has taken. In
        other stores the members of a client push together, so these are all members of that worker's client. The result
        is empty if `worker` was added when the store grew.
        """
        place = self.places[worker]
        if place == NEW:
            return range(0)
        if kind.startswith("dist_"):
            return range(place, place + 1)
        return next(range(*client) for client in self.clients if place in range(*client))


class Roles(NamedTuple):
    """The numbers of workers, servers and spares, and for each client the range [first, stop) of its workers."""

    num_workers: int
    num_servers: int
    spares: int
    clients: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return self.num_workers + self.num_servers + self.spares


class RankMapping(NamedTuple):
    """The ranks with which a store continues after some ranks have died, and their new roles.

    The ranks that are left get new numbers: first the workers, then the servers, then the spares.

    Attributes:
        origin: For each new rank, its old rank.
        roles: The new numbers of workers, servers and spares, and the new clients.
        places: For each new worker, the old rank of the worker whose place it has: its own, or that of a dead worker.
            NEW for an additional worker.
    """

    origin: tuple[int, ...]
    roles: Roles
    places: tuple[int, ...]


def map_ranks(
    old: Roles, lost: Collection[int], nodes: Sequence[int], grow: bool = False, alone: bool = False
) -> RankMapping:
    """Decide which ranks take each place after the ranks `lost` have died.

    A spare on the same node as the dead rank is preferred. This function does not check that enough ranks are left for
    the store to continue; `refusal` does.

    Args:
        old: The roles before the deaths.
        lost: The old ranks that have died.
        nodes: The node of each old rank.
        grow: True if each remaining spare becomes a worker. The new worker becomes the last one of the smallest client.
            If several clients are smallest, it joins the last of these clients.
        alone: True if every worker is a client of its own, including the spares that become workers.
    """
    spares = [rank for rank in range(old.num_workers + old.num_servers, old.size) if rank not in lost]
    holders = {place: place for place in range(old.num_workers + old.num_servers) if place not in lost}
    workers, servers = range(old.num_workers), range(old.num_workers, old.num_workers + old.num_servers)
    # If a role has lost all its ranks, one of its places is filled first.
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
    return RankMapping((*workers_now, *left, *spares), roles, places)


def refusal(old: Roles, new: RankMapping) -> str:
    """Return the reason why the store cannot continue with these ranks, or "" if it can."""
    roles = new.roles
    if not roles.num_workers:
        return f"all {old.num_workers} workers have died, and no spare is left"
    if old.num_servers and not roles.num_servers:
        return f"all {old.num_servers} servers have died, and no spare is left"
    if not old.num_servers and all(rank >= old.num_workers for rank in new.origin[: roles.num_workers]):
        return f"all {old.num_workers} workers have died, which alone held the values: load a checkpoint"
    return ""


def mirror_of(server: int, nodes: Sequence[int]) -> int | None:
    """Return the server that keeps copies of this server's units, or None if all servers share a node.

    `nodes` is the node of each server.
    """
    count = len(nodes)
    following = ((server + step) % count for step in range(1, count))
    return next((other for other in following if nodes[other] != nodes[server]), None)


def refuse_mirrors(mirrors: int, spares: int, nodes: Sequence[int]) -> str:
    """Return the reason why servers on these nodes cannot have as many mirrors as the options ask for, or ""."""
    if mirrors and spares < 0:
        return f"mirrors={mirrors} and spares={spares}: a death ends the store all the same; ask for spares=0 or more"
    if not mirrors or len(set(nodes)) > 1:
        return ""
    why = "this store has no servers"
    if nodes:
        why = f"all {len(nodes)} share one" if len(nodes) > 1 else "there is one server"
    return (
        f"mirrors={mirrors} needs servers on at least two nodes, but {why}: start one on another host, or leave it out"
    )

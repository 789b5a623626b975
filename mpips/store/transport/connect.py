"""Lines between workers and servers: rings where both ends can map each other's memory, messages elsewhere."""

from __future__ import annotations

import platform
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError, warn
from collectives.fabric import arena
from collectives.fabric.arena import Region
from collectives.fabric.poison import Peers
from mpips.store.roles import Layout
from mpips.store.runtime.generation import Generation
from mpips.store.runtime.rendezvous import exchange
from mpips.store.transport import ring
from mpips.store.transport.channel import MessageLine
from mpips.store.transport.line import Line
from mpips.store.transport.ring import Rings, SharedLine

WHAT = "mpips.create"


class _Offer(msgspec.Struct, array_like=True):
    """A rank's memory, for others of its node to try: a server's rings, a worker's few bytes; a server's ledger."""

    region: tuple[int, ...]
    ledger: tuple[int, ...] = ()


class Connection(NamedTuple):
    """This rank's lines: to every server (on a worker) or from every worker (on a server), a server's own rings, and
    where the servers of its node keep their ledgers. A spare has no lines."""

    lines: list[Line]
    rings: Rings | None
    ledgers: dict[int, Region]


def connect(layout: Layout, generation: Generation, ledger: Region | None = None) -> Connection:
    """Connect workers and servers. `ledger`: this server's, where it keeps one.

    Collective over all ranks of the store, blocking; once a generation. A pair uses rings if MPI says that they share a
    node and both could in fact map the other's memory. RuntimeWarning on rank 0 where this processor does not keep the
    order of stores, as messages then take the place of rings.
    """
    own = Rings.create(layout.num_workers) if layout.is_server else None
    memory = own.memory if own else arena.empty(64, np.uint8)
    region = arena.locate(memory)
    assert region is not None
    offer = msgspec.msgpack.encode(_Offer(tuple(region), tuple(ledger or ())))
    said = [msgspec.msgpack.decode(data, type=_Offer) for data in exchange(generation, offer, WHAT, True)]
    offers = [Region(*one.region) for one in said]
    servers = range(layout.num_workers, layout.num_workers + layout.num_servers)
    peers = range(layout.num_workers) if layout.is_server else servers if layout.is_worker else range(0)
    mapped = {peer: _try(layout, peer, offers[peer]) for peer in peers}
    verdicts = exchange(generation, bytes(mapped.get(peer) is not None for peer in range(len(offers))), WHAT, True)
    _see_order(layout)
    processes = Peers([offer.pid for offer in offers])
    lines: list[Line] = []
    for peer in peers:
        theirs = mapped[peer]
        if theirs is None or not verdicts[peer][layout.rank]:
            lines.append(MessageLine(layout.world, peer))
        elif own:
            lines.append(SharedLine(own.reply_ring(peer), own.request_ring(peer)))
        else:
            rings, gone = Rings(layout.num_workers, theirs), partial(processes.ended, peer)
            both = rings.request_ring(layout.rank), rings.reply_ring(layout.rank)
            lines.append(SharedLine(*both, generation.wait, gone))
    ledgers = {
        rank: Region(*one.ledger) for rank, one in enumerate(said)
        if one.ledger and rank != layout.rank and layout.same_node(rank, layout.rank)
    }  # fmt: skip
    return Connection(lines, own, ledgers)


def _try(layout: Layout, peer: int, region: Region) -> NDArray[Any] | None:
    if not (layout.same_node(layout.rank, peer) and ring.usable()):
        return None
    try:
        return arena.attach(region)
    except CollectiveError:  # another container: MPI shares memory there, we cannot
        return None


def _see_order(layout: Layout) -> None:
    if layout.rank == 0 and not ring.usable() and len(set(layout.nodes)) < len(layout.nodes):
        warn(
            f"this processor ({platform.machine()}) may reorder stores to memory, so workers and servers of one node "
            "talk by messages, which is slower"
        )

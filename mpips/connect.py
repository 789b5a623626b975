"""Lines between workers and servers: rings where both ends can map each other's memory, messages elsewhere."""

from __future__ import annotations

import msgspec
import numpy as np

from collectives.errors import CollectiveError
from collectives.node import arena
from collectives.node.arena import Region
from mpips import meet, rings
from mpips.layout import Layout
from mpips.lines import Line, MessageLine, SharedLine
from mpips.rings import Rings


class _Offer(msgspec.Struct, array_like=True):
    """A rank's memory, for others of its node to try: a server's rings, a worker's few bytes."""

    region: tuple[int, ...]


def connect(layout: Layout) -> tuple[list[Line], Rings | None]:
    """This rank's lines: to every server (on a worker) or from every worker (on a server), and a server's own rings.

    Collective over `layout.world`. A pair uses rings if MPI says that they share a node and both could in fact map the
    other's memory.
    """
    own = Rings.create(layout.num_workers) if layout.is_server else None
    memory = own.memory if own else arena.empty(64, np.uint8)
    region = arena.locate(memory)
    assert region is not None
    what = "mpips.create"
    offers = [
        msgspec.msgpack.decode(data, type=_Offer).region
        for data in meet.exchange(layout.world, msgspec.msgpack.encode(_Offer(tuple(region))), what)
    ]
    peers = range(layout.num_workers) if layout.is_server else range(layout.num_workers, layout.world.Get_size())
    mapped = {peer: _try(layout, peer, Region(*offers[peer])) for peer in peers}
    verdicts = meet.exchange(layout.world, bytes(mapped.get(peer) is not None for peer in range(len(offers))), what)
    lines: list[Line] = []
    for peer in peers:
        both = mapped[peer] is not None and verdicts[peer][layout.rank]
        if not both:
            lines.append(MessageLine(layout.world, peer))
        elif own:
            lines.append(SharedLine(own.reply_ring(peer), own.request_ring(peer), patient=False))
        else:
            theirs = Rings(layout.num_workers, mapped[peer])  # type: ignore[arg-type]
            lines.append(SharedLine(theirs.request_ring(layout.rank), theirs.reply_ring(layout.rank), patient=True))
    return lines, own


def _try(layout: Layout, peer: int, region: Region) -> np.ndarray | None:
    if not (layout.same_node(layout.rank, peer) and rings.usable()):
        return None
    try:
        return arena.attach(region)
    except CollectiveError:  # another container: MPI shares memory there, we cannot
        return None

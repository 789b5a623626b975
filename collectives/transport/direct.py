"""The protocol for node-shared arrays: the owner writes finished blocks straight into the readers' arrays.

See `collectives.transport.shared_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.call import Call
from collectives.node import arena
from collectives.transport.cards import Card
from collectives.transport.program import Phase, Program, Step, Window, combine, copy
from collectives.transport.room import Room

BLOCK_BYTES = 256 << 10


def program(room: Room, call: Call, x: Window, out: Window, cards: Sequence[Card]) -> Program:
    """What this rank does, once all have come with these cards."""
    xs, outs = [x] * room.size, [out] * room.size
    for rank in room.turn():
        card = cards[rank]
        in_place = card.x == card.out
        xs[rank] = Window(arena.attach(card.x).view(call.dtype), call.extent_of_x(rank, in_place)[0])
        outs[rank] = Window(arena.attach(card.out).view(call.dtype), call.extent_of_out(rank, in_place)[0])
    order = [room.rank, *room.turn()]
    if call.kind == "alltoall":
        blocks = [(out.part(*call.arrival(room.rank, rank)), xs[rank].part(*call.block(room.rank))) for rank in order]
        return Program((Phase(tuple(step for to, source in blocks for step in copy(to, source))),))
    sources = [xs[rank] for rank in call.sources(room.rank)]
    readers = [outs[rank] for rank in order if rank in call.readers(room.rank)]
    steps: list[Step] = []
    start, end = call.block(room.rank)
    block = BLOCK_BYTES // call.dtype.itemsize
    scratch = np.empty(min(block, end - start), call.dtype)
    for first in range(start, end, block):
        last = min(first + block, end)
        parts = [source.part(first, last) for source in sources]
        total = parts[0] if len(parts) == 1 else readers[0].part(first, last)
        steps += combine(call, parts, total, scratch)
        for reader in readers:
            steps += copy(reader.part(first, last), total)
    return Program((Phase(tuple(steps)),), reaches=True)

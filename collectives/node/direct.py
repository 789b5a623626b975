"""Node-shared arrays: the owner of a piece reads it everywhere and writes finished blocks into the readers' arrays.

It is the peer-to-peer parameter server of the BML paper (section 2), run on loads and stores. Rank r owns block r of
the vector, and reduces it block by block so that a block stays in cache. n/p elements are read from each source and
written to each reader, with no copy beside. Two meetings. In alltoall every rank copies its blocks from the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.arrays import Vector
from collectives.call import Call
from collectives.fabric import arena
from collectives.fabric.arena import Region
from collectives.fabric.descriptors import Place
from collectives.fabric.layout import NodeMemory
from collectives.node.program import Phase, Program, Step, Window, combine, copy

BLOCK_BYTES = 256 << 10


def program(
    memory: NodeMemory,
    call: Call,
    x: Window,
    out: Window,
    kept: Sequence[Vector],
    places: Sequence[tuple[Place, Place]],
) -> Program:
    """What this rank does, once all have come with arrays at these places. Its block goes into `kept`, too."""
    xs, outs = [x] * memory.size, [out] * memory.size
    for rank in memory.turn():
        x_place, out_place = places[rank]
        in_place = x_place == out_place
        xs[rank] = Window(_attach(x_place).view(call.dtype), call.extent_of_x(rank, in_place)[0])
        outs[rank] = Window(_attach(out_place).view(call.dtype), call.extent_of_out(rank, in_place)[0])
    order = [memory.rank, *memory.turn()]
    if call.kind == "alltoall":
        mine = call.block(memory.rank)
        blocks = [(out.part(*call.arrival(memory.rank, rank)), xs[rank].part(*mine)) for rank in order]
        return Program((Phase(tuple(step for to, source in blocks for step in copy(to, source))),))
    sources = [xs[rank] for rank in call.sources(memory.rank)]
    readers = [outs[rank] for rank in order if rank in call.readers(memory.rank)]
    steps: list[Step] = []
    start, end = call.block(memory.rank)
    block = max(1, BLOCK_BYTES // call.dtype.itemsize)
    scratch = np.empty(min(block, end - start), call.dtype)
    for first in range(start, end, block):
        last = min(first + block, end)
        parts = [source.part(first, last) for source in sources]
        total = parts[0] if len(parts) == 1 else readers[0].part(first, last)
        steps += combine(call, parts, total, scratch)
        for reader in readers:
            steps += copy(reader.part(first, last), total)
        for vector in kept:
            steps += copy(vector[first:last], total)
    return Program((Phase(tuple(steps)),))


def _attach(place: Place) -> Vector:
    return arena.attach(Region(*place[:5]))

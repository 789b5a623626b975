"""Programs in which ranks touch each other's arrays: in node-shared memory, or by copies that the kernel makes.

**Node-shared arrays** (`shared_program`): the owner of a piece reads it everywhere and writes finished blocks into the
readers' arrays. It is the peer-to-peer parameter server of the BML paper (section 2), run on loads and stores. Rank r
owns block r of the vector, and reduces it block by block so that a block stays in cache. n/p elements are read from
each source and written to each reader, with no copy beside. Two meetings. In alltoall every rank copies its blocks from
the others.

**Large ordinary arrays** (`crossing_program`): the owner fetches the sources' parts block by block into a buffer that
its cache holds, reduces them, and delivers the finished block, still in its cache, into the readers' arrays. Against
stages, an element is copied once less on either side of the sum, but every page costs the kernel a look. In alltoall
every rank fetches its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from collectives.arrays import Vector
from collectives.call import Call, scale
from collectives.fabric import arena
from collectives.fabric.arena import Region
from collectives.fabric.layout import NodeMemory, Place
from collectives.fabric.process_memory import Move, deliver, fetch
from collectives.node.program import Phase, Program, Step, Window, combine, copy

BLOCK_BYTES = 256 << 10


def shared_program(
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




class _Far(NamedTuple):
    """A part of the vector in another process: elements from `first` on lie at `address`."""

    pid: int
    address: int
    first: int
    itemsize: int

    def at(self, start: int) -> tuple[int, int]:
        return self.pid, self.address + (start - self.first) * self.itemsize


def crossing_program(
    memory: NodeMemory,
    call: Call,
    x: Window,
    out: Window,
    kept: Sequence[Vector],
    places: Sequence[tuple[Place, Place]],
) -> Program:
    """One rank's part of a call, in which it touches the others' arrays, where these places say they are. Its block
    goes into `kept`, too."""
    reached = _Reached(memory, call, x, out, places)
    if call.kind == "alltoall":
        return Program((Phase(tuple(reached.arrivals()), tuple(reached.own())),))
    return Program((Phase(tuple(reached.steps(kept))),))


class _Reached:
    def __init__(self, memory: NodeMemory, call: Call, x: Window, out: Window, places: Sequence[tuple[Place, Place]]):
        self._call, self._rank, self._order = call, memory.rank, [memory.rank, *memory.turn()]
        self._x, self._out, self._buffers = x, out, memory.buffers(BLOCK_BYTES)
        self._xs: dict[int, _Far] = {}
        self._outs: dict[int, _Far] = {}
        for rank in memory.turn():
            (x_place, out_place), pid, size = places[rank], memory.pids[rank], call.dtype.itemsize
            in_place = x_place.address == out_place.address
            self._xs[rank] = _Far(pid, x_place.address, call.extent_of_x(rank, in_place)[0], size)
            self._outs[rank] = _Far(pid, out_place.address, call.extent_of_out(rank, in_place)[0], size)

    def steps(self, kept: Sequence[Vector]) -> Iterator[Step]:
        call, rank = self._call, self._rank
        start, end = call.block(rank)
        block = max(1, BLOCK_BYTES // call.dtype.itemsize)
        size = block * call.dtype.itemsize if call.operation is not None else 0  # elements of any size are only copied
        buffers = [buffer[:size].view(call.dtype) for buffer in self._buffers]
        readers = [reader for reader in self._order if reader in call.readers(rank) and not self._has_it(reader)]
        for first in range(start, end, block):
            last = min(first + block, end)
            total = self._place(first, last, buffers[0])
            yield from self._combined(first, last, total, [buffer[: last - first] for buffer in buffers])
            for reader in readers:
                if reader == rank:
                    yield from copy(self._out.part(first, last), total)
                else:
                    yield from _moved(deliver, total, *self._outs[reader].at(first))
            for vector in kept:
                yield from copy(vector[first:last], total)

    def _has_it(self, reader: int) -> bool:
        """Whether the piece comes from that very place, as in a broadcast in place it does on the root."""
        far = reader != self._rank and self._call.sources(self._rank) == [reader]
        return far and self._xs[reader] == self._outs[reader]

    def _place(self, first: int, last: int, buffer: Vector) -> Vector:
        """Where this rank makes its piece of the result."""
        if self._call.sources(self._rank) == [self._rank]:
            return self._x.part(first, last)
        return self._out.part(first, last) if self._rank in self._call.readers(self._rank) else buffer[: last - first]

    def _combined(self, first: int, last: int, total: Vector, buffers: Sequence[Vector]) -> Iterator[Step]:
        """total = the sources' parts, in the order of the ranks; this rank's own may be `total`, so that is written
        last."""
        sources, operation = self._call.sources(self._rank), self._call.operation
        if len(sources) == 1:
            if sources != [self._rank]:
                yield from _moved(fetch, total, *self._xs[sources[0]].at(first))
        else:
            assert operation is not None
            so_far = yield from self._part(sources[0], first, last, buffers[0])
            for source in sources[1:]:
                part = yield from self._part(source, first, last, buffers[1])
                to = total if source == sources[-1] else buffers[0]
                yield operation.into, (so_far, part, to)
                so_far = to
        if operation is not None and operation.is_mean:
            yield scale(total, self._call.p)

    def _part(self, source: int, first: int, last: int, buffer: Vector) -> Generator[Step, None, Vector]:
        """Returns the source's part, which the steps fetch into the buffer if it is another's."""
        if source == self._rank:
            return self._x.part(first, last)
        yield from _moved(fetch, buffer, *self._xs[source].at(first))
        return buffer

    def arrivals(self) -> Iterator[Step]:
        """alltoall: what all others have for this rank."""
        start, _ = self._call.block(self._rank)
        for source in self._order[1:]:
            to = self._out.part(*self._call.arrival(self._rank, source))
            yield from _moved(fetch, to, *self._xs[source].at(start))

    def own(self) -> Iterator[Step]:
        """alltoall: what this rank has for itself."""
        to = self._call.arrival(self._rank, self._rank)
        return copy(self._out.part(*to), self._x.part(*self._call.block(self._rank)))


def _moved(copy: Callable[[Vector, int, int], Move], vector: Vector, pid: int, address: int) -> Iterator[Step]:
    if vector.nbytes:
        yield copy(vector, pid, address), ()

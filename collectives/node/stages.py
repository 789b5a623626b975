"""Ordinary arrays: blocks pass through stages small enough for the cache, in a pipeline, one meeting a block.

While block k is reduced, k + 1 is staged and k - 1 copied out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collectives.arrays import Vector
from collectives.call import Call
from collectives.fabric.layout import NodeMemory
from collectives.node.program import Phase, Program, Step, Window, combine, copy, same


class Staged:
    """The pipeline of one rank. Block k of owner q is part k of q's piece of the vector."""

    def __init__(self, memory: NodeMemory, call: Call, x: Window, out: Window):
        self._memory, self._call, self._x, self._out = memory, call, x, out
        self._block = max(1, memory.block_bytes // call.dtype.itemsize)
        self._pieces = [self._piece(owner) for owner in range(memory.size)]
        self._count = max(-(-(stop - start) // self._block) for start, stop in self._pieces)
        self._scratch = np.empty(min(self._block, call.n), call.dtype)

    def program(self, restage: bool) -> Program:
        """`restage`: some rank may have come without its first block staged."""
        phases = [Phase(self.puts(0))] if restage else []
        alltoall = self._call.kind == "alltoall"
        for k in range(self._count):
            if alltoall:
                phases.append(Phase(self._takes(k) + self.puts(k + 1)))
            else:
                total, home = self._reduces(k)
                phases.append(Phase(total + self.puts(k + 1), home + self._takes(k - 1)))
        last = () if alltoall else self._takes(self._count - 1)
        return Program(tuple(phases), (last, last))

    def puts(self, k: int) -> tuple[Step, ...]:
        """My share of block k of every other owner, into my stage."""
        call, memory = self._call, self._memory
        steps: list[Step] = []
        for owner in memory.turn():
            if call.kind == "alltoall" or memory.rank in call.sources(owner):
                part = self._x.part(*self._range(owner, k))
                steps += copy(self._stage(memory.stage_in(memory.rank, k % 2, owner), part.size), part)
        return tuple(steps)

    def _reduces(self, k: int) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """Block k of mine into the stage, and from there to my own out."""
        call, memory = self._call, self._memory
        start, stop = self._range(memory.rank, k)
        wanted = call.readers(memory.rank)
        if start == stop:
            return (), ()
        parts = [
            self._stage(memory.stage_in(rank, k % 2, memory.rank), stop - start) if rank != memory.rank
            else self._x.part(start, stop)
            for rank in call.sources(memory.rank)
        ]
        if wanted == [memory.rank]:
            return tuple(combine(call, parts, self._out.part(start, stop), self._scratch)), ()
        total = self._stage(memory.stage_out(memory.rank, k % 3), stop - start)
        home = tuple(copy(self._out.part(start, stop), total)) if memory.rank in wanted else ()
        if memory.rank in wanted and len(parts) == 1 and same(parts[0], self._out.part(start, stop)):
            home = ()
        return tuple(combine(call, parts, total, total)), home

    def _takes(self, k: int) -> tuple[Step, ...]:
        """Block k of every other owner, into my out."""
        call, memory = self._call, self._memory
        steps: list[Step] = []
        if k < 0:
            return ()
        if call.kind == "alltoall":
            return tuple(self._arrivals(k))
        for owner in memory.turn():
            start, stop = self._range(owner, k)
            if memory.rank in call.readers(owner):
                stage = self._stage(memory.stage_out(owner, k % 3), stop - start)
                steps += copy(self._out.part(start, stop), stage)
        return tuple(steps)

    def _arrivals(self, k: int) -> Iterator[Step]:
        """alltoall: block k of what every rank, and this one too, has for me."""
        memory, (begin, _) = self._memory, self._call.block(self._memory.rank)
        start, stop = self._range(memory.rank, k)
        for source in [memory.rank, *memory.turn()]:
            at, _ = self._call.arrival(memory.rank, source)
            to = self._out.part(at + start - begin, at + stop - begin)
            if source == memory.rank:
                yield from copy(to, self._x.part(start, stop))
            else:
                yield from copy(to, self._stage(memory.stage_in(source, k % 2, memory.rank), stop - start))

    def _piece(self, owner: int) -> tuple[int, int]:
        """A broadcast has nothing to reduce: the root owns it all."""
        if self._call.kind == "broadcast":
            return (0, self._call.n) if owner == self._call.root else (self._call.n, self._call.n)
        return self._call.block(owner)

    def _range(self, owner: int, k: int) -> tuple[int, int]:
        start, stop = self._pieces[owner]
        return min(start + k * self._block, stop), min(start + (k + 1) * self._block, stop)

    def _stage(self, memory: Vector, size: int) -> Vector:
        return memory[: size * self._call.dtype.itemsize].view(self._call.dtype)

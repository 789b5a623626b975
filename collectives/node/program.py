"""Programs over a node's shared memory: steps between meetings, in four ways, which `executor` chooses and carries out.

**Slots.** Every rank puts its small vector into its slot, all meet, and each takes what it wants. One meeting. A sum of
one or two floats is done by Python's own numbers, where NumPy's call takes longer to begin than the additions take.
Storing each sum rounds it to the elements' type: Python adds in double precision, and a float32 sum rounded from there
has the same bits as one of float32 (a double has more than twice as many digits and two).

**Stages.** Blocks of ordinary arrays pass through stages small enough for the cache, in a pipeline, one meeting a
block. While block k is reduced, k + 1 is staged and k - 1 copied out.

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
from typing import NamedTuple, TypeAlias

import numpy as np

from mpips.collectives.arrays import Vector, same
from mpips.collectives.call import Call
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import Region
from mpips.collectives.fabric.layout import SLOT_BYTES, ArrayPlace, NodeMemory
from mpips.collectives.fabric.process_memory import Move, deliver, fetch
from mpips.collectives.kernels import sums
from mpips.collectives.kernels.sums import Step

Turns: TypeAlias = "tuple[Sequence[Step], Sequence[Step]]"
NOTHING: Turns = ((), ())
BLOCK_BYTES = 256 << 10  # of what is reduced in place, at a time
SHORT_BYTES = 128 << 10  # up to here bytes are copied without `numpy.copyto`, which begins later but lets threads run


class Window(NamedTuple):
    """A part of the whole vector that is somewhere in memory: elements [first, first + vector.size)."""

    vector: Vector
    first: int = 0

    def part(self, start: int, stop: int) -> Vector:
        return self.vector[start - self.first : stop - self.first]


class Phase(NamedTuple):
    """Work before this rank says it is done with the phase, and work after that needs nobody."""

    before: tuple[Step, ...]
    after: tuple[Step, ...] = ()


class Program(NamedTuple):
    """The steps of a rank in one operation, bound to its arrays and the others'."""

    phases: tuple[Phase, ...] = ()
    """Once all have entered; each ends with a meeting. Ranks touch each other's arrays in the first alone."""
    last: Turns = NOTHING
    """At the end, where there is nobody to meet any more: of even and of odd operations."""


def merged(programs: Sequence[Program]) -> Program:
    """Programs of the same number of phases as one: what they do in a phase is done in one."""
    phases = tuple(
        Phase(tuple(s for phase in every for s in phase.before), tuple(s for phase in every for s in phase.after))
        for every in zip(*(program.phases for program in programs))
    )
    return Program(phases)


def copy(to: Vector, source: Vector) -> Iterator[Step]:
    """A copy, where there is anything to copy."""
    if not to.size or same(to, source):
        return
    if to.nbytes <= SHORT_BYTES:
        yield to.view(np.uint8).data.__setitem__, (slice(None), source.view(np.uint8).data)
    else:
        yield np.copyto, (to, source)


def combine(call: Call, parts: Sequence[Vector], total: Vector, scratch: Vector) -> Iterator[Step]:
    """total = the reduction of all parts in their order, of which one may be `total` itself; `scratch` is as long."""
    if not total.size:
        return
    if len(parts) == 1:
        yield from copy(total, parts[0])
    else:
        assert call.operation is not None
        divisor = call.p if call.operation.is_mean else 1
        yield from sums.steps(call.operation.into, parts, total, scratch, divisor, call.nbytes)


MOST_SCALARS = 2  # elements, 8 bytes of float32
MOST_BYTES = SLOT_BYTES


class Scalars(NamedTuple):
    """A sum of a few floats: `x` to `mine`, then `out` = the sum of all parts in their order, for both parities."""

    x: memoryview
    out: memoryview
    mine: tuple[memoryview, memoryview]
    first: tuple[memoryview, memoryview]
    second: tuple[memoryview, memoryview]
    more: tuple[tuple[memoryview, ...], tuple[memoryview, ...]]
    mean: bool


def slot_puts(memory: NodeMemory, call: Call, x: Window, parity: int) -> tuple[Step, ...]:
    """Return what this rank brings, into its slot."""
    start, stop = 0, call.n
    if call.kind == "broadcast" and memory.rank != call.root:
        return ()
    if call.kind == "allgather":
        start, stop = call.block(memory.rank)
    return tuple(copy(_slot(memory, call, memory.rank, parity).part(start, stop), x.part(start, stop)))


def slot_takes(memory: NodeMemory, call: Call, x: Window, out: Window, parity: int) -> tuple[Step, ...]:
    """Return what this rank wants, from the slots to `out`."""
    slots = [_slot(memory, call, rank, parity) for rank in range(memory.size)]
    steps: list[Step] = []
    if call.operation is not None:
        start, stop = _summed(memory, call)
        total = out.part(start, stop)
        steps += combine(call, [slot.part(start, stop) for slot in slots], total, total)
    elif call.kind == "broadcast":
        steps += copy(out.part(0, call.n), (x if memory.rank == call.root else slots[call.root]).part(0, call.n))
    else:
        mine = call.block(memory.rank)
        for rank in [memory.rank, *memory.turn()]:
            block = call.block(rank)
            source = slots[rank].part(*(mine if call.kind == "alltoall" else block))
            to = call.arrival(memory.rank, rank) if call.kind == "alltoall" else block
            steps += copy(out.part(*to), x.part(*block) if rank == memory.rank else source)
    return tuple(steps)


def slot_scalars(memory: NodeMemory, call: Call, x: Window, out: Window) -> Scalars | None:
    """The call as a sum of a few floats; None where it is none, or where this rank does not take all of it."""
    adds = call.operation is not None and call.operation.name in ("sum", "mean")
    known = call.dtype.char in "fd" and call.dtype.isnative and x.vector.flags.aligned and out.vector.flags.aligned
    if call.kind != "allreduce" or not adds or not known or not 0 < call.n <= MOST_SCALARS or call.p == 1:
        return None
    assert call.operation is not None
    even, odd = ([_slot(memory, call, rank, parity).vector.data for rank in range(memory.size)] for parity in (0, 1))
    return Scalars(
        x.vector.data,
        out.vector.data,
        (even[memory.rank], odd[memory.rank]),
        (even[0], odd[0]),
        (even[1], odd[1]),
        (tuple(even[2:]), tuple(odd[2:])),
        call.operation.is_mean,
    )


def _slot(memory: NodeMemory, call: Call, rank: int, parity: int) -> Window:
    return Window(memory.slot(rank, parity)[: call.nbytes].view(call.dtype))


def _summed(memory: NodeMemory, call: Call) -> tuple[int, int]:
    """The elements of the reduction that this rank takes."""
    if call.kind == "reduce" and memory.rank != call.root:
        return 0, 0
    return call.block(memory.rank) if call.kind == "reduce_scatter" else (0, call.n)


class StagePipeline:
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
            self._stage(memory.stage_in(rank, k % 2, memory.rank), stop - start)
            if rank != memory.rank
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


def shared_program(
    memory: NodeMemory,
    call: Call,
    x: Window,
    out: Window,
    kept: Sequence[Vector],
    places: Sequence[tuple[ArrayPlace, ArrayPlace]],
) -> Program:
    """Return what this rank does, once all have come with arrays at these places. Its block goes into `kept`, too."""
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


def _attach(place: ArrayPlace) -> Vector:
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
    places: Sequence[tuple[ArrayPlace, ArrayPlace]],
) -> Program:
    """One rank's part of a call, in which it touches the others' arrays, where these places say they are. Its block
    goes into `kept`, too."""
    reached = _Reached(memory, call, x, out, places)
    if call.kind == "alltoall":
        return Program((Phase(tuple(reached.arrivals()), tuple(reached.own())),))
    return Program((Phase(tuple(reached.steps(kept))),))


class _Reached:
    def __init__(
        self, memory: NodeMemory, call: Call, x: Window, out: Window, places: Sequence[tuple[ArrayPlace, ArrayPlace]]
    ):
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
        """Return whether the piece comes from that very place, as in a broadcast in place it does on the root."""
        far = reader != self._rank and self._call.sources(self._rank) == [reader]
        return far and self._xs[reader] == self._outs[reader]

    def _place(self, first: int, last: int, buffer: Vector) -> Vector:
        """Return where this rank makes its piece of the result."""
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
                to, divisor = buffers[0], 1
                if source == sources[-1]:
                    to, divisor = total, self._call.p if operation.is_mean else 1
                yield from sums.steps(operation.into, (so_far, part), to, None, divisor, self._call.nbytes)
                so_far = to

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

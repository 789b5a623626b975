"""Programs over a node's shared memory: lists of actions, of four kinds. `executor` chooses a program and runs it.

An action copies a vector (`Copy`), reduces several to one (`Combine`), or is a step that only Python can take. So a
program is data: `steps_of` turns actions into calls of NumPy, and `short_cut` into a record for one compiled function.

**Slots.** Every rank copies its small vector into its slot. All ranks *meet* once, that is, each waits until all others
have come to the same point. Then each rank reads what it needs from the slots.

**Stages.** Blocks of arrays in private memory pass through shared buffers that are small enough for the cache. It is a
pipeline with one meeting for each block: while block k is reduced, block k + 1 is copied in and block k - 1 copied out.

**Node-shared arrays** (`shared_program`). Rank r owns block r of the vector. It reads that block from all ranks'
arrays, reduces it in pieces that stay in the cache, and writes finished pieces into the arrays of all ranks that want
them. So n/p elements are read from each source and written to each reader, without any other copy, in two meetings.
This is the peer-to-peer parameter server of the BML paper (section 2) with loads and stores. In alltoall every rank
copies its blocks from the arrays of the other ranks.

**Large arrays in private memory** (`crossing_program`). As for node-shared arrays, but the kernel copies. The owner
fetches the parts of the sources piece by piece into a buffer that fits its cache, reduces them, and delivers the
finished piece, still in its cache, into the readers' arrays. Stages would copy each element once more before the sum
and once more after it. On the other hand, the kernel's copies take extra time for every page. In alltoall every rank
fetches its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from mpips.collectives.arrays import Vector, same_address
from mpips.collectives.call import Call
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import Region
from mpips.collectives.fabric.layout import ArrayPlace, NodeAreas
from mpips.collectives.fabric.process_memory import KernelCopy, deliver, fetch
from mpips.collectives.kernels import sums
from mpips.collectives.kernels.sums import Step

# the size of the pieces in which shared_program and crossing_program reduce a block
BLOCK_BYTES = 256 << 10
# Copies of up to this size are made by a memoryview. Longer copies are made by `numpy.copyto`, which takes longer to
# start but releases the GIL.
SHORT_BYTES = 128 << 10


class Window(NamedTuple):
    """A part of the whole vector in memory: the elements [first, first + vector.size)."""

    vector: Vector
    first: int = 0

    def part(self, start: int, stop: int) -> Vector:
        return self.vector[start - self.first : stop - self.first]


class Copy(NamedTuple):
    """An action: copy `source` to `to`. The two do not overlap."""

    to: Vector
    source: Vector


class Combine(NamedTuple):
    """An action: set `total` to the reduction of all parts, in their order.

    One of the parts may be `total` itself. `scratch` has the size of a part.
    """

    call: Call
    parts: tuple[Vector, ...]
    total: Vector
    scratch: Vector


Action: TypeAlias = "Copy | Combine | Step"
# Two lists of actions, for even and for odd operations. They differ because even and odd operations use different
# slots.
Turns: TypeAlias = "tuple[Sequence[Action], Sequence[Action]]"
NOTHING: Turns = ((), ())


def steps_of(actions: Iterable[Action]) -> tuple[Step, ...]:
    """Return the Python calls that carry out these actions."""
    steps: list[Step] = []
    for action in actions:
        if isinstance(action, Copy):
            if action.to.nbytes <= SHORT_BYTES:
                target, source = action.to.view(np.uint8).data, action.source.view(np.uint8).data
                steps.append((target.__setitem__, (slice(None), source)))
            else:
                steps.append((np.copyto, tuple(action)))
        elif isinstance(action, Combine):
            call = action.call
            assert call.reduction is not None
            divisor = call.p if call.reduction.is_mean else 1
            combine = call.reduction.combine
            steps += sums.steps(combine, action.parts, action.total, action.scratch, divisor, call.nbytes)
        else:
            steps.append(action)
    return tuple(steps)


class Phase(NamedTuple):
    """The work of a rank in one phase. After it, all ranks wait for each other."""

    # actions before this rank signals that it has finished the phase
    before: tuple[Action, ...]
    # actions after the signal, which other ranks need not wait for
    after: tuple[Action, ...] = ()


class NodeProgram(NamedTuple):
    """The actions of a rank in one operation, bound to its own arrays and those of the other ranks."""

    # The phases of the operation, which begin after all ranks have entered it. After each phase the ranks wait for each
    # other. Ranks touch the arrays of other ranks only in the first phase.
    phases: tuple[Phase, ...] = ()
    # actions that follow the last phase, for even and for odd operations
    last: Turns = NOTHING


def merge(programs: Sequence[NodeProgram]) -> NodeProgram:
    """Merge programs phase by phase. They must have the same number of phases, and no `last` actions."""
    phases = tuple(
        Phase(tuple(s for phase in every for s in phase.before), tuple(s for phase in every for s in phase.after))
        for every in zip(*(program.phases for program in programs))
    )
    return NodeProgram(phases)


class StepProgram(NamedTuple):
    """A program as Python calls: for each phase those before and after its signal, and `last` by parity."""

    phases: tuple[tuple[Sequence[Step], Sequence[Step]], ...] = ()
    last: tuple[Sequence[Step], Sequence[Step]] = ((), ())


def with_steps(program: NodeProgram) -> StepProgram:
    """Return the program as Python calls."""
    even, odd = program.last
    phases = tuple((steps_of(phase.before), steps_of(phase.after)) for phase in program.phases)
    return StepProgram(phases, (steps_of(even), steps_of(odd)))


def copy(to: Vector, source: Vector) -> Iterator[Copy]:
    """Yield the action that copies `source` to `to`, or nothing if that would change nothing."""
    if to.size and not same_address(to, source):
        yield Copy(to, source)


def combine(call: Call, parts: Sequence[Vector], total: Vector, scratch: Vector) -> Iterator[Action]:
    """Yield the action that sets `total` to the reduction of all parts; see `Combine`."""
    if len(parts) == 1:
        yield from copy(total, parts[0])
    elif total.size:
        yield Combine(call, tuple(parts), total, scratch)


def slot_puts(memory: NodeAreas, call: Call, x: Window, parity: int) -> tuple[Action, ...]:
    """Return the actions that copy this rank's input into its slot. `parity`: 0 for even operations, 1 for odd ones."""
    start, stop = 0, call.n
    if call.kind == "broadcast" and memory.rank != call.root:
        return ()
    if call.kind == "allgather":
        start, stop = call.block(memory.rank)
    return tuple(copy(_slot(memory, call, memory.rank, parity).part(start, stop), x.part(start, stop)))


def slot_takes(memory: NodeAreas, call: Call, x: Window, out: Window, parity: int) -> tuple[Action, ...]:
    """Return the actions that compute this rank's `out` from the slots of all ranks."""
    slots = [_slot(memory, call, rank, parity) for rank in range(memory.size)]
    actions: list[Action] = []
    if call.reduction is not None:
        start, stop = _result_interval(memory, call)
        total = out.part(start, stop)
        actions += combine(call, [slot.part(start, stop) for slot in slots], total, total)
    elif call.kind == "broadcast":
        actions += copy(out.part(0, call.n), (x if memory.rank == call.root else slots[call.root]).part(0, call.n))
    else:
        own_block = call.block(memory.rank)
        for rank in [memory.rank, *memory.turn()]:
            block = call.block(rank)
            source = slots[rank].part(*(own_block if call.kind == "alltoall" else block))
            to = call.arrival(memory.rank, rank) if call.kind == "alltoall" else block
            actions += copy(out.part(*to), x.part(*block) if rank == memory.rank else source)
    return tuple(actions)


def _slot(memory: NodeAreas, call: Call, rank: int, parity: int) -> Window:
    return Window(memory.slot(rank, parity)[: call.nbytes].view(call.dtype))


def _result_interval(memory: NodeAreas, call: Call) -> tuple[int, int]:
    """Return the interval of the result that this rank computes."""
    if call.kind == "reduce" and memory.rank != call.root:
        return 0, 0
    return call.block(memory.rank) if call.kind == "reduce_scatter" else (0, call.n)


class StagePipeline:
    """The program of one rank that moves data through stages.

    Each rank owns a piece of the vector, which is cut into blocks. "Block k of owner q" is block k of q's piece.

    Stages are reused: two for input (by k % 2) and three for results (by k % 3). In phase k a rank reduces block k from
    input stage k % 2 and fills input stage (k + 1) % 2. Results need three stages, because a rank may still copy block
    k - 1 out after its signal, while faster ranks write block k + 1.
    """

    def __init__(self, memory: NodeAreas, call: Call, x: Window, out: Window):
        self._memory = memory
        self._call = call
        self._x = x
        self._out = out
        # the number of elements in a block
        self._block = max(1, memory.block_bytes // call.dtype.itemsize)
        self._pieces = [self._piece(owner) for owner in range(memory.size)]
        self._count = max(-(-(stop - start) // self._block) for start, stop in self._pieces)
        self._scratch = np.empty(min(self._block, call.n), call.dtype)

    def program(self, restage: bool) -> NodeProgram:
        """Return the program. `restage`: True if a rank may have entered without copying its first blocks to stages."""
        phases = [Phase(self.puts(0))] if restage else []
        alltoall = self._call.kind == "alltoall"
        for k in range(self._count):
            if alltoall:
                phases.append(Phase(self._takes(k) + self.puts(k + 1)))
            else:
                total, home = self._reduces(k)
                phases.append(Phase(total + self.puts(k + 1), home + self._takes(k - 1)))
        last = () if alltoall else self._takes(self._count - 1)
        return NodeProgram(tuple(phases), (last, last))

    def puts(self, k: int) -> tuple[Action, ...]:
        """Return the actions that copy this rank's input for block k of every other owner into its stages."""
        call, memory = self._call, self._memory
        actions: list[Action] = []
        for owner in memory.turn():
            if call.kind == "alltoall" or memory.rank in call.sources(owner):
                part = self._x.part(*self._range(owner, k))
                actions += copy(self._stage(memory.stage_in(memory.rank, k % 2, owner), part.size), part)
        return tuple(actions)

    def _reduces(self, k: int) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        """Return the actions that reduce block k of this rank, and those that copy the result to this rank's `out`."""
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
        if memory.rank in wanted and len(parts) == 1 and same_address(parts[0], self._out.part(start, stop)):
            home = ()
        return tuple(combine(call, parts, total, total)), home

    def _takes(self, k: int) -> tuple[Action, ...]:
        """Return the actions that copy the result for block k of every other owner to this rank's `out`."""
        call, memory = self._call, self._memory
        actions: list[Action] = []
        if k < 0:
            return ()
        if call.kind == "alltoall":
            return tuple(self._arrivals(k))
        for owner in memory.turn():
            start, stop = self._range(owner, k)
            if memory.rank in call.readers(owner):
                stage = self._stage(memory.stage_out(owner, k % 3), stop - start)
                actions += copy(self._out.part(start, stop), stage)
        return tuple(actions)

    def _arrivals(self, k: int) -> Iterator[Action]:
        """Yield the actions of alltoall that copy block k from every rank, including this one, to out."""
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
        """Return the interval that a rank owns. In a broadcast the root owns the whole vector."""
        if self._call.kind == "broadcast":
            return (0, self._call.n) if owner == self._call.root else (self._call.n, self._call.n)
        return self._call.block(owner)

    def _range(self, owner: int, k: int) -> tuple[int, int]:
        start, stop = self._pieces[owner]
        return min(start + k * self._block, stop), min(start + (k + 1) * self._block, stop)

    def _stage(self, memory: Vector, size: int) -> Vector:
        return memory[: size * self._call.dtype.itemsize].view(self._call.dtype)


def shared_program(
    memory: NodeAreas,
    call: Call,
    x: Window,
    out: Window,
    block_copies: Sequence[Vector],
    places: Sequence[tuple[ArrayPlace, ArrayPlace]],
) -> NodeProgram:
    """Compile the program of this rank for node-shared arrays.

    Args:
        block_copies: Vectors into which this rank's block of the result is copied too.
        places: For each rank the places of its x and its out.
    """
    xs, outs = [x] * memory.size, [out] * memory.size
    for rank in memory.turn():
        x_place, out_place = places[rank]
        in_place = x_place == out_place
        xs[rank] = Window(_attach(x_place).view(call.dtype), call.extent_of_x(rank, in_place)[0])
        outs[rank] = Window(_attach(out_place).view(call.dtype), call.extent_of_out(rank, in_place)[0])
    order = [memory.rank, *memory.turn()]
    if call.kind == "alltoall":
        own_block = call.block(memory.rank)
        blocks = [(out.part(*call.arrival(memory.rank, rank)), xs[rank].part(*own_block)) for rank in order]
        return NodeProgram((Phase(tuple(step for to, source in blocks for step in copy(to, source))),))
    sources = [xs[rank] for rank in call.sources(memory.rank)]
    readers = [outs[rank] for rank in order if rank in call.readers(memory.rank)]
    actions: list[Action] = []
    start, end = call.block(memory.rank)
    block = max(1, BLOCK_BYTES // call.dtype.itemsize)
    scratch = np.empty(min(block, end - start), call.dtype)
    for first in range(start, end, block):
        last = min(first + block, end)
        parts = [source.part(first, last) for source in sources]
        total = parts[0] if len(parts) == 1 else readers[0].part(first, last)
        actions += combine(call, parts, total, scratch)
        for reader in readers:
            actions += copy(reader.part(first, last), total)
        for vector in block_copies:
            actions += copy(vector[first:last], total)
    return NodeProgram((Phase(tuple(actions)),))


def _attach(place: ArrayPlace) -> Vector:
    return arena.attach(Region(*place[:5]))


class _RemoteWindow(NamedTuple):
    """A part of the vector in the memory of another process. Element `first` of the vector is at `address`."""

    pid: int
    address: int
    first: int
    itemsize: int

    def at(self, start: int) -> tuple[int, int]:
        return self.pid, self.address + (start - self.first) * self.itemsize


def crossing_program(
    memory: NodeAreas,
    call: Call,
    x: Window,
    out: Window,
    block_copies: Sequence[Vector],
    places: Sequence[tuple[ArrayPlace, ArrayPlace]],
) -> NodeProgram:
    """Compile the program of this rank for large arrays in private memory. Arguments as in `shared_program`."""
    reached = _CrossingArrays(memory, call, x, out, places)
    if call.kind == "alltoall":
        return NodeProgram((Phase(tuple(reached.arrivals()), tuple(reached.own())),))
    return NodeProgram((Phase(tuple(reached.steps(block_copies))),))


class _CrossingArrays:
    """The arrays of all ranks in a program for large arrays in private memory, and the actions on these arrays."""

    def __init__(
        self, memory: NodeAreas, call: Call, x: Window, out: Window, places: Sequence[tuple[ArrayPlace, ArrayPlace]]
    ):
        self._call = call
        self._rank = memory.rank
        self._order = [memory.rank, *memory.turn()]
        self._x = x
        self._out = out
        self._buffers = memory.buffers(BLOCK_BYTES)
        # another rank -> the place of its `x`, and (below) the place of its `out`
        self._xs: dict[int, _RemoteWindow] = {}
        self._outs: dict[int, _RemoteWindow] = {}
        for rank in memory.turn():
            (x_place, out_place), pid, size = places[rank], memory.pids[rank], call.dtype.itemsize
            in_place = x_place.address == out_place.address
            self._xs[rank] = _RemoteWindow(pid, x_place.address, call.extent_of_x(rank, in_place)[0], size)
            self._outs[rank] = _RemoteWindow(pid, out_place.address, call.extent_of_out(rank, in_place)[0], size)

    def steps(self, block_copies: Sequence[Vector]) -> Iterator[Action]:
        """Yield the actions that make this rank's block of the result and deliver it."""
        call, rank = self._call, self._rank
        start, end = call.block(rank)
        block = max(1, BLOCK_BYTES // call.dtype.itemsize)
        # Only reductions need buffers. Other calls may have elements of any size, even larger than a buffer.
        size = block * call.dtype.itemsize if call.reduction is not None else 0
        buffers = [buffer[:size].view(call.dtype) for buffer in self._buffers]
        readers = [reader for reader in self._order if reader in call.readers(rank) and not self._is_source(reader)]
        for first in range(start, end, block):
            last = min(first + block, end)
            total = self._place(first, last, buffers[0])
            yield from self._combined(first, last, total, [buffer[: last - first] for buffer in buffers])
            for reader in readers:
                if reader == rank:
                    yield from copy(self._out.part(first, last), total)
                else:
                    yield from _kernel_copy(deliver, total, *self._outs[reader].at(first))
            for vector in block_copies:
                yield from copy(vector[first:last], total)

    def _is_source(self, reader: int) -> bool:
        """True if the reader's `out` is itself the source of this piece, as on the root of an in-place broadcast."""
        far = reader != self._rank and self._call.sources(self._rank) == [reader]
        return far and self._xs[reader] == self._outs[reader]

    def _place(self, first: int, last: int, buffer: Vector) -> Vector:
        """Return where this rank computes a piece of the result: in a part of `x` or `out`, or in `buffer`."""
        if self._call.sources(self._rank) == [self._rank]:
            return self._x.part(first, last)
        return self._out.part(first, last) if self._rank in self._call.readers(self._rank) else buffer[: last - first]

    def _combined(self, first: int, last: int, total: Vector, buffers: Sequence[Vector]) -> Iterator[Action]:
        """Yield the actions that set `total` to the reduction of the sources' parts, in the order of the ranks.

        This rank's own part may be `total` itself, so only the last step writes to `total`.
        """
        sources, reduction = self._call.sources(self._rank), self._call.reduction
        if len(sources) == 1:
            if sources != [self._rank]:
                yield from _kernel_copy(fetch, total, *self._xs[sources[0]].at(first))
        else:
            assert reduction is not None
            so_far = yield from self._part(sources[0], first, last, buffers[0])
            for source in sources[1:]:
                part = yield from self._part(source, first, last, buffers[1])
                to, divisor = buffers[0], 1
                if source == sources[-1]:
                    to, divisor = total, self._call.p if reduction.is_mean else 1
                yield from sums.steps(reduction.combine, (so_far, part), to, None, divisor, self._call.nbytes)
                so_far = to

    def _part(self, source: int, first: int, last: int, buffer: Vector) -> Generator[Action, None, Vector]:
        """If another rank owns the source's part, yield the action that fetches it into the buffer. Return the part."""
        if source == self._rank:
            return self._x.part(first, last)
        yield from _kernel_copy(fetch, buffer, *self._xs[source].at(first))
        return buffer

    def arrivals(self) -> Iterator[Action]:
        """Yield the actions of alltoall that fetch, from every other rank, the block that is meant for this rank."""
        start, _ = self._call.block(self._rank)
        for source in self._order[1:]:
            to = self._out.part(*self._call.arrival(self._rank, source))
            yield from _kernel_copy(fetch, to, *self._xs[source].at(start))

    def own(self) -> Iterator[Action]:
        """Yield the action of alltoall that copies the block that this rank sends to itself."""
        to = self._call.arrival(self._rank, self._rank)
        return copy(self._out.part(*to), self._x.part(*self._call.block(self._rank)))


def _kernel_copy(
    copy: Callable[[Vector, int, int], KernelCopy], vector: Vector, pid: int, address: int
) -> Iterator[Action]:
    if vector.nbytes:
        yield copy(vector, pid, address), ()

"""Collectives over the memory of one node: loads and stores instead of messages.

Every piece of the result has an *owner*, who reads the *sources'* x, reduces block by block so that a block stays in
cache, and hands it to the *readers'* out. It is the peer-to-peer parameter server of the BML paper (section 2), run on
loads and stores. Rank r owns block r of the vector. Three protocols:

eager    small vectors: all ranks put theirs into their slots, and each takes what it wants. One meeting. Node-shared
         arrays leave it for direct sooner than ordinary ones for staged; where ranks differ in this, staged serves.
direct   all arrays are node-shared (`collectives.empty`): the owner writes finished blocks straight into the readers'
         arrays. n/p elements read from each source and written to each reader, no copy beside. Two meetings.
         In alltoall everybody copies its blocks from the others' arrays.
staged   ordinary arrays: blocks pass through stages small enough for the cache, in a pipeline: while block k is
         reduced, k + 1 is staged and k - 1 copied out. One meeting a block. Where nothing is reduced, a long vector has
         a *rival*: the MPI may copy once, from process to process. The first calls try both, and the faster stays. (A
         sum would not keep its bits from one call to the next.)

All of them add in the order of the ranks, so a sum's bits depend neither on the protocol, nor on the vector's length,
nor on the element's place in it.

A protocol compiles to a program: lists of (function, arguments) between meetings, bound to the ranks' memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from collectives import arena
from collectives.arrays import Flat, Vector
from collectives.call import Call
from collectives.native import Choice, NativePlan
from collectives.operations import scale
from collectives.table import Eager
from collectives.transport.room import CARDS, NOWHERE, Card, Room

Step: TypeAlias = "tuple[Any, tuple[Any, ...]]"
DIRECT_BLOCK_BYTES = 256 << 10


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


@dataclass
class Program:
    """What a rank does once all have entered; phases end with a meeting, `last` needs none."""

    phases: tuple[Phase, ...] = ()
    last: tuple[Step, ...] = ()


class Rival(NamedTuple):
    """The MPI's own call, as the second way of a choice."""

    plan: NativePlan
    choice: Choice


class MemoryPlan:
    """One call compiled for the ranks of a room. x and out hold the rank's part of the vector (`Call.extent_of_x`)."""

    def __init__(self, room: Room, call: Call, x: Flat, out: Flat, eager: Eager, rival: Rival | None = None):
        self._room, self._call = room, call
        self._x = Window(x.vector(), call.extent_of_x(room.rank, x == out)[0])
        self._out = Window(out.vector(), call.extent_of_out(room.rank, x == out)[0])
        shareable = call.nbytes > eager.always and not (call.kind == "alltoall" and x == out)
        self._rival = rival
        self._rivalled = False
        self._token = -CARDS
        self._tokens: tuple[int, ...] | None = None
        self._met_soon: Callable[[], bool] | None = None
        self._program = Program()
        self._where = (arena.locate(self._x.vector), arena.locate(self._out.vector)) if shareable else (None, None)
        self.direct = None not in self._where
        """True where this rank's arrays are node-shared and worth it; the protocol is direct if all ranks' are."""
        self.eager = not self.direct and call.nbytes <= max(eager.always, eager.ordinary)
        """True where this rank brings its vector in its slot; the protocol is eager if all ranks do."""
        self._takes: list[tuple[Step, ...]] = []
        if self.eager:
            self._early = [_eager_puts(room, call, self._x, parity) for parity in (0, 1)]
        elif not self.direct:
            self._early = [_Staged(room, call, self._x, self._out).puts(0)] * 2
        else:
            self._early = [(), ()]

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        for function, arguments in self._early[self._room.operation + 1 & 1]:
            function(*arguments)
        self._enter()
        yield from self._met()

    def quick(self) -> Iterator[None] | None:
        """The operation, at once if the others come soon: None when it is done, else the steps that are left."""
        room = self._room
        parity = room.operation + 1 & 1
        for function, arguments in self._early[parity]:
            function(*arguments)
        met_soon = self._met_soon
        if met_soon is None or not room.readable(self._token):
            self._enter()
            return self._met()
        if not met_soon():
            return self._met()
        if not self._takes:
            return self._work()
        for function, arguments in self._takes[parity]:
            function(*arguments)
        return None

    def _enter(self) -> None:
        if not self._room.readable(self._token):
            self._publish()
        self._room.enter(self._token)

    def _met(self) -> Iterator[None]:
        room = self._room
        yield from room.meet(self._tokens)
        tokens = room.tokens_now()
        if tokens != self._tokens:
            self._bind(tokens)
        yield from self._work()

    def _work(self) -> Iterator[None]:
        room = self._room
        if self._takes:
            for function, arguments in self._takes[room.operation & 1]:
                function(*arguments)
            return
        if not self._rivalled or self._rival is None:
            yield from self._own()
            return
        start = time.perf_counter()
        yield from self._rival.plan.run() if self._rival.choice.second else self._own()
        yield from self._rival.choice.learn(time.perf_counter() - start)

    def _own(self) -> Iterator[None]:
        room = self._room
        for phase in self._program.phases:
            for function, arguments in phase.before:
                function(*arguments)
            room.signal()
            for function, arguments in phase.after:
                function(*arguments)
            yield from room.follow()
        for function, arguments in self._program.last:
            function(*arguments)

    def _publish(self) -> None:
        x, out = self._where
        self._token = self._room.publish(Card(self._call.text, False, x or NOWHERE, out or NOWHERE))

    def _bind(self, tokens: tuple[int, ...]) -> None:
        """The ranks' arrays are others than last time: read their cards and compile anew."""
        self._tokens = self._met_soon = None
        room, call = self._room, self._call
        cards = room.cards(tokens)
        shared = [card.x.pid != 0 and card.out.pid != 0 for card in cards]
        self._takes, self._rivalled = [], not any(shared)
        if all(shared):
            self._program = _direct(room, call, self._x, self._out, cards)
        elif self.eager and not any(shared):
            self._takes = [_eager_takes(room, call, self._x, self._out, parity) for parity in (0, 1)]
        else:
            self._program = _Staged(room, call, self._x, self._out).program(restage=any(shared))
        self._tokens = tokens
        self._met_soon = room.meeting(self._token, tokens)


def _same(a: Vector, b: Vector) -> bool:
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


def _copy(to: Vector, source: Vector) -> Iterator[Step]:
    if to.size and not _same(to, source):
        yield np.copyto, (to, source)


def _combine(call: Call, parts: Sequence[Vector], total: Vector, scratch: Vector) -> Iterator[Step]:
    """total = the reduction of all parts in their order, of which one may be `total` itself; `scratch` is as long."""
    if not total.size:
        return
    if len(parts) == 1:
        yield from _copy(total, parts[0])
    else:
        assert call.operation is not None
        add = call.operation.into
        first, *others = parts
        for index, part in enumerate(others, 2):
            unread = any(_same(later, total) for later in parts[index:])
            to = scratch[: total.size] if unread else total
            yield add, (first, part, to)
            first = to
    if call.operation is not None and call.operation.is_mean:
        yield scale(total, call.p)


# eager


def _slot(room: Room, call: Call, rank: int, parity: int) -> Window:
    return Window(room.slot(rank, parity)[: call.nbytes].view(call.dtype))


def _eager_puts(room: Room, call: Call, x: Window, parity: int) -> tuple[Step, ...]:
    """In bytes, which takes half the time of `numpy.copyto` where there are few."""
    if call.kind == "broadcast" and room.rank != call.root:
        return ()
    start, stop = call.block(room.rank) if call.kind == "allgather" else (0, call.n)
    slot, part = _slot(room, call, room.rank, parity).part(start, stop), x.part(start, stop)
    return ((slot.view(np.uint8).data.__setitem__, (slice(None), part.view(np.uint8).data)),) if part.size else ()


def _eager_takes(room: Room, call: Call, x: Window, out: Window, parity: int) -> tuple[Step, ...]:
    slots = [_slot(room, call, rank, parity) for rank in range(room.size)]
    mine = call.block(room.rank)
    steps: list[Step] = []
    if call.kind in ("allreduce", "reduce_scatter", "reduce"):
        start, stop = mine if call.kind == "reduce_scatter" else (0, call.n)
        if call.kind != "reduce" or room.rank == call.root:
            total = out.part(start, stop)
            steps += _combine(call, [slot.part(start, stop) for slot in slots], total, total)
    elif call.kind == "broadcast":
        steps += _copy(out.part(0, call.n), (x if room.rank == call.root else slots[call.root]).part(0, call.n))
    else:
        for rank in [room.rank, *room.turn()]:
            block = call.block(rank)
            source = slots[rank].part(*(mine if call.kind == "alltoall" else block))
            to = call.arrival(room.rank, rank) if call.kind == "alltoall" else block
            steps += _copy(out.part(*to), x.part(*block) if rank == room.rank else source)
    return tuple(steps)


# direct


def _direct(room: Room, call: Call, x: Window, out: Window, cards: Sequence[Card]) -> Program:
    xs, outs = [x] * room.size, [out] * room.size
    for rank in room.turn():
        card = cards[rank]
        in_place = card.x == card.out
        xs[rank] = Window(arena.attach(card.x).view(call.dtype), call.extent_of_x(rank, in_place)[0])
        outs[rank] = Window(arena.attach(card.out).view(call.dtype), call.extent_of_out(rank, in_place)[0])
    order = [room.rank, *room.turn()]
    if call.kind == "alltoall":
        blocks = [(out.part(*call.arrival(room.rank, rank)), xs[rank].part(*call.block(room.rank))) for rank in order]
        return Program((Phase(tuple(step for to, source in blocks for step in _copy(to, source))),))
    sources = [xs[rank] for rank in call.sources(room.rank)]
    readers = [outs[rank] for rank in order if rank in call.readers(room.rank)]
    steps: list[Step] = []
    start, end = call.block(room.rank)
    block = DIRECT_BLOCK_BYTES // call.dtype.itemsize
    scratch = np.empty(min(block, end - start), call.dtype)
    for first in range(start, end, block):
        last = min(first + block, end)
        parts = [source.part(first, last) for source in sources]
        total = parts[0] if len(parts) == 1 else readers[0].part(first, last)
        steps += _combine(call, parts, total, scratch)
        for reader in readers:
            steps += _copy(reader.part(first, last), total)
    return Program((Phase(tuple(steps)),))


# staged


class _Staged:
    """The pipeline of one rank. Block k of owner q is part k of q's piece of the vector."""

    def __init__(self, room: Room, call: Call, x: Window, out: Window):
        self._room, self._call, self._x, self._out = room, call, x, out
        self._block = max(1, room.block_bytes // call.dtype.itemsize)
        self._pieces = [self._piece(owner) for owner in range(room.size)]
        self._count = max(-(-(stop - start) // self._block) for start, stop in self._pieces)
        self._scratch = np.empty(min(self._block, call.n), call.dtype)

    def program(self, restage: bool) -> Program:
        """`restage`: some rank came without its first block staged."""
        phases = [Phase(self.puts(0))] if restage else []
        for k in range(self._count):
            if self._call.kind == "alltoall":
                phases.append(Phase(self._takes(k) + self.puts(k + 1)))
            else:
                total, home = self._reduces(k)
                phases.append(Phase(total + self.puts(k + 1), home + self._takes(k - 1)))
        return Program(tuple(phases), self._takes(self._count - 1) if self._call.kind != "alltoall" else ())

    def puts(self, k: int) -> tuple[Step, ...]:
        """My share of block k of every other owner, into my stage."""
        call, room = self._call, self._room
        steps: list[Step] = []
        for owner in room.turn():
            if call.kind == "alltoall" or room.rank in call.sources(owner):
                part = self._x.part(*self._range(owner, k))
                steps += _copy(self._stage(room.stage_in(room.rank, k % 2, owner), part.size), part)
        return tuple(steps)

    def _reduces(self, k: int) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """Block k of mine into the stage, and from there to my own out."""
        call, room = self._call, self._room
        start, stop = self._range(room.rank, k)
        wanted = call.readers(room.rank)
        if start == stop:
            return (), ()
        parts = [
            self._stage(room.stage_in(rank, k % 2, room.rank), stop - start) if rank != room.rank
            else self._x.part(start, stop)
            for rank in call.sources(room.rank)
        ]
        if wanted == [room.rank]:
            return tuple(_combine(call, parts, self._out.part(start, stop), self._scratch)), ()
        total = self._stage(room.stage_out(room.rank, k % 3), stop - start)
        home = tuple(_copy(self._out.part(start, stop), total)) if room.rank in wanted else ()
        if room.rank in wanted and len(parts) == 1 and _same(parts[0], self._out.part(start, stop)):
            home = ()
        return tuple(_combine(call, parts, total, total)), home

    def _takes(self, k: int) -> tuple[Step, ...]:
        """Block k of every other owner, into my out."""
        call, room = self._call, self._room
        steps: list[Step] = []
        if k < 0:
            return ()
        if call.kind == "alltoall":
            return tuple(self._arrivals(k))
        for owner in room.turn():
            start, stop = self._range(owner, k)
            if room.rank in call.readers(owner):
                stage = self._stage(room.stage_out(owner, k % 3), stop - start)
                steps += _copy(self._out.part(start, stop), stage)
        return tuple(steps)

    def _arrivals(self, k: int) -> Iterator[Step]:
        """alltoall: block k of what every rank, and this one too, has for me."""
        room, (begin, _) = self._room, self._call.block(self._room.rank)
        start, stop = self._range(room.rank, k)
        for source in [room.rank, *room.turn()]:
            at, _ = self._call.arrival(room.rank, source)
            to = self._out.part(at + start - begin, at + stop - begin)
            if source == room.rank:
                yield from _copy(to, self._x.part(start, stop))
            else:
                yield from _copy(to, self._stage(room.stage_in(source, k % 2, room.rank), stop - start))

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

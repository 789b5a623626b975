"""A schedule over memory that the ranks of a node share: loads instead of messages, marks instead of requests.

Every rank *exposes* the vector that it sends from: its own array where that is node-shared, else a copy beside, into
which it puts what a step sends when the step begins. Whoever receives waits for the sender's mark and then copies or
adds straight from there. A rank marks two things of each step, in one word a lane: *ready* (what the step sends is
there) and *taken* (what the step receives has been read). Who overwrites what it has sent waits first until that was
taken. Sums are made in the order in which `collectives.network.messages` makes them, so both give the same bits.

Each lane runs through its steps on its own. A copy beside takes as much memory as the vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from collectives.arrays import Flat, Vector
from collectives.call import Call
from collectives.network.workspace import Workspace
from collectives.node import arena
from collectives.schedule.model import NOBODY, Interval, RankStep, Round, Schedule, extent, in_rank_order, overlap
from collectives.transport.cards import CARDS, NOWHERE, Card
from collectives.transport.desks import LANES
from collectives.transport.room import Room

Extent: TypeAlias = "tuple[int, int]"
DONE = (1 << 32) - 1


class _Action(NamedTuple):
    """Wait until `rank` (NOBODY: no wait) has marked `value` in the lane, then call `function`, if there is one."""

    rank: int
    value: int
    function: Any = None
    arguments: tuple[Any, ...] = ()


class ScheduledMemory:
    """One call compiled for the ranks of a room. Making it is local; ValueError for a schedule of too many lanes."""

    def __init__(self, room: Room, call: Call, schedule: Schedule, x: Flat, out: Flat):
        if len(schedule.lanes) > LANES:
            raise ValueError(f"{schedule.name} has more than {LANES} lanes: use messages")
        self._room, self._call, self._schedule = room, call, schedule
        self._space = Workspace(call, room.rank, x, out, arena.empty)
        source = self._space.source
        self._exposed = source if arena.locate(source) else arena.empty(source.size, source.dtype)
        self._marks = [room.marks(rank) for rank in range(room.size)]
        self._token = -CARDS
        self._tokens: tuple[int, ...] | None = None
        self._lanes: list[list[_Action]] = []

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        room = self._room
        yield from room.caught_up()
        self._space.begin()
        if not room.readable(self._token):
            self._token = room.publish(Card(self._call.text, x=arena.locate(self._exposed) or NOWHERE))
        room.enter(self._token)
        yield from room.meet()
        tokens = room.tokens_now()
        if tokens != self._tokens:
            self._bind(tokens)
        lanes = [self._run_lane(lane, actions) for lane, actions in enumerate(self._lanes)]
        while lanes:
            lanes = [lane for lane in lanes if next(lane, self) is not self]
            if lanes:
                yield
        self._space.end()

    def _run_lane(self, lane: int, actions: list[_Action]) -> Iterator[Any]:
        room, marks, base = self._room, self._marks, self._room.operation << 32
        for rank, value, function, arguments in actions:
            if rank != NOBODY:
                words, wanted = marks[rank], base + value
                while words[lane] < wanted:
                    room.waiting = lane
                    yield
                room.waiting = None
                if room.fence is not None:
                    room.fence()
            if function is not None:
                function(*arguments)

    def _bind(self, tokens: tuple[int, ...]) -> None:
        """The ranks' arrays are others than last time: read their cards and compile anew."""
        self._tokens = None
        room, call = self._room, self._call
        sources = [
            self._exposed if rank == room.rank else arena.attach(card.x).view(call.dtype)
            for rank, card in enumerate(room.cards(tokens))
        ]
        program = self._schedule.program(room.rank)
        self._lanes = [
            list(_Lane(room, call, self._space, sources, lane, self._schedule.offsets(call.n, lane)).compile(steps))
            for lane, steps in enumerate(program)
        ]
        self._tokens = tokens


class _Lane:
    """The compiler of one lane of one rank. It knows who may still have to read what, and how far others must be."""

    def __init__(
        self, room: Room, call: Call, space: Workspace, sources: Sequence[Vector], lane: int, offsets: Any
    ) -> None:
        self._room, self._call, self._space, self._sources = room, call, space, sources
        self._number, self._offsets = lane, offsets
        self._exposed = sources[room.rank]
        self._put = None if self._exposed is space.source else np.zeros(len(offsets) - 1, bool)
        """Which chunks stand beside as they are now; None where the vector itself is exposed."""
        self._unread: list[tuple[Extent, int, int]] = []
        """(elements, reader, the reader's mark when it has them) of all that was sent."""
        self._reached = [0] * room.size
        """The marks that others are known to have come to."""

    def compile(self, steps: Iterable[RankStep]) -> Iterator[_Action]:
        """All actions of the lane, in order."""
        for step in steps:
            ready, taken = 2 * step.number + 1, 2 * step.number + 2
            sends = [(extent(self._offsets, r.send), r.send_to) for r in step.rounds if r.send_to != NOBODY]
            takes = [r for r in step.rounds if r.receive_from != NOBODY]
            landings = [extent(self._offsets, r.receive) for r in takes]
            clash = any(overlap(landing, [sent for sent, _ in sends]) for landing in landings)
            beside = self._put is None and self._call.kind != "alltoall" and clash
            yield from self._puts(step)
            if self._put is None and self._call.kind != "alltoall":
                yield from self._freed(landings)
            yield self._mark(ready)
            later: list[_Action] = []
            sums: dict[Extent, dict[int, Vector]] = {}
            for r in takes:
                source, place = self._from(r), self._place(r)
                self._reached[r.receive_from] = max(self._reached[r.receive_from], ready)
                if beside:
                    scratch = np.empty_like(place)
                    yield _Action(r.receive_from, ready, np.copyto, (scratch, source))
                    source = scratch
                if r.add:
                    sums.setdefault(extent(self._offsets, r.receive), {self._room.rank: place})[r.receive_from] = source
                elif beside:
                    later.append(_Action(NOBODY, 0, np.copyto, (place, source)))
                else:
                    yield _Action(r.receive_from, ready, np.copyto, (place, source))
            for terms in sums.values():
                adds = self._adds(terms, ready)
                if beside:
                    later += adds
                else:
                    yield from adds
            yield self._mark(taken)
            self._unread += [(sent, reader, taken) for sent, reader in sends]
            if later:
                yield from self._freed(landings)
                yield from later
        yield self._mark(DONE)
        yield from self._freed([(0, self._exposed.size)])

    def _puts(self, step: RankStep) -> Iterator[_Action]:
        """What the step sends, beside, as far as it does not stand there; what it receives stands there no more."""
        if self._put is None:
            return
        for r in step.rounds:
            if r.send_to != NOBODY:
                for start, stop in self._missing(r.send):
                    yield from self._freed([(start, stop)])
                    part = slice(start, stop)
                    yield _Action(NOBODY, 0, np.copyto, (self._exposed[part], self._space.source[part]))
                self._put[r.send.start : r.send.stop] = True
        for r in step.rounds:
            if r.receive_from != NOBODY and self._call.kind != "alltoall":
                self._put[r.receive.start : r.receive.stop] = False

    def _missing(self, interval: Interval) -> list[Extent]:
        """The longest runs of elements in the interval that do not stand beside as they are now."""
        assert self._put is not None
        edges = np.flatnonzero(np.diff(np.concatenate(([True], self._put[interval.start : interval.stop], [True]))))
        runs = (self._offsets[interval.start + edges]).reshape(-1, 2).tolist()
        return [(start, stop) for start, stop in runs if start < stop]

    def _freed(self, written: list[Extent]) -> Iterator[_Action]:
        """Wait until nobody has to read what is going to be written."""
        for sent, reader, mark in self._unread:
            if mark > self._reached[reader] and overlap(sent, written):
                self._reached[reader] = mark
                yield _Action(reader, mark)
        self._unread = [known for known in self._unread if known[2] > self._reached[known[1]]]

    def _mark(self, value: int) -> _Action:
        return _Action(NOBODY, 0, self._room.mark, (self._number, value))

    def _from(self, r: Round) -> Vector:
        """Where the sender exposes what this rank receives."""
        start, stop = extent(self._offsets, r.receive)
        if self._call.kind == "alltoall":
            start, stop = self._call.block(self._room.rank)
        return self._sources[r.receive_from][start:stop]

    def _place(self, r: Round) -> Vector:
        return self._space.arriving(*extent(self._offsets, r.receive), (int(r.receive.start), int(r.receive.stop)))

    def _adds(self, terms: dict[int, Vector], ready: int) -> Iterator[_Action]:
        """This rank's own vector becomes the sum of all terms, each read when its rank is ready; others stay."""
        assert self._call.operation is not None
        own = self._room.rank
        waits, scratch = set(terms) - {own}, np.empty_like(terms[own])
        for to, of in in_rank_order(own, terms):
            for rank in sorted(waits & {to, of}):
                yield _Action(rank, ready)
            waits -= {to, of}
            place = terms[own] if to == own else scratch
            yield _Action(NOBODY, 0, self._call.operation.into, (terms[to], terms[of], place))
            terms[to] = place

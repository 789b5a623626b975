"""A broadcast or a reduce of few bytes that is called again and again: senders run ahead of takers.

In a broadcast only the root has something to say, in a reduce only the root to hear. After AFTER such operations in a
row on the same arrays, ranks no longer meet. A *sender* puts its vector into one of DEPTH places on its desk, in turn,
and signs the place with the operation's number; a *taker* waits for the signatures, takes, and says how far it is. A
sender waits only where a taker is DEPTH operations behind, so ranks that share a core change places once for many
operations. Any other call ends it: first all takers come to where this rank is (`Room.caught_up`).

A rank that waits looks whether another has gone into a different call (`Room.astray`). So a sender hears of a mismatch
up to DEPTH operations late, when ranks have made different numbers of calls: the communicator is of no more use then.

What the root of a broadcast and the others do at once, where nobody is late:

    operation = room.operation + 1              operation = room.operation + 1
    if operation > bound[0]: ...                if signed[operation % DEPTH] != operation: ...
    place[operation % DEPTH][:] = x             out[:] = place[operation % DEPTH]
    signed[operation % DEPTH] = operation       done[0] = operation
    room.operation = operation                  room.operation = operation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from os import sched_yield
from textwrap import indent
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.arrays import Vector
from collectives.call import ROOTED, Call
from collectives.transport import few
from collectives.transport.desks import AHEAD_BYTES, AHEAD_DEPTH
from collectives.transport.flat import MOST_OPERATIONS, Usual
from collectives.transport.program import combine, same

if TYPE_CHECKING:
    from collectives.transport.room import Room

DEPTH = AHEAD_DEPTH
AFTER = 16


def serves(room: Room, call: Call) -> bool:
    """Whether ranks may run ahead in this call, whose vectors pass through slots."""
    return room.whole and room.size > 1 and call.kind in ROOTED and 0 < call.nbytes <= AHEAD_BYTES


class Ahead:
    """One call bound to the rank's arrays. All ranks count the same operations, so all begin at the same one."""

    def __init__(self, room: Room, call: Call, x: Vector, out: Vector):
        self.text = call.text
        self._room, self._call = room, call
        self._x, self._out = x, out
        root, others = (call.root,), tuple(rank for rank in range(room.size) if rank != call.root)
        self.senders: tuple[int, ...]
        self.takers: tuple[int, ...]
        self.senders, self.takers = (root, others) if call.kind == "broadcast" else (others, root)
        self._in_a_row, self._last = 0, -1
        self._bound = [0]
        """The last operation that this sender can do without looking at the takers."""
        self.usual: Usual
        """At once, where nobody is late."""
        self._perform: Callable[[int], None] | None = None

    def count(self) -> bool:
        """One more operation in which all have met is done on this rank; True if from the next on they run ahead."""
        operation = self._room.operation
        self._in_a_row = self._in_a_row + 1 if self._last == operation - 1 else 1
        self._last = operation
        if self._in_a_row < AFTER:
            return False
        if self._perform is None:
            self.usual, self._perform = self._functions()
        self._in_a_row = self._bound[0] = 0
        self._room.run_ahead(self)
        return True

    def steps(self) -> Iterator[None]:
        """The next operation. Nothing of it is done before it can be done to the end."""
        assert self._perform is not None
        room = self._room
        operation = room.awaited = room.operation + 1
        try:
            while self.late(operation):
                yield
            self._perform(operation)
        finally:
            room.awaited = 0

    def late(self, operation: int) -> list[int]:
        """The ranks of the room without which this one cannot do an operation."""
        room = self._room
        if room.rank in self.senders:
            return self.behind(operation - DEPTH)
        return [rank for rank in self.senders if room.signed(rank)[operation % DEPTH] != operation]

    def behind(self, operation: int) -> list[int]:
        """The takers that have not done an operation."""
        return [rank for rank in self.takers if self._room.taken(rank)[0] < operation]

    def sent(self, operation: int) -> bool:
        """Whether a sender has done an operation; of the last DEPTH."""
        return any(self._room.signed(rank)[operation % DEPTH] == operation for rank in self.senders)

    def wait(self, operation: int) -> bool:
        """A moment, until nobody is late; whether that came so."""
        for look in range(self._room.patient_looks):
            if not self.late(operation):
                return True
            if look >= self._room.spins:
                sched_yield()
        return False

    def bound(self) -> int:
        """The last operation that this sender could do."""
        return min(min(self._room.taken(rank)[0] for rank in self.takers) + DEPTH, MOST_OPERATIONS)

    def _functions(self) -> tuple[Usual, Callable[[int], None]]:
        room, call = self._room, self._call
        mine = room.rank
        names: dict[str, Any] = {"room": room, "ahead": self, "MASK": DEPTH - 1, "fence": room.fence}
        x, out = self._x, self._out
        if mine in self.senders:
            names |= {"x": _bytes(x), "mine": self._places(mine), "signed": room.signed(mine)}
            names["bound"] = self._bound
            ready, lines = _PLACE, ["mine[place][:] = x", "FENCE", "signed[place] = operation"]
            if call.kind == "broadcast" and not same(x, out):
                names["out"] = _bytes(out)
                lines += ["out[:] = x"]
        else:
            names |= {f"signed{rank}": room.signed(rank) for rank in self.senders} | {"taken": room.taken(mine)}
            missing = " or ".join(f"signed{rank}[place] != operation" for rank in self.senders)
            ready, (lines, more) = _SIGNED.format(missing=missing), self._takes(x, out)
            names |= more
            lines = ["FENCE", *lines, "FENCE", "taken[0] = operation"]
        text = "\n".join(lines).replace("FENCE", "fence()" if room.fence else "pass")
        usual, perform = _maker(ready, text, tuple(names))(*names.values())
        return usual, perform

    def _takes(self, x: Vector, out: Vector) -> tuple[list[str], dict[str, Any]]:
        """Lines by which a taker has the result, and their names."""
        call = self._call
        if call.kind == "broadcast":
            return ["out[:] = sent[place]"], {"out": _bytes(out), "sent": self._places(call.root)}
        put = ["mine[place][:] = x"]
        names: dict[str, Any] = {"mine": self._places(call.root), "x": _bytes(x)}
        parts = [[place.view(call.dtype) for place in self._vectors(rank)] for rank in range(call.p)]
        added = few.added(call, out)
        if added:
            put += [f"part{rank}_at = part{rank}[place]" for rank in range(call.p)]
            names |= {f"part{rank}": [part.data for part in every] for rank, every in enumerate(parts)}
            return [*put, *added.format(p="at").splitlines()], {**names, "out": out.data}
        steps = [tuple(combine(call, list(each), out, out)) for each in zip(*parts)]
        return [*put, "for function, arguments in adds[place]:", "    function(*arguments)"], {**names, "adds": steps}

    def _vectors(self, rank: int) -> list[Vector]:
        return [self._room.place(rank, place)[: self._call.nbytes] for place in range(DEPTH)]

    def _places(self, rank: int) -> list[memoryview]:
        return [place.data for place in self._vectors(rank)]


def _bytes(vector: Vector) -> memoryview:
    return vector.view(np.uint8).data


@cache
def _maker(ready: str, lines: str, names: tuple[str, ...]) -> Callable[..., tuple[Usual, Callable[[int], None]]]:
    made: dict[str, Any] = {}
    text = _FUNCTIONS.format(ready=indent(ready, " " * 8), lines=indent(lines, " " * 8))
    exec(f"def make({', '.join(names)}):\n{text}", made)
    make: Callable[..., tuple[Usual, Callable[[int], None]]] = made["make"]
    return make


_PLACE = """
if operation > bound[0]:
    ahead.wait(operation)
    bound[0] = ahead.bound()
    if operation > bound[0]:
        return call.afresh()
"""

_SIGNED = """
if {missing}:
    if not ahead.wait(operation):
        return call.afresh()
"""

_FUNCTIONS = """
    def usual(call):
        if room.running is not ahead:
            return call.afresh()
        operation = room.operation + 1
        place = operation & MASK
{ready}
{lines}
        room.operation = operation
        return None

    def perform(operation):
        place = operation & MASK
{lines}
        room.operation = operation

    return usual, perform
"""

"""A broadcast or a reduce of few bytes that is called again and again: senders run ahead of takers.

In a broadcast only the root has something to say, in a reduce only the root to hear. After AFTER operations in a row of
one such call, ranks no longer meet. Which arrays a rank brings is its own business: the places are all that others see.
A *sender* puts its vector into one of DEPTH places on its desk, in turn, and signs the place with the operation's
number; a *taker* waits for the signatures, takes, and says how far it is. A sender waits only where a taker is DEPTH
operations behind, so ranks that share a core change places once for many operations. Any other call ends it: first all
takers come to where this rank is (`Room.caught_up`).

A rank that waits looks whether another has gone into a different call (`Room.astray`). So a sender hears of a mismatch,
or of a rank that has given up, up to DEPTH operations late. As ranks have made different numbers of calls by then, the
communicator is of no more use.

What the root of a broadcast and the others do at once, where nobody is late:

    operation = room.operation + 1              operation = room.operation + 1
    if operation > bound[0]: ...                if signed[operation % DEPTH] != operation: ...
    place[operation % DEPTH][:] = x             out[:] = place[operation % DEPTH]
    signed[operation % DEPTH] = operation       taken[0] = operation
    room.operation = operation                  room.operation = operation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from os import sched_yield
from textwrap import indent
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.arrays import Vector
from collectives.call import ROOTED, Call
from collectives.operations import scale
from collectives.transport import few
from collectives.transport.desks import AHEAD_BYTES, AHEAD_DEPTH
from collectives.transport.flat import MOST_OPERATIONS, Usual
from collectives.transport.program import same

if TYPE_CHECKING:
    from collectives.transport.room import Room

DEPTH = AHEAD_DEPTH
AFTER = 16


def serves(room: Room, call: Call, always: int) -> bool:
    """Whether ranks may run ahead in this call, whose vectors pass through slots whatever the arrays are: up to
    `always` bytes."""
    may = room.whole and room.size > 1 and not room.meets_always
    return may and call.kind in ROOTED and 0 < call.nbytes <= min(always, AHEAD_BYTES)


class Ahead:
    """One call bound to the rank's arrays. All ranks count the operations of the same call, whatever arrays they are
    bound to, so all begin at the same one."""

    def __init__(self, room: Room, call: Call, x: Vector, out: Vector):
        self.text = call.text
        self._room, self._call = room, call
        self._x, self._out = x, out
        root, others = (call.root,), tuple(rank for rank in range(room.size) if rank != call.root)
        self.senders: tuple[int, ...]
        self.takers: tuple[int, ...]
        self.senders, self.takers = (root, others) if call.kind == "broadcast" else (others, root)

    @cached_property
    def usual(self) -> Usual:
        """The next operation at once, where nobody is late. Called with the plan."""
        return self._functions[0]

    def count(self) -> None:
        """One more operation in which all have met is done on this rank."""
        if self._room.count(self.text) == AFTER:
            self._room.run_ahead(self)

    def goes_on(self) -> bool:
        """Whether ranks run ahead in this call, and its next operation has a number."""
        room = self._room
        return room.ahead is not None and room.ahead.text == self.text and room.operation < MOST_OPERATIONS

    def steps(self) -> Iterator[None]:
        """The next operation. Nothing of it is done before it can be done to the end."""
        room, perform = self._room, self._functions[1]
        operation = room.awaited = room.operation + 1
        try:
            while self.late(operation):
                yield
            perform(operation)
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

    def held_up_by(self, late: Sequence[int], operation: int) -> list[int]:
        """For whom those ranks wait that are late for an operation; themselves where they wait for nobody."""
        room, found = self._room, set[int]()
        for rank in late:
            if rank in self.takers:
                wanted = room.taken(rank)[0] + 1
                others = {sender for sender in self.senders if room.signed(sender)[wanted % DEPTH] != wanted}
            else:
                others = {*self.behind(operation - DEPTH)}
            found |= others or {rank}
        return sorted(found)

    def sent(self, operation: int) -> bool:
        """Whether a sender has done an operation; of the last DEPTH."""
        return any(self._room.signed(rank)[operation % DEPTH] == operation for rank in self.senders)

    def wait(self, operation: int) -> bool:
        """A moment, until nobody is late; whether that came so."""
        room = self._room
        for look in range(room.patient_looks):
            if not self.late(operation):
                if room.rank in self.senders:
                    taken = min(room.taken(rank)[0] for rank in self.takers)
                    room.bound[0] = min(taken + DEPTH, MOST_OPERATIONS)
                return operation <= MOST_OPERATIONS
            if look >= room.spins:
                sched_yield()
        return False

    @cached_property
    def _functions(self) -> tuple[Usual, Callable[[int], None]]:
        """`usual`, and what carries an operation out when nobody is late for it."""
        room = self._room
        names: dict[str, Any] = {"room": room, "text": self.text, "MASK": DEPTH - 1, "fence": room.fence}
        if room.rank in self.senders:
            ready, lines, more = _PLACE, *self._sends()
        else:
            missing = " or ".join(f"signed{rank}[place] != operation" for rank in self.senders)
            ready, lines, more = _SIGNED.format(missing=missing), *self._takes()
        text = "\n".join(lines).replace("FENCE", "fence()" if room.fence else "pass")
        names |= more
        usual, perform = _maker(ready, text, tuple(names))(*names.values())
        return usual, perform

    def _sends(self) -> tuple[list[str], dict[str, Any]]:
        """Lines by which a sender puts its vector, and their names."""
        room, x = self._room, self._x
        lines = ["mine[place][:] = x", "FENCE", "signed[place] = operation"]
        names = {"x": _bytes(x), "mine": self._places(room.rank), "signed": room.signed(room.rank), "bound": room.bound}
        if self._call.kind == "broadcast" and not same(x, self._out):
            return [*lines, "out[:] = x"], {**names, "out": _bytes(self._out)}
        return lines, names

    def _takes(self) -> tuple[list[str], dict[str, Any]]:
        """Lines by which a taker has the result, and their names."""
        room, call = self._room, self._call
        names: dict[str, Any] = {f"signed{rank}": room.signed(rank) for rank in self.senders}
        names["taken"] = room.taken(room.rank)
        if call.kind == "broadcast":
            lines, more = ["out[:] = sent[place]"], {"out": _bytes(self._out), "sent": self._places(call.root)}
        else:
            lines, more = self._adds()
        return ["FENCE", *lines, "FENCE", "taken[0] = operation"], {**names, **more}

    def _adds(self) -> tuple[list[str], dict[str, Any]]:
        """Lines by which the root of a reduce puts its own vector, and has the sum."""
        call, out = self._call, self._out
        assert call.operation is not None
        lines = ["mine[place][:] = x", *(f"part{rank}_at = part{rank}[place]" for rank in range(call.p))]
        names: dict[str, Any] = {"mine": self._places(call.root), "x": _bytes(self._x)}
        vectors = [self._room.places(rank, call.nbytes, call.dtype) for rank in range(call.p)]
        if added := few.added(call, out):
            names |= {f"part{rank}": [place.data for place in places] for rank, places in enumerate(vectors)}
            return [*lines, *added.format(p="at").splitlines()], {**names, "out": out.data}
        names |= {f"part{rank}": places for rank, places in enumerate(vectors)}
        names |= {"add": call.operation.into, "out": out}
        lines += ["add(part0_at, part1_at, out)", *(f"add(out, part{rank}_at, out)" for rank in range(2, call.p))]
        if call.operation.is_mean:
            names["scale"], names["scaling"] = scale(out, call.p)
            lines += ["scale(*scaling)"]
        return lines, names

    def _places(self, rank: int) -> list[memoryview]:
        return [place.data for place in self._room.places(rank, self._call.nbytes, np.dtype(np.uint8))]


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
if operation > bound[0] and not call.ahead.wait(operation):
    return call.afresh()
"""

_SIGNED = """
if ({missing}) and not call.ahead.wait(operation):
    return call.afresh()
"""

_FUNCTIONS = """
    def usual(call):
        if room.running != text:
            return call.counted()
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

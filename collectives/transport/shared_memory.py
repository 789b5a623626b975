"""Collectives over the memory of one node: loads and stores instead of messages.

Every piece of the result has an *owner*, who reads the *sources'* x, reduces block by block so that a block stays in
cache, and hands it to the *readers'* out. It is the peer-to-peer parameter server of the BML paper (section 2), run on
loads and stores. Rank r owns block r of the vector. Four protocols:

eager    small vectors: all ranks put theirs into their slots, and each takes what it wants. One meeting. Node-shared
         arrays leave it for direct sooner than ordinary ones for staged; where ranks differ in this, staged serves.
         A broadcast or reduce of few bytes that is called again and again needs no meeting (`ahead`).
direct   all arrays are node-shared (`collectives.empty`): the owner writes finished blocks straight into the readers'
         arrays. n/p elements read from each source and written to each reader, no copy beside. Two meetings.
         In alltoall everybody copies its blocks from the others' arrays.
staged   ordinary arrays: blocks pass through stages small enough for the cache, in a pipeline: while block k is
         reduced, k + 1 is staged and k - 1 copied out. One meeting a block.
reach    ordinary arrays, where the kernel copies between processes (`reach`): as direct, but the owner fetches blocks
         from the sources and delivers finished ones. Two meetings. Also where only some ranks' arrays are node-shared.

Long vectors in ordinary arrays try stages and reach, and where nothing is reduced the MPI's own call, in their first
calls, and the fastest stays. (The MPI's sums would not keep their bits from one call to the next.)

All of them add in the order of the ranks, so a sum's bits depend neither on the protocol, nor on the vector's length,
nor on the element's place in it.

A protocol compiles to a program: lists of (function, arguments) between meetings, bound to the ranks' memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from collectives.arrays import Flat
from collectives.call import Call
from collectives.choice import Choice
from collectives.errors import MismatchError
from collectives.network.native import NativePlan
from collectives.node import arena
from collectives.started import HELD
from collectives.transport import ahead, direct, eager, flat, reach
from collectives.transport.ahead import Ahead
from collectives.transport.cards import CARDS, NOWHERE, Card
from collectives.transport.flat import NO_LINES, NOTHING, Lines, Turns, Usual
from collectives.transport.program import Program, Window, same
from collectives.transport.room import Room
from collectives.transport.staged import Staged
from collectives.tuner.table import Slots


class Trial(NamedTuple):
    """The ways that a long vector in ordinary arrays may go: stages, reach if the room has it, the rival if there is
    one."""

    choice: Choice
    rival: NativePlan | None


class MemoryPlan:
    """One call compiled for the ranks of a room. x and out hold the rank's part of the vector (`Call.extent_of_x`)."""

    def __init__(self, room: Room, call: Call, x: Flat, out: Flat, limits: Slots, trial: Trial | None = None):
        self._room, self._call = room, call
        self._x = Window(x.vector(), call.extent_of_x(room.rank, x == out)[0])
        self._out = Window(out.vector(), call.extent_of_out(room.rank, x == out)[0])
        shareable = call.nbytes > limits.always and not (call.kind == "alltoall" and x == out)
        self._trial = trial
        self._ways: list[Program | NativePlan] = []
        self._token = -CARDS
        self._tokens: tuple[int, ...] | None
        self.quick: Usual
        """Begins the operation, and ends it if the others come soon: None, or the steps that are left, or HELD."""
        self._soon: Usual
        may = ahead.serves(room, call, limits.always)
        self.ahead = Ahead(room, call, self._x.vector, self._out.vector) if may else None
        """The call as ranks run ahead in it, where they may."""
        self._unsettle()
        self._program = Program()
        self._where = (arena.locate(self._x.vector), arena.locate(self._out.vector)) if shareable else (None, None)
        self.direct = None not in self._where
        """True where this rank's arrays are node-shared and worth it; the protocol is direct if all ranks' are."""
        self.eager = not self.direct and call.nbytes <= max(limits.always, limits.ordinary)
        """True where this rank brings its vector in its slot; the protocol is eager if all ranks do."""
        self._takes: Turns | None = None
        self._early = NOTHING
        if self.eager:
            self._early = eager.puts(room, call, self._x, 0), eager.puts(room, call, self._x, 1)
        elif not self.direct:
            self._early = (Staged(room, call, self._x, self._out).puts(0),) * 2

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        if self.ahead is not None and self.ahead.goes_on():
            yield from self.ahead.steps()
        else:
            yield from self._room.caught_up()
            yield from self._begin()

    def afresh(self) -> Iterator[None]:
        """Begin the operation, with a card that others can read; the steps that are left, or HELD."""
        return HELD if self._room.held else self._begin()

    def _begin(self) -> Iterator[None]:
        self._bring(self._room.operation + 1 & 1)
        try:
            self._enter()
            return self.met()
        except BaseException as error:
            self.break_off(error)
            raise

    def _in_steps(self) -> Iterator[None] | None:
        """As `afresh`, where the others' arrays are known, but the ways are yet to be tried or the best takes steps."""
        if self._room.held:
            return HELD
        self._settle()
        self._bring(self._room.operation + 1 & 1)
        left = self._soon(self)
        return _begun(self._met_soon()) if left is None else left

    def counted(self) -> Iterator[None] | None:
        """Begin the operation; counted, as ranks run ahead after so many."""
        assert self.ahead is not None
        if self._room.running == self.ahead.text:
            self.quick = self.ahead.usual
            return self.quick(self) or iter(())  # after which this is asked how the next one goes
        left = self._soon(self)
        if left is None:
            self.ahead.count()
        return left

    def _unsettle(self) -> None:
        """What the others bring is not known."""
        self._tokens, self._soon = None, MemoryPlan.afresh
        self.quick = MemoryPlan.afresh if self.ahead is None else MemoryPlan.counted

    def _settle(self) -> None:
        """See how the next operations go, while the others bring what they brought last time. While ways are tried, by
        other plans too, each operation sees anew whether it brings something."""
        way, trying = self._way(), self._trial and not self._trial.choice.decided
        if trying or self._tokens is None or not isinstance(way, Program):
            self.quick = MemoryPlan._in_steps
            return
        puts = flat.loop("puts", self._early) if self._stages_first() else NO_LINES
        self.quick = self._enters(puts, flat.through(way))

    def _enters(self, puts: Lines = NO_LINES, then: Lines = NO_LINES) -> Usual:
        assert self._tokens is not None
        return self._room.usual(self._token, self._tokens, puts, then)

    def _way(self) -> Program | NativePlan:
        """The way that the call goes, or tries next."""
        return self._ways[self._trial.choice.way] if self._ways and self._trial else self._program

    def _bring(self, parity: int) -> None:
        """What others will look for as soon as this rank has entered."""
        if self._stages_first():
            for function, arguments in self._early[parity]:
                function(*arguments)

    def _stages_first(self) -> bool:
        """Whether this rank brings something: the ways that are tried beside stages have nothing to bring."""
        return self._trial is None or not self._trial.choice.way

    def _enter(self) -> None:
        if not self._room.readable(self._token):
            self._publish()
        self._room.enter(self._token)

    def met(self) -> Iterator[None]:
        """The steps after this rank has entered; begun, so that who drops them before the first one breaks off."""
        return _begun(self._met())

    def _met(self) -> Iterator[None]:
        room = self._room
        try:
            yield
            yield from room.meet()
            tokens = room.tokens_now()
            if tokens != self._tokens:
                self._bind(tokens)
        except MismatchError:  # of which all ranks know
            raise
        except BaseException as error:
            self.break_off(error)
            raise
        yield from self._work()

    def _met_soon(self) -> Iterator[None]:
        """The steps after all have come and brought what they brought last time."""
        try:
            yield
        except BaseException as error:
            self.break_off(error)
            raise
        yield from self._work()

    def break_off(self, error: BaseException) -> None:
        """This rank leaves an operation in which it has done nothing yet: it takes back its entry, or, where all have
        come, waits until nobody touches its arrays."""
        room = self._room
        if not (room.stands(self._token) or room.lost):
            return
        interrupted = not isinstance(error, GeneratorExit)  # else who closed this has said what there is to say
        if interrupted and room.whole and room.withdraw(room.given_up(self._call.text, error)) and not room.lost:
            return
        if room.complete() and (self.direct or self._trial is not None):
            room.leave_off(room.phase + 1)

    def _work(self) -> Iterator[None]:
        room = self._room
        if self._takes:
            for function, arguments in self._takes[room.operation & 1]:
                function(*arguments)
            if self.ahead is not None:
                self.ahead.count()
            return
        way, start = self._way(), time.perf_counter()
        yield from self._carry_out(way) if isinstance(way, Program) else way.run()
        if self._ways and self._trial:
            yield from self._trial.choice.learn((time.perf_counter() - start) / self._call.nbytes)

    def _carry_out(self, program: Program, done: int = 0) -> Iterator[None]:
        """The program from the end of that many phases on, of the last of which others may not have come to it."""
        room = self._room
        end = room.phase + len(program.phases) - done
        try:
            if done:
                yield
                yield from room.follow()
            for phase in program.phases[done:]:
                for function, arguments in phase.before:
                    function(*arguments)
                room.signal()
                for function, arguments in phase.after:
                    function(*arguments)
                yield from room.follow()
            for function, arguments in program.last:
                function(*arguments)
        except BaseException as error:
            raise self.broken_off(program, end, error) from None

    def behind(self, program: Program, done: int) -> Iterator[None]:
        """The rest of a program, where the others do not keep up in that phase. It need not be what the last operation
        went by: a function made for what others brought before serves when they bring that again."""
        return _begun(self._carry_out(program, done))

    def broken_off(self, program: Program, end: int, error: BaseException) -> BaseException:
        """This rank leaves a program, which ends with phase `end`, halfway; the error to raise."""
        told = self._room.fail(error.pid, error.errno) if isinstance(error, reach.OutOfReach) else None
        if program.reaches:
            self._room.leave_off(end)
        return told or error

    def _publish(self) -> None:
        x, out = self._where
        x_at = out_at = 0
        in_place = same(self._x.vector, self._out.vector)
        if self._reaches() and not (self._call.kind == "alltoall" and in_place):
            written = not (self._call.kind == "broadcast" and in_place and self._call.root == self._room.rank)
            x_at, out_at = reach.place(self._x.vector), reach.place(self._out.vector, written)
        self._token = self._room.publish(Card(self._call.text, 0, x or NOWHERE, out or NOWHERE, x_at, out_at))

    def _bind(self, tokens: tuple[int, ...]) -> None:
        """The ranks' arrays are others than last time: read their cards and compile anew."""
        self._unsettle()
        room, call = self._room, self._call
        cards = room.cards(tokens)
        shared = [card.x.pid != 0 and card.out.pid != 0 for card in cards]
        self._takes, self._ways, self._program = None, [], Program()
        if all(shared):
            self._program = direct.program(room, call, self._x, self._out, cards)
        elif self.eager and not any(shared):
            even, odd = (eager.takes(room, call, self._x, self._out, parity) for parity in (0, 1))
            self._takes = even, odd
        else:
            self._bind_ordinary(cards, any(shared))
        self._tokens = tokens
        if self._takes:
            self._soon = self._enters(*eager.lines(room, call, self._x, self._out, self._early, self._takes))
            self.quick = self._soon if self.ahead is None else MemoryPlan.counted
        else:
            self._soon = self._enters()
            self._settle()

    def _bind_ordinary(self, cards: Sequence[Card], mixed: bool) -> None:
        """Some arrays are not node-shared: the ways that these can go."""
        room, call, x, out = self._room, self._call, self._x, self._out
        in_reach = self._reaches() and all(card.x_at and card.out_at for card in cards)
        if mixed and in_reach:
            self._program = reach.program(room, call, x, out, cards)
            return
        trial = self._trial
        if trial is None or mixed or in_reach != self._reaches():  # the trial counts on every way
            self._program = Staged(room, call, x, out).program(restage=mixed or trial is not None)
            return
        self._ways = [Staged(room, call, x, out).program(restage=False)]
        if in_reach:
            self._ways.append(reach.program(room, call, x, out, cards))
        if trial.rival is not None:
            self._ways.append(trial.rival)

    def _reaches(self) -> bool:
        """Whether reach is one of the ways."""
        return self._trial is not None and bool(self._room.pids)


def _begun(steps: Iterator[None]) -> Iterator[None]:
    """At their first yield, so that who closes them ends what has been entered."""
    next(steps)
    return steps

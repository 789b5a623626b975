"""Carry out, line by line, a call that is made again on one node: put, enter, meet, take; or phases and meetings.

Four programs (`program`) carry a call out; all ranks pick the same, by what they bring:

slots         small vectors;
direct        arrays in node-shared memory;
cross memory  large arrays in memory of each rank's own, where the kernel copies between processes;
stages        other arrays, and where ranks bring unlike ones.

All of them add in the order of the ranks, so a sum's bits depend neither on the program, nor on the vector's length,
nor on the element's place in it.

Before it, `api` finds the plan by the array's identity. The first run reads the others' descriptors and binds a program
to the arrays. From then on `fast` carries the call out in one straight-line function, as long as the others bring what
they brought; else it says so, and `steps` or `rest` goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from os import sched_yield
from typing import Any, NamedTuple

import numpy as np

from mpips.collectives.arrays import Flat, Vector, same
from mpips.collectives.call import Call
from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.board import NUMBERS, ORDER, Board
from mpips.collectives.fabric.layout import DESCRIPTORS, PLACE_WORDS, ArrayPlace, Descriptor
from mpips.collectives.fabric.process_memory import place as reached_at
from mpips.collectives.kernels import sums
from mpips.collectives.kernels.sums import perform
from mpips.collectives.node.program import (
    NOTHING,
    Program,
    Scalars,
    StagePipeline,
    Turns,
    Window,
    crossing_program,
    merged,
    shared_program,
    slot_puts,
    slot_scalars,
    slot_takes,
)

DONE, NOT_BEGUN, MET = 0, 1, 2
"""What `fast` gives back: all is done; `steps` is to do it; all have met, and `rest` is to do it."""
SLOTS, SHARED, CROSS, STAGES = range(4)
WAYS = ("slots", "direct", "cross_memory", "stages")
NOWHERE = (ArrayPlace(), ArrayPlace())


class Ways(NamedTuple):
    """The ways of vectors by their bytes; the same on all ranks."""

    slots: int
    """Up to here any arrays go through slots."""
    ordinary_slots: int
    """Up to here ordinary arrays do."""
    cross_memory: int
    """From here on ordinary arrays go by copies between processes, where the kernel permits them."""


class Part(NamedTuple):
    """One array of a call: x and out hold this rank's part of the whole vector (`Call.extent_of_x`)."""

    call: Call
    x: Window
    out: Window
    kept: tuple[Vector, ...] = ()
    """Vectors into which this rank's block of the result goes, too; where a call has several parts."""


def part_of(call: Call, rank: int, x: Flat, out: Flat, kept: Sequence[Flat] = ()) -> Part:
    """The part of a call that lies at these addresses on this rank."""
    in_place = x == out
    return Part(
        call,
        Window(x.vector(), call.extent_of_x(rank, in_place)[0]),
        Window(out.vector(), call.extent_of_out(rank, in_place)[0]),
        tuple(flat.vector() for flat in kept),
    )


class Executor:
    """One call compiled for the ranks of a board: of one array, or of several that are reduced side by side. Making it
    is local."""

    holds = False

    def __init__(self, board: Board, text: str, parts: Sequence[Part], ways: Ways) -> None:
        self._board, self._memory, self._text, self._parts, self._ways = board, board.memory, text, parts, ways
        self._put = -DESCRIPTORS
        self._token = 0
        self._tokens: tuple[int, ...] | None = None
        self.modes = [self._mode(part) for part in parts]
        """How this rank means to go with each array."""
        for part, mode in zip(parts, self.modes):
            call = part.call
            if call.operation is not None:
                many = 2 if mode == CROSS else call.p
                sums.prepare(call.operation.into, call.dtype, many, call.nbytes, call.operation.is_mean)
        self._lends = any(mode in (SHARED, CROSS) for mode in self.modes)
        """Whether others may touch this rank's arrays, in the first phase."""
        self._program = Program()
        self._puts = self._brought()
        self.fast: Callable[[], int] = not_begun

    def steps(self) -> Iterator[None]:
        """The operation from its beginning, in steps between which there is something to wait for."""
        board = self._board
        if not board.descriptors.readable(self._put):
            self._publish()
        perform(self._puts[board.number + 1 & 1])
        board.enter(self._token, self._lends)
        yield from board.met()
        yield from self.rest()

    def rest(self) -> Iterator[None]:
        """The operation from where all have met."""
        board = self._board
        tokens = board.tokens()
        if tokens != self._tokens:
            self._bind(tokens)
        program = self._program
        for phase in program.phases:
            perform(phase.before)
            board.signal()
            perform(phase.after)
            yield from board.followed()
        perform(program.last[board.number & 1])

    def free(self) -> None:
        """There is nothing of MPI to give back."""

    @property
    def way(self) -> str:
        """Return how this rank means to go, as `tuner.table` names it."""
        return WAYS[self.modes[0]]

    def _mode(self, part: Part) -> int:
        call, ways = part.call, self._ways
        moving = call.kind == "alltoall" and same(part.x.vector, part.out.vector)  # nobody may read it meanwhile
        located = arena.locate(part.x.vector) and arena.locate(part.out.vector)
        if len(self._parts) > 1:
            return SHARED if located else CROSS
        if located and call.nbytes > ways.slots and not moving:
            return SHARED
        if call.nbytes <= max(ways.slots, ways.ordinary_slots):
            return SLOTS
        crosses = self._crosses(call) and not moving and reached_at(part.x.vector)
        return CROSS if crosses else STAGES

    def _crosses(self, call: Call) -> bool:
        return self._memory.reachable and call.nbytes >= self._ways.cross_memory

    def _brought(self) -> Turns:
        """Return what this rank puts before it enters, whatever the others bring."""
        call, x, out, _ = self._parts[0]
        if self.modes == [SLOTS]:
            return slot_puts(self._memory, call, x, 0), slot_puts(self._memory, call, x, 1)
        if self.modes == [STAGES]:
            return (StagePipeline(self._memory, call, x, out).puts(0),) * 2
        return NOTHING

    def _publish(self) -> None:
        places = tuple(self._places(part, mode) for part, mode in zip(self._parts, self.modes))
        many = place = None
        if len(places) > 1:
            many = arena.empty((len(places), PLACE_WORDS), np.int64)
            many[:] = np.array(places, np.int64).reshape(len(places), -1)
            place = _region(many)
        self._token = self._board.publish(Descriptor(self._text, places), many, place)
        self._put = self._board.descriptors.put

    def _places(self, part: Part, mode: int) -> tuple[ArrayPlace, ArrayPlace]:
        """Return where the others find this rank's x and out; nowhere where these go through slots or stages."""
        if mode in (SLOTS, STAGES):
            return NOWHERE
        call, x, out = part.call, part.x.vector, part.out.vector
        x_place, out_place = NOWHERE if mode == CROSS else (_region(x), _region(out))
        x_at = out_at = 0
        if self._crosses(call) or len(self._parts) > 1:
            read_alone = call.kind == "broadcast" and same(x, out) and call.root == self._board.rank
            x_at, out_at = reached_at(x), reached_at(out, not read_alone)
        return x_place._replace(address=x_at), out_place._replace(address=out_at)

    def _bind(self, tokens: tuple[int, ...]) -> None:
        """The ranks' arrays are others than last time: read their descriptors and compile anew."""
        self._tokens, self.fast = None, not_begun
        descriptors = self._board.read(tokens)
        programs = [self._compile(number, descriptors) for number in range(len(self._parts))]
        self._program = programs[0] if len(programs) == 1 else merged(programs)
        self._tokens = tokens
        if self._board.fence is None:
            self.fast = self._fast(tokens)

    def _compile(self, number: int, descriptors: Sequence[Descriptor]) -> Program:
        part, memory = self._parts[number], self._memory
        places = [descriptor.places[number] for descriptor in descriptors]
        if all(x.shared and out.shared for x, out in places):
            return shared_program(memory, *part, places)
        if self.modes[number] == SLOTS and not any(x.shared for x, _ in places):
            return Program(last=(slot_takes(memory, *part[:3], 0), slot_takes(memory, *part[:3], 1)))
        if all(x.address and out.address for x, out in places):
            return crossing_program(memory, *part, places)
        if len(self._parts) > 1:
            raise CollectiveError(f"array {number} of {self._text} lies where other ranks cannot reach it: pass a copy")
        unlike = any(x.shared or x.address for x, _ in places) or self.modes[number] == SLOTS
        return StagePipeline(memory, *part[:3]).program(restage=unlike)

    def _fast(self, tokens: tuple[int, ...]) -> Callable[[], int]:
        """The call as one straight-line function, while the others bring these tokens."""
        others = int.from_bytes(array("Q", tokens), ORDER)
        bound, program = _Bound(self._board, self._text, self._put, self._token, others), self._program
        if self.modes == [SLOTS] and not self._program.phases:
            few = slot_scalars(self._memory, *self._parts[0][:3])
            if few is not None:
                summed = _sum_of_scalars(bound, few)
                return _mean_of_scalars(summed, few, self._board.size) if few.mean else summed
        if not program.phases:
            return _straight(bound, self._puts, program.last, self._lends)
        return _in_phases(bound, _straight(bound, self._puts, NOTHING, self._lends), program)


def _region(vector: Vector) -> ArrayPlace:
    region = arena.locate(vector)
    return ArrayPlace() if region is None else ArrayPlace(*region)


def not_begun() -> int:
    """The fast path of what has none."""
    return NOT_BEGUN


class _Bound(NamedTuple):
    """The knowledge of a fast path: this rank brings `token`, as the `put`th that it has put. The others bring the
    words `others`, side by side."""

    board: Board
    text: str
    put: int
    token: int
    others: int


def _sum_of_scalars(bound: _Bound, few: Scalars) -> Callable[[], int]:
    board, text, put, token, others = bound
    rank, ones, order, read, meet = board.rank, board.ones << 32, ORDER, int.from_bytes, board.meet
    even, odd = zip(board.entries, few.mine, few.first, few.second, few.more)
    spins, looks, numbers = board.spins, board.looks, board.numbers
    turns, x, two, mark = (even, odd), few.x, len(few.x) == 2, board.marks.word
    out: Any = few.out  # floats, which memoryviews of them take

    def fast() -> int:
        number = board.number + 1
        if put <= board.spent or number > NUMBERS:
            return NOT_BEGUN
        row, mine, first, second, more = turns[number & 1]
        mine[0] = x[0]
        if two:
            mine[1] = x[1]
        board.number = number
        row[rank] = mark[0] = number << 32 | token
        entered = number * ones
        wanted = entered + others
        if read(row, order) != wanted:
            for look in looks:
                seen = read(row, order)
                if seen == wanted:
                    break
                if look >= spins:
                    if seen & numbers == entered:
                        return MET
                    sched_yield()
            else:
                if not meet(row, wanted, text):
                    return MET
        out[0] = first[0] + second[0]
        if two:
            out[1] = first[1] + second[1]
        for part in more:
            out[0] = out[0] + part[0]
            if two:
                out[1] = out[1] + part[1]
        return DONE

    return fast


def _mean_of_scalars(summed: Callable[[], int], few: Scalars, ranks: int) -> Callable[[], int]:
    out: Any = few.out

    def fast() -> int:
        code = summed()
        if code == DONE:
            for i in range(len(out)):
                out[i] = out[i] / ranks
        return code

    return fast


def _straight(bound: _Bound, puts: Turns, last: Turns, lends: bool) -> Callable[[], int]:
    board, text, put, token, others = bound
    rank, ones, order, read, meet = board.rank, board.ones << 32, ORDER, int.from_bytes, board.meet
    turns, spins, looks, numbers = tuple(zip(board.entries, puts, last)), board.spins, board.looks, board.numbers
    mark = board.marks.word

    def fast() -> int:
        number = board.number + 1
        if put <= board.spent or number > NUMBERS:
            return NOT_BEGUN
        row, brought, taken = turns[number & 1]
        for function, arguments in brought:
            function(*arguments)
        board.number = number
        if lends:
            board.last_phase, board.lent = board.phase + 1, number
        row[rank] = mark[0] = number << 32 | token
        entered = number * ones
        wanted = entered + others
        if read(row, order) != wanted:
            for look in looks:
                seen = read(row, order)
                if seen == wanted:
                    break
                if look >= spins:
                    if seen & numbers == entered:
                        return MET
                    sched_yield()
            else:
                if not meet(row, wanted, text):
                    return MET
        for function, arguments in taken:
            function(*arguments)
        return DONE

    return fast


def _in_phases(bound: _Bound, enter: Callable[[], int], program: Program) -> Callable[[], int]:
    board, text = bound.board, bound.text
    rank, order, read = board.rank, ORDER, int.from_bytes
    progress, finished, follow, spins, looks = board.progress, board.ones, board.follow, board.spins, board.looks
    phases, (even, odd) = program.phases, program.last

    def fast() -> int:
        code = enter()
        if code:
            return code
        for before, after in phases:
            for function, arguments in before:
                function(*arguments)
            phase = board.phase = board.phase + 1
            row = progress[phase & 1]
            row[rank] = phase
            for function, arguments in after:
                function(*arguments)
            wanted = phase * finished
            if read(row, order) != wanted:
                for look in looks:
                    if read(row, order) == wanted:
                        break
                    if look >= spins:
                        sched_yield()
                else:
                    follow(row, wanted, text)
        for function, arguments in odd if board.number & 1 else even:
            function(*arguments)
        return DONE

    return fast

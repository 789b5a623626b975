"""Run a call on one node, compiled for its arrays: put, enter, meet, take; or phases with meetings.

There are four kinds of programs (`program`). All ranks choose the same kind, by the arrays that all of them pass:

slots         for small vectors;
direct        for arrays in node-shared memory;
cross memory  for large arrays in private memory, if the kernel copies between the processes;
stages        for all other arrays, and if ranks pass arrays in different kinds of memory.

All of them add in the order of the ranks. So the bits of a sum depend neither on the program, nor on the length of the
vector, nor on the place of the element in it.

`api` finds the plan by the identity of the array, and the plan runs its executor. The first run reads the descriptors
of the other ranks and compiles a program for the arrays of all ranks. After that `fast` runs the call in one
straight-line function, as long as the other ranks pass the same arrays again. Otherwise it returns how far it came, and
`steps` or `rest` does the remaining work.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from os import sched_yield
from typing import Any, NamedTuple

import numpy as np

from mpips.collectives.arrays import Flat, Vector, same_address
from mpips.collectives.call import Call
from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.board import NUMBERS, ORDER, Board
from mpips.collectives.fabric.layout import DESCRIPTORS, PLACE_WORDS, ArrayPlace, Descriptor
from mpips.collectives.fabric.process_memory import reachable_address
from mpips.collectives.kernels import sums
from mpips.collectives.kernels.sums import perform
from mpips.collectives.node.program import (
    NOTHING,
    NodeProgram,
    Scalars,
    StagePipeline,
    Turns,
    Window,
    crossing_program,
    merge,
    shared_program,
    slot_puts,
    slot_scalars,
    slot_takes,
)

# Results of `fast`. DONE: the call is complete. NOT_BEGUN: run `steps`. MET: all ranks have entered; run `rest`.
DONE, NOT_BEGUN, MET = 0, 1, 2
# The mode of an array is the kind of program that it takes. WAYS has the modes' names in the tuning table.
SLOTS, SHARED, CROSS, STAGES = range(4)
WAYS = ("slots", "direct", "cross_memory", "stages")
NOWHERE = (ArrayPlace(), ArrayPlace())


class WayLimits(NamedTuple):
    """The sizes in bytes at which vectors change from one kind of program to another. The same on all ranks."""

    # the largest vector that goes through slots in any case, even if its array is in node-shared memory
    slots: int
    # the largest vector that goes through slots if its array is in private memory
    ordinary_slots: int
    # the smallest vector in private memory for which the cross-memory program is used, if the kernel permits that
    cross_memory: int


class CallArray(NamedTuple):
    """One array of a call. x and out are this rank's parts of the whole vector (`Call.extent_of_x`)."""

    call: Call
    x: Window
    out: Window
    # Vectors into which this rank's block of the result is copied too. Only in calls of several arrays.
    block_copies: tuple[Vector, ...] = ()


def call_array(call: Call, rank: int, x: Flat, out: Flat, block_copies: Sequence[Flat] = ()) -> CallArray:
    """Return the CallArray of a call whose x and out are at these addresses in this rank's memory."""
    in_place = x == out
    return CallArray(
        call,
        Window(x.vector(), call.extent_of_x(rank, in_place)[0]),
        Window(out.vector(), call.extent_of_out(rank, in_place)[0]),
        tuple(flat.vector() for flat in block_copies),
    )


class NodeExecutor:
    """The runner of a call between the ranks of a node. The constructor is local: it sends nothing.

    Args:
        board: The board on which the ranks meet.
        text: The call in words, as ranks compare it.
        parts: The arrays of the call. Several arrays are reduced in the same phases.
        ways: The sizes at which to use another kind of program.
    """

    holds = False

    def __init__(self, board: Board, text: str, parts: Sequence[CallArray], ways: WayLimits) -> None:
        self._board = board
        self._memory = board.memory
        self._text = text
        self._parts = parts
        self._ways = ways
        # this rank's descriptor: its running number on the board, and its token
        self._put = -DESCRIPTORS
        self._token = 0
        # the tokens of all ranks for which `_program` is compiled
        self._tokens: tuple[int, ...] | None = None
        # The mode that this rank proposes for each array. The program depends on those of all ranks.
        self.modes = [self._choose_mode(part) for part in parts]
        for part, mode in zip(parts, self.modes):
            call = part.call
            if call.reduction is not None:
                vectors = 2 if mode == CROSS else call.p
                sums.prepare(call.reduction.combine, call.dtype, vectors, call.nbytes, call.reduction.is_mean)
        # True if other ranks may touch this rank's arrays (they do so in the first phase only)
        self._lends = any(mode in (SHARED, CROSS) for mode in self.modes)
        self._program = NodeProgram()
        self._puts = self._compile_puts()
        self.fast: Callable[[], int] = not_begun

    def steps(self) -> Iterator[None]:
        """Run the whole call. Yields whenever it has to wait."""
        board = self._board
        if not board.descriptors.readable(self._put):
            self._publish()
        perform(self._puts[board.number + 1 & 1])
        board.enter(self._token, self._lends)
        yield from board.met()
        yield from self.rest()

    def rest(self) -> Iterator[None]:
        """Run the call from the point where all ranks have entered it. Yields whenever it has to wait."""
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
        """Do nothing: it has no MPI objects."""

    @property
    def way(self) -> str:
        """The mode that this rank proposes for its first array, as `tuner.table` names it."""
        return WAYS[self.modes[0]]

    def _choose_mode(self, part: CallArray) -> int:
        """Return the mode for an array, by its size and its memory."""
        call, ways = part.call, self._ways
        # An alltoall in place overwrites x, so other ranks must not read x itself.
        moving = call.kind == "alltoall" and same_address(part.x.vector, part.out.vector)
        located = arena.locate(part.x.vector) and arena.locate(part.out.vector)
        if len(self._parts) > 1:
            return SHARED if located else CROSS
        if located and call.nbytes > ways.slots and not moving:
            return SHARED
        if call.nbytes <= max(ways.slots, ways.ordinary_slots):
            return SLOTS
        crosses = self._crosses(call) and not moving and reachable_address(part.x.vector)
        return CROSS if crosses else STAGES

    def _crosses(self, call: Call) -> bool:
        return self._memory.reachable and call.nbytes >= self._ways.cross_memory

    def _compile_puts(self) -> Turns:
        """Return the steps that this rank takes before it enters. They do not depend on the other ranks' arrays."""
        call, x, out, _ = self._parts[0]
        if self.modes == [SLOTS]:
            return slot_puts(self._memory, call, x, 0), slot_puts(self._memory, call, x, 1)
        if self.modes == [STAGES]:
            return (StagePipeline(self._memory, call, x, out).puts(0),) * 2
        return NOTHING

    def _publish(self) -> None:
        """Put a descriptor of this rank's arrays on the board."""
        places = tuple(self._places(part, mode) for part, mode in zip(self._parts, self.modes))
        all_places = place = None
        if len(places) > 1:
            all_places = arena.empty((len(places), PLACE_WORDS), np.int64)
            all_places[:] = np.array(places, np.int64).reshape(len(places), -1)
            place = _region(all_places)
        self._token = self._board.publish(Descriptor(self._text, places), all_places, place)
        self._put = self._board.descriptors.put

    def _places(self, part: CallArray, mode: int) -> tuple[ArrayPlace, ArrayPlace]:
        """Return where other ranks find this rank's x and out, or NOWHERE if they go through slots or stages.

        An array that is written must be writable for other processes too. The x of the root of an in-place broadcast is
        also its out, but nobody writes to it.
        """
        if mode in (SLOTS, STAGES):
            return NOWHERE
        call, x, out = part.call, part.x.vector, part.out.vector
        x_place, out_place = NOWHERE if mode == CROSS else (_region(x), _region(out))
        x_at = out_at = 0
        if self._crosses(call) or len(self._parts) > 1:
            read_alone = call.kind == "broadcast" and same_address(x, out) and call.root == self._board.rank
            x_at, out_at = reachable_address(x), reachable_address(out, not read_alone)
        return x_place._replace(address=x_at), out_place._replace(address=out_at)

    def _bind(self, tokens: tuple[int, ...]) -> None:
        """Read the descriptors of these tokens, and compile a program for the arrays that all ranks pass now."""
        self._tokens = None
        self.fast = not_begun
        descriptors = self._board.read(tokens)
        programs = [self._compile(number, descriptors) for number in range(len(self._parts))]
        self._program = programs[0] if len(programs) == 1 else merge(programs)
        self._tokens = tokens
        # The fast path has no fences: it relies on a processor that keeps stores in order.
        if self._board.fence is None:
            self.fast = self._fast(tokens)

    def _compile(self, number: int, descriptors: Sequence[Descriptor]) -> NodeProgram:
        """Compile the program of one array. All ranks come to the same kind, because they see the same descriptors."""
        part, memory = self._parts[number], self._memory
        places = [descriptor.places[number] for descriptor in descriptors]
        if all(x.shared and out.shared for x, out in places):
            return shared_program(memory, *part, places)
        if self.modes[number] == SLOTS and not any(x.shared for x, _ in places):
            return NodeProgram(last=(slot_takes(memory, *part[:3], 0), slot_takes(memory, *part[:3], 1)))
        if all(x.address and out.address for x, out in places):
            return crossing_program(memory, *part, places)
        if len(self._parts) > 1:
            raise CollectiveError(f"array {number} of {self._text} lies where other ranks cannot reach it: pass a copy")
        # Ranks that proposed another mode have not staged their first block before they entered.
        unlike = any(x.shared or x.address for x, _ in places) or self.modes[number] == SLOTS
        return StagePipeline(memory, *part[:3]).program(restage=unlike)

    def _fast(self, tokens: tuple[int, ...]) -> Callable[[], int]:
        """Return the call as one straight-line function. It is valid as long as the ranks enter with these tokens."""
        others = int.from_bytes(array("Q", tokens), ORDER)
        bound, program = _FastPathValues(self._board, self._text, self._put, self._token, others), self._program
        if self.modes == [SLOTS] and not self._program.phases:
            scalars = slot_scalars(self._memory, *self._parts[0][:3])
            if scalars is not None:
                summed = _sum_of_scalars(bound, scalars)
                return _mean_of_scalars(summed, scalars, self._board.size) if scalars.mean else summed
        if not program.phases:
            return _one_meeting(bound, self._puts, program.last, self._lends)
        return _in_phases(bound, _one_meeting(bound, self._puts, NOTHING, self._lends), program)


def _region(vector: Vector) -> ArrayPlace:
    region = arena.locate(vector)
    return ArrayPlace() if region is None else ArrayPlace(*region)


def not_begun() -> int:
    """The `fast` of runners without a fast path."""
    return NOT_BEGUN


class _FastPathValues(NamedTuple):
    """The values for which a fast path is compiled."""

    board: Board
    text: str
    # this rank's descriptor: its running number on the board, and its token
    put: int
    token: int
    # the tokens of all ranks, as a row of the board read as one integer
    others: int


# The functions below return a `fast`. They bind everything to local variables and repeat the same lines of code,
# because attribute look-ups and calls would cost what the fast path saves. Each begins by returning NOT_BEGUN in three
# rare cases: this rank's descriptor has been overwritten, fast paths are held (both: `board.spent`), or the number of
# the operation wraps around.


def _sum_of_scalars(bound: _FastPathValues, scalars: Scalars) -> Callable[[], int]:
    """Return a fast path that sums one or two floats through slots."""
    board, text, put, token, others = bound
    rank = board.rank
    ones = board.ones << 32
    order = ORDER
    read = int.from_bytes
    meet = board.meet
    even, odd = zip(board.entries, scalars.own, scalars.first, scalars.second, scalars.more)
    spins = board.spins
    looks = board.looks
    numbers = board.numbers
    turns = even, odd
    x = scalars.x
    two = len(scalars.x) == 2
    mark = board.marks.word
    # typed as Any, because a type checker does not know that these memoryviews hold floats
    out: Any = scalars.out

    def fast() -> int:
        number = board.number + 1
        if put <= board.spent or number > NUMBERS:
            return NOT_BEGUN
        row, own, first, second, more = turns[number & 1]
        own[0] = x[0]
        if two:
            own[1] = x[1]
        board.number = number
        # Enter the operation. Other ranks read this rank's slot from here on.
        row[rank] = mark[0] = number << 32 | token
        # Wait until all words of the row have this number and the known tokens. One read takes in the whole row.
        entered = number * ones
        wanted = entered + others
        if read(row, order) != wanted:
            for look in looks:
                row_now = read(row, order)
                if row_now == wanted:
                    break
                if look >= spins:
                    # All ranks have entered, but some with another token.
                    if row_now & numbers == entered:
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


def _mean_of_scalars(summed: Callable[[], int], scalars: Scalars, ranks: int) -> Callable[[], int]:
    """Return a fast path that runs `summed`, a sum of one or two floats, and divides the result."""
    out: Any = scalars.out

    def fast() -> int:
        code = summed()
        if code == DONE:
            for i in range(len(out)):
                out[i] = out[i] / ranks
        return code

    return fast


def _one_meeting(bound: _FastPathValues, puts: Turns, last: Turns, lends: bool) -> Callable[[], int]:
    """Return a fast path that puts, enters, waits until all ranks have entered, and takes."""
    board, text, put, token, others = bound
    rank = board.rank
    ones = board.ones << 32
    order = ORDER
    read = int.from_bytes
    meet = board.meet
    turns = tuple(zip(board.entries, puts, last))
    spins = board.spins
    looks = board.looks
    numbers = board.numbers
    mark = board.marks.word

    def fast() -> int:
        # The same lines as in `_sum_of_scalars`.
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
                row_now = read(row, order)
                if row_now == wanted:
                    break
                if look >= spins:
                    if row_now & numbers == entered:
                        return MET
                    sched_yield()
            else:
                if not meet(row, wanted, text):
                    return MET
        for function, arguments in taken:
            function(*arguments)
        return DONE

    return fast


def _in_phases(bound: _FastPathValues, enter: Callable[[], int], program: NodeProgram) -> Callable[[], int]:
    """Return a fast path that runs the phases of a program, each with a meeting, after `enter`."""
    board = bound.board
    text = bound.text
    rank = board.rank
    order = ORDER
    read = int.from_bytes
    progress = board.progress
    finished = board.ones
    follow = board.follow
    spins = board.spins
    looks = board.looks
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
